"""The audit in a slime training of several ranks, on the HARNESS of slime_harness.py: figures on every rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, name_of, parallel_state, place_of
from slime_harness import Place, Training, arguments, make_samples, rank_data

from rlk_audit import AuditConfig, Collector, ConsistencyError, TokenBatch
from rlk_audit.integrations.slime import SlimeAudit

SAMPLES = make_samples(13, seed=3)
CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1"), "position": "auto"}, samples_per_step=16, worst_k=8)


@pytest.fixture(params=LAYOUTS, ids=name_of)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """This rank's place in a layout, with Megatron's groups of it."""
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state(request.param))
    return place_of(request.param)


def core(samples: list[oracle.Sample], with_ids: bool = True) -> dict[str, Any]:
    """What one process that has all tokens reports."""
    collector = Collector(CONFIG)
    columns = [[torch.tensor(getattr(s, side)) for s in samples] for side in ("train", "rollout", "mask")]
    named = {name: [getattr(s, name) for s in samples] for name in ("sample_index", "rollout_id")}
    ids = {"token_ids": [s.token_ids for s in samples]} if with_ids else {}
    labels = {"engine": [s.labels["engine"] for s in samples]}
    collector.update(
        TokenBatch.from_lists(*columns, **named, **ids, labels=labels, sample_slot=[s.slot for s in samples])
    )
    return comparable(collector.compute().to_dict())


def comparable(values: Any) -> Any:
    if isinstance(values, dict):
        left_out = ("rank", "microbatch", "worst_rank", "worst_microbatch")
        return {name: comparable(part) for name, part in values.items() if name not in left_out}
    if isinstance(values, (list, tuple)):
        return [comparable(part) for part in values]
    return values.hex() if isinstance(values, float) else values


def assert_report(audit: SlimeAudit, place: Place, expected: dict[str, Any], rollout_id: int) -> None:
    """On every rank of the last stage the figures of all tokens, bit for bit; none on an earlier stage."""
    if not place.last_stage:
        assert audit.report is None
        return
    assert audit.report is not None
    assert audit.report.step == rollout_id
    found = comparable(audit.report.to_dict())
    for part in ("metrics", "classes", "warnings", "worst_tokens", "breakdowns", "samples", "histogram"):
        assert found[part] == expected[part], part
    assert audit.report.complete


def test_recomputed_log_probs_on_every_rank(place: Place, collectives: list[tuple[Any, ...]]) -> None:
    audit = SlimeAudit(CONFIG)
    training = Training(arguments(rollout_data_postprocess_path=audit.rollout_data_postprocess), place)
    for rollout_id in (3, 4):
        samples = SAMPLES[: 13 - rollout_id]
        collectives.clear()
        training.train_actor(rollout_id, rank_data(samples, place))
        assert_report(audit, place, core(samples), rollout_id)
        if place.last_stage:
            assert oracle.differences(audit.report.metrics, oracle.audit(samples, worst_k=8)) == []
    sums = [call for call in collectives if call[0] == "all_reduce"]
    assert collectives == sums
    several = place.last_stage and place.dp_size * place.cp_size > 1
    assert len(sums) == int(several), "one SUM a rollout, and none on an earlier stage"


@pytest.mark.parametrize("recompute", [False, True])
def test_the_policy_loss_on_every_rank(place: Place, recompute: bool) -> None:
    """Losses and gradients of each rank stay as they are, the figures are those of all tokens."""
    audit = SlimeAudit(CONFIG)
    hooks = {"rollout_data_postprocess_path": audit.begin_rollout, "custom_tis_function_path": audit.tis}
    audited = Training(arguments(**hooks, use_tis=True, recompute_loss_function=recompute), place)
    without = Training(arguments(recompute_loss_function=recompute), place)
    for training in (audited, without):
        training.train_actor(7, rank_data(SAMPLES, place, recomputed=False))
    audit.begin_rollout(audited.args, 8, rank_data([], place))
    assert_report(audit, place, core(SAMPLES, with_ids=False), 7)
    assert audited.losses == without.losses
    if place.last_stage:
        assert audited.weight.grad is not None
        assert torch.equal(audited.weight.grad, without.weight.grad)


def test_miles_padded_rows_on_every_rank(place: Place) -> None:
    """Rows padded to one length are cut by that length."""
    audit = SlimeAudit(AuditConfig())
    hooks = {"rollout_data_postprocess_path": audit.begin_rollout, "custom_tis_function_path": audit.tis}
    training = Training(arguments(**hooks, use_tis=True, qkv_format="bshd"), place, miles=True)
    training.train_actor(0, rank_data(SAMPLES, place, padded=64))
    audit.begin_rollout(training.args)
    if place.last_stage:
        unnamed = [oracle.Sample(s.train, s.rollout, s.mask) for s in SAMPLES]
        assert audit.report is not None
        assert oracle.differences(audit.report.metrics, oracle.audit(unnamed)) == []


def test_strict_stops_every_rank(place: Place) -> None:
    """Also on the stages that hold no log-probabilities."""
    audit = SlimeAudit(AuditConfig(mode="strict", limits={"abs_dlogp_max": 1e-6}))
    with pytest.raises(ConsistencyError, match="abs_dlogp_max"):
        audit.rollout_data_postprocess(arguments(), 0, rank_data(SAMPLES, place))


def test_the_rank_that_the_training_logs_from_tracks(
    place: Place, monkeypatch: pytest.MonkeyPatch, gathered: Any
) -> None:
    rows: list[dict[str, float]] = []
    module = SimpleNamespace(log=lambda args, metrics, step_key: rows.append(metrics))
    monkeypatch.setitem(sys.modules, "slime.observability.logging_utils", module)
    SlimeAudit(AuditConfig()).rollout_data_postprocess(arguments(), 2, rank_data(SAMPLES, place))
    found = [row for own in gathered(rows) for row in own]
    assert len(found) == 1
    assert found[0]["rollout/step"] == 2
    assert found[0]["rlk_audit/abs_dlogp_max"] == oracle.audit(SAMPLES).metrics["abs_dlogp_max"]


def test_a_bad_variable_on_one_rank_stops_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlk_audit.integrations.vime import VIME

    if dist.get_rank() == dist.get_world_size() - 1:
        monkeypatch.setenv("VIME_RLK_CONSISTENCY", "loud")
    with pytest.raises((ValueError, RuntimeError), match="loud"):
        SlimeAudit(dialect=VIME).rollout_data_postprocess(arguments(), 0, rank_data(SAMPLES, place))
