"""The outcome of one step: plain records, made by the limits and carried by the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PASS, FAIL, NO_DATA, PENDING = "pass", "fail", "no_data", "pending"


@dataclass(frozen=True)
class LimitResult:
    """How one limit went.

    Attributes:
        metric: key without prefix. value: what it was.
        relation, bound: what it must be, such as ``<=`` 0.05; NaN while a relative limit has too few steps.
        outcome: pass, fail, no_data (the metric is null) or pending (too few steps).
    """

    metric: str
    relation: str
    bound: float
    value: float
    outcome: str

    def __str__(self) -> str:
        beyond = self.outcome == FAIL and not math.isfinite(self.value)  # null once it was in JSON
        value = "beyond the range of its numbers" if beyond else f"{self.value:.6g}"
        return f"{self.metric} is {value}, must be {self.relation} {self.bound:.6g}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a step.

    Attributes:
        limits: every limit with its value, bound and outcome.
        violations: sentences on what must not occur at all, such as classes that must be empty.
    """

    limits: tuple[LimitResult, ...] = ()
    violations: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no limit failed and there is no violation."""
        return not self.failures()

    @property
    def failed_limits(self) -> tuple[LimitResult, ...]:
        """The limits that were crossed."""
        return tuple(result for result in self.limits if result.outcome == FAIL)

    def failures(self) -> tuple[str, ...]:
        """Return a sentence on each thing that failed."""
        return tuple(map(str, self.failed_limits)) + self.violations

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; ``from_dict`` gives an equal verdict back."""
        return {
            "passed": self.passed,
            "limits": [dict(vars(result)) for result in self.limits],
            "violations": list(self.violations),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        """Make a verdict of ``to_dict``'s values; None among the numbers becomes NaN."""
        results = []
        for result in values["limits"]:
            numbers = {name: math.nan if result[name] is None else float(result[name]) for name in ("bound", "value")}
            texts = {name: str(result[name]) for name in ("metric", "relation", "outcome")}
            results.append(LimitResult(texts["metric"], texts["relation"], outcome=texts["outcome"], **numbers))
        return cls(tuple(results), tuple(map(str, values["violations"])))
