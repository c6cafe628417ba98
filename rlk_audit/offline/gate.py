"""What a gate has to say of a run beside the limits that it crossed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlk_audit.limits import MIN_HISTORY, Limit
from rlk_audit.report import StepReport
from rlk_audit.run_view import RunView
from rlk_audit.verdict import PENDING

LEAST_COVERAGE = 0.99
"""Of a step's active tokens, to be compared; a limit on ``compared_coverage`` takes its place."""


def doubts(view: RunView, limits: Sequence[Limit]) -> Iterator[str]:
    """Yield why a run is no pass though it crossed no limit.

    Args:
        view: judged steps, and judged reports that were replaced.
        limits: that were asked for.
    """
    if view.problems:
        yield "what was left out could hide a crossed limit"
    yield from _replaced(view.replaced)
    judged = first_judged(view)
    never = [metric for metric, report in judged.items() if report is None]
    if never:
        yield f"{', '.join(never)} cannot be judged, for a median needs {MIN_HISTORY} steps before"
    if not any(limit.metric == "compared_coverage" for limit in limits):
        yield from _uncovered(view.steps)
    if not any(limit.metric == "abs_dlogp_max" and limit.window is None and limit.value == 0 for limit in limits):
        yield from _self_compared(view.steps)


def first_judged(view: RunView) -> dict[str, StepReport | None]:
    """Return metrics with a limit that some step had too little before it for -> the first step that was judged."""
    first: dict[tuple[int, str], StepReport | None] = {}
    for step in view.steps:
        for place, result in enumerate(() if step.verdict is None else step.verdict.limits):
            limit = place, result.metric  # a metric may have an absolute one too, which is always judged
            if result.outcome == PENDING:
                first.setdefault(limit, None)
            elif limit in first and first[limit] is None:
                first[limit] = step
    return {metric: step for (_, metric), step in first.items()}


def _replaced(reports: Sequence[StepReport]) -> Iterator[str]:
    failed = [report for report in reports if report.failures]
    if failed:
        yield (
            f"of the reports that a later one of their step replaced {len(failed)} failed, first that of step "
            f"{failed[0].step}: {failed[0].failures[0]}"
        )


def _uncovered(steps: Sequence[StepReport]) -> Iterator[str]:
    short = [step for step in steps if step.metrics.get("compared_coverage", 1.0) < LEAST_COVERAGE]
    if short:
        worst = min(short, key=lambda step: step.metrics["compared_coverage"]).metrics
        least = f"{worst['compared_coverage']:.2%}"
        if {"compared_token_count", "active_token_count"} <= set(worst):  # a log may lack them
            least = f"{worst['compared_token_count']:,} of {worst['active_token_count']:,}"
        yield (
            f"in {len(short)} of {len(steps)} steps less than {LEAST_COVERAGE:.0%} of the active tokens were compared, "
            f"at the least {least} "
            "(--limit 'compared_coverage>=SHARE' says what is enough)"
        )


def _self_compared(steps: Sequence[StepReport]) -> Iterator[str]:
    same = sum("self_comparison" in step.notes for step in steps)
    if same:
        yield (
            f"in {same} of {len(steps)} steps train and rollout are the same values throughout, as where one is a copy "
            "of the other (--limit abs_dlogp_max=0 says that they must be)"
        )
