"""Auditor over ranks: one writer, its step, and a process group that ends and starts anew."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rlk_audit import AuditConfig, Auditor, StepReport
from rlk_audit.sinks import JsonlSink


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int | str | None] = []
        self.closed = 0

    def write(self, report: StepReport) -> None:
        self.steps.append("run" if report.kind == "run" else report.step)

    def close(self) -> None:
        self.closed += 1


class Broken(Kept):
    def write(self, report: StepReport) -> None:
        raise OSError("disk full")


def observe(auditor: Auditor) -> None:
    """Rank r adds r + 1 tokens of drift (r + 1) / 8."""
    count = dist.get_rank() + 1
    auditor.update([-2.0 + count / 8] * count, [-2.0] * count, [1] * count, sample_index=dist.get_rank())


def test_one_rank_writes_and_every_rank_gets_the_report(shared_dir: Path, gathered) -> None:
    path = shared_dir / "audit.jsonl"
    auditor = Auditor(AuditConfig(), sinks=[JsonlSink(path)] if dist.get_rank() == 0 else [Kept()])
    reports = []
    for step in (7, 8):
        observe(auditor)
        reports.append(auditor.step(step).to_dict())
    everywhere = gathered(reports)
    assert everywhere == [reports] * dist.get_world_size()
    auditor.close()
    *steps, run = map(json.loads, gathered(path.read_text().splitlines())[0])
    assert steps == reports
    assert [(report["step"], report["kind"]) for report in (*steps, run)] == [(7, "step"), (8, "step"), (None, "run")]
    a_step = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    counts = [report["metrics"]["compared_token_count"] for report in (*steps, run)]
    assert counts == [a_step, a_step, 2 * a_step]


@pytest.mark.parametrize("writer", [None, -1])
def test_sinks_are_used_on_the_writing_rank_alone(writer: int | None, gathered) -> None:
    """The group's first rank, or the one that says so; the others may pass sinks too."""
    size = dist.get_world_size()
    sink = Kept()
    chosen = None if writer is None else dist.get_rank() == size + writer
    auditor = Auditor(AuditConfig(), sinks=[sink], writer=chosen)
    observe(auditor)
    auditor.step(3)
    auditor.close()
    expected: list[Any] = [([], 1)] * size
    expected[0 if writer is None else size + writer] = ([3, "run"], 1)
    assert gathered((sink.steps, sink.closed)) == expected


@pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")
def test_a_group_without_rank_0_has_a_writer_too(gathered) -> None:
    ranks = list(range(1, dist.get_world_size()))
    group = dist.new_group(ranks)
    sink = Kept()
    if dist.get_rank() in ranks:
        auditor = Auditor(AuditConfig(), group, sinks=[sink])
        observe(auditor)
        assert auditor.step(5).metrics["compared_token_count"] == sum(rank + 1 for rank in ranks)
    assert gathered(sink.steps) == [[]] + [[5]] + [[]] * (len(ranks) - 1)


def test_a_sink_that_fails_stops_no_rank(caplog: pytest.LogCaptureFixture, gathered) -> None:
    kept = Kept()
    auditor = Auditor(AuditConfig(), sinks=[Broken(), kept])
    with caplog.at_level(logging.WARNING, logger="rlk_audit.auditor"):
        for step in range(3):
            observe(auditor)
            assert auditor.step(step).metrics["compared_token_count"] > 0
    told = ["Broken could not write step 0: disk full"]
    assert gathered(caplog.messages) == [told] + [[]] * (dist.get_world_size() - 1)
    assert gathered(kept.steps) == [[0, 1, 2]] + [[]] * (dist.get_world_size() - 1)


def test_collectives_of_an_auditor(collectives: list[tuple[Any, ...]]) -> None:
    """One exchange when it is made, one all-reduce a step, nothing in update and close."""
    many = dist.get_world_size() > 1
    auditor = Auditor(AuditConfig())
    assert [name for name, *_ in collectives] == ["all_gather"] * many
    collectives.clear()
    for step in range(3):
        for _ in range(step):
            observe(auditor)
        assert [name for name, *_ in collectives] == ["all_reduce"] * (step * many)
        auditor.step(step)
    collectives.clear()
    auditor.close()
    assert collectives == []


def test_the_process_group_may_end_and_start_anew(shared_dir: Path, gathered, collectives) -> None:
    """Kills: a group, its size or an agreement that outlives its process group in module state."""
    size, rank, backend = dist.get_world_size(), dist.get_rank(), dist.get_backend()
    auditor = Auditor(AuditConfig())
    observe(auditor)
    before = auditor.step(1)
    gathered(None)  # nobody leaves while another still reduces
    dist.destroy_process_group()
    auditor.update([-2.0], [-2.5], [1])
    alone = auditor.step(2)
    assert (alone.group_size, alone.metrics["compared_token_count"]) == (1, 1)
    # A store of its own: keys of the first group's rendezvous are still in torchrun's.
    store = dist.FileStore(str(shared_dir / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    collectives.clear()
    anew = Auditor(AuditConfig())
    observe(anew)
    after = anew.step(1)
    assert [name for name, *_ in collectives] == ["all_gather", "all_reduce"] * (size > 1)
    assert after.to_dict() == before.to_dict()
    assert after.metrics["compared_token_count"] == size * (size + 1) // 2
