"""Exhaustive check of the sketch's bound: every float32 in [2^-32, 2^16), about 400 million values.

    python benchmarks/sweep_sketch.py [grouping_power ...]

For each grouping power: no value lies outside its bin, and the worst relative error of the representative is the stated
one. A minute or two a grouping power on one core.
"""

import sys

import numpy as np
import torch

from rlk_audit.sketch import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    bin_bounds,
    bin_index,
    bins_per_side,
    magnitude_at,
    relative_accuracy,
)

CHUNK = 1 << 22


def first_bits(exponent: int) -> int:
    return int(np.float32(2.0**exponent).view(np.int32))


def sweep(power: int) -> tuple[int, int, float]:
    """Return (values seen, values outside their bin, worst relative error)."""
    bins = bins_per_side(power)
    bounds = [bin_bounds(index, power) for index in range(bins)]
    low, high = (torch.tensor(side, dtype=torch.float64) for side in zip(*bounds, strict=True))
    answer = torch.tensor([magnitude_at(index + 2, power) for index in range(bins)], dtype=torch.float64)
    seen, misplaced, worst = 0, 0, 0.0
    last = first_bits(MAX_EXPONENT)
    for start in range(first_bits(MIN_EXPONENT), last, CHUNK):
        bits = torch.arange(start, min(start + CHUNK, last), dtype=torch.int32)
        values = bits.view(torch.float32)
        index = bin_index(values, power) - (bins + 2) - 2
        exact = values.double()
        misplaced += int(((exact < low[index]) | (exact >= high[index])).sum())
        worst = max(worst, float(((answer[index] - exact).abs() / exact).max()))
        seen += len(values)
    return seen, misplaced, worst


def main() -> int:
    failed = False
    for power in [int(text) for text in sys.argv[1:]] or [5, 6, 7, 8]:
        seen, misplaced, worst = sweep(power)
        bound = relative_accuracy(power)
        failed |= misplaced > 0 or worst > bound
        print(f"k={power}: {seen} values, {misplaced} outside their bin, worst error {worst:.6%}, bound {bound:.6%}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
