"""Audit of a dump: two readings as a stream, one reduction a step, over however many processes share the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit.allreduce import Group, gather_objects, group_place, on_first_rank
from rlk_audit.config import AuditConfig
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, DumpPart, ReadOptions
from rlk_audit.offline.exact import collect
from rlk_audit.offline.looks import excerpt, is_of
from rlk_audit.offline.plan import Plan, Progress, Reading, scan, sort_steps
from rlk_audit.offline.run import Looks, Run
from rlk_audit.offline.texts import TokenTexts
from rlk_audit.report import StepReport
from rlk_audit.run_view import Causes, RunView, join_causes


def _silent(stage: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Asked:
    """What is asked of an audit beside the figures of every step.

    Attributes:
        labels: to break down by; None for all that split the tokens.
        exact: exact quantiles in place of the sketch's, by a third reading.
        texts: turns token ids into texts for excerpts.
    """

    labels: Sequence[str] | None = None
    exact: bool = False
    texts: TokenTexts | None = None


def audit_dump(
    paths: Sequence[Path],
    format: str = "auto",
    *,
    config: AuditConfig | None = None,
    options: ReadOptions | None = None,
    asked: Asked | None = None,
    progress: Progress = _silent,
    group: Group = None,
) -> RunView:
    """Collective where a process group exists: every rank must call this; they share the files.

    Args:
        paths: files, folders and glob patterns.
        format: of the dump, or ``auto``.
        config: limits and intervals; breakdowns and samples are set by what the dump holds.
        options: how files may be read.
        asked: what else is wanted.
        progress: told of what is done.
        group: whose ranks share the work.

    Returns:
        The run; causes, excerpts, density and means of samples on the first rank alone.

    Raises:
        DumpError: nothing of the dump can be used.
        ValueError: a label asked for is not in the dump.
    """
    asked = asked or Asked()
    reading = Reading(options or ReadOptions())
    parts = _find(paths, format, reading, group)
    plan = Plan.of(parts, _scan(parts, reading, progress, group), config or AuditConfig(), asked.labels)
    if not plan.steps:
        raise DumpError(_nothing_read(reading, group))
    run = Run(plan, reading.again(), progress, group)
    steps, total = run.reports()
    notes = list(plan.notes)
    if asked.exact:
        *steps, total = _exact([*steps, total], run, plan.config, group)
        notes.append("quantiles of abs(dlogp) are exact")
    problems = [problem for told in gather_objects(reading.problems + run.changed, group) for problem in told]
    if len(run.diagnosed) < len(plan.steps):
        notes.append(f"{len(run.diagnosed)} of {len(plan.steps)} steps were diagnosed, evenly spaced")
    if plan.most_tokens > run.diagnosed_tokens:
        notes.append(f"of a step, about {run.diagnosed_tokens:,} tokens were diagnosed at most")
    formats = ", ".join(sorted({part.format for part in parts}))
    looks: list[Looks] = gather_objects(run.looks, group)
    return RunView(
        ", ".join(map(str, paths)),
        tuple(steps),
        total if len(steps) > 1 else None,
        join_causes(Causes(step, step, findings) for step, findings in run.findings),
        looks[0].density.density(look.density for look in looks[1:]),
        _excerpts(looks, total, asked.texts),
        tuple(dict.fromkeys(map(str, problems))),
        (f"read as {formats}: parts: {len(parts):,}, tokens: {plan.tokens:,}", *notes),
        _all_means(looks),
    )


def _find(paths: Sequence[Path], format: str, reading: Reading, group: Group) -> list[DumpPart]:
    """Find the parts on the first rank, for all: files may come while others look."""
    try:
        return on_first_rank(lambda: files.find(paths, format, tell=reading.tell), group)
    except OSError as error:
        raise DumpError(str(error)) from error


def _scan(parts: list[DumpPart], reading: Reading, progress: Progress, group: Group) -> list[Any]:
    rank, size = group_place(group)
    mine = {}
    for number in range(rank, len(parts), size):
        mine[number] = scan(parts[number], reading)
        progress("scanning", number + 1, len(parts))
    scans = {number: found for share in gather_objects(mine, group) for number, found in share.items()}
    return [scans[number] for number in range(len(parts))]


def _nothing_read(reading: Reading, group: Group) -> str:
    told = [str(problem) for share in gather_objects(reading.problems, group) for problem in share]
    return f"nothing could be read; {told[0]}" if told else "the dump has no samples"


def _exact(reports: list[StepReport], run: Run, config: AuditConfig, group: Group) -> list[StepReport]:
    """Collective: return the reports, of which the last is that of all steps, with exact quantiles."""
    mine, *others = gather_objects(collect(run.samples(), reports, config), group)
    for other in others:
        for want, seen in zip(mine, other, strict=True):
            want.merge(seen)
    return [want.answers(report) for want, report in zip(mine, reports, strict=True)]


def _excerpts(looks: list[Looks], total: StepReport, texts: TokenTexts | None) -> tuple[Any, ...]:
    cuttings = looks[0].cuttings.worst(look.cuttings for look in looks[1:])
    pairs = [
        (cutting, token) for cutting, token in zip(cuttings, total.worst_tokens, strict=False) if is_of(cutting, token)
    ]
    show = texts or TokenTexts()
    return tuple(excerpt(cutting, token, show.of(cutting.sample.token_ids)) for cutting, token in pairs)


def _all_means(looks: list[Looks]) -> Any:
    means = []
    for step in sort_steps({step for look in looks for step in look.means}):
        pieces = [piece for look in looks for piece in look.means.get(step, ())]
        slots, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        means.append(values[np.argsort(slots, kind="stable")])
    return np.concatenate(means) if means else np.zeros(0)
