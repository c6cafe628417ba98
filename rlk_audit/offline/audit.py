"""Audit of a dump: two readings as a stream, one reduction a step, over however many processes share the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlk_audit.allreduce import Group, agree_on_layout, all_reduce, gather_objects, group_place, mark_agreed
from rlk_audit.config import AuditConfig
from rlk_audit.diagnose import diagnose
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, DumpPart, DumpSample, ReadOptions
from rlk_audit.finding import Finding
from rlk_audit.layout import WORST_TOKEN, StateLayout
from rlk_audit.offline.exact import collect
from rlk_audit.offline.looks import Cuttings, ProbabilityDensity, excerpt, is_of, sample_means
from rlk_audit.offline.plan import Plan, Progress, Reading, Step, scan
from rlk_audit.offline.states import StepStates
from rlk_audit.offline.texts import TokenTexts
from rlk_audit.offline.tokens import Tokens
from rlk_audit.report import StepReport
from rlk_audit.run_total import RunTotal
from rlk_audit.run_view import Causes, RunView
from rlk_audit.state import State

BATCH_TOKENS = 1 << 18
"""Tokens of a step that are measured at a time."""
MAX_WAITING_TOKENS = 1 << 22
"""Tokens of all steps that may wait to be measured."""
DIAGNOSED_TOKENS = 1 << 16
"""Tokens of a step that are diagnosed."""
LEAST_DIAGNOSED_TOKENS = 1 << 10
KEPT_TOKENS = 1 << 22
"""Tokens of all steps under way that are kept for their diagnosis."""
MAX_DIAGNOSED_STEPS = 64


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
    run = _Run(plan, Reading(reading.options), progress, group)
    steps, total = run.reports()
    problems = [problem for told in gather_objects(reading.problems + run.missing, group) for problem in told]
    notes = list(plan.notes)
    if asked.exact:
        *steps, total = _exact([*steps, total], run, group)
        notes.append("quantiles of abs(dlogp) are exact")
    if len(run.diagnosed) < len(plan.steps):
        notes.append(f"{len(run.diagnosed)} of {len(plan.steps)} steps were diagnosed, evenly spaced")
    formats = ", ".join(sorted({part.format for part in parts}))
    looks: list[_Looks] = gather_objects(run.looks, group)
    return RunView(
        ", ".join(map(str, paths)),
        tuple(steps),
        total if len(steps) > 1 else None,
        _causes(run.findings),
        looks[0].density.density(look.density for look in looks[1:]),
        _excerpts(looks, total, asked.texts),
        tuple(dict.fromkeys(map(str, problems))),
        (f"read as {formats}: {len(parts)} parts, {plan.tokens} tokens", *notes),
        _all_means(looks),
    )


def _find(paths: Sequence[Path], format: str, reading: Reading, group: Group) -> list[DumpPart]:
    """Find the parts on the first rank, for all: files may come while others look."""
    found: list[DumpPart] | str = []
    if group_place(group)[0] == 0:
        try:
            found = files.find(paths, format, tell=reading.tell)
        except DumpError as error:
            found = str(error)
    shared: list[DumpPart] | str = gather_objects(found, group)[0]
    if isinstance(shared, str):
        raise DumpError(shared)
    return shared


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


@dataclass
class _Looks:
    """What a rank saw of tokens one by one."""

    cuttings: Cuttings = field(default_factory=Cuttings)
    density: ProbabilityDensity = field(default_factory=ProbabilityDensity)
    means: dict[Step, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: Step, tokens: Tokens) -> None:
        self.cuttings.add(step, tokens)
        self.density.add(tokens)
        self.means[step].append(sample_means(tokens))


class _Run:
    """The second reading: measures this rank's parts and reduces each step as soon as its tokens are in."""

    def __init__(self, plan: Plan, reading: Reading, progress: Progress, group: Group) -> None:
        self._plan = plan
        self._reading = reading
        self._progress = progress
        self._group = group
        rank, size = group_place(group)
        self._mine = range(rank, len(plan.parts), size)
        self.config = plan.config
        self._hosts = agree_on_layout(plan.config, group)
        self._states = StepStates(plan.config)
        self._waiting: dict[Step, list[tuple[int, DumpSample]]] = defaultdict(list)
        self._waiting_tokens: Counter[Step] = Counter()
        self._kept: dict[Step, list[tuple[int, DumpSample]]] = defaultdict(list)
        self._kept_tokens: Counter[Step] = Counter()
        self._cap = max(LEAST_DIAGNOSED_TOKENS, min(DIAGNOSED_TOKENS, KEPT_TOKENS // max(plan.most_open, 1)))
        self._left: Counter[Step] = Counter()
        for number in self._mine:
            self._left.update(plan.scans[number].samples)
        self._done = 0
        every = -(-len(plan.steps) // MAX_DIAGNOSED_STEPS)
        self.diagnosed = frozenset(plan.steps[::every])
        self.looks = _Looks()
        self.missing: list[Any] = []
        self.findings: list[tuple[Step, tuple[Finding, ...]]] = []

    def reports(self) -> tuple[list[StepReport], StepReport]:
        """Collective: return the report of each step and of all tokens; there is a step."""
        total = RunTotal(self._plan.config)
        steps = []
        ready = self._feed()
        for step in self._plan.steps:
            while self._left[step] > 0 and next(ready, False):
                pass
            report, vector = self._reduce(step)
            total.add(vector, 1)
            steps.append(report)
        of_all = total.report()
        assert of_all is not None
        return steps, _compact(of_all)

    def samples(self) -> Iterator[tuple[Step, int, DumpSample]]:
        """Yield this rank's samples with their steps and numbers, as many as the scan found."""
        first = self._plan.first_slots()
        for number in self._mine:
            part, slots = self._plan.parts[number], Counter(first[number])
            expected = self._plan.scans[number].samples.total()
            for step, sample in islice(self._reading.samples(part), expected):
                yield step, slots[step], sample
                slots[step] += 1

    def _feed(self) -> Iterator[bool]:
        """Measure sample after sample."""
        for step, slot, sample in self.samples():
            self._add(step, slot, sample)
            yield True
        short = sum(self._left.values())
        if short:
            paths = self._plan.parts[self._mine[0]].paths
            self._reading.tell(paths[0], f"files changed while they were read: {short} samples are not there any more")
            self.missing += self._reading.problems[-1:]
            self._left.clear()

    def _add(self, step: Step, slot: int, sample: DumpSample) -> None:
        self._left[step] -= 1
        self._waiting[step].append((slot, sample))
        self._waiting_tokens[step] += len(sample)
        if step in self.diagnosed and self._kept_tokens[step] < self._cap:
            self._kept[step].append((slot, sample))
            self._kept_tokens[step] += len(sample)
        if not self._left[step] or self._waiting_tokens[step] >= BATCH_TOKENS:
            self._measure(step)
        elif self._waiting_tokens.total() >= MAX_WAITING_TOKENS:
            for waiting in list(self._waiting):
                self._measure(waiting)

    def _measure(self, step: Step) -> None:
        tokens = Tokens.join(self._waiting.pop(step), self._plan.labels)
        self._done += self._waiting_tokens.pop(step)
        self._states.collector(step).update(tokens.batch())
        self.looks.add(step, tokens)
        self._progress("auditing", self._done, self._plan.tokens // group_place(self._group)[1])

    def _reduce(self, step: Step) -> tuple[StepReport, Tensor]:
        """Collective: reduce a step, diagnose it on the first rank, and return its report and vector of one row."""
        if step in self._waiting:
            self._measure(step)
        collector = self._states.take(step)
        mark_agreed(collector, self._group, self._hosts)
        pending = all_reduce(collector, self._group, async_op=True)
        pending.wait()
        vector = _one_row(pending.vector, self._plan.config, pending.group_size)
        report = _compact(StepReport.from_vector(vector, self._plan.config, step=step))
        if step in self.diagnosed:
            kept = gather_objects(self._kept.pop(step, []), self._group)
            if group_place(self._group)[0] == 0:
                report.findings = self._diagnose(report, [numbered for share in kept for numbered in share])
                self.findings.append((step, report.findings))
        return report, vector

    def _diagnose(self, report: StepReport, numbered: list[tuple[int, DumpSample]]) -> tuple[Finding, ...]:
        numbered.sort(key=lambda pair: pair[0])
        before = np.cumsum([0] + [len(sample) for _, sample in numbered])[:-1]
        chosen = [pair for pair, tokens in zip(numbered, before, strict=True) if tokens < self._cap]
        return diagnose(report, Tokens.join(chosen, self._plan.labels).table(self._plan.labels))


def _exact(reports: list[StepReport], run: _Run, group: Group) -> list[StepReport]:
    """Collective: return the reports, of which the last is that of all steps, with exact quantiles."""
    mine, *others = gather_objects(collect(run.samples(), reports, run.config), group)
    for other in others:
        for want, seen in zip(mine, other, strict=True):
            want.merge(seen)
    return [want.answers(report) for want, report in zip(mine, reports, strict=True)]


def _one_row(vector: Tensor, config: AuditConfig, group_size: int) -> Tensor:
    """Return a group's vector as that of one rank: which process read a file says nothing of the run."""
    state = State.of_vector(vector, StateLayout(config, group_size))
    state.worst[:, WORST_TOKEN.index("rank")] = -1
    return state.pack(StateLayout(config), 0, -1)


def _compact(report: StepReport) -> StepReport:
    """Return the report without the vector behind it and without its one row of ranks."""
    return StepReport.from_dict(report.to_dict() | {"ranks": []})


def _causes(findings: Sequence[tuple[Step, tuple[Finding, ...]]]) -> tuple[Causes, ...]:
    """Join neighbouring steps of the same codes; the findings are those of the step where the first is strongest."""
    causes = []
    for _, group in groupby(findings, key=lambda pair: [finding.code for finding in pair[1]]):
        steps = list(group)
        strongest = max(steps, key=lambda pair: pair[1][0].strength)
        causes.append(Causes(steps[0][0], steps[-1][0], strongest[1]))
    return tuple(causes)


def _excerpts(looks: list[_Looks], total: StepReport, texts: TokenTexts | None) -> tuple[Any, ...]:
    cuttings = looks[0].cuttings.worst(look.cuttings for look in looks[1:])
    pairs = [
        (cutting, token) for cutting, token in zip(cuttings, total.worst_tokens, strict=False) if is_of(cutting, token)
    ]
    show = texts or TokenTexts()
    return tuple(excerpt(cutting, token, show.of(cutting.sample.token_ids)) for cutting, token in pairs)


def _all_means(looks: list[_Looks]) -> Any:
    steps = sorted({step for look in looks for step in look.means}, key=lambda step: (step is not None, step or 0))
    means = []
    for step in steps:
        pieces = [piece for look in looks for piece in look.means.get(step, ())]
        slots, values = (np.concatenate(column) for column in zip(*pieces, strict=True))
        means.append(values[np.argsort(slots, kind="stable")])
    return np.concatenate(means) if means else np.zeros(0)
