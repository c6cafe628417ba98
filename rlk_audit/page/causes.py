"""Causes of drift over ranges of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rlk_audit.finding import NOTHING_TO_CHECK, Finding
from rlk_audit.page.text import steps_name
from rlk_audit.report import StepReport
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
    groups = [_group(causes, "diagnosed from tokens") for causes in view.causes]
    groups += [_group(causes, "said by the step's report") for causes in _of_reports(view.steps)]
    if view.total is not None and view.total.findings:
        groups.append(CauseGroup("the whole run", "said by the total's report", view.total.findings))
    if len(groups) <= GROUPS:
        return groups, ""
    kept = sorted(range(len(groups)), key=lambda place: (not groups[place].is_fault, place))[:GROUPS]
    return [groups[place] for place in sorted(kept)], f"{GROUPS} of {len(groups):,} ranges, those with a fault first."


def _group(causes: Causes, source: str) -> CauseGroup:
    return CauseGroup(steps_name(causes.first_step, causes.last_step), source, causes.findings)


def _of_reports(steps: Sequence[StepReport]) -> list[Causes]:
    """Join neighbouring steps that name the same causes; the strongest step's words stand for all."""
    found = []
    for _, neighbours in groupby(steps, key=lambda report: tuple(finding.code for finding in report.findings)):
        reports = list(neighbours)
        if reports[0].findings:
            strongest = max(reports, key=lambda report: report.findings[0].strength)
            found.append(Causes(reports[0].step, reports[-1].step, strongest.findings))
    return found
