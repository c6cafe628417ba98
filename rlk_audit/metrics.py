"""Step metrics from the integers of a state vector: every formula of the metrics reference stands here once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_audit import exact_sum
from rlk_audit.breakdowns import ROW_LENGTH, UNKNOWN, Bucket, bucket_figures
from rlk_audit.config import TOKEN_CLASSES, quantile_suffix
from rlk_audit.layout import COUNTERS, EXTREMES, FLAGS, MINIMA, ROW_HEADER, StateLayout, breakdown_field
from rlk_audit.samples import SampleTable
from rlk_audit.sketch import (
    MAX_EXPONENT,
    bin_bounds,
    bins_per_side,
    fold_sides,
    quantile_of_magnitude,
    quantile_of_signed,
)

Int64s = npt.NDArray[np.int64]

SIGNED_QUANTILES = ("0.01", "0.5", "0.99")

OVERFLOWS = {
    "ratio0_mean": "overflow_ratio",
    "chi2_0": "overflow_square",
    "ess0": "overflow_square",
    "approx_kl0": "overflow_k3",
    "mult_prob_error": "overflow_mult",
}
"""Metric that is null when a token's exponential left float32 -> counter of such tokens."""

TOKEN_WARNINGS = (*TOKEN_CLASSES[1:-1], "token_mismatch", "zero_fill_suspect")
"""Every class of tokens that is neither rejected, which other codes tell, nor compared; and what is counted beside."""
OTHER_COUNTED_WARNINGS = ("length_mismatch", "update_failed", "duplicate_microbatch")


HISTOGRAM_GROUPING_POWER = 2
"""Grouping power of the histogram that is shown: 4 bins a power of two, at most 385 in all."""


@dataclass(frozen=True)
class Histogram:
    """Counts of signed dlogp in bins, without empty ones at either end.

    Attributes:
        first: number of the first bin among all of them, from the most negative one.
        counts: tokens a bin, which add up to the compared ones.

    Raises:
        ValueError: there is no such bin, or they hold no token.
    """

    first: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.first + len(self.counts) < len(_HISTOGRAM_EDGES):
            raise ValueError(
                f"a histogram has {len(_HISTOGRAM_EDGES) - 1} bins, got {len(self.counts)} from {self.first}"
            )
        if min(self.counts, default=0) < 0 or not any(self.counts):
            raise ValueError("a histogram has counts of tokens, none of which is negative and not all are 0")

    @property
    def edges(self) -> tuple[float, ...]:
        """Return nats, ascending, one more than there are bins; the middle bin holds all below 2^-32 in magnitude."""
        return _HISTOGRAM_EDGES[self.first : self.first + len(self.counts) + 1]


@dataclass(frozen=True)
class Totals:
    """A state vector taken apart.

    Attributes:
        counters: name -> count. slots: name of a sum -> its slots. sketch: two-sided counts.
        breakdowns: int64 [buckets, ROW_LENGTH] for each label. samples: the table of samples, or None.
        rows: int64 [group_size, row_length].
    """

    counters: Mapping[str, int]
    slots: Mapping[str, Int64s]
    sketch: Int64s
    breakdowns: tuple[Int64s, ...]
    samples: SampleTable | None
    rows: Int64s
    layout: StateLayout

    @classmethod
    def of(cls, numbers: Int64s, layout: StateLayout) -> Totals:
        """Take apart ``numbers`` (int64 [layout.length])."""
        parts = {name: numbers[f.slice] for name, f in layout.fields.items()}
        return cls(
            dict(zip(COUNTERS, parts["counters"].tolist(), strict=True)),
            {name.removeprefix("sum_"): part for name, part in parts.items() if name.startswith("sum_")},
            parts["sketch"],
            tuple(parts[breakdown_field(name)].reshape(-1, ROW_LENGTH) for name in layout.config.breakdowns),
            SampleTable.of(parts["samples"]) if layout.config.samples_per_step is not None else None,
            numbers[layout.additive_length :].reshape(layout.group_size, layout.row_length),
            layout,
        )

    @property
    def compared(self) -> int:
        """Compared tokens."""
        return self.counters["compared"]

    @property
    def active(self) -> int:
        """Active tokens: the sum of all classes."""
        return sum(self.counters[name] for name in TOKEN_CLASSES)

    @property
    def total(self) -> int | None:
        """Positions of responses; None where a contribution did not say which positions are."""
        return None if self.counters["total_unknown"] else self.counters["total"]

    def column(self, name: str) -> Int64s:
        """Return one header field of every rank's row."""
        return self.rows[:, ROW_HEADER.index(name)]

    def column_float64(self, name: str) -> npt.NDArray[np.float64]:
        """Return one header field that is kept as float64 bits."""
        return np.ascontiguousarray(self.column(name)).view(np.float64)

    def extremes(self) -> dict[str, float]:
        """Return the exact extremes over the ranks that compared tokens; NaN where none did."""
        filled = self.column("compared") > 0
        if not filled.any():
            return dict.fromkeys(EXTREMES, math.nan)
        return {
            name: float((np.min if name in MINIMA else np.max)(self.column_float64(name)[filled])) for name in EXTREMES
        }

    def flag(self, name: str) -> int:
        """Return 1 if any rank set the flag."""
        return int(bool((self.column("flags") & FLAGS[name]).any()))


def step_metrics(totals: Totals) -> dict[str, float | int]:
    """Return every metric of a step by key; NaN where there is nothing to say."""
    return {name: value for figures in FIGURES for name, value in figures(totals).items()}


def step_warnings(totals: Totals) -> dict[str, int]:
    """Return every warning code with its count, 0 included."""
    counted = {name: totals.counters[name] for name in TOKEN_WARNINGS + OTHER_COUNTED_WARNINGS}
    flags = {name: totals.flag(name) for name in FLAGS}
    expected = totals.column("expected_active")
    if ((expected > 0) & (expected != totals.active + 1)).any():
        flags["unexpected_token_count"] = 1
    steps = totals.column("step")
    if (steps != steps[0]).any():
        flags["step_mismatch"] = 1
    return counted | flags | {"nothing_compared": int(totals.compared == 0)} | _sample_warnings(totals)


def _sample_warnings(totals: Totals) -> dict[str, int]:
    if totals.samples is None:
        return {}
    return {"zero_active_sample": totals.samples.zero_active, "sample_table_overflow": totals.samples.unplaced}


def step_breakdowns(totals: Totals, worst: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[Bucket, ...]]:
    """Return every breakdown's buckets, the unknown one first.

    Args:
        totals: the step's.
        worst: label -> bucket -> abs(dlogp) of its worst token, where the step's worst tokens tell it.
    """
    extremes = totals.extremes()
    least, largest = extremes["abs_dlogp_min"], extremes["abs_dlogp_max"]
    return {
        name: bucket_figures(rows, (UNKNOWN, *names), least, largest, dict(worst.get(name, {})))
        for (name, names), rows in zip(totals.layout.config.breakdowns.items(), totals.breakdowns, strict=True)
    }


def step_notes(totals: Totals) -> tuple[str, ...]:
    """Return remarks that are no warnings."""
    identical = totals.counters["identical"] == totals.compared > 0
    return ("self_comparison",) if identical and not totals.layout.config.expect_identical else ()


_HISTOGRAM_BINS = range(bins_per_side(HISTOGRAM_GROUPING_POWER))
_HISTOGRAM_MAGNITUDES = (
    *(bin_bounds(index, HISTOGRAM_GROUPING_POWER)[0] for index in _HISTOGRAM_BINS),
    2.0**MAX_EXPONENT,
)
_HISTOGRAM_EDGES = tuple(-edge for edge in reversed(_HISTOGRAM_MAGNITUDES)) + _HISTOGRAM_MAGNITUDES


def dlogp_histogram(totals: Totals) -> Histogram | None:
    """Return the sketch in coarser bins; None where nothing was compared."""
    if not totals.compared:
        return None
    middle = len(totals.sketch) // 2
    merged = 1 << (totals.layout.config.grouping_power - HISTOGRAM_GROUPING_POWER)

    def coarse(side: Int64s) -> Int64s:
        # A side is under, bins, over, and over is empty: dlogp of compared tokens stays far below 2^16.
        return np.asarray(side[1:-1].reshape(-1, merged).sum(axis=1))

    center = totals.sketch[middle - 1 : middle + 2].sum(keepdims=True)
    counts = np.concatenate([coarse(totals.sketch[:middle][::-1])[::-1], center, coarse(totals.sketch[middle + 1 :])])
    filled = np.flatnonzero(counts)
    first, last = int(filled[0]), int(filled[-1])
    return Histogram(first, tuple(counts[first : last + 1].tolist()))


def _quantiles_and_extremes(totals: Totals) -> dict[str, float]:
    config = totals.layout.config
    extremes = totals.extremes()
    power = config.grouping_power
    values = {"abs_dlogp_max": extremes["abs_dlogp_max"]}
    folded = fold_sides(totals.sketch)
    low, high = extremes["abs_dlogp_min"], extremes["abs_dlogp_max"]
    for q in config.quantiles:
        values[f"abs_dlogp_{quantile_suffix(q)}"] = quantile_of_magnitude(folded, q, power, low, high)
    low, high = extremes["dlogp_min"], extremes["dlogp_max"]
    values |= {"dlogp_min": low, "dlogp_max": high}
    for q in SIGNED_QUANTILES:
        values[f"dlogp_{quantile_suffix(q)}"] = quantile_of_signed(totals.sketch, q, power, low, high)
    values |= {"ratio0_min": _exp(low), "ratio0_max": _exp(high), "prob_diff_max": extremes["prob_diff_max"]}
    return values


def _means(totals: Totals) -> dict[str, float]:
    """Return what derives from the exact sums; all arithmetic up to the last division is on integers."""
    n, slots = totals.compared, totals.slots
    dlogp = exact_sum.total_of_terms(slots["dlogp"])
    dlogp_squared = exact_sum.total_of_squares(slots["dlogp_squared"])
    train = exact_sum.total_of_terms(slots["train_logp"])
    ratio = exact_sum.total_of_terms(slots["ratio"])
    ratio_squared = exact_sum.total_of_squares(slots["ratio_squared"])
    scale, square_scale = n << exact_sum.SUM_SCALE, n << exact_sum.PRODUCT_SCALE
    values = {
        "abs_dlogp_mean": _quotient(exact_sum.total_of_magnitudes(slots["dlogp"]), scale),
        "dlogp_mean": _quotient(dlogp, scale),
        "dlogp_std": math.sqrt(_quotient(n * dlogp_squared - dlogp**2, n * square_scale)),
        "kl0_k1": _quotient(-dlogp, scale),
        "kl0_k2": _quotient(dlogp_squared, 2 * square_scale),
        "ratio0_mean": _quotient(ratio, scale),
        "chi2_0": _quotient(ratio_squared - square_scale, square_scale),
        "ess0": _quotient(ratio**2, n * ratio_squared),
        "approx_kl0": _quotient(exact_sum.total_of_terms(slots["k3"]), scale),
        "mult_prob_error": _quotient(exact_sum.total_of_terms(slots["mult"]), scale),
        "prob_diff_mean": _quotient(exact_sum.total_of_terms(slots["prob_diff"]), scale),
        "prob_pearson": _pearson(totals),
        "train_nll": _quotient(-train, scale),
        "rollout_nll": _quotient(dlogp - train, scale),
        "log_ppl_diff": _quotient(-dlogp, scale),
    }
    for name, counter in OVERFLOWS.items():
        if totals.counters[counter]:
            values[name] = math.nan
    return values


def _shares(totals: Totals) -> dict[str, float]:
    n, counters = totals.compared, totals.counters
    low, high = counters["clipped_low"], counters["clipped_high"]
    total = totals.total
    return {
        "clipfrac0": _quotient(low + high, n),
        "clipfrac0_low": _quotient(low, n),
        "clipfrac0_high": _quotient(high, n),
        "tail_frac_ln2": _quotient(counters["tail_ln2"], n),
        "identical_frac": _quotient(counters["identical"], n),
        "mask_coverage": math.nan if total is None else _quotient(totals.active, total),
        "compared_coverage": _quotient(n, totals.active),
    }


def _counts(totals: Totals) -> dict[str, float | int]:
    warnings = step_warnings(totals)
    total = totals.total
    values: dict[str, float | int] = {
        "total_token_count": math.nan if total is None else total,
        "active_token_count": totals.active,
        "compared_token_count": totals.compared,
        **{f"overflow/{name}": totals.counters[counter] for name, counter in OVERFLOWS.items()},
        "warning_count": sum(warnings.values()),
        **{f"warning/{code}": count for code, count in warnings.items()},
        **_updates_since_rollout(totals),
    }
    return values


def _updates_since_rollout(totals: Totals) -> dict[str, float | int]:
    keys = ("updates_since_rollout_min", "updates_since_rollout_max", "updates_since_rollout")
    low, high = totals.column(keys[0]), totals.column(keys[1])
    known = low <= high
    if not known.any():
        return dict.fromkeys(keys, math.nan)
    least, most = int(low[known].min()), int(high[known].max())
    return dict(zip(keys, (least, most, least if least == most else math.nan), strict=True))


def _of_samples(totals: Totals) -> Mapping[str, float | int]:
    return {} if totals.samples is None else totals.samples.metrics()


FIGURES: tuple[Callable[[Totals], Mapping[str, float | int]], ...] = (
    _quantiles_and_extremes,
    _means,
    _shares,
    _counts,
    _of_samples,
)
"""What makes the metrics of a step, each some of them."""


def _pearson(totals: Totals) -> float:
    n, slots = totals.compared, totals.slots
    p, q = exact_sum.total_of_terms(slots["train_prob"]), exact_sum.total_of_terms(slots["rollout_prob"])
    p_variance = n * exact_sum.total_of_squares(slots["train_prob_squared"]) - p * p
    q_variance = n * exact_sum.total_of_squares(slots["rollout_prob_squared"]) - q * q
    covariance = n * exact_sum.total_of_products(slots["prob_product"]) - p * q
    # The square is a quotient of integers, at most 1 by Cauchy and Schwarz, so rounding keeps it at most 1.
    square = _quotient(covariance * covariance, p_variance * q_variance)
    return math.copysign(math.sqrt(square), covariance)


def _quotient(numerator: int, denominator: int) -> float:
    """Return the correctly rounded quotient; NaN for a zero denominator."""
    return numerator / denominator if denominator else math.nan


def _exp(value: float) -> float:
    """Return exp(value); NaN where it leaves float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.nan


def rank_figures(totals: Totals) -> list[dict[str, Any]]:
    """Return each rank's figures, in group order; NaN where it compared nothing."""
    compared = totals.column("compared")
    filled = compared > 0
    columns: dict[str, Any] = {
        "rank": totals.column("rank"),
        "group_rank": np.arange(totals.layout.group_size),
        "compared_token_count": compared,
        "abs_dlogp_mean": np.where(filled, totals.column_float64("abs_dlogp_sum") / np.maximum(compared, 1), math.nan),
        "update_failed": totals.column("update_failed"),
        "step": totals.column("step") - 1,
    }
    for name in ("abs_dlogp_max", "dlogp_min", "dlogp_max"):
        columns[name] = np.where(filled, totals.column_float64(name), math.nan)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
