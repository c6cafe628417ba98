"""Logarithmic axes that have a place for zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlk_audit.page.text import power_of_ten

ZERO_NOTE = "Values of exactly 0 are drawn at the edge."

_MOST_DECADES = 300
"""From 1 to either end of a scale; a log that was tampered with may have any float."""


@dataclass(frozen=True)
class LogScale:
    """A range of magnitudes; zeros stand at its lower edge, a decade below the least magnitude.

    Attributes:
        low, high: nats, powers of ten that hold every magnitude.
        has_zero: whether a value is 0.
    """

    low: float
    high: float
    has_zero: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> LogScale:
        """Return the scale of the finite ones among the values, which are not negative."""
        finite = [value for value in values if math.isfinite(value)]
        positive = [value for value in finite if value > 0] or [1.0]
        low, high = (min(max(math.log10(end(positive)), -_MOST_DECADES), _MOST_DECADES) for end in (min, max))
        low, high = math.floor(low), math.ceil(high)
        has_zero = 0 in finite
        return cls(10.0 ** (low - has_zero), 10.0 ** max(high, low + 1), has_zero)

    def places(self, values: Iterable[float]) -> list[float | None]:
        """Return where the values are drawn; None leaves a gap."""
        return [(value if value > 0 else self.low) if math.isfinite(value) else None for value in values]

    def axis(self, title: str) -> dict[str, Any]:
        """Return the axis of plotly."""
        low, high = math.log10(self.low), math.log10(self.high)
        decades = high - low
        exponents = range(round(low), round(high) + 1, max(1, math.ceil(decades / 8)))
        return {
            "type": "log",
            "title": {"text": title},
            "range": [low - 0.02 * decades, high + 0.02 * decades],
            "tickvals": [10.0**exponent for exponent in exponents],
            "ticktext": ["0" if 10.0**e == self.low and self.has_zero else power_of_ten(e) for e in exponents],
        }


def or_least(value: float) -> float:
    """Return a magnitude by which to sort, -1 where there is no finite one."""
    return value if math.isfinite(value) else -1.0


def finite_maximum(values: Sequence[float]) -> float:
    """Return the largest finite value; NaN without any."""
    return max((value for value in values if math.isfinite(value)), default=math.nan)
