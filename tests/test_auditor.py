"""Auditor in one process: steps that begin anew, sinks that stop nothing, mode off."""

from __future__ import annotations

import logging
import random
import socket
from typing import Any

import numpy as np
import pytest
import torch

from rlk_audit import AuditConfig, Auditor, Collector, StepReport


class Kept:
    """A sink that keeps its reports and fails where it is told to."""

    def __init__(self, failing: tuple[int, ...] = ()) -> None:
        self.reports: list[StepReport] = []
        self.closed = 0
        self._failing = failing

    def write(self, report: StepReport) -> None:
        if report.step in self._failing:
            raise ValueError(f"no room for {report.step}")
        self.reports.append(report)

    def close(self) -> None:
        self.closed += 1

    def steps(self) -> list[int | str | None]:
        return [report.step if report.kind == "step" else report.kind for report in self.reports]


def observe(auditor: Auditor, *drifts: float, **fields: Any) -> None:
    auditor.update([-2.0 + drift for drift in drifts], [-2.0] * len(drifts), [1] * len(drifts), **fields)


def test_each_step_begins_anew() -> None:
    """Reported: not reset, the second step reads 0.65."""
    auditor = Auditor()
    observe(auditor, 0.25, 0.75, microbatch=0)
    first = auditor.step(1)
    observe(auditor, 1.0, 1.0, microbatch=0)
    second = auditor.step(2)
    assert [(r.step, r.metrics["abs_dlogp_mean"], r.metrics["compared_token_count"]) for r in (first, second)] == [
        (1, 0.5, 2), (2, 1.0, 2),
    ]  # fmt: skip
    assert second.warnings == {}, "micro-batch 0 of the second step is no duplicate of the first's"
    assert (first.scope, first.group_size, first.kind) == ("group", 1, "step")


def test_a_step_equals_the_collector_s_own_figures() -> None:
    """No process group: the same numbers, only the scope says that this is the whole group."""
    auditor, collector = Auditor(AuditConfig()), Collector(AuditConfig())
    for microbatch in range(3):
        values = torch.linspace(-3.0, -1.0, 4 + microbatch), torch.full((4 + microbatch,), -2.0)
        for target in (auditor, collector):
            target.update(*values, torch.ones(4 + microbatch), microbatch=microbatch)
    report, alone = auditor.step(0).to_dict(), collector.compute().to_dict()
    assert report.pop("scope") == "group"
    assert alone.pop("scope") == "rank"
    assert report.pop("step") == 0
    assert alone.pop("step") is None
    assert [rank.pop("host") for rank in report["ranks"] + alone["ranks"]] == [socket.gethostname()[:32], ""]
    assert [rank.pop("step") for rank in report["ranks"] + alone["ranks"]] == [0, -1]
    assert report == alone


def test_the_training_s_random_numbers_are_left_alone() -> None:
    """Otherwise dropout and sampling would differ from those of a run without an audit."""

    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    limits = {"abs_dlogp_p99": 0.01}
    auditor = Auditor(AuditConfig(limits=limits, samples_per_step=4))
    before = states()
    for step in range(3):
        observe(auditor, *torch.linspace(0.1, 0.9, 300).tolist(), sample_slot=0, token_position=torch.arange(300))
        assert auditor.step(step).verdict
    auditor.close()
    assert states() == before


def test_an_empty_step_is_reported_as_one() -> None:
    sink = Kept()
    auditor = Auditor(sinks=[sink])
    assert auditor.step(1).warnings == {"nothing_compared": 1}
    assert sink.steps() == [1]


def test_mode_off_builds_nothing() -> None:
    sink = Kept()
    auditor = Auditor(AuditConfig(mode="off"), sinks=[sink])
    observe(auditor, 0.5)
    auditor.update("whatever", object())
    assert auditor.collector is None
    assert auditor.step(1) is None
    auditor.close()
    assert sink.reports == []


def test_sinks_get_every_step_and_the_run_s_total_and_are_closed_once() -> None:
    sinks = [Kept(), Kept()]
    auditor = Auditor(sinks=sinks)
    for step in (5, 6):
        observe(auditor, 0.25 * step)
        auditor.step(step)
    auditor.close()
    auditor.close()
    assert [sink.steps() for sink in sinks] == [[5, 6, "run"]] * 2
    assert [sink.closed for sink in sinks] == [1, 1]
    total = sinks[0].reports[-1].metrics
    assert (total["compared_token_count"], total["abs_dlogp_max"], total["abs_dlogp_mean"]) == (2, 1.5, 1.375)


def test_a_rank_that_does_not_write_uses_no_sink() -> None:
    sink = Kept()
    auditor = Auditor(sinks=[sink], writer=False)
    observe(auditor, 0.5)
    assert auditor.step(1).metrics["compared_token_count"] == 1
    auditor.close()
    assert (sink.reports, sink.closed) == ([], 1), "what it will not use is closed at once"


def test_a_failing_sink_is_told_once_and_again_after_it_worked(caplog: pytest.LogCaptureFixture) -> None:
    """And the sinks beside it go on. Kills: an exception that leaves `step` on one rank alone."""
    failing, other = Kept(failing=(1, 2, 4)), Kept()
    auditor = Auditor(sinks=[failing, other])
    with caplog.at_level(logging.WARNING, logger="rlk_audit.auditor"):
        for step in range(5):
            assert auditor.step(step).step == step
    assert [record.message for record in caplog.records if record.name == "rlk_audit.auditor"] == [
        "Kept could not write step 1: no room for 1",
        "Kept could not write step 4: no room for 4",
    ]
    assert failing.steps() == [0, 3]
    assert other.steps() == [0, 1, 2, 3, 4]


def test_a_sink_that_cannot_be_closed_is_told_and_the_others_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Kills: a training that is over and ends with an exception of its log."""
    failing, other = Kept(), Kept()
    failing.close = lambda: 1 / 0
    auditor = Auditor(sinks=[failing, other])
    auditor.step(1)
    with caplog.at_level(logging.WARNING, logger="rlk_audit.auditor"):
        auditor.close()
    told = [record.message for record in caplog.records if record.name == "rlk_audit.auditor"]
    assert told == ["Kept could not be closed: division by zero"]
    assert other.closed == 1 and other.steps() == [1, "run"]
    auditor.close()


def test_misuse_raises_and_data_does_not(caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor()
    with pytest.raises(TypeError, match=r"^train_log_probs must be a tensor, an array or a list, got str$"):
        auditor.update("-1.0", [-1.0], [1])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'wheight'"):
        auditor.update([-1.0], [-1.0], [1], wheight=1)
    with caplog.at_level(logging.WARNING, logger="rlk_audit.collector"):
        auditor.update([-1.0], [-1.0, -2.0], [1])
    assert caplog.messages == [
        "an update failed and nothing of it was counted: rollout_log_probs must have the shape of train_log_probs, "
        "(1,), got (2,)"
    ]
    report = auditor.step(1)
    assert report.warnings == {"update_failed": 1, "nothing_compared": 1}
    assert not report.complete
