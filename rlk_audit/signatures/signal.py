"""What the signatures of faults share: a signal, the noise of low precision, and where in the step a fault lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlk_audit.finding import Value as Value
from rlk_audit.token_table import Bools, Floats, TokenTable

MIN_TOKENS = 6
"""Fewer compared tokens say nothing: five numbers fit many faults."""
NOISE_CEILING = 0.03
"""Nats of a logit: recorded bfloat16 engines lie at 0.004 to 0.013 in the median, a weight update's move above it."""
CLIP = 1.0
"""Nats: a token counts at most so much where pairings are compared, so that a few odd ones do not decide."""
CERTAIN = 0.95
"""Above this probability drift is near zero whatever the cause, since the other tokens have no mass to shift."""


@dataclass(frozen=True)
class Signal:
    """A fault that a signature found.

    Attributes:
        code: of the fault.
        nats: the sum of abs(dlogp) that it accounts for.
        evidence: the statistics it was decided on.
        summary: one sentence with numbers.
        rest: the table without what the fault explains: re-paired, or without its tokens.
    """

    code: str
    nats: float
    evidence: Mapping[str, Value]
    summary: str
    rest: TokenTable


def drift(table: TokenTable) -> float:
    """Return the sum of abs(dlogp) over compared tokens."""
    return float(np.abs(table.dlogp).sum())


def clipped(dlogp: Floats) -> Floats:
    """Return abs(dlogp), at most CLIP."""
    return np.minimum(np.abs(dlogp), CLIP)


def middle(table: TokenTable) -> Floats:
    """Return the mean of both sides: unlike one side alone, it does not correlate with symmetric noise."""
    return np.where(table.compared, np.minimum((table.train + table.rollout) / 2, 0.0), 0.0)


def logit_noise(table: TokenTable) -> Floats:
    """Return dlogp / (1 - p) of uncertain compared tokens.

    A log-probability moves with its logit by the factor 1 - p, for rounding and for moved weights alike; divided by it,
    tokens of different confidence compare. Tokens above CERTAIN are left out, where the division would blow up.
    """
    probability = np.exp(middle(table))
    uncertain = table.compared & (probability < CERTAIN)
    noise: Floats = table.dlogp[uncertain] / (1 - probability[uncertain])
    return noise


def noise_level(table: TokenTable) -> float:
    """Return the median of abs(logit_noise), 0 without uncertain tokens."""
    noise = logit_noise(table)
    return float(np.median(np.abs(noise))) if len(noise) else 0.0


def share(part: float, whole: float) -> float:
    """Return part / whole, 0 for an empty whole."""
    return float(part / whole) if whole else 0.0


WHERE_SHARE = 0.95
"""A fault lies on one code if nearly all of its tokens do, and most tokens of the code have it."""
WHERE_OTHERS = 0.2
"""... and the code is not simply nearly the whole step: at least so many tokens lie elsewhere."""


def where(table: TokenTable, affected: Bools) -> dict[str, Value]:
    """Return `{"where": "label=code"}` if the affected tokens are those of one code, else nothing."""
    count = int(affected.sum())
    for name, (codes, names) in table.groups().items():
        for code, code_name in enumerate(names):
            of_code = codes == code
            inside = int((affected & of_code).sum())
            if share(inside, count) < WHERE_SHARE or share(inside, int(of_code.sum())) < 0.5:
                continue
            if share(int((~of_code).sum()), len(table)) >= WHERE_OTHERS:
                return {"where": f"{name}={code_name}"}
    return {}


def at(evidence: Mapping[str, Value]) -> str:
    """Return ` on label=code` for a summary, or nothing."""
    return f" on {evidence['where']}" if "where" in evidence else ""
