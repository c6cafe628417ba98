"""The readable reference of the per-token work: classes, counts, sketch, exact sums and extremes of flat tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rlk_audit import breakdowns, exact_sum, samples
from rlk_audit.config import TOKEN_CLASSES, AuditConfig
from rlk_audit.layout import COUNTER_INDEX, MINIMA, TOKEN_COUNTS, StateLayout, breakdown_field
from rlk_audit.sketch import bin_index
from rlk_audit.state import State
from rlk_audit.worst import NO_TOKEN

ZERO_FILL_TRAIN_LOGP = -1.0
"""A rollout value of exactly 0 beside a train value below this looks like a fill, not like a certain token."""
LN2 = math.log(2.0)
SQUARE_OVERFLOW = 2.0**64
"""The square of a float32 rounds to a finite float32 exactly when the value is below this."""
K3_SERIES_BELOW = 2.0**-6
K3_SERIES = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)
"""exp(d) - 1 - d near 0 is d^2 times this polynomial to a few 2^-42, where the difference itself would cancel."""
CPU_CHUNK = 1 << 15
"""Tokens measured at once on a CPU, so that the temporaries stay in cache."""


@dataclass(frozen=True)
class FlatTokens:
    """A batch as flat tensors [n] on one device.

    Attributes:
        train, rollout: log-probabilities as given, any float dtype.
        active: bool, mask != 0.
        missing: bool, where the engine gave no value; None = nowhere.
        mismatch: bool, where the token ids of both sides differ; None = nowhere or not known.
        codes: breakdown -> int64, but for ``confidence``, which the rollout value decides.
        slot: int64, the sample's place in the table of samples; None = there is no table.
    """

    train: Tensor
    rollout: Tensor
    active: Tensor
    missing: Tensor | None
    mismatch: Tensor | None
    codes: Mapping[str, Tensor] = field(default_factory=dict)
    slot: Tensor | None = None

    def part(self, chunk: slice) -> FlatTokens:
        """Return a stretch of the tokens."""
        return FlatTokens(
            self.train[chunk],
            self.rollout[chunk],
            self.active[chunk],
            None if self.missing is None else self.missing[chunk],
            None if self.mismatch is None else self.mismatch[chunk],
            {name: codes[chunk] for name, codes in self.codes.items()},
            None if self.slot is None else self.slot[chunk],
        )


def measure(tokens: FlatTokens, layout: StateLayout, state: State) -> tuple[Tensor, Tensor]:
    """Add tokens to ``state`` (additive fields and extremes).

    Returns:
        abs(dlogp), float64 [n], NO_TOKEN where not compared; which tokens were compared, bool [n].
    """
    count = tokens.train.numel()
    size = CPU_CHUNK if tokens.train.device.type == "cpu" else max(count, 1)
    parts = [
        _measure_chunk(tokens.part(slice(start, start + size)), layout, state)
        for start in range(0, max(count, 1), size)
    ]
    return torch.cat([magnitude for magnitude, _ in parts]), torch.cat([compared for _, compared in parts])


def _measure_chunk(tokens: FlatTokens, layout: StateLayout, state: State) -> tuple[Tensor, Tensor]:
    config = layout.config
    train, rollout = tokens.train.to(torch.float64, copy=True), tokens.rollout.to(torch.float64, copy=True)
    counters = state.additive[layout.fields["counters"].slice]
    classes = classify(tokens, train, rollout, config)
    counters.scatter_add_(0, classes, torch.ones_like(classes))
    compared = classes == COUNTER_INDEX["compared"]
    excluded = ~compared
    # From here on a token that is not compared has T = R = 0 and adds nothing anywhere.
    train.masked_fill_(excluded, 0.0)
    rollout.masked_fill_(excluded, 0.0)
    dlogp = train - rollout + 0.0  # a zero is +0.0 whatever the signs were
    magnitude = dlogp.abs()
    counts = _threshold_counts(tokens, compared, train, rollout, dlogp, magnitude, config)
    rounded = Rounded.of(train, rollout, dlogp)
    _add_sums(layout, state, excluded, rounded, counts)
    first = COUNTER_INDEX[TOKEN_COUNTS[0]]
    counters[first : first + len(TOKEN_COUNTS)] += torch.stack([counts[name] for name in TOKEN_COUNTS])
    sketch = state.additive[layout.fields["sketch"].slice]
    sketch.scatter_add_(0, bin_index(rounded.dlogp, config.grouping_power), compared.long())
    add_to_parts(tokens, layout, state, rollout, dlogp, compared)
    if train.numel():
        _widen_extremes(state, excluded, dlogp, magnitude, rounded.prob_diff)
    return magnitude.masked_fill_(excluded, NO_TOKEN), compared


def add_to_parts(
    tokens: FlatTokens, layout: StateLayout, state: State, rollout: Tensor, dlogp: Tensor, compared: Tensor
) -> None:
    """Add tokens to the breakdowns and the table of samples; R and d, float64 [n], are 0 where not compared."""
    magnitude = dlogp.abs()
    for name in layout.config.breakdowns:
        codes = breakdowns.confidence_codes(rollout) if name == "confidence" else tokens.codes[name]
        rows = state.additive[layout.fields[breakdown_field(name)].slice]
        breakdowns.add_tokens(rows, codes, magnitude, compared, magnitude > LN2)
    if tokens.slot is not None:
        table = state.additive[layout.fields["samples"].slice]
        samples.add_tokens(table, tokens.slot, tokens.active, compared, dlogp)


def classify(tokens: FlatTokens, train: Tensor, rollout: Tensor, config: AuditConfig) -> Tensor:
    """Return each token's counter (int64 [n], 0 = inactive): the first class of TOKEN_CLASSES that holds."""
    floor, tolerance = config.sentinel_floor, config.positive_tolerance
    holds = {
        "rejected": tokens.mismatch,
        "rollout_missing": tokens.missing,
        "rollout_sentinel": (rollout <= floor) & (rollout > -math.inf),
        "train_sentinel": (train <= floor) & (train > -math.inf),
        "rollout_nan": rollout.isnan(),
        "rollout_neginf": rollout == -math.inf,
        "train_nan": train.isnan(),
        "train_neginf": train == -math.inf,
        "positive": (train > tolerance) | (rollout > tolerance),
    }
    classes = torch.full_like(train, COUNTER_INDEX["compared"], dtype=torch.int64)
    for name in reversed(TOKEN_CLASSES[:-1]):  # the first that holds is written last
        where = holds[name]
        if where is not None:
            classes.masked_fill_(where, COUNTER_INDEX[name])
    return classes.masked_fill_(~tokens.active, COUNTER_INDEX["inactive"])


def _threshold_counts(
    tokens: FlatTokens,
    compared: Tensor,
    train: Tensor,
    rollout: Tensor,
    dlogp: Tensor,
    magnitude: Tensor,
    config: AuditConfig,
) -> dict[str, Tensor]:
    mismatch = tokens.active & tokens.mismatch if tokens.mismatch is not None else torch.zeros_like(compared)
    return {
        "token_mismatch": mismatch.sum(),
        "identical": (compared & (dlogp == 0)).sum(),
        "clipped_low": (dlogp < math.log1p(-config.eps_low)).sum(),
        "clipped_high": (dlogp > math.log1p(config.eps_high)).sum(),
        "tail_ln2": (magnitude > LN2).sum(),
        "zero_fill_suspect": ((rollout == 0) & (train < ZERO_FILL_TRAIN_LOGP)).sum(),
    }


class Rounded(NamedTuple):
    """The base quantities of tokens, float32 [n]: rounded once, before anything else uses them."""

    dlogp: Tensor
    ratio: Tensor
    k3: Tensor
    mult: Tensor
    train_logp: Tensor
    train_prob: Tensor
    rollout_prob: Tensor
    prob_diff: Tensor

    @classmethod
    def of(cls, train: Tensor, rollout: Tensor, dlogp: Tensor) -> Rounded:
        """Return them from float64 [n] that are 0 where a token is not compared."""
        ratio, train_prob, rollout_prob = dlogp.exp(), train.exp().float(), rollout.exp().float()
        return cls(
            dlogp.float(),
            ratio.float(),
            k3_of(dlogp, ratio).float(),
            torch.maximum(ratio, ratio.reciprocal()).float(),
            train.float(),
            train_prob,
            rollout_prob,
            (train_prob - rollout_prob).abs_(),
        )


def _add_sums(layout: StateLayout, state: State, excluded: Tensor, rounded: Rounded, counts: dict[str, Tensor]) -> None:
    """Add the exact sums and count overflows into ``counts``; squares and products are those of the rounded values."""

    def slots(name: str) -> Tensor:
        return state.additive[layout.fields[f"sum_{name}"].slice]

    def finite(values: Tensor, overflow: str) -> Tensor:
        """Make what is not compared 0, and what overflows too, which is counted."""
        values.masked_fill_(excluded, 0.0)
        overflows = values == math.inf
        counts[overflow] = overflows.sum()
        return values.masked_fill_(overflows, 0.0)

    ratio = finite(rounded.ratio, "overflow_ratio")
    counts["overflow_square"] = counts["overflow_ratio"] + (ratio >= SQUARE_OVERFLOW).sum()
    k3, mult = finite(rounded.k3, "overflow_k3"), finite(rounded.mult, "overflow_mult")
    dlogp_parts, ratio_parts = exact_sum.split(rounded.dlogp), exact_sum.split(ratio)
    train_parts = exact_sum.split(rounded.train_prob.masked_fill_(excluded, 0.0))
    rollout_parts = exact_sum.split(rounded.rollout_prob.masked_fill_(excluded, 0.0))
    exact_sum.add_terms(slots("dlogp"), dlogp_parts)
    exact_sum.add_squares(slots("dlogp_squared"), dlogp_parts)
    exact_sum.add_terms(slots("ratio"), ratio_parts)
    exact_sum.add_squares(slots("ratio_squared"), ratio_parts)
    exact_sum.add_terms(slots("k3"), exact_sum.split(k3))
    exact_sum.add_terms(slots("mult"), exact_sum.split(mult))
    exact_sum.add_terms(slots("train_logp"), exact_sum.split(rounded.train_logp))
    exact_sum.add_terms(slots("train_prob"), train_parts)
    exact_sum.add_squares(slots("train_prob_squared"), train_parts)
    exact_sum.add_terms(slots("rollout_prob"), rollout_parts)
    exact_sum.add_squares(slots("rollout_prob_squared"), rollout_parts)
    exact_sum.add_products(slots("prob_product"), train_parts, rollout_parts)
    exact_sum.add_terms(slots("prob_diff"), exact_sum.split(rounded.prob_diff))


def k3_of(dlogp: Tensor, exp_dlogp: Tensor) -> Tensor:
    """Return exp(d) - 1 - d (float64 [n]), never negative: k3 of J. Schulman, "Approximating KL Divergence" (2020)."""
    series = torch.full_like(dlogp, K3_SERIES[-1])
    for coefficient in reversed(K3_SERIES[:-1]):
        series.mul_(dlogp).add_(coefficient)
    series.mul_(dlogp * dlogp)
    return torch.where(dlogp.abs() < K3_SERIES_BELOW, series, exp_dlogp - 1.0 - dlogp)


def _widen_extremes(state: State, excluded: Tensor, dlogp: Tensor, magnitude: Tensor, prob_diff: Tensor) -> None:
    minima, maxima = state.extremes[: len(MINIMA)], state.extremes[len(MINIMA) :]
    lowest = [values.masked_fill(excluded, math.inf).amin() for values in (dlogp, magnitude)]
    highest = [values.masked_fill(excluded, -math.inf).amax() for values in (dlogp, magnitude, prob_diff)]
    torch.minimum(minima, torch.stack(lowest), out=minima)
    torch.maximum(maxima, torch.stack([value.double() for value in highest]), out=maxima)
