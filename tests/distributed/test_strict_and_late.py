"""Ranks that stop together, steps that are read late, and tensor-parallel replicas that measured something else."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk_audit import AuditConfig, Auditor, ConsistencyError
from rlk_audit.megatron_plugin import MegatronAudit, register

TWO_RANKS = pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")
STRICT = AuditConfig(mode="strict", limits={"abs_dlogp_max": 1.0})


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)


def observe(target: Auditor | MegatronAudit, drift: float) -> None:
    add = target.update if isinstance(target, Auditor) else target.observe
    add([-4.0 + drift], [-4.0], [1], sample_index=dist.get_rank())


def stop(step: Any, number: int) -> str:
    with pytest.raises(ConsistencyError) as caught:
        step(number)
    return str(caught.value)


def names(collectives: list[tuple[Any, ...]]) -> list[str]:
    return [name for name, *_ in collectives]


# --- strict -----------------------------------------------------------------------------------------------------------


def test_a_drift_on_one_rank_stops_every_rank(gathered, collectives: list[tuple[Any, ...]]) -> None:
    size = dist.get_world_size()
    auditor = Auditor(STRICT)
    observe(auditor, 0.25)
    assert auditor.step(1).verdict.passed
    observe(auditor, 2.0 if dist.get_rank() == size - 1 else 0.25)
    collectives.clear()
    told = stop(auditor.step, 2)
    assert names(collectives) == ["all_reduce"] * (size > 1), "the summed report tells every rank the same"
    assert told.startswith(
        f"step 2 failed its verdict: abs_dlogp_max is 2, must be <= 1. worst token: sample {size - 1}, "
    )
    assert gathered(told) == [told] * size


def test_a_failed_update_on_one_rank_stops_every_rank(gathered) -> None:
    auditor = Auditor(STRICT)
    observe(auditor, 0.25)
    if dist.get_rank() == 0:
        auditor.update([-1.0], [-1.0, -1.0], [1])
    told = stop(auditor.step, 1)
    assert "1 updates failed" in told
    assert gathered(told) == [told] * dist.get_world_size()


def stages() -> tuple[SimpleNamespace, int]:
    """PP = 2: the ranks' groups, and this rank's stage; a model-parallel group is a rank of each stage."""
    half = dist.get_world_size() // 2
    across = [dist.new_group([place, place + half]) for place in range(half)]
    data = [dist.new_group(list(range(stage * half, (stage + 1) * half))) for stage in range(2)]
    stage, place = divmod(dist.get_rank(), half)
    return SimpleNamespace(dp=data[stage], dp_cp=data[stage], pp=across[place], mp=across[place]), stage


@TWO_RANKS
def test_all_stages_stop_together(gathered, collectives: list[tuple[Any, ...]]) -> None:
    """The first stage holds no verdict, and still raises in the same step, with the same text."""
    collection, stage = stages()
    audit = register(config=STRICT, pg_collection=collection)
    half = dist.get_world_size() // 2
    reduction = ["all_reduce"] * (stage == 1 and half > 1)
    collectives.clear()
    observe(audit, 0.25)
    report = audit.step_end(1)
    assert (report is None) is (stage == 0)
    assert names(collectives) == [*reduction, "all_reduce"]
    assert collectives[-1] == ("all_reduce", 2, torch.int64)
    observe(audit, 2.0 if dist.get_rank() == dist.get_world_size() - 1 else 0.25)
    collectives.clear()
    told = stop(audit.step_end, 2)
    assert names(collectives) == [*reduction, "all_reduce", "broadcast_object_list"]
    assert told.startswith("step 2 failed its verdict: abs_dlogp_max is 2, must be <= 1. ")
    assert gathered(told) == [told] * dist.get_world_size()


# --- lag --------------------------------------------------------------------------------------------------------------


def test_a_late_step_is_reported_a_step_later(gathered, collectives: list[tuple[Any, ...]]) -> None:
    size = dist.get_world_size()
    written: list[Any] = []
    sink = SimpleNamespace(write=lambda report: written.append(report.step), close=lambda: written.append("closed"))
    auditor = Auditor(AuditConfig(lag=1), sinks=[sink])
    collectives.clear()
    reports = []
    for step in (1, 2, 3):
        observe(auditor, step / 4)
        reports.append(auditor.step(step))
    assert reports[0] is None
    assert [(r.step, r.metrics["abs_dlogp_max"], r.metrics["compared_token_count"]) for r in reports[1:]] == [
        (1, 0.25, size), (2, 0.5, size),
    ]  # fmt: skip
    assert names(collectives) == ["all_reduce"] * (3 * (size > 1))
    collectives.clear()
    auditor.close()
    assert collectives == []
    assert gathered(written) == [[1, 2, 3, None, "closed"]] + [["closed"]] * (size - 1), "the last step is not lost"


# --- tensor-parallel replicas -----------------------------------------------------------------------------------------


@TWO_RANKS
@pytest.mark.parametrize("disagree", [False, True])
def test_replicas_are_compared_at_their_interval(
    disagree: bool, caplog: pytest.LogCaptureFixture, collectives: list[tuple[Any, ...]]
) -> None:
    """TP over all ranks: every second step two integers are reduced, and more only on a difference."""
    odd = dist.get_world_size() - 1
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    collection = SimpleNamespace(dp=own, dp_cp=own, tp=dist.group.WORLD)
    audit = register(config=AuditConfig(), pg_collection=collection, tp_agreement_interval=2)
    collectives.clear()
    reports = []
    with caplog.at_level(logging.WARNING, logger="rlk_audit.megatron_groups"):
        for step in (1, 2, 3):
            observe(audit, 0.5 if disagree and dist.get_rank() == odd else 0.25)
            reports.append(audit.step_end(step).warnings)
    assert collectives[0] == ("all_reduce", 2, torch.int64)
    assert names(collectives) == ["all_reduce"] + ["all_gather"] * disagree
    assert reports == [{}, {"tp_disagreement": 1} if disagree else {}, {}]
    told = f"tensor-parallel ranks [{odd}] measured other log-probabilities than the first"
    plugin = [record.message for record in caplog.records if record.name == "rlk_audit.megatron_groups"]
    assert plugin == [told] * disagree
