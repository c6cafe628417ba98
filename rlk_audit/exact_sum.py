"""Sums that are exact and do not depend on the order of their terms.

A float32 is ``mantissa * 2^(exponent - 150)`` with an integer mantissa below 2^24. Adding the mantissas of equal sign
and exponent as int64 loses nothing, commutes and associates, so any sharding of the terms gives the same slots, and the
slots give the exact total. A slot overflows only after 2^39 terms. The product of two float32 has a 48-bit mantissa; it
is added in two 24-bit parts, so totals of squares and products are exact too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SIGNED_SLOTS = 512
UNSIGNED_SLOTS = 256
SQUARE_SLOTS = 2 * UNSIGNED_SLOTS
PRODUCT_SLOTS = 2 * SIGNED_SLOTS
SUM_SCALE = 150
"""A total of terms is ``total_of_terms(slots) / 2**SUM_SCALE``."""
PRODUCT_SCALE = 2 * SUM_SCALE
"""A total of squares or products is ``total_of_...(slots) / 2**PRODUCT_SCALE``."""

FRACTION_BITS = 32
"""Fixed-point numbers are in steps of 2^-32."""
_PART_BITS = 24
_PART_MASK = (1 << _PART_BITS) - 1

Slots = npt.NDArray[np.int64]


def fixed_point(values: Tensor) -> Tensor:
    """Return float64 values, below 2^31 in magnitude, as int64 in steps of 2^-FRACTION_BITS, rounded to even."""
    return (values * 2.0**FRACTION_BITS).round_().long()


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (slot, mantissa), int64, of finite float32 values; slot is the sign and the biased exponent, 0 to 511."""
    bits = values.view(torch.int32)
    slot = (bits >> 23) & 0x1FF
    mantissa = (bits & 0x7FFFFF) | ((slot & 0xFF) != 0).int() << 23
    return slot.long(), mantissa.long()


def add_terms(slots: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Add ``split`` terms to ``slots`` (int64, SIGNED_SLOTS, or UNSIGNED_SLOTS if none is negative)."""
    slots.scatter_add_(0, *parts)


def add_squares(slots: Tensor, parts: tuple[Tensor, Tensor]) -> None:
    """Add squares of ``split`` terms to ``slots`` (int64, SQUARE_SLOTS), by exponent: high parts, then low ones."""
    slot, mantissa = parts
    exponent = slot & 0xFF
    square = mantissa * mantissa
    slots[:UNSIGNED_SLOTS].scatter_add_(0, exponent, square >> _PART_BITS)
    slots[UNSIGNED_SLOTS:].scatter_add_(0, exponent, square & _PART_MASK)


def add_products(slots: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> None:
    """Add products of non-negative terms to ``slots`` (int64, PRODUCT_SLOTS), by the sum of their exponents."""
    # A subnormal has the exponent of the smallest normal number.
    exponent = left[0].clamp(min=1) + right[0].clamp(min=1)
    product = left[1] * right[1]
    slots[:SIGNED_SLOTS].scatter_add_(0, exponent, product >> _PART_BITS)
    slots[SIGNED_SLOTS:].scatter_add_(0, exponent, product & _PART_MASK)


def _occupied(slots: Slots) -> Iterator[tuple[int, int]]:
    for index in np.flatnonzero(slots).tolist():
        yield index, int(slots[index])


def total_of_terms(slots: Slots) -> int:
    """Return the exact total times 2^SUM_SCALE, as an integer."""
    total = 0
    for index, mantissas in _occupied(slots):
        term = mantissas << max(index & 0xFF, 1)
        total += -term if index >> 8 else term
    return total


def total_of_magnitudes(slots: Slots) -> int:
    """Return the exact total of the terms' absolute values times 2^SUM_SCALE, as an integer."""
    return sum(mantissas << max(index & 0xFF, 1) for index, mantissas in _occupied(slots))


def total_of_squares(slots: Slots) -> int:
    """Return the exact total of squares times 2^PRODUCT_SCALE, as an integer."""
    high, low = slots[:UNSIGNED_SLOTS], slots[UNSIGNED_SLOTS:]
    return sum(part << (2 * max(e, 1) + _PART_BITS) for e, part in _occupied(high)) + sum(
        part << (2 * max(e, 1)) for e, part in _occupied(low)
    )


def total_of_products(slots: Slots) -> int:
    """Return the exact total of products times 2^PRODUCT_SCALE, as an integer."""
    high, low = slots[:SIGNED_SLOTS], slots[SIGNED_SLOTS:]
    return sum(part << (e + _PART_BITS) for e, part in _occupied(high)) + sum(part << e for e, part in _occupied(low))


def magnitude_sum_float64(slots: Tensor) -> Tensor:
    """Return the total of absolute values as a float64 scalar tensor, on the device, to a few units of 2^-53."""
    weights = _CPU_WEIGHTS if slots.device.type == "cpu" else _weights(slots.device)
    return (slots.double().view(-1, UNSIGNED_SLOTS) * weights).sum()


def _weights(device: torch.device) -> Tensor:
    """Return 2^(max(exponent, 1) - SUM_SCALE), float64 [UNSIGNED_SLOTS], built of bits: exp2 need not be exact."""
    exponent = torch.arange(UNSIGNED_SLOTS, device=device).clamp_(min=1) - SUM_SCALE
    return ((exponent + 1023) << 52).view(torch.float64)


_CPU_WEIGHTS = _weights(torch.device("cpu"))
