"""A rank whose update fails: it still reduces, the others' numbers stand, and every rank says `incomplete`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import agreed
from strategies import bits, without_layout

from rlk_audit import AuditConfig, Auditor, Collector, StepReport, all_reduce

FAILING = [0, -1]


def add(collector: Collector, rank: int, microbatch: int) -> None:
    """A different number of tokens for each rank and micro-batch."""
    drift = torch.linspace(-0.5, 0.1 + 0.1 * rank, 2 + rank + 3 * microbatch, dtype=torch.float64)
    collector.update(
        drift - 2.0, torch.full_like(drift, -2.0), torch.ones_like(drift), microbatch=microbatch, sample_index=rank
    )


def expected(failing: int) -> StepReport:
    """All ranks' two micro-batches but the second of the failing rank, in one process."""
    collector = Collector()
    for rank in range(dist.get_world_size()):
        part = Collector()
        for microbatch in range(1 if rank == failing else 2):
            add(part, rank, microbatch)
        if rank == failing:
            part.mark_failed("expected")
        collector.merge(part)
    return collector.compute()


def raise_half_way(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement fails after it has added its counts to the batch's own state."""
    measure = collector._measure_tokens

    def broken(*args: Any) -> None:
        measure(*args)
        raise RuntimeError("the device went away")

    with monkeypatch.context() as patch:
        patch.setattr(collector, "_measure_tokens", broken)
        add(collector, dist.get_rank(), 1)


def give_unequal_shapes(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    collector.update(torch.zeros(2, 5), torch.zeros(2, 4), torch.ones(2, 5), microbatch=1)


def give_whole_numbers(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    collector.update(torch.tensor([-1.0]), torch.tensor([-1]), torch.ones(1), microbatch=1)


SENTENCES = {
    raise_half_way: "the device went away",
    give_unequal_shapes: "rollout_log_probs must have the shape of train_log_probs, (2, 5), got (2, 4)",
    give_whole_numbers: "rollout_log_probs must have a floating-point dtype, got torch.int64",
}


@pytest.mark.parametrize("fail", SENTENCES, ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("failing", FAILING)
def test_a_failed_update_on_one_rank(
    fail: Callable[[Collector, pytest.MonkeyPatch], None],
    failing: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    collectives,
) -> None:
    """Kills: a failed rank that skips the reduction; half of a batch committed; `complete` known to one rank alone."""
    failing %= dist.get_world_size()
    collector = agreed(Collector())
    collectives.clear()
    add(collector, dist.get_rank(), 0)
    with caplog.at_level(logging.WARNING, logger="rlk_audit.collector"):
        if dist.get_rank() == failing:
            fail(collector, monkeypatch)
        else:
            add(collector, dist.get_rank(), 1)
    told = [f"an update failed and nothing of it was counted: {SENTENCES[fail]}"]
    assert caplog.messages == (told if dist.get_rank() == failing else [])
    report = all_reduce(collector)
    assert [name for name, *_ in collectives] == ["all_reduce"] * (dist.get_world_size() > 1)
    assert report.complete is False
    assert report.warnings["update_failed"] == 1 == report.metrics["warning/update_failed"]
    assert [row.update_failed for row in report.rank_table] == [
        int(rank == failing) for rank in range(dist.get_world_size())
    ]
    assert bits(without_layout(report)) == bits(without_layout(expected(failing)))


def test_every_update_failing_everywhere_is_not_no_drift() -> None:
    auditor = Auditor(AuditConfig())
    auditor.update([-1.0], [-1.0, -2.0], [1])
    report = auditor.step(1)
    assert report.warnings == {"update_failed": dist.get_world_size(), "nothing_compared": 1}
    assert report.complete is False
    assert report.to_dict()["metrics"]["abs_dlogp_mean"] is None


def test_the_next_step_is_complete_again() -> None:
    auditor = Auditor(AuditConfig())
    if dist.get_rank() == 0:
        auditor.update([-1.0], [-1.0, -2.0], [1])
    assert auditor.step(1).complete is False
    auditor.update([-1.0], [-1.5], [1])
    report = auditor.step(2)
    assert report.complete is True
    assert report.warnings == {}
    assert report.metrics["compared_token_count"] == dist.get_world_size()
