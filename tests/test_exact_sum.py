"""Sums that lose nothing: every total is compared with a sum of fractions."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from rlk_audit import exact_sum

TINY = float(np.finfo(np.float32).smallest_subnormal)
LARGEST = float(np.finfo(np.float32).max)
HARD = [
    1.0, -1.0, 1e30, -1e30, 1e-30, TINY, -TINY, 3 * TINY, 0.0, -0.0, LARGEST, -LARGEST, 2.0**-126, 1 / 3, 16777215.0,
]  # fmt: skip


def float32s(seed: int, count: int = 500, lowest: float = -1.0) -> list[float]:
    """Float32 values over all magnitudes, those of HARD among them."""
    rng = random.Random(seed)
    spread = [rng.uniform(lowest, 1.0) * 2.0 ** rng.randint(-149, 127) for _ in range(count)]
    return [float(np.float32(value)) for value in spread + [v for v in HARD if v >= lowest or lowest < 0]]


def split(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    return exact_sum.split(torch.tensor(values, dtype=torch.float32))


def terms(values: list[float]) -> torch.Tensor:
    slots = torch.zeros(exact_sum.SIGNED_SLOTS, dtype=torch.int64)
    exact_sum.add_terms(slots, split(values))
    return slots


def scaled(total: int, scale: int) -> Fraction:
    return Fraction(total, 2**scale)


def test_split_loses_no_bit() -> None:
    values = float32s(0)
    for value, slot, mantissa in zip(values, *(part.tolist() for part in split(values)), strict=True):
        sign = -1 if slot >= 256 else 1
        assert sign * Fraction(mantissa) * Fraction(2) ** (max(slot % 256, 1) - 150) == Fraction(value)
        assert mantissa < 2**24


@pytest.mark.parametrize("seed", range(5))
def test_totals_of_terms_are_exact(seed: int) -> None:
    """Magnitudes 2^-149 to 2^127 in one sum: a float64 keeps none of the small ones."""
    values = float32s(seed)
    slots = terms(values).numpy()
    assert scaled(exact_sum.total_of_terms(slots), exact_sum.SUM_SCALE) == sum(map(Fraction, values))
    magnitudes = sum(abs(Fraction(value)) for value in values)
    assert scaled(exact_sum.total_of_magnitudes(slots), exact_sum.SUM_SCALE) == magnitudes
    approximate = float(exact_sum.magnitude_sum_float64(torch.from_numpy(slots)))
    assert abs(Fraction(approximate) - magnitudes) <= magnitudes * Fraction(1, 2**48)


@pytest.mark.parametrize("seed", range(5))
def test_totals_of_squares_and_products_are_exact(seed: int) -> None:
    """24 x 24 bits need 48: kills a square rounded to float32, and parts put back at the wrong scale."""
    values, others = float32s(seed), float32s(seed + 100)
    squares = torch.zeros(exact_sum.SQUARE_SLOTS, dtype=torch.int64)
    exact_sum.add_squares(squares, split(values))
    total = scaled(exact_sum.total_of_squares(squares.numpy()), exact_sum.PRODUCT_SCALE)
    assert total == sum(Fraction(value) ** 2 for value in values)
    left, right = [abs(value) for value in values], [abs(value) for value in others]
    products = torch.zeros(exact_sum.PRODUCT_SLOTS, dtype=torch.int64)
    exact_sum.add_products(products, split(left), split(right))
    total = scaled(exact_sum.total_of_products(products.numpy()), exact_sum.PRODUCT_SCALE)
    assert total == sum(Fraction(a) * Fraction(b) for a, b in zip(left, right, strict=True))


def test_order_and_grouping_leave_no_trace() -> None:
    """1e30 - 1e30 + 1: in floating point the answer depends on the order."""
    for values in itertools.permutations([1e30, -1e30, 1.0, TINY]):
        values = [float(np.float32(value)) for value in values]
        assert torch.equal(terms(list(values)), terms(list(values[:1])) + terms(list(values[1:])))
        total = scaled(exact_sum.total_of_terms(terms(list(values)).numpy()), exact_sum.SUM_SCALE)
        assert total == Fraction(1.0) + Fraction(TINY)


def test_slots_add_up_to_2_to_the_39_terms() -> None:
    """The stated bound: 2^39 terms of the largest mantissa still fit."""
    slots = (terms([16777215.0]) * 2**39).numpy()
    assert int(slots.max()) == (2**24 - 1) * 2**39 > 0
    total = scaled(exact_sum.total_of_terms(slots), exact_sum.SUM_SCALE)
    assert total == Fraction(16777215) * 2**39


def test_no_terms_are_an_exact_zero() -> None:
    empty = np.zeros(exact_sum.SIGNED_SLOTS, dtype=np.int64)
    assert exact_sum.total_of_terms(empty) == exact_sum.total_of_magnitudes(empty) == 0
    assert exact_sum.total_of_squares(empty) == 0
    assert exact_sum.total_of_products(np.zeros(exact_sum.PRODUCT_SLOTS, dtype=np.int64)) == 0
    assert float(exact_sum.magnitude_sum_float64(torch.from_numpy(empty))) == 0.0
