"""LogHistogram: a quantile sketch whose merge is integer addition.

Guarantee. With grouping power ``k`` every quantile ``y`` of values whose exact order statistic ``x`` has a magnitude
in [2^-32, 2^16) satisfies ``abs(y - x) <= a * abs(x)`` with ``a = 2^-(k+1) / (1 + 2^-(k+1))``: 0.775 % for k = 6.
Below 2^-32 the error is at most 2^-33; zero, the minimum (order index 0) and the maximum (order index n - 1) are exact.
Values are filed as float32; for a float64 value that is rounded so, 2^-24 of its magnitude is added to the error.

Cost. ``2 * (48 << k) + 5`` int64 counts: 49 KB for k = 6, whatever the data.

How. The bit pattern of a non-negative float32 grows with its value, so ``bits >> (23 - k)`` is a monotone key that
splits every power of two into 2^k equal bins: the bucketing of HdrHistogram (G. Tene) and the linearly interpolated
mapping of DDSketch (Masson, Rim, Lee, VLDB 2019) without a logarithm, whose rounding differs between devices. Counts
are integers, so a merged sketch depends on the multiset of values alone. The proof stands in docs/sketch.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit.config import quantile_fraction, quantile_text

MIN_EXPONENT = -32
MAX_EXPONENT = 16
BIAS = 127
MANTISSA_BITS = 23
_SIGN_MASK = 0x7FFFFFFF

Counts = npt.NDArray[np.int64]
_Representative = Callable[[int], float]


# --- mapping: value -> bin ------------------------------------------------------------------------------------------


def bins_per_side(grouping_power: int) -> int:
    """Return how many bins cover [2^-32, 2^16) on one side of zero."""
    return (MAX_EXPONENT - MIN_EXPONENT) << grouping_power


def sketch_length(grouping_power: int) -> int:
    """Return the number of counts of a two-sided sketch.

    They stand in the order of the values: over, bins and under of the negative side, zero, then under, bins, over.
    """
    return 2 * bins_per_side(grouping_power) + 5


def bin_index(values: Tensor, grouping_power: int) -> Tensor:
    """Return the count's index (int64, same shape) of each float32 value; finite or infinite, never NaN."""
    bits = values.view(torch.int32)
    magnitude = bits & _SIGN_MASK
    lowest_key = (MIN_EXPONENT + BIAS) << grouping_power
    bins = bins_per_side(grouping_power)
    # 1 is `under`, 2 .. bins + 1 are the bins, bins + 2 is `over`; zero alone stays at distance 0.
    distance = ((magnitude >> (MANTISSA_BITS - grouping_power)) - (lowest_key - 2)).clamp_(1, bins + 2)
    distance *= magnitude != 0
    return ((bins + 2) + torch.where(bits < 0, -distance, distance)).long()


def bin_bounds(index: int, grouping_power: int) -> tuple[float, float]:
    """Return the magnitudes [low, high) of the bin ``index`` steps above 2^-32, 0 <= index < bins_per_side."""
    octave, part = divmod(index, 1 << grouping_power)
    low = math.ldexp((1 << grouping_power) + part, MIN_EXPONENT + octave - grouping_power)
    return low, low + math.ldexp(1.0, MIN_EXPONENT + octave - grouping_power)


def relative_accuracy(grouping_power: int) -> float:
    """Return the guaranteed relative error of a quantile inside [2^-32, 2^16)."""
    half = 2.0 ** -(grouping_power + 1)
    return half / (1.0 + half)


# --- counts -> order statistics -------------------------------------------------------------------------------------


def order_index(q: str, count: int) -> int:
    """Return the 0-based place in sorted data of the smallest value with at least ``q`` of ``count`` at or below it.

    Integer arithmetic on the decimal text of ``q``: floating-point ranks are off by one for many counts.
    """
    fraction = quantile_fraction(q)
    at_or_below = -(-fraction.numerator * count // fraction.denominator)
    return max(at_or_below, 1) - 1


def fold_sides(counts: Counts) -> Counts:
    """Return the counts of absolute values, [zero, under, bins, over], from the counts of a two-sided sketch."""
    middle = len(counts) // 2
    folded = counts[middle:].copy()
    folded[1:] += counts[:middle][::-1]
    return folded


def magnitude_at(distance: int, grouping_power: int) -> float:
    """Return the representative magnitude at a distance from zero: 0, under, bins, over.

    2ab/(a+b) makes the error the same at both ends [a, b) of a bin; ``over`` answers its lower edge, 2^16.
    """
    if distance == 0:
        return 0.0
    if distance == 1:
        return math.ldexp(1.0, MIN_EXPONENT - 1)
    if distance == bins_per_side(grouping_power) + 2:
        return math.ldexp(1.0, MAX_EXPONENT)
    low, high = bin_bounds(distance - 2, grouping_power)
    return 2.0 * low * high / (low + high)


def _at_order(counts: Counts, order: int) -> int:
    return int(np.searchsorted(np.cumsum(counts), order, side="right"))


def quantile_of_signed(counts: Counts, q: str, grouping_power: int, minimum: float, maximum: float) -> float:
    """Return a quantile of the values from two-sided counts and the exact extremes; NaN without values."""
    middle = len(counts) // 2

    def representative(index: int) -> float:
        distance = index - middle
        return math.copysign(magnitude_at(abs(distance), grouping_power), distance)

    return _quantile(counts, q, minimum, maximum, representative)


def quantile_of_magnitude(folded: Counts, q: str, grouping_power: int, minimum: float, maximum: float) -> float:
    """Return a quantile of absolute values from folded counts and the exact extremes; NaN without values."""
    return _quantile(folded, q, minimum, maximum, lambda distance: magnitude_at(distance, grouping_power))


def _quantile(counts: Counts, q: str, minimum: float, maximum: float, representative: _Representative) -> float:
    count = int(counts.sum())
    if count == 0:
        return math.nan
    order = order_index(q, count)
    if order == 0:
        return minimum
    if order == count - 1:
        return maximum
    return min(max(representative(_at_order(counts, order)), minimum), maximum)


# --- the public object ----------------------------------------------------------------------------------------------


class LogHistogram:
    """A two-sided quantile sketch of float values, standing alone.

    Args:
        grouping_power: 5 to 8; see ``relative_accuracy``.
        device: where the counts live and where values are expected.
    """

    def __init__(self, grouping_power: int = 6, device: str | torch.device = "cpu") -> None:
        if isinstance(grouping_power, bool) or not isinstance(grouping_power, int) or not 5 <= grouping_power <= 8:
            raise ValueError(f"grouping_power must be an integer from 5 to 8, got {grouping_power!r}")
        self.grouping_power = grouping_power
        with torch.inference_mode(False):
            self.counts = torch.zeros(sketch_length(grouping_power), dtype=torch.int64, device=device)
            self._nan_count = torch.zeros((), dtype=torch.int64, device=device)
            self._minimum = torch.full((), math.inf, dtype=torch.float64, device=device)
            self._maximum = torch.full((), -math.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, values: Tensor | Sequence[float], mask: Tensor | Sequence[float] | None = None) -> None:
        """Add values (any shape, any float dtype); where ``mask`` is 0 a value does not count. NaN is counted apart."""
        values = torch.as_tensor(values, device=self.counts.device).double().reshape(-1)
        mask = None if mask is None else torch.as_tensor(mask, device=values.device)
        if mask is not None and mask.numel() != values.numel():
            raise ValueError(f"mask must have one entry a value, got {mask.numel()} for {values.numel()}")
        active = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
        nan = active & values.isnan()
        active = active & ~nan
        self._nan_count += nan.sum()
        safe = torch.where(active, values, 0.0)
        self.counts.scatter_add_(0, bin_index(safe.float(), self.grouping_power), active.long())
        if values.numel():
            self._minimum.copy_(torch.minimum(self._minimum, torch.where(active, values, math.inf).amin()))
            self._maximum.copy_(torch.maximum(self._maximum, torch.where(active, values, -math.inf).amax()))

    def merge(self, other: LogHistogram) -> None:
        """Add another sketch's counts to this one; the other stays as it is.

        Raises:
            ValueError: the grouping powers differ.
        """
        if other.grouping_power != self.grouping_power:
            raise ValueError(
                f"cannot merge a sketch of grouping_power {other.grouping_power} into one of {self.grouping_power}"
            )
        device = self.counts.device
        self.counts += other.counts.to(device)
        self._nan_count += other._nan_count.to(device)
        self._minimum.copy_(torch.minimum(self._minimum, other._minimum.to(device)))
        self._maximum.copy_(torch.maximum(self._maximum, other._maximum.to(device)))

    def quantile(self, q: str | float | Decimal) -> float:
        """Return the smallest value with at least ``q`` of the values at or below it; NaN when empty.

        Raises:
            ValueError: ``q`` is not a number from 0 to 1.
        """
        text = quantile_text(q)
        counts = self.counts.cpu().numpy()
        return quantile_of_signed(counts, text, self.grouping_power, self.min, self.max)

    @property
    def count(self) -> int:
        """Values counted, NaN excluded."""
        return int(self.counts.sum())

    @property
    def nan_count(self) -> int:
        """Values that were NaN; they are in no bin."""
        return int(self._nan_count)

    @property
    def zero_count(self) -> int:
        """Values that were exactly zero in float32."""
        return int(self.counts[len(self.counts) // 2])

    @property
    def min(self) -> float:
        """The exact minimum; NaN when empty."""
        return float(self._minimum) if self.count else math.nan

    @property
    def max(self) -> float:
        """The exact maximum; NaN when empty."""
        return float(self._maximum) if self.count else math.nan

    @property
    def relative_accuracy(self) -> float:
        """The guaranteed relative error of a quantile of float32 values inside [2^-32, 2^16)."""
        return relative_accuracy(self.grouping_power)
