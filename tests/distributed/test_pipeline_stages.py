"""The training plugin on several ranks: stages without the loss, tensor-parallel replicas, one writer, mode off."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk_audit import AuditConfig, Auditor, Collector, ConsistencyError, LayoutMismatchError, StepReport
from rlk_audit.megatron_plugin import MegatronAudit, register

AUDIT = SimpleNamespace(rlk_consistency_mode="audit")
TWO_RANKS = pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")


class Kept:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def write(self, report: StepReport) -> None:
        self.reports.append(report)

    def close(self) -> None:
        """Nothing is held back."""


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are given here, so the search for others must not need megatron."""
    monkeypatch.setitem(sys.modules, "megatron", None)


def grid(**sizes: int) -> tuple[SimpleNamespace, dict[str, int]]:
    """Groups of a rank grid whose first axis varies fastest (tp, cp, dp, pp), and this rank's place in it."""
    names = list(sizes)
    place, stride, rest = {}, {}, 1
    for name in names:
        place[name] = dist.get_rank() // rest % sizes[name]
        stride[name] = rest
        rest *= sizes[name]
    assert rest == dist.get_world_size()

    def group_of(*axes: str) -> dist.ProcessGroup:
        """The group of this rank along these axes; every rank creates all groups, in one order."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(rest):
            key = tuple(rank // stride[name] % sizes[name] for name in names if name not in axes)
            members.setdefault(key, []).append(rank)
        groups = {key: dist.new_group(ranks) for key, ranks in members.items()}
        return groups[tuple(place[name] for name in names if name not in axes)]

    data = [name for name in names if name in ("dp", "cp")]
    collection = SimpleNamespace(dp=group_of("dp"), dp_cp=group_of(*data), pp=group_of("pp"), mp=group_of("tp", "pp"))
    return collection, place


def observe(audit: MegatronAudit, drifts: list[float], **fields: Any) -> None:
    rollout = torch.full((len(drifts),), -3.0, dtype=torch.float64)
    audit.observe(rollout + torch.tensor(drifts, dtype=torch.float64), rollout, torch.ones(len(drifts)), **fields)


@TWO_RANKS
def test_b27_stages_without_the_loss_do_nothing(gathered, collectives: list[tuple[Any, ...]]) -> None:
    """PP = 2: the first stage knows rollout values alone; figures come once, from the last stage."""
    data_size = dist.get_world_size() // 2
    collection, place = grid(dp=data_size, pp=2)
    sink = Kept()
    audit = register(AUDIT, pg_collection=collection, sinks=[sink])
    last_stage = place["pp"] == 1
    assert audit.owns_report is last_stage
    collectives.clear()
    if last_stage:
        observe(audit, [0.25] * (1 + place["dp"]), microbatch=0)
    else:
        audit.observe(None, torch.tensor([-3.0]), torch.ones(1), microbatch=0)
    assert collectives == []
    report = audit.step_end(4)
    assert [name for name, *_ in collectives] == ["all_reduce"] * (last_stage and data_size > 1)
    if last_stage:
        assert (report.step, report.group_size) == (4, data_size)
        assert report.metrics["compared_token_count"] == data_size * (data_size + 1) // 2
        assert report.warnings == {}
        assert report.complete
    else:
        assert report is None
    size = dist.get_world_size()
    assert gathered(len(sink.reports)) == [0] * (size - 1) + [1], "the last rank writes"


@TWO_RANKS
def test_b27_a_stage_without_the_loss_is_the_caller_s_own(gathered) -> None:
    """On an early stage wrappers hand back the functions themselves."""
    collection, place = grid(dp=dist.get_world_size() // 2, pp=2)
    audit = register(AUDIT, pg_collection=collection)

    def forward_step(data_iterator: object, model: object) -> None:
        """Never called here."""

    kept = audit.wrap_forward_step(forward_step) is forward_step and audit.wrap_schedule(forward_step) is forward_step
    assert kept is (place["pp"] == 0)
    assert (audit.step_end(1) is None) is (place["pp"] == 0)
    assert gathered(kept).count(True) == dist.get_world_size() // 2


def test_a_handle_without_an_auditor_is_free(collectives: list[tuple[Any, ...]]) -> None:
    audit = MegatronAudit(None)
    audit.observe(None, None, None)
    audit.attach(None, torch.ones(1))
    assert audit.step_end(1) is None
    assert audit.owns_report is False
    audit.close()
    assert collectives == []


@TWO_RANKS
def test_b25_each_tensor_parallel_rank_reduces_its_own_group(gathered) -> None:
    data_size = dist.get_world_size() // 2
    collection, place = grid(tp=2, dp=data_size)
    sink = Kept()
    audit = register(AUDIT, pg_collection=collection, sinks=[sink])
    observe(audit, [0.5, 0.125, 0.0] * (1 + place["dp"]))
    report = audit.step_end(1)
    assert report.metrics["compared_token_count"] == 3 * data_size * (data_size + 1) // 2
    figures = report.to_dict()["metrics"]
    figures.pop("worst_rank")
    assert gathered(figures) == [figures] * dist.get_world_size()
    assert gathered(len(sink.reports)) == [0] * (dist.get_world_size() - 1) + [1]


@TWO_RANKS
@pytest.mark.parametrize("cp_sharded", [True, False])
def test_context_parallel_ranks_are_added_only_where_each_holds_its_own(cp_sharded: bool) -> None:
    """CP = 2: sharded, each of the two has half of the tokens; gathered, both have all of them."""
    data_size = dist.get_world_size() // 2
    collection, _place = grid(cp=2, dp=data_size)
    audit = register(AUDIT, pg_collection=collection, cp_sharded=cp_sharded)
    observe(audit, [0.5] * (2 if cp_sharded else 4))
    report = audit.step_end(1)
    assert report.metrics["compared_token_count"] == 4 * data_size
    assert report.group_size == data_size * (2 if cp_sharded else 1)


def test_an_explicit_group_goes_before_all_others() -> None:
    collection, _ = grid(dp=dist.get_world_size())
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    audit = register(AUDIT, pg_collection=collection, group=own)
    observe(audit, [0.5])
    assert audit.step_end(1).metrics["compared_token_count"] == 1


def test_without_any_group_all_ranks_are_data_parallel() -> None:
    audit = register(AUDIT)
    observe(audit, [0.5] * (1 + dist.get_rank()))
    size = dist.get_world_size()
    assert audit.step_end(1).metrics["compared_token_count"] == size * (size + 1) // 2


@pytest.mark.parametrize("args", [None, SimpleNamespace(), SimpleNamespace(rlk_consistency_mode=None)])
def test_mode_off_exchanges_once_and_builds_nothing(args, collectives: list[tuple[Any, ...]]) -> None:
    audit = register(args)
    assert [name for name, *_ in collectives] == ["all_gather"] * (dist.get_world_size() > 1)
    assert audit.auditor is None
    collectives.clear()
    observe(audit, [0.5])
    assert audit.step_end(1) is None
    assert collectives == []


@TWO_RANKS
def test_one_rank_off_is_told_on_every_rank(gathered) -> None:
    """The variable that did not reach one node: also the stage that would not have reduced is told."""
    off = dist.get_world_size() - 1
    collection, _ = grid(dp=dist.get_world_size() // 2, pp=2)
    with pytest.raises(LayoutMismatchError) as caught:
        register(None if dist.get_rank() == off else AUDIT, pg_collection=collection)
    told = str(caught.value)
    assert f'"off" on rank {off};' in told
    assert 'mode is "audit" on rank' in told
    assert "eps_low" not in told
    assert gathered(told) == [told] * dist.get_world_size()


@TWO_RANKS
def test_stages_of_different_settings_are_told(gathered) -> None:
    """The stage without the loss reduces nothing, and yet its settings count: one cause, one message."""
    collection, place = grid(dp=dist.get_world_size() // 2, pp=2)
    with pytest.raises(LayoutMismatchError, match=r"worst_k is 4 on rank"):
        register(config=AuditConfig(worst_k=4 + place["pp"]), pg_collection=collection)
    assert gathered("done") == ["done"] * dist.get_world_size()


# --- set-up that fails on some ranks ----------------------------------------------------------------------------------


def odd_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@TWO_RANKS
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("LIMITS", "abs_dlogp_p99==0.1", "set up on no rank, since it failed on some: RLK_AUDIT_LIMITS: "),
        ("CONFIG", "/no/such/file.yaml", "set up on no rank, since it failed on some: RLK_AUDIT_CONFIG: /no/such"),
        ("LIMITS", "abs_dlogp_p98=0.1", "a limit names the metric 'abs_dlogp_p98', which is not computed"),
        ("MAX_STATE_BYTES", "1000", "more than max_state_bytes=1000"),
        ("REDUCTION_GROUP", "gloo", "reduction_group is training on rank"),
        ("CP_SHARDED", "no", "cp_sharded is True on rank"),
        ("TP_AGREEMENT_INTERVAL", "3", "tp_agreement_interval is 0 on rank"),
    ],
)
def test_a_setting_that_is_wrong_on_one_rank_stops_all(
    variable: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch, gathered
) -> None:
    """Kills: a rank that raises by itself, or goes on by itself, while the others wait for it."""
    if odd_rank():
        monkeypatch.setenv(f"RLK_AUDIT_{variable}", value)
    with pytest.raises(LayoutMismatchError) as caught:
        register(AUDIT)
    assert told in str(caught.value)
    assert f"rank {dist.get_world_size() - 1}" in str(caught.value)
    assert gathered(str(caught.value)) == [str(caught.value)] * dist.get_world_size()


@TWO_RANKS
def test_a_sink_that_cannot_be_set_up_stops_all(tmp_path, monkeypatch: pytest.MonkeyPatch, gathered) -> None:
    """Only the writing rank meets it."""
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("RLK_AUDIT_SINKS", "jsonl")
    monkeypatch.setenv("RLK_AUDIT_OUTPUT_DIR", str(file))
    with pytest.raises(LayoutMismatchError, match=f"failed on some: .*on rank {dist.get_world_size() - 1}"):
        register(AUDIT)
    assert gathered("done") == ["done"] * dist.get_world_size()


@TWO_RANKS
@pytest.mark.parametrize("settings", [{"limits": {"abs_dlogp_p98": 0.1}}, {"max_state_bytes": 1000}])
def test_a_mistake_on_every_rank_is_the_same_on_every_stage(settings: dict[str, Any], gathered) -> None:
    """Also on a stage that reduces nothing: it must not go on alone."""
    collection, _ = grid(dp=dist.get_world_size() // 2, pp=2)
    with pytest.raises(ValueError, match=r"abs_dlogp_p98|max_state_bytes=1000") as caught:
        register(config=AuditConfig(**settings), pg_collection=collection)
    assert gathered(str(caught.value)) == [str(caught.value)] * dist.get_world_size()


@TWO_RANKS
def test_the_size_is_checked_for_the_whole_group() -> None:
    """Not for one rank at set-up and for all in the first step."""
    one = Collector(AuditConfig(worst_k=64)).layout
    config = AuditConfig(worst_k=64, max_state_bytes=8 * one.length)
    with pytest.raises(ValueError, match="max_state_bytes"):
        Auditor(config)


@TWO_RANKS
def test_replicas_with_verdicts_of_their_own_stop_together(gathered) -> None:
    """Strict, and log-probabilities that each context-parallel rank holds whole: one of them is broken."""
    collection, _ = grid(cp=dist.get_world_size())
    config = AuditConfig(mode="strict")
    audit = register(config=config, pg_collection=collection, cp_sharded=False)
    observe(audit, [0.5])
    audit.step_end(1)
    observe(audit, [float("nan") if dist.get_rank() == 0 else 0.5])
    with pytest.raises(ConsistencyError) as caught:
        audit.step_end(2)
    assert "train_nan" in str(caught.value)
    assert gathered(str(caught.value)) == [str(caught.value)] * dist.get_world_size()
    audit.close()
