"""The sketch by itself: which bin, which order statistic, what a bin answers, and the public histogram."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlk_audit import LogHistogram
from rlk_audit.sketch import (
    bin_bounds,
    bin_index,
    bins_per_side,
    fold_sides,
    magnitude_at,
    order_index,
    relative_accuracy,
    sketch_length,
)

POWERS = (5, 6, 7, 8)
WITHIN_A_BIN = relative_accuracy(6) * (1 + 1e-12)
"""The bound, and room for the rounding of the comparison: values at the lower edge of a bin reach it."""


def places(values: list[float], power: int = 6) -> list[int]:
    """Distance of each value's bin from the zero class, signed."""
    index = bin_index(torch.tensor(values, dtype=torch.float32), power)
    return (index - sketch_length(power) // 2).tolist()


# --- value -> bin -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", POWERS)
def test_every_bin_holds_its_lower_edge_and_nothing_below_it(power: int) -> None:
    """All bins of one side. Kills: `floor` for `ceil`, an offset of one, an edge given to the wrong side."""
    bounds = [bin_bounds(index, power) for index in range(bins_per_side(power))]
    low = np.array([bound[0] for bound in bounds], dtype=np.float32)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    below = np.nextafter(low, np.float32(0.0))
    expected = list(range(2, bins_per_side(power) + 2))
    assert places(low.tolist(), power) == expected
    assert places(below.tolist(), power) == [distance - 1 for distance in expected]
    assert places((-low).tolist(), power) == [-distance for distance in expected]


def test_what_lies_outside_the_bins() -> None:
    """Zero is a class of its own, below 2^-32 is `under`, from 2^16 on is `over`."""
    over = bins_per_side(6) + 2
    assert places([0.0, -0.0]) == [0, 0]
    assert places([1e-45, 1e-38, 2.0**-33, -(2.0**-33), -1e-45]) == [1, 1, 1, -1, -1]
    assert places([2.0**-32, -(2.0**-32)]) == [2, -2]
    assert places([65535.99, 65536.0, 3e38, math.inf]) == [over - 1, over, over, over]
    assert places([-65535.99, -65536.0, -math.inf]) == [1 - over, -over, -over]


def test_bins_grow_with_the_values() -> None:
    values = torch.sort(torch.cat([-torch.logspace(-12, 6, 5000), torch.logspace(-12, 6, 5000), torch.zeros(2)])).values
    index = bin_index(values, 6)
    assert bool((index.diff() >= 0).all())
    assert index.min() == 0
    assert index.max() == sketch_length(6) - 1


@pytest.mark.parametrize(("power", "accuracy"), [(5, 0.015385), (6, 0.0077519), (7, 0.0038911), (8, 0.0019493)])
def test_a_bin_answers_within_the_stated_accuracy_at_both_ends(power: int, accuracy: float) -> None:
    assert relative_accuracy(power) == pytest.approx(accuracy, rel=1e-4)
    for index in (0, 1, 77, bins_per_side(power) // 2, bins_per_side(power) - 1):
        low, high = map(Fraction, bin_bounds(index, power))
        answer = Fraction(magnitude_at(index + 2, power))
        assert abs((answer - low) / low - (high - answer) / high) < Fraction(1, 10**14), "the same at both ends"
        assert (answer - low) / low <= relative_accuracy(power) * (1 + 1e-12)


def test_what_the_outer_classes_answer() -> None:
    assert magnitude_at(0, 6) == 0.0
    assert magnitude_at(1, 6) == 2.0**-33
    assert magnitude_at(bins_per_side(6) + 2, 6) == 2.0**16


# --- order statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "count", "expected"),
    [
        ("0", 10, 0), ("1", 10, 9), ("0.5", 1, 0), ("0.5", 2, 0), ("0.5", 3, 1), ("0.5", 4, 1), ("0.9", 10, 8),
        ("0.99", 100, 98), ("0.99", 101, 99), ("0.999", 1000, 998), ("0.07", 100, 6), ("0.29", 100, 28),
        ("0.999", 2**62, 2**62 * 999 // 1000),
    ],
)  # fmt: skip
def test_order_index(q: str, count: int, expected: int) -> None:
    """0.07 * 100 and 0.29 * 100 are above 7 and below 29 in floating point: an off-by-one rank."""
    assert order_index(q, count) == expected


def test_folding_adds_the_two_sides() -> None:
    counts = np.arange(1, 12)  # over bins under zero under bins over, made short
    assert fold_sides(counts).tolist() == [6, 7 + 5, 8 + 4, 9 + 3, 10 + 2, 11 + 1]
    assert counts.tolist() == list(range(1, 12)), "its argument stays as it was"


# --- LogHistogram -----------------------------------------------------------------------------------------------------


def histogram(values: list[float], power: int = 6) -> LogHistogram:
    made = LogHistogram(power)
    made.update(torch.tensor(values, dtype=torch.float64))
    return made


def test_an_empty_histogram_has_no_quantile() -> None:
    empty = LogHistogram()
    assert empty.count == empty.zero_count == empty.nan_count == 0
    assert all(math.isnan(value) for value in (empty.quantile(0.5), empty.min, empty.max))


@pytest.mark.parametrize("value", [0.37, -0.37, 0.0, 1e-40, -1e30, 7e-11])
def test_a_single_value_is_every_quantile(value: float) -> None:
    one = histogram([value])
    assert [one.quantile(q) for q in ("0", "0.001", "0.5", "0.99", "1")] == [value] * 5


def test_quantiles_stay_between_the_extremes() -> None:
    """Reported: a p99 above the maximum. [137, 389] is wider than a bin, [137.0, 137.1] is not."""
    few = histogram([137.0, 215.0, 237.0, 389.0])
    close = histogram([137.0, 137.05, 137.1])
    for q in ("0", "0.01", "0.5", "0.9", "0.99", "1"):
        assert 137.0 <= few.quantile(q) <= 389.0
        assert 137.0 <= close.quantile(q) <= 137.1
    assert (few.quantile(0), few.quantile(1)) == (137.0, 389.0)


def test_one_outlier_among_many() -> None:
    many, hundred = histogram([1.0] * 1000 + [1e7]), histogram([1.0] * 99 + [1e7])
    assert many.quantile("0.99") == pytest.approx(1.0, rel=WITHIN_A_BIN)
    assert hundred.quantile("0.99") == pytest.approx(1.0, rel=WITHIN_A_BIN), "99 of 100 are at or below 1"
    assert hundred.quantile("1") == 1e7


def test_negative_values_come_first() -> None:
    signed = histogram([-8.0, -2.0, 0.0, 0.5, 100.0])
    answers = [signed.quantile(q) for q in ("0.2", "0.4", "0.6", "0.8", "1")]
    assert answers == pytest.approx([-8.0, -2.0, 0.0, 0.5, 100.0], rel=WITHIN_A_BIN)


def test_nan_and_masked_values_are_in_no_bin() -> None:
    made = LogHistogram()
    made.update(torch.tensor([1.0, math.nan, math.nan, math.nan, 2.0]), torch.tensor([1, 1, 1, 0, 0]))
    assert (made.count, made.nan_count, made.min, made.max) == (1, 2, 1.0, 1.0)
    made.update([])
    made.update([[0.0, -0.0], [-1.0, 3.0]])
    assert (made.count, made.zero_count, made.min, made.max) == (5, 2, -1.0, 3.0)


def test_merge_is_the_histogram_of_both() -> None:
    values = torch.linspace(-3.0, 5.0, 101).tolist()
    left, right, both = histogram(values[:40]), histogram([*values[40:], math.nan]), histogram([*values, math.nan])
    snapshot = right.counts.clone()
    left.merge(right)
    left.merge(LogHistogram())
    assert torch.equal(left.counts, both.counts)
    assert (left.min, left.max, left.nan_count) == (both.min, both.max, 1)
    left.update([1.0])
    assert torch.equal(right.counts, snapshot), "the argument is neither changed nor aliased"
    assert right.count == 61


def test_update_writes_no_input_and_keeps_no_graph() -> None:
    values = torch.tensor([0.5, math.nan, -2.0], requires_grad=True)
    before = values._version
    made = LogHistogram()
    made.update(values * 1.0)
    assert values._version == before
    assert not made.counts.requires_grad


@pytest.mark.parametrize("power", [5, 6, 7, 8])
def test_every_grouping_power_from_5_to_8_is_taken(power: int) -> None:
    made = LogHistogram(power)
    made.update([1.0, 2.0, 3.0])
    assert made.quantile("0.5") == pytest.approx(2.0, rel=2.0**-power)


@pytest.mark.parametrize("power", [4, 9, 6.0, "6", True])
def test_a_wrong_grouping_power_is_told(power: object) -> None:
    with pytest.raises(ValueError, match=r"^grouping_power must be an integer from 5 to 8, got") as caught:
        LogHistogram(power)
    assert str(caught.value).endswith(f"got {power!r}")


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan, math.inf, "half", "", None])
def test_a_wrong_quantile_is_told(q: object) -> None:
    with pytest.raises(ValueError, match=r"^a quantile must be a decimal number from 0 to 1, got") as caught:
        histogram([1.0]).quantile(q)
    assert str(caught.value).endswith(f"got {q!r}")


def test_other_misuse_is_told() -> None:
    with pytest.raises(ValueError, match=r"^mask must have one entry a value, got 2 for 3$"):
        LogHistogram().update([1.0, 2.0, 3.0], torch.ones(2))
    with pytest.raises(ValueError, match=r"^cannot merge a sketch of grouping_power 7 into one of 6$"):
        LogHistogram(6).merge(LogHistogram(7))
