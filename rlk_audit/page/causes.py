"""Causes of drift over ranges of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rlk_audit.finding import NOTHING_TO_CHECK, Finding
from rlk_audit.page.text import steps_name
from rlk_audit.run_view import Causes, RunView

GROUPS = 60
"""Ranges of steps that are shown."""


@dataclass(frozen=True)
class CauseGroup:
    """What was found in a range of steps; ``source`` says on what it rests."""

    where: str
    source: str
    findings: tuple[Finding, ...]

    @property
    def is_fault(self) -> bool:
        """Whether something is to be checked."""
        return any(finding.check_first != NOTHING_TO_CHECK for finding in self.findings)


def cause_groups(view: RunView) -> tuple[list[CauseGroup], str]:
    """Return the causes in the order of steps, faults first where there are too many, and what was left out."""
    reports = [Causes(report.step, report.step, report.findings) for report in view.steps]
    groups = [_group(causes, "diagnosed from tokens") for causes in _joined(view.causes)]
    groups += [_group(causes, "said by the steps' reports") for causes in _joined(reports)]
    if view.total is not None and view.total.findings:
        groups.append(CauseGroup("the whole run", "said by the total's report", view.total.findings))
    if len(groups) <= GROUPS:
        return groups, ""
    kept = sorted(range(len(groups)), key=lambda place: (not groups[place].is_fault, place))[:GROUPS]
    return [groups[place] for place in sorted(kept)], f"{GROUPS} of {len(groups):,} ranges, those with a fault first."


def _group(causes: Causes, source: str) -> CauseGroup:
    return CauseGroup(steps_name(causes.first_step, causes.last_step), source, causes.findings)


def _joined(causes: Sequence[Causes]) -> list[Causes]:
    """Join neighbours that name the same causes in the same places; the strongest one's words stand for all."""
    joined = []
    for _, group in groupby(causes, key=_named):
        neighbours = list(group)
        if neighbours[0].findings:
            strongest = max(neighbours, key=lambda found: found.findings[0].strength)
            joined.append(Causes(neighbours[0].first_step, neighbours[-1].last_step, strongest.findings))
    return joined


def _named(causes: Causes) -> tuple[object, ...]:
    """Return codes and the places that the evidence names, such as an engine; its numbers differ from step to step."""
    return tuple(
        (finding.code, *(value for value in finding.evidence.values() if isinstance(value, str)))
        for finding in causes.findings
    )
