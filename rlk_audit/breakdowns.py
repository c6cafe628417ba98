"""Breakdowns: the same few figures of a step, split by a label of the tokens.

A label has buckets: first the tokens whose code is unknown, then its codes in order, so that the parts always add up to
the whole. A bucket is a row of integers: a coarse sketch of abs(dlogp), whose counts add up to the compared tokens; the
tokens in the tail; and the sum of abs(dlogp) in fixed point. Everything adds up over micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit.config import BUILT_IN_BREAKDOWNS, CONFIDENCE_EDGES, POSITION_BUCKETS
from rlk_audit.exact_sum import FRACTION_BITS, fixed_point
from rlk_audit.sketch import bin_index, bins_per_side, magnitude_at, quantile_of_magnitude

UNKNOWN = "unknown"
"""Name of the label code -1."""
GROUPING_POWER = 3
"""Of the coarse sketch: its quantiles are within 5.9 %."""
QUANTILES = {"abs_dlogp_p50": "0.5", "abs_dlogp_p99": "0.99"}
PART_BITS = 21
"""abs(dlogp) is rounded to steps of 2^-32 nats and added in two parts, the lower one of this many bits.

Neither part reaches 2^21, so that a sum overflows after 2^42 tokens at the largest abs(dlogp), also in a run's total.
"""

_SKETCH = bins_per_side(GROUPING_POWER) + 3
"""Zero, under, the bins, over."""
TAIL, HIGH, LOW = range(_SKETCH, _SKETCH + 3)
ROW_LENGTH = _SKETCH + 3

CONFIDENCE_LOGS = tuple(math.log(edge) for edge in CONFIDENCE_EDGES)
"""Decided on R against these, so that no exponential of the device takes part."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bucket:
    """One part of a breakdown; figures are NaN where it compared nothing.

    Attributes:
        name: of the code, or ``unknown``.
        compared_token_count: tokens.
        tail_frac_ln2: share of them with abs(dlogp) > ln 2.
        abs_dlogp_mean: nats, to 2^-33 a token.
        abs_dlogp_p50, abs_dlogp_p99: nats, within 5.9 %.
        abs_dlogp_max: nats, exact, where a worst token of the report lies in the bucket; else NaN.
    """

    name: str
    compared_token_count: int
    tail_frac_ln2: float
    abs_dlogp_mean: float
    abs_dlogp_p50: float
    abs_dlogp_p99: float
    abs_dlogp_max: float


def position_codes(position: Tensor) -> Tensor:
    """Return the code (int64) of each response position: 0, 1, then one for each power of two; -1 where unknown."""
    exponent = (position.double().view(torch.int64) >> 52) - 1023
    return torch.where(position < 0, -1, (exponent + 1).clamp_(0, len(POSITION_BUCKETS) - 1))


def confidence_codes(rollout: Tensor) -> Tensor:
    """Return the code (int64) of each rollout log-probability (float64), by the probability it stands for."""
    codes = torch.zeros_like(rollout, dtype=torch.int64)
    for edge in CONFIDENCE_LOGS:
        codes += rollout >= edge
    return codes


def bucket_of_position(position: int) -> str:
    """Return the bucket's name of one response position."""
    return UNKNOWN if position < 0 else POSITION_BUCKETS[min(position.bit_length(), len(POSITION_BUCKETS) - 1)]


def bucket_of_confidence(rollout: float) -> str:
    """Return the bucket's name of one rollout log-probability."""
    return BUILT_IN_BREAKDOWNS["confidence"][sum(rollout >= edge for edge in CONFIDENCE_LOGS)]


def add_tokens(rows: Tensor, codes: Tensor, magnitude: Tensor, compared: Tensor, tail: Tensor) -> None:
    """Add tokens to the rows of one label.

    Args:
        rows: int64 [buckets * ROW_LENGTH], changed in place.
        codes: int64 [n]; what is no code of the label counts as unknown.
        magnitude: float64 [n], abs(dlogp), 0 where not compared.
        compared, tail: bool [n].
    """
    buckets = len(rows) // ROW_LENGTH
    row = torch.where((codes >= 0) & (codes < buckets - 1), codes + 1, 0) * ROW_LENGTH
    distance = bin_index(magnitude.float(), GROUPING_POWER) - (bins_per_side(GROUPING_POWER) + 2)
    fixed = fixed_point(magnitude)
    rows.scatter_add_(0, row + distance, compared.long())
    rows.scatter_add_(0, row + TAIL, tail.long())
    rows.scatter_add_(0, row + HIGH, fixed >> PART_BITS)
    rows.scatter_add_(0, row + LOW, fixed & ((1 << PART_BITS) - 1))


def bucket_figures(
    rows: Rows, names: Sequence[str], least: float, largest: float, maxima: dict[str, float]
) -> tuple[Bucket, ...]:
    """Return the figures of every bucket.

    Args:
        rows: int64 [buckets, ROW_LENGTH].
        names: of the buckets.
        least, largest: exact extremes of abs(dlogp) over all tokens, between which every answer lies.
        maxima: name -> exact maximum, where known.
    """
    return tuple(
        _bucket(row, name, least, largest, maxima.get(name, math.nan)) for row, name in zip(rows, names, strict=True)
    )


def _bucket(row: Rows, name: str, least: float, largest: float, maximum: float) -> Bucket:
    counts = row[:_SKETCH]
    count = int(counts.sum())
    if not count:
        return Bucket(name, 0, *[math.nan] * 5)
    filled = np.flatnonzero(counts)
    low = magnitude_at(int(filled[0]), GROUPING_POWER)
    high = magnitude_at(int(filled[-1]), GROUPING_POWER) if math.isnan(maximum) else maximum
    quantiles = {
        key: min(max(quantile_of_magnitude(counts, q, GROUPING_POWER, low, high), least), largest)
        for key, q in QUANTILES.items()
    }
    total = (int(row[HIGH]) << PART_BITS) + int(row[LOW])
    return Bucket(
        name,
        count,
        tail_frac_ln2=int(row[TAIL]) / count,
        abs_dlogp_mean=total / (count << FRACTION_BITS),
        abs_dlogp_max=maximum,
        **quantiles,
    )
