"""Causes of drift over ranges of steps."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_audit.finding import NOTHING_TO_CHECK, Finding
from rlk_audit.page.text import steps_name
from rlk_audit.run_view import Causes, RunView, join_causes

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
    source = "said by the steps' reports" if view.density is None else "diagnosed from tokens"
    groups = [_group(causes, source) for causes in view.causes]
    if not view.causes:
        reports = [Causes(report.step, report.step, report.findings) for report in view.steps]
        groups += [_group(causes, "said by the steps' reports") for causes in join_causes(reports)]
    if view.total is not None and view.total.findings:
        groups.append(CauseGroup("the whole run", "said by the total's report", view.total.findings))
    if len(groups) <= GROUPS:
        return groups, ""
    kept = sorted(range(len(groups)), key=lambda place: (not groups[place].is_fault, place))[:GROUPS]
    return [groups[place] for place in sorted(kept)], f"{GROUPS} of {len(groups):,} ranges, those with a fault first."


def _group(causes: Causes, source: str) -> CauseGroup:
    return CauseGroup(steps_name(causes.first_step, causes.last_step), source, causes.findings)
