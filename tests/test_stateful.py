"""An audit whose calls come in any order, beside a list of what was given: each report is the oracle's of that list."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Expected, Sample, audit, float32
from strategies import WHOLE_FORMS, assert_reports, bits, random_samples
from virtual_ranks import reducing_with

from rlk_audit import AuditConfig, Auditor, Collector, StepReport, TokenBatch

ranks = st.integers(0, 3)
seeds = st.integers(0, 2**32 - 1)
numbers = st.sampled_from([None, 0, 1])


@dataclass
class Given:
    """What counts, what is warned of beside, and in how many steps."""

    samples: list[Sample] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def add(self, other: Given) -> None:
        self.samples += other.samples
        self.warnings.update(other.warnings)

    def expected(self) -> Expected:
        expected = audit(self.samples)
        expected.warnings.update(self.warnings)
        return expected


@dataclass
class Open:
    """A rank's open step."""

    given: Given = field(default_factory=Given)
    microbatches: set[int] = field(default_factory=set)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def write(self, report: StepReport) -> None:
        self.reports.append(report.to_dict())

    def close(self) -> None:
        pass


class AuditMachine(RuleBasedStateMachine):
    """The first rank is an auditor's, the others are collectors; a SUM of their vectors is the reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Collector] = []
        self.patch = reducing_with(self.others)
        self.patch.__enter__()
        self.auditor: Auditor | None = None
        self.step_number = self.samples_made = 0
        self.saved: list[tuple[dict[str, Any], Given]] = []

    @initialize(size=st.integers(1, 4), lag=st.integers(0, 1), bias=st.sampled_from([0.0, 1.0]))
    def begin(self, size: int, lag: int, bias: float) -> None:
        """A bias leaves dlogp of one sign, so that no extreme is 0."""
        self.config, self.bias = AuditConfig(lag=lag), bias
        self._begin(size, Given())

    def _begin(self, size: int, total: Given) -> None:
        self.sink = Kept()
        self.auditor = Auditor(self.config, sinks=[self.sink])
        self.others[:] = [Collector(self.config) for _ in range(size - 1)]
        self.open = [Open() for _ in range(size)]
        self.in_flight: tuple[int, Given] | None = None
        self.reported: list[int] = []
        self.total = copy.deepcopy(total)

    # --- a rank's step ------------------------------------------------------------------------------------------------

    @rule(rank=ranks, seed=seeds, number=numbers)
    def update(self, rank: int, seed: int, number: int | None) -> None:
        """A micro-batch in any form; of a number that was seen, it is a duplicate."""
        rank, batch, group = self._rank(rank), *self._batch(seed)
        _update(self._ranks[rank], batch, number)
        opened = self.open[rank]
        if number in opened.microbatches:
            opened.given.warnings["duplicate_microbatch"] += 1
            return
        opened.given.samples += group
        opened.microbatches |= {number} - {None}

    @rule(rank=ranks, number=numbers)
    def fail(self, rank: int, number: int | None) -> None:
        """An update of unequal shapes; its number may come again, and one that came is a duplicate."""
        rank = self._rank(rank)
        self._ranks[rank].update(torch.zeros(2), torch.zeros(3), torch.ones(2), microbatch=number)
        opened = self.open[rank]
        opened.given.warnings["duplicate_microbatch" if number in opened.microbatches else "update_failed"] += 1

    @rule(rank=ranks, seed=seeds, number=numbers, as_vector=st.booleans())
    def merge(self, rank: int, seed: int, number: int | None, as_vector: bool) -> None:
        """Another collector's state is added, with its micro-batches' numbers unless it comes as a vector."""
        rank, batch, group = self._rank(rank), *self._batch(seed)
        other = Collector(self.config)
        _update(other, batch, number)
        mine = self._collectors[rank]
        if as_vector:
            mine.merge_vector(other.pack())
        else:
            mine.merge(other)
            self.open[rank].microbatches |= {number} - {None}
        self.open[rank].given.samples += group

    @rule(rank=ranks)
    def reset(self, rank: int) -> None:
        rank = self._rank(rank)
        self._collectors[rank].reset()
        self.open[rank] = Open()

    @rule(rank=ranks)
    def compute(self, rank: int) -> None:
        """A rank's own report; reading it changes nothing."""
        rank = self._rank(rank)
        first, again = (self._collectors[rank].compute() for _ in range(2))
        assert bits(first.to_dict()) == bits(again.to_dict()) and first.scope == "rank"
        assert_reports(first, self.open[rank].given.expected())

    # --- the group's --------------------------------------------------------------------------------------------------

    @rule(skipped=st.integers(0, 2), error=st.none() | st.integers(0, 1))
    def step(self, skipped: int, error: int | None) -> None:
        """The training may say how many active tokens there were, and be wrong."""
        given = Given()
        for opened in self.open:
            given.add(opened.given)
        told = None if error is None else int(audit(given.samples).metrics["active_token_count"]) + error
        self.step_number += 1 + skipped
        report = self.auditor.step(self.step_number, expected_active_tokens=told)
        if error:
            given.warnings["unexpected_token_count"] = 1
        ended: tuple[int, Given] | None = (self.step_number, given)
        if self.config.lag:
            ended, self.in_flight = self.in_flight, ended
        self.open = [Open() for _ in self.open]
        if ended is None:
            assert report is None
            return
        self._end(*ended)
        assert report.step == ended[0] and report.group_size == len(self.open)
        assert_reports(report, ended[1].expected())

    @rule(seed=seeds)
    def whole_step(self, seed: int) -> None:
        """A step as it usually is: every rank has a micro-batch."""
        for rank in range(len(self.open)):
            self.update(rank, seed + rank, None)
        self.step(0, None)

    def _end(self, number: int, given: Given) -> None:
        self.total.add(given)
        self.total.steps += 1
        # What is a flag of a step, and no count, is one of the run.
        self.total.warnings["unexpected_token_count"] = min(self.total.warnings["unexpected_token_count"], 1)
        self.total.warnings = +self.total.warnings
        self.reported.append(number)

    @rule()
    def save(self) -> None:
        """What is open or in flight is not in it, and what comes later does not reach it."""
        self.saved.append((self.auditor.state_dict(), copy.deepcopy(self.total)))

    @precondition(lambda self: self.saved)
    @rule(which=seeds, size=st.none() | st.integers(1, 4))
    def load(self, which: int, size: int | None) -> None:
        """Into the auditor as it stands, or into a new one of a group of any size."""
        state, total = self.saved[which % len(self.saved)]
        if size is not None:
            self._close()
            self._begin(size, total)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        self.auditor.load_state_dict(torch.load(file, weights_only=True))
        self.total = copy.deepcopy(total)

    @invariant()
    def the_total_is_that_of_all_steps(self) -> None:
        if self.auditor is None:
            return
        total = self.auditor.run_total()
        assert (total is None) == (self.total.steps == 0)
        if total is not None:
            assert_reports(total, self.total.expected())

    def teardown(self) -> None:
        try:
            if self.auditor is not None:
                self._close()
        finally:
            self.patch.__exit__(None, None, None)

    def _close(self) -> None:
        """What is in flight is finished, and the sink has had every step once, and the total."""
        total = self.auditor.run_total()
        self.auditor.close()
        if self.in_flight is not None:
            self._end(*self.in_flight)
            total = self.auditor.run_total()
            assert_reports(total, self.total.expected())
        steps = [report["step"] for report in self.sink.reports if report["kind"] == "step"]
        assert steps == self.reported
        totals = [report for report in self.sink.reports if report["kind"] == "run"]
        assert totals == ([] if total is None else [total.to_dict()])

    # --- helpers ------------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Sequence[Auditor | Collector]:
        return [self.auditor, *self.others]

    @property
    def _collectors(self) -> Sequence[Collector]:
        return [self.auditor.collector, *self.others]

    def _rank(self, rank: int) -> int:
        return rank % len(self.open)

    def _batch(self, seed: int) -> tuple[TokenBatch | dict[str, Any], list[Sample]]:
        """Samples that no other has the indices of, in a form of update."""
        rng = random.Random(seed)
        group = random_samples(rng, rng.randrange(4), longest=4)
        group = [replace(s, sample_index=self.samples_made + i, rollout=self._biased(s)) for i, s in enumerate(group)]
        self.samples_made += len(group)
        (batch,) = rng.choice(WHOLE_FORMS)(group, rng)
        return batch, group

    def _biased(self, sample: Sample) -> list[float | None]:
        return [None if value is None else float32(value - self.bias) for value in sample.rollout]


def _update(rank: Auditor | Collector, batch: TokenBatch | dict[str, Any], number: int | None) -> None:
    if isinstance(batch, TokenBatch):
        rank.update(batch, microbatch=number)
    else:
        rank.update(**batch, microbatch=number)


TestAudit = AuditMachine.TestCase
TestAudit.settings = settings(max_examples=100, stateful_step_count=40)
