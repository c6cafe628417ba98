"""RunView: a run's reports and what was read of its tokens, as tables, pages and comparisons show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_audit.finding import Finding
from rlk_audit.report import StepReport, WorstToken


@dataclass(frozen=True)
class Excerpt:
    """A worst token among its neighbours; one entry a token in every tuple, in the order of positions.

    Attributes:
        step: the step it belongs to; None where unknown.
        worst: the token itself.
        positions: in the response.
        texts: of the tokens, or their ids as text where no tokenizer was given; empty where ids are unknown.
        train_logp, rollout_logp: nats; NaN where there is none.
        active: whether the token counts.
    """

    step: int | None
    worst: WorstToken
    positions: tuple[int, ...]
    texts: tuple[str, ...]
    train_logp: tuple[float, ...]
    rollout_logp: tuple[float, ...]
    active: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Density:
    """Compared tokens by their two probabilities.

    Attributes:
        edges: of the bins on both axes, ascending from 0 to 1.
        counts: int64 [bins, bins], rollout by train.
    """

    edges: tuple[float, ...]
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Causes:
    """What a diagnosis of tokens found, the same in each of the steps from first to last."""

    first_step: int | None
    last_step: int | None
    findings: tuple[Finding, ...]


def join_causes(causes: Iterable[Causes]) -> tuple[Causes, ...]:
    """Join neighbours that name the same causes in the same places; the strongest one's words stand for all.

    Steps without findings are left out, and part what lies around them.
    """
    joined = []
    for _, group in groupby(causes, key=_named):
        neighbours = list(group)
        if neighbours[0].findings:
            strongest = max(neighbours, key=lambda found: found.findings[0].strength)
            joined.append(Causes(neighbours[0].first_step, neighbours[-1].last_step, strongest.findings))
    return tuple(joined)


def _named(causes: Causes) -> tuple[object, ...]:
    """Return codes and the places that the evidence names, such as an engine; its numbers differ from step to step."""
    return tuple(
        (finding.code, *(value for value in finding.evidence.values() if isinstance(value, str)))
        for finding in causes.findings
    )


@dataclass(frozen=True, eq=False)
class RunView:
    """A run, or a dump of one.

    Attributes:
        title: where it comes from.
        steps: reports of its steps, ascending.
        total: of all tokens; None where only the steps are known.
        causes: of the steps in order; empty where no tokens were diagnosed (``StepReport.findings`` may hold some).
        density, excerpts: of tokens that were read; None and empty for a run's log, which has none.
        problems: what of the source could not be read, one sentence each.
        notes: remarks on the source, such as its format and labels that it holds.
        sample_means: float64 [samples], mean abs(dlogp) of each sample, by step; None where tokens were not read.
        replaced: reports in whose place a later one of the same step stands, in the order in which they came.
    """

    title: str
    steps: tuple[StepReport, ...]
    total: StepReport | None = None
    causes: tuple[Causes, ...] = ()
    density: Density | None = None
    excerpts: tuple[Excerpt, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sample_means: npt.NDArray[np.float64] | None = None
    replaced: tuple[StepReport, ...] = ()

    @property
    def whole(self) -> StepReport:
        """The total, or the only step where there is none; of several steps without a total the last."""
        return self.steps[-1] if self.total is None else self.total

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, NaN and infinities as None; densities and excerpts are left out."""
        return {
            "title": self.title,
            "total": None if self.total is None else self.total.to_dict(),
            "steps": [report.to_dict() for report in self.steps],
            "causes": [
                {
                    "first_step": causes.first_step,
                    "last_step": causes.last_step,
                    "findings": [finding.to_dict() for finding in causes.findings],
                }
                for causes in self.causes
            ],
            "problems": list(self.problems),
            "notes": list(self.notes),
        }
