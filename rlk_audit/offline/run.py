"""The second reading of a dump: every step measured and reduced as soon as its tokens are in."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rlk_audit.allreduce import Group, agree_on_layout, all_reduce, gather_objects, group_place, mark_agreed
from rlk_audit.config import AuditConfig
from rlk_audit.diagnose import diagnose
from rlk_audit.dumps.sample import DumpSample, Problem
from rlk_audit.finding import Finding
from rlk_audit.layout import WORST_TOKEN, StateLayout
from rlk_audit.offline.looks import Cuttings, ProbabilityDensity, sample_means
from rlk_audit.offline.plan import Plan, Progress, Reading, Step
from rlk_audit.offline.states import StepStates
from rlk_audit.offline.tokens import BATCH_TOKENS, Tokens, owned
from rlk_audit.report import StepReport
from rlk_audit.run_total import RunTotal
from rlk_audit.state import State

MAX_WAITING_TOKENS = 1 << 22
"""Tokens of all steps that may wait to be measured."""
DIAGNOSED_TOKENS = 1 << 16
"""Tokens of a step that are diagnosed."""
LEAST_DIAGNOSED_TOKENS = 1 << 10
KEPT_TOKENS = 1 << 22
"""Tokens of all steps under way that are kept for their diagnosis."""
MAX_DIAGNOSED_STEPS = 64


@dataclass
class Looks:
    """What a rank saw of tokens one by one."""

    cuttings: Cuttings = field(default_factory=Cuttings)
    density: ProbabilityDensity = field(default_factory=ProbabilityDensity)
    means: dict[Step, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: Step, tokens: Tokens) -> None:
        """Look at tokens of a step."""
        self.cuttings.add(step, tokens)
        self.density.add(tokens)
        self.means[step].append(sample_means(tokens))


class Run:
    """Measures this rank's parts and reduces each step as soon as its tokens are in.

    Attributes:
        diagnosed: steps that are diagnosed.
        diagnosed_tokens: of a step that are diagnosed, and the rest of the last sample.
        looks: what this rank saw of tokens one by one.
        changed: files that are not as they were at the first reading.
        findings: of the diagnosed steps, on the first rank.
    """

    def __init__(self, plan: Plan, reading: Reading, progress: Progress, group: Group) -> None:
        self._plan = plan
        self._reading = reading
        self._progress = progress
        self._group = group
        rank, size = group_place(group)
        self._mine = range(rank, len(plan.parts), size)
        self._hosts = agree_on_layout(plan.config, group)
        self._states = StepStates(plan.config)
        self._waiting: dict[Step, list[tuple[int, DumpSample]]] = defaultdict(list)
        self._waiting_tokens: Counter[Step] = Counter()
        self._kept: dict[Step, list[tuple[int, DumpSample]]] = defaultdict(list)
        self._kept_tokens: Counter[Step] = Counter()
        self.diagnosed_tokens = max(
            LEAST_DIAGNOSED_TOKENS, min(DIAGNOSED_TOKENS, KEPT_TOKENS // max(plan.most_open, 1))
        )
        self._left: Counter[Step] = Counter()
        for number in self._mine:
            self._left.update(plan.scans[number].samples)
        self._done = 0
        self._tokens = sum(plan.scans[number].tokens.total() for number in self._mine)
        every = -(-len(plan.steps) // MAX_DIAGNOSED_STEPS)
        self.diagnosed = frozenset(plan.steps[::every])
        self.looks = Looks()
        self.changed: list[Problem] = []
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
        deque(ready, maxlen=0)  # to the end, for what came after the first reading
        of_all = total.report()
        assert of_all is not None
        return steps, _compact(of_all)

    def samples(self) -> Iterator[tuple[Step, int, DumpSample]]:
        """Yield this rank's samples with their steps and numbers, as many of each step as the scan found."""
        first = self._plan.first_slots()
        for number in self._mine:
            yield from self._of_part(number, Counter(first[number]))

    def _of_part(self, number: int, slots: Counter[Step]) -> Iterator[tuple[Step, int, DumpSample]]:
        part, left = self._plan.parts[number], Counter(self._plan.scans[number].samples)
        more = 0
        for step, sample in self._reading.samples(part):
            if left[step] > 0:
                left[step] -= 1
                yield step, slots[step], sample
                slots[step] += 1
            else:
                more += 1
        self._left -= left  # no step waits for what is gone
        if left.total() or more:
            told = f"{left.total()} samples are gone, {more} are new and left out"
            self.changed.append(Problem(part.paths[0], f"it changed while it was read: {told}"))

    def _feed(self) -> Iterator[bool]:
        """Measure sample after sample."""
        for step, slot, sample in self.samples():
            self._add(step, slot, owned(sample))
            yield True

    def _add(self, step: Step, slot: int, sample: DumpSample) -> None:
        self._left[step] -= 1
        self._waiting[step].append((slot, sample))
        self._waiting_tokens[step] += len(sample)
        if step in self.diagnosed and self._kept_tokens[step] < self.diagnosed_tokens:
            self._kept[step].append((slot, sample))
            self._kept_tokens[step] += len(sample)
        if not self._left[step] or self._waiting_tokens[step] >= BATCH_TOKENS:
            self._measure(step)
        elif self._waiting_tokens.total() >= MAX_WAITING_TOKENS:
            for waiting in list(self._waiting):
                self._measure(waiting)

    def _measure(self, step: Step) -> None:
        tokens = Tokens.join(self._waiting.pop(step), self._plan.labels, self._plan.config)
        self._done += self._waiting_tokens.pop(step)
        self._states.collector(step).update(tokens.batch())
        self.looks.add(step, tokens)
        self._progress("auditing", self._done, self._tokens)

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
        chosen = [pair for pair, tokens in zip(numbered, before, strict=True) if tokens < self.diagnosed_tokens]
        return diagnose(report, Tokens.join(chosen, self._plan.labels).table(self._plan.labels))


def _one_row(vector: Tensor, config: AuditConfig, group_size: int) -> Tensor:
    """Return a group's vector as that of one rank: which process read a file says nothing of the run."""
    state = State.of_vector(vector, StateLayout(config, group_size))
    state.worst[:, WORST_TOKEN.index("rank")] = -1
    return state.pack(StateLayout(config), 0, -1)


def _compact(report: StepReport) -> StepReport:
    """Return the report without the vector behind it and without its one row of ranks."""
    return StepReport.from_dict(report.to_dict() | {"ranks": []})
