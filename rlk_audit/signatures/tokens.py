"""Signatures that show in single tokens: what was dropped, filled in, appended, rounded, or compared with itself."""

from __future__ import annotations

import numpy as np

from rlk_audit.signatures.signal import MIN_TOKENS, Signal, Value, at, drift, share, where
from rlk_audit.token_table import Bools, Floats, TokenTable

DROPPED_NATS = 10.0
"""What a token of T = -inf counts in the drift: about the log-probability that a filter drops."""
FILLED_OTHER = -1.0
"""A log-prob of 0 says "certain"; a value of the other side below this denies it, and rounding cannot."""
END_FLOOR = 0.5
"""Nats: a made-up value at the end of a sample is far off, or it does not matter."""
END_ENRICHMENT = 5.0
"""Ends are far off at least so many times as often as inner tokens: what falls anywhere falls on all alike."""
MIN_ENDS = 3
ROUNDED_SHARE = 0.999
"""Of the values; one fits the narrow format by chance with probability 2^-16 (bfloat16) or 2^-13 (float16)."""
ROUNDING_SHOWS = 0.5
"""Rounding does harm if it makes at least this part of the drift's square."""


def self_comparison(table: TokenTable) -> Signal | None:
    """All compared tokens have d exactly 0: two programs never agree so, one value was used twice."""
    compared = table.dlogp[table.compared]
    if len(compared) < MIN_TOKENS or compared.any():
        return None
    summary = f"all {len(compared)} tokens have bitwise the same value on both sides"
    return Signal("self_comparison", 0.0, {"identical_tokens": len(compared)}, summary, table)


def train_filter(table: TokenTable) -> Signal | None:
    """T = -inf: a filter of the trainer gave the sampled token no probability."""
    dropped = np.isneginf(table.train) & np.isfinite(table.rollout)
    count = int(dropped.sum())
    if not count:
        return None
    evidence = {"tokens": count, "token_share": share(count, len(table)), **where(table, dropped)}
    summary = f"train log-prob is -inf on {count} of {len(table)} tokens{at(evidence)} that the engine sampled"
    return Signal("train_filter", DROPPED_NATS * count, evidence, summary, table.take(~dropped))


def zero_fill(table: TokenTable) -> Signal | None:
    """One side is exactly 0 where the other is far below: positions that nobody scored, filled with zeros."""
    sides = {"rollout": (table.rollout, table.train), "train": (table.train, table.rollout)}
    found = {side: _filled(table, *columns) for side, columns in sides.items()}
    side = max(found, key=lambda name: int(found[name][0].sum()))
    filled, stretches = found[side]
    count = int(filled.sum())
    if not count:
        return None
    other, mean = next(name for name in sides if name != side), float(sides[side][1][filled].mean())
    evidence: dict[str, Value] = {"side": side, "tokens": count, "token_share": share(count, len(table))}
    evidence |= {"stretches": stretches, f"{other}_logp_mean": mean, **where(table, filled)}
    summary = (
        f"the {side} log-prob is exactly 0 on {count} tokens in {stretches} stretches{at(evidence)}, where the {other} "
        f"side says {mean:.3g} on average"
    )
    rest = table.take(~filled)
    return Signal("zero_fill", drift(table) - drift(rest), evidence, summary, rest)


def _filled(table: TokenTable, side: Floats, other: Floats) -> tuple[Bools, int]:
    """Return the tokens of stretches of zeros in which the other side denies some, and the number of stretches."""
    zero = table.compared & (side == 0)
    suspect = zero & (other < FILLED_OTHER)
    if suspect.sum() < 2 or (suspect & _ends(table)).sum() > 0.5 * suspect.sum():
        return np.zeros(len(table), dtype=bool), 0
    # A stretch is filled as a whole, also where the other side happens to be near 0.
    first = np.ones(len(table), dtype=bool)
    first[1:] = (zero[1:] != zero[:-1]) | (table.row[1:] != table.row[:-1])
    stretch = np.cumsum(first) - 1
    filled = zero & (np.bincount(stretch, weights=suspect)[stretch] > 0)
    return filled, len(np.unique(stretch[filled]))


def _ends(table: TokenTable) -> Bools:
    """Return the last active token of each sample."""
    last = np.ones(len(table), dtype=bool)
    last[:-1] = table.row[1:] != table.row[:-1]
    return last


def synthetic_end(table: TokenTable) -> Signal | None:
    """Large drift on last tokens, and hardly elsewhere: an end token that was appended, not sampled."""
    compared, last = table.compared, _ends(table)
    inner = np.abs(table.dlogp[compared & ~last])
    if len(inner) < MIN_TOKENS:
        return None
    floor = max(END_FLOOR, float(np.quantile(inner, 0.95)))
    far = compared & last & (np.abs(table.dlogp) > floor)
    count, ends = int(far.sum()), int((compared & last).sum())
    elsewhere = share(float((inner > floor).sum()), len(inner))
    if count < MIN_ENDS or share(count, ends) < max(0.1, END_ENRICHMENT * elsewhere):
        return None
    evidence: dict[str, Value] = {"ends": count, "end_share": share(count, ends), "share_elsewhere": elsewhere}
    evidence |= {"rollout_logp_median": float(np.median(table.rollout[far])), **where(table, far)}
    summary = (
        f"the last token of {count} of {ends} samples{at(evidence)} drifts by "
        f"{np.abs(table.dlogp[far]).mean():.3g} nats on average, which {elsewhere:.2%} of the others do"
    )
    rest = table.take(~far)
    return Signal("synthetic_end", drift(table) - drift(rest), evidence, summary, rest)


SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
"""Narrowest first: what fits bfloat16 fits float16's bits as well."""


def rounded(table: TokenTable) -> Signal | None:
    """One side's values, or both sides', all fit bfloat16 or float16."""
    columns = {"train": table.train[table.compared], "rollout": table.rollout[table.compared]}
    dtypes = {side: dtype for side, values in columns.items() if (dtype := _narrow_dtype(values)) is not None}
    if not dtypes:
        return None
    steps = np.concatenate([_step(columns[side], SIGNIFICANT_BITS[dtype]) for side, dtype in dtypes.items()])
    # An error spread evenly over a step has a twelfth of its square as variance, and a quarter of it as mean size.
    made = min(1.0, share(float((steps**2).sum()) / 12, float((table.dlogp**2).sum())))
    error = float(steps.mean()) / 4
    sides, kinds = " and ".join(dtypes), " and ".join(dict.fromkeys(dtypes.values()))
    evidence: dict[str, Value] = {"side": sides, "dtype": kinds, "abs_error_mean": error, "share_of_square": made}
    evidence["harmless"] = int(made < ROUNDING_SHOWS)
    told = "small beside the other drift" if evidence["harmless"] else "most of the drift"
    summary = (
        f"every {sides} log-prob fits {kinds}: rounding errs by {error:.2g} nats on average, {told} "
        f"({made:.0%} of its square)"
    )
    return Signal("rounded", made * drift(table), evidence, summary, table)


def _narrow_dtype(values: Floats) -> str | None:
    values = values[values != 0]
    if len(np.unique(values)) < MIN_TOKENS:
        return None
    mantissa = np.frexp(values)[0]
    for dtype, bits in SIGNIFICANT_BITS.items():
        scaled = mantissa * 2.0**bits
        if float((scaled == np.round(scaled)).mean()) >= ROUNDED_SHARE:
            return dtype
    return None


def _step(values: Floats, bits: int) -> Floats:
    """Return the distance of neighbours of that many significant bits."""
    return np.where(values == 0, 0.0, np.ldexp(1.0, np.frexp(values)[1] - bits))
