"""What a diagnosis says of a step: plain records, made by ``diagnose`` and carried by the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = float | int | str
NOTHING_TO_CHECK = "nothing"
"""``check_first`` of a finding that is no fault."""
HEALTHY, TOO_FEW = "healthy", "too_few_tokens"
"""Codes of findings that name no cause."""


@dataclass(frozen=True)
class Finding:
    """A cause of drift.

    Attributes:
        code: of the cause.
        strength: share of the step's abs(dlogp) that it explains, 0 to 1.
        evidence: the statistics it was decided on.
        check_first: where to look.
        summary: one sentence with numbers.
    """

    code: str
    strength: float
    evidence: Mapping[str, Value]
    check_first: str
    summary: str

    @property
    def names_cause(self) -> bool:
        """Whether it says what made the drift."""
        return self.code not in (HEALTHY, TOO_FEW)

    @property
    def advice(self) -> str:
        """The summary and, where something is to be checked, what."""
        nothing = self.check_first == NOTHING_TO_CHECK
        return self.summary if nothing else f"{self.summary}; check {self.check_first}"

    def __str__(self) -> str:
        return f"{self.code} ({self.strength:.0%}): {self.advice}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; NaN and infinities are None."""
        return {name: plain(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finding:
        """Make a finding of ``to_dict``'s values.

        Raises:
            ValueError: a part is missing or of another kind.
        """
        try:
            evidence = {str(name): _evidence(value) for name, value in values["evidence"].items()}
            texts = (str(values[name]) for name in ("check_first", "summary"))
            return cls(str(values["code"]), float(values["strength"]), evidence, *texts)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a finding: {type(error).__name__} {error}") from error


def _evidence(value: Any) -> Value:
    if value is not None and not isinstance(value, (float, int, str)):
        raise TypeError(f"expected a number, a text or null, got {value!r}")
    return math.nan if value is None else value


def plain(value: Any) -> Any:
    """Return a value as strict JSON has it: NaN and infinities are None, also inside of mappings and sequences."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):  # most values: the look for a mapping is slow
        return value
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value
