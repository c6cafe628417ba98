"""Faults that were found by attacking the package, each with its neighbours. Over ranks: tests/distributed."""

from __future__ import annotations

import json
import math
import threading
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from strategies import observe

from rlk_audit import AuditConfig, Auditor, Collector, LogHistogram, StepReport, TokenBatch
from rlk_audit.allreduce import Pending
from rlk_audit.contracts import ContractError, apply_contract
from rlk_audit.layout import ONE_WORST_ABOVE, WORST_TOKEN
from rlk_audit.limits import Judge
from rlk_audit.megatron_plugin import MegatronAudit, register
from rlk_audit.metadata import batch_fields, partition_metadata
from rlk_audit.run_total import RunTotal
from rlk_audit.settings import resolve_settings
from rlk_audit.sinks import JsonlSink

ONE = {"train_log_probs": [-1.5], "rollout_log_probs": [-1.0], "mask": [1]}
CONTRACT = {
    "version": "example-1",
    "chain_logprob_aggregates": {
        "compute_dtype": "float32",
        "require_all": True,
        "nan_inf_policy": "hard_fail",
        "empty_active_token_set": "hard_fail",
        "dlogp_definition": "comparison_lhs_logp - comparison_rhs_logp",
        "default_clip_interval": [0.8, 1.2],
        "metrics": {
            "max_abs_dlogp": {
                "pass_rule": "value <= threshold",
                "by_execution_dtype": {"bfloat16": {"threshold": 0.06}},
            }
        },
    },
}


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WORST_TOKEN, "rejected", "sketch", "counters"])
def test_a_label_may_have_the_name_of_a_field(name: str) -> None:
    config = AuditConfig(breakdowns={name: 8})
    fields = {"sample_index": 3, "rollout_id": 4, "token_position": 5, "token_ids": 6}
    collector = Collector(config)
    collector.update(**ONE, **fields, labels={name: 7}, microbatch=2)
    (worst,) = collector.compute().worst_tokens
    ids = (worst.sample_index, worst.rollout_id, worst.token_position, worst.token_id, worst.microbatch, worst.rank)
    assert ids == (3, 4, 5, 6, 2, 0)
    assert (worst.abs_dlogp, worst.train_logp, worst.labels) == (0.5, -1.5, {name: "7"})


def test_a_value_a_row_is_not_a_value_a_column() -> None:
    """Square batches too, where both would fit."""
    for rows, columns in ((2, 2), (2, 3)):
        train = torch.full((rows, columns), -1.5)
        train[1] = -2.0
        collector = Collector(AuditConfig(breakdowns={"engine": 2}))
        labels = {"engine": torch.tensor([0, 1])}
        collector.update(
            train, torch.full_like(train, -1.0), torch.ones_like(train), sample_index=[7, 8], labels=labels
        )
        report = collector.compute()
        assert report.warnings == {}
        assert (report.worst_tokens[0].sample_index, report.worst_tokens[0].labels) == (8, {"engine": "1"})
        assert [bucket.abs_dlogp_mean for bucket in report.breakdowns["engine"][1:]] == [0.5, 1.0]


def test_one_worst_token_a_sample_where_samples_are_unknown() -> None:
    """An unknown sample is no sample that all tokens share."""
    train = [-1.5, -1.25, -1.75]
    config = AuditConfig(worst_per_sample=1)
    report = observe({"train_log_probs": train, "rollout_log_probs": [-1.0] * 3, "mask": [1] * 3}, config=config)
    assert [token.abs_dlogp for token in report.worst_tokens] == [0.75, 0.5, 0.25]


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["approx_kl0", "mult_prob_error", "ratio0_mean", "ratio0_max", "chi2_0", "ess0"])
@pytest.mark.parametrize("mode", ["audit", "strict"])
def test_a_figure_beyond_its_range_is_beyond_its_limit(metric: str, mode: str) -> None:
    """Kills: an infinite drift that passes, since its figure is null."""
    sign = -1 if metric == "mult_prob_error" else 1
    train, rollout = (-0.1, -900.0) if sign > 0 else (-900.0, -0.1)
    config = AuditConfig(mode=mode, limits={metric: 0.5 if metric == "ess0" else 10.0})
    report = observe({"train_log_probs": [train], "rollout_log_probs": [rollout], "mask": [1]}, config=config)
    assert math.isnan(report.metrics[metric])
    verdict = Judge(config).judge(report)
    assert not verdict.passed
    assert [str(result) for result in verdict.failed_limits] == [
        f"{metric} is beyond the range of its numbers, must be {'>= 0.5' if metric == 'ess0' else '<= 10'}"
    ]


def beyond_range(limits: dict[str, Any], *drifts: float) -> tuple[bool, str]:
    """Of samples of one token: whether the verdict passed, and what it told."""
    config = AuditConfig(samples_per_step=4, limits=limits)
    batch = TokenBatch.from_lists(
        [[-1.0 + min(d, 0.0)] for d in drifts], [[-1.0 - max(d, 0.0)] for d in drifts], sample_slot=range(len(drifts))
    )
    verdict = Judge(config).judge(observe(batch, config=config))
    return verdict.passed, "; ".join(verdict.failures())


@pytest.mark.parametrize("metric", ["seq_chi2_0", "seq_ratio0_geo_mean", "seq_ratio0_geo_min", "seq_ratio0_geo_max"])
def test_a_figure_of_samples_beyond_its_range_is_beyond_its_limit(metric: str) -> None:
    passed, told = beyond_range({metric: "<=1e9"}, 998.0, 998.0)
    assert not passed and told == f"{metric} is beyond the range of its numbers, must be <= 1e+09"
    assert beyond_range({metric: "<=1e9"}, 0.5, 0.25) == (True, "")


def test_ratios_that_all_vanish_have_no_effective_sample() -> None:
    passed, told = beyond_range({"ess0": ">=0.9"}, -150.0, -150.0)
    assert not passed and told == "ess0 is beyond the range of its numbers, must be >= 0.9"


def test_a_limit_on_samples_without_samples_has_no_data() -> None:
    config = AuditConfig(samples_per_step=4, limits={"seq_chi2_0": 1.0, "seq_ratio0_geo_max": 2.0})
    batch = TokenBatch.from_lists([[-1.0]], [[-1.0]], sample_slot=[9])
    verdict = Judge(config).judge(observe(batch, config=config))
    assert [result.outcome for result in verdict.limits] == ["no_data", "no_data"]


def test_a_failure_says_the_same_once_it_was_in_json() -> None:
    config = AuditConfig(limits={"ratio0_max": 2.0})
    report = observe(TokenBatch.from_lists([[-1.0]], [[-998.0]]), config=config)
    report.verdict = Judge(config).judge(report)
    assert report.failures == ("ratio0_max is beyond the range of its numbers, must be <= 2",)
    assert StepReport.from_dict(json.loads(report.to_json())).failures == report.failures


def test_a_limit_without_data_is_told(caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor(AuditConfig(limits={"updates_since_rollout": 3}))
    auditor.update(**ONE)
    assert auditor.step(1).verdict.passed
    assert caplog.messages == ["step 1: a limit has no data: updates_since_rollout is null"]


@pytest.mark.parametrize("bound", [Decimal("0.4"), np.float32(0.4), np.float64(0.4), torch.tensor(0.4), "0.4"])
def test_a_bound_may_be_any_number(bound: Any) -> None:
    config = AuditConfig(limits={"abs_dlogp_max": bound})
    json.dumps(config.to_dict())
    assert not Judge(config).judge(observe(ONE, config=config)).passed


@pytest.mark.parametrize("bound", [None, True, {}, [], [None], object()])
def test_what_is_no_bound_is_refused_by_name(bound: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^limits\['abs_dlogp_max'\] must be"):
        AuditConfig(limits={"abs_dlogp_max": bound})


@pytest.mark.parametrize(
    ("metric", "bound", "value", "passes"),
    [("dlogp_p01", -0.4, -0.5, False), ("compared_token_count", 2, 1, False), ("sample_count", 1, 1, True)],
)
def test_a_plain_limit_bounds_on_the_bad_side(metric: str, bound: float, value: float, passes: bool) -> None:
    config = AuditConfig(limits={metric: bound}, samples_per_step=1)
    collector = Collector(config)
    collector.update(**ONE, sample_slot=0)
    report = collector.compute()
    assert report.metrics[metric] == pytest.approx(value, rel=0.01)
    assert Judge(config).judge(report).passed == passes


def judged(config: AuditConfig, drifts: list[float]) -> list[bool]:
    judge = Judge(config)
    verdicts = []
    for drift in drifts:
        update = {"train_log_probs": [-1.0 - drift], "rollout_log_probs": [-1.0], "mask": [1]}
        verdicts.append(judge.judge(observe(update, config=config)).passed)
    return verdicts


def test_a_drift_that_stays_goes_on_failing() -> None:
    """Kills: a relative limit whose history takes what crossed it, and so forgives it after half a window."""
    config = AuditConfig(limits={"abs_dlogp_max": "3x_median_20"})
    assert judged(config, [0.125] * 20 + [1.25] * 60) == [True] * 20 + [False] * 60


@pytest.mark.parametrize(
    ("metric", "bound"),
    [
        ("dlogp_mean", "3x_median_20"),
        ("kl0_k1", "3x_median_20"),
        ("ess0", "3x_median_20"),
        ("abs_dlogp_p99", "0.5x_median_20"),
    ],
)
def test_a_relative_limit_that_bounds_nothing_is_refused(metric: str, bound: str) -> None:
    with pytest.raises(ValueError, match=f"of {metric}"):
        Judge(AuditConfig(limits={metric: bound}))
    Judge(AuditConfig(limits={"ess0": "0.5x_median_20"}))


@pytest.mark.parametrize("settings", [{"limits": {"abs_dlogp_max": 0.1}}, {"expect_identical": True}])
def test_a_step_that_compared_nothing_passes_nothing(settings: dict[str, Any]) -> None:
    config = AuditConfig(**settings)
    verdict = Judge(config).judge(observe(config=config))
    assert not verdict.passed and "nothing was compared" in verdict.failures()


# --- data that make no batch ------------------------------------------------------------------------------------------

TWO = ([[-1.0, -2.0], [-1.5]], [[-1.0, -2.0], [-1.0]])
BROKEN_LISTS: list[dict[str, Any]] = [
    {"mask": [[1, 1], None]},
    {"mask": [[1, None], [1]]},
    {"token_ids": [[1, 2], None]},
    {"token_ids": [[1, None], [3]]},
    {"sample_index": ["a", 1]},
    {"labels": {"engine": ["e0", 1]}},
    {"rollout_log_probs": [[-1.0, "x"], [-1.0]]},
    {"rollout_log_probs": [[{}, -1.0], [-1.0]]},
    {"train_log_probs": [None, [-1.0]]},
    {"train_log_probs": [torch.zeros(1, 2), [-1.0]], "rollout_log_probs": [[-1.0], [-1.0]]},
    {"train_log_probs": [[-1.0, None], [-1.0]]},
]


@pytest.mark.parametrize("broken", BROKEN_LISTS, ids=str)
def test_lists_that_make_no_batch_fail_the_update_and_nothing_else(broken: dict[str, Any]) -> None:
    """An exception on one rank would leave the others waiting."""
    given = {"train_log_probs": TWO[0], "rollout_log_probs": TWO[1], **broken}
    report = observe(TokenBatch.from_lists(**given), config=AuditConfig(breakdowns={"engine": 2}))
    assert report.warnings["update_failed"] == 1
    assert report.metrics["active_token_count"] == 0


BROKEN_ARRAYS: dict[str, Any] = {
    "ragged": lambda: TokenBatch.from_padded([[-1.0], [-1.0, -2.0]], [[-1.0], [-1.0, -2.0]], [[1], [1, 1]]),
    "none": lambda: TokenBatch.from_padded([[-1.0, None]], [[-1.0, -1.0]], [[1, 1]]),
    "start": lambda: TokenBatch.from_padded([[-1.0, -1.0]], [[-1.0, -1.0]], [[1, 1]], response_start=[0, 1, 2]),
    "index": lambda: TokenBatch.from_padded([[-1.0, -1.0]], [[-1.0, -1.0]], [[1, 1]], sample_index=[None]),
    "no bounds": lambda: TokenBatch.from_packed([-1.0], [-1.0], [1], cu_seqlens=[]),
    "rows of bounds": lambda: TokenBatch.from_packed([-1.0], [-1.0], [1], cu_seqlens=[[0, 1]]),
    "rows": lambda: TokenBatch.from_packed([[-1.0], [-1.0]], [[-1.0], [-1.0]], [[1], [1]], cu_seqlens=[0, 1]),
    "shard": lambda: TokenBatch.from_cp_shard(
        [-1.0], [-1.0], [1], cp_rank=0, cp_size=2, cu_seqlens_padded=torch.zeros(2, 2)
    ),
}


@pytest.mark.parametrize("name", BROKEN_ARRAYS)
def test_arrays_that_make_no_batch_fail_the_update_and_nothing_else(name: str) -> None:
    report = observe(BROKEN_ARRAYS[name]())
    assert report.warnings["update_failed"] == 1, report.warnings


def test_misuse_of_a_constructor_still_raises() -> None:
    with pytest.raises(ValueError, match="index_scores must be"):
        TokenBatch.from_padded([[-1.0]], [[-1.0]], [[1]], index_scores="tokens")
    with pytest.raises(ValueError, match="expected 0 <= cp_rank < cp_size"):
        TokenBatch.from_cp_shard([[-1.0]], [[-1.0]], [[1]], cp_rank=2, cp_size=2, seq_length=2)


def test_an_id_that_is_unknown_may_be_none() -> None:
    batch = TokenBatch.from_lists(*TWO, sample_index=[None, 4], labels={"engine": [None, 1]})
    report = observe(batch, config=AuditConfig(breakdowns={"engine": 2}))
    assert report.warnings == {}
    assert report.worst_tokens[0].sample_index == 4
    assert [bucket.compared_token_count for bucket in report.breakdowns["engine"]] == [2, 0, 1]


@pytest.mark.parametrize("cp", [1, 2])
def test_a_pack_may_be_one_row(cp: int) -> None:
    """[1, total], as megatron-core's packed sequences are; ids of the tokens too."""
    train, rollout = torch.linspace(-1, -2, 8), torch.full((8,), -1.0)
    ids = torch.arange(8)
    bounds = torch.tensor([0, 4, 8]) * cp
    place = {"cu_seqlens": bounds} if cp == 1 else {"cp_rank": 0, "cp_size": cp, "cu_seqlens_padded": bounds}
    build = TokenBatch.from_packed if cp == 1 else TokenBatch.from_cp_shard
    flat = observe(build(train, rollout, torch.ones(8), token_ids=ids, sample_index=torch.tensor([5, 6]), **place))
    row = build(
        train[None], rollout[None], torch.ones(1, 8), token_ids=ids[None], sample_index=torch.tensor([5, 6]), **place
    )
    assert flat.warnings == {}
    assert observe(row).to_dict() == flat.to_dict()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("whole", [True, False])
def test_slots_may_be_one_a_sample_or_one_a_token(kind: Any, whole: bool) -> None:
    config = AuditConfig(samples_per_step=4)
    slots = [3, 1] if whole else [[3, 3], [1, 1]]
    values = torch.full((2, 2), -1.5), torch.full((2, 2), -1.0), torch.ones(2, 2)
    report = observe(TokenBatch.from_padded(*values, sample_slot=kind(slots)), config=config)
    assert report.warnings == {}
    assert [(sample.sample_slot, sample.compared_token_count) for sample in report.samples] == [(1, 2), (3, 2)]


@pytest.mark.parametrize("name", ["mask", "rollout_log_probs"])
def test_several_rows_are_no_pack_of_one(name: str) -> None:
    """Kills: the first of two rows taken for the pack's."""
    given = {"train_log_probs": torch.full((1, 3), -1.5), "rollout_log_probs": torch.full((1, 3), -1.0)}
    given |= {"mask": torch.ones(1, 3)}
    assert observe(TokenBatch.from_packed(**given, cu_seqlens=[0, 3])).warnings == {}
    given[name] = given[name].expand(2, 3)
    report = observe(TokenBatch.from_packed(**given, cu_seqlens=[0, 3]))
    assert report.metrics["compared_token_count"] == 0
    assert {"length_mismatch", "update_failed"} & set(report.warnings)


def test_a_pack_of_one_row_may_lack_the_rollout_side() -> None:
    batch = TokenBatch.from_packed(torch.full((1, 3), -1.5), None, torch.ones(1, 3), cu_seqlens=[0, 3])
    assert observe(batch).classes["rollout_missing"] == 3


def test_a_pack_beside_ragged_rows_is_refused_whole(caplog: pytest.LogCaptureFixture) -> None:
    batch = TokenBatch.from_packed(
        torch.full((3,), -1.5), [[-1.0], [-1.0, -1.0]], torch.ones(3), cu_seqlens=[0, 3], sample_index=torch.tensor([7])
    )
    report = observe(batch)
    assert report.warnings == {"length_mismatch": 1, "nothing_compared": 1} and report.classes["rejected"] == 3
    assert "a pack of 1 samples (sample_index 7) is refused" in caplog.text


def test_whole_numbers_are_log_probabilities_too() -> None:
    report = observe(TokenBatch([-1, -2], [-1, -1], [1, 1]))
    assert (report.warnings, report.metrics["abs_dlogp_max"]) == ({}, 1.0)


def test_refused_samples_and_other_tokens_are_rejected_together() -> None:
    """Kills: the tokens of a refused sample counted in the place of those whose ids differ."""
    batch = TokenBatch.from_lists(
        [[-1.0, -1.0], [-1.0]], [[-1.0, -1.0], [-1.0, -1.0]], token_ids=[[1, 2], [3]], rollout_token_ids=[[1, 9], [3]]
    )
    report = observe(batch)
    assert report.classes["rejected"] == 2 and report.metrics["compared_token_count"] == 1


def test_one_worst_token_a_sample_over_micro_batches() -> None:
    """Kills: two tokens of a sample kept of two micro-batches, in the place of another sample's."""
    config = AuditConfig(worst_k=2, worst_per_sample=1)
    collector = Collector(config)
    for sample, drift in ((0, 5.0), (0, 4.0), (1, 1.0)):
        collector.update([-1.0 - drift], [-1.0], [1], sample_index=sample)
    found = collector.compute().worst_tokens
    assert [(token.sample_index, token.abs_dlogp) for token in found] == [(0, 5.0), (1, 1.0)]


def test_a_slot_that_is_no_integer_is_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(AuditConfig(samples_per_step=4))
    collector.update(**ONE, sample_slot=torch.tensor([0.5]))
    assert "sample_slot must be integers" in caplog.text


def test_what_is_needed_is_told() -> None:
    with pytest.raises(TypeError, match=r"train_log_probs and mask are needed; only rollout_log_probs may be None$"):
        Collector().update(None, [-1.0], [1])


@pytest.mark.parametrize(("step", "of_step"), [(None, ""), (4, " of step 4")])
def test_a_failed_reduction_says_of_which_step(step: int | None, of_step: str) -> None:
    def fail() -> None:
        raise RuntimeError("closed by peer")

    pending = Pending(Collector().pack(), SimpleNamespace(wait=fail), AuditConfig(), 1, step=step)
    with pytest.raises(RuntimeError) as raised:
        pending.wait()
    assert str(raised.value) == (
        f"the audit's reduction{of_step} failed; has a rank of its group ended, or does one stand still? "
        "(closed by peer)"
    )


def test_labels_may_be_none() -> None:
    assert TokenBatch.from_padded([[-1.0]], [[-1.0]], [[1]], labels=None).fault is None


# --- the end of a step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3), np.int32(3)])
def test_a_step_may_be_any_integer(number: Any, tmp_path: Path) -> None:
    auditor = Auditor(sinks=[JsonlSink(tmp_path / "audit.jsonl")])
    auditor.update(**ONE)
    assert auditor.step(number).step == 3
    auditor.close()
    assert json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[0])["step"] == 3


def test_a_fault_that_stays_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor(writer=False)
    for number in range(150):
        auditor.update([-1.0], [-1.0, -1.0], [1])
        auditor.step(number)
    assert len(caplog.messages) == 2, "once a hundred steps"


def test_closing_twice_at_once_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit handler beside the program's own call: the step in flight is written before the sinks close."""
    written: list[Any] = []

    class Sink:
        def write(self, report: StepReport) -> None:
            written.append(report.step)

        def close(self) -> None:
            written.append("closed")

    auditor = Auditor(AuditConfig(lag=1), sinks=[Sink()])
    auditor.update(**ONE)
    auditor.step(1)
    inside, go_on = threading.Event(), threading.Event()
    wait = Pending.wait_at_most

    def slow(self: Pending, seconds: float) -> StepReport | None:
        inside.set()
        go_on.wait(10)
        return wait(self, seconds)

    monkeypatch.setattr(Pending, "wait_at_most", slow)
    threads = [threading.Thread(target=auditor.close) for _ in range(3)]
    threads[0].start()
    assert inside.wait(10)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert written == [1, None, "closed"]


def test_a_run_may_be_resumed_once_without_its_audit() -> None:
    auditor = Auditor(AuditConfig(eps_high=0.28))
    auditor.update(**ONE)
    auditor.step(1)
    saved = auditor.state_dict()
    off = Auditor(AuditConfig(mode="off"))
    off.load_state_dict(saved)
    again = Auditor(AuditConfig(eps_high=0.28))
    again.load_state_dict(off.state_dict())
    assert again.run_total().metrics["compared_token_count"] == 1


def test_a_saved_run_is_of_its_time_whatever_comes_after() -> None:
    auditor = Auditor()
    auditor.update(**ONE)
    auditor.step(1)
    saved = auditor.state_dict()
    again = Auditor()
    again.load_state_dict(saved)
    for run in (auditor, again):
        run.update(**ONE)
        run.step(2)
        assert run.run_total().metrics["compared_token_count"] == 2
    third = Auditor()
    third.load_state_dict(saved)
    assert third.run_total().metrics["compared_token_count"] == 1


def test_a_damaged_state_is_refused_when_it_is_loaded() -> None:
    auditor = Auditor()
    auditor.update(**ONE)
    auditor.step(1)
    saved = auditor.state_dict()
    saved["total"]["state"][0] = saved["total"]["state"][0][:-1]
    with pytest.raises(ValueError, match="the saved run total must hold"):
        Auditor().load_state_dict(saved)


def test_the_run_keeps_the_warning_of_an_unexpected_count() -> None:
    auditor = Auditor()
    for number, expected in enumerate((1, 5, 1), start=1):
        auditor.update(**ONE)
        auditor.step(number, expected_active_tokens=expected)
    assert auditor.run_total().warnings == {"unexpected_token_count": 1}


def test_steps_of_a_run_share_no_sample() -> None:
    """Kills: a total that takes sample 0 of two steps for one."""
    auditor = Auditor(AuditConfig(worst_per_sample=1))
    for number in (1, 2):
        auditor.update([-1.0 - number], [-1.0], [1], sample_index=0)
        auditor.step(number)
    assert [token.abs_dlogp for token in auditor.run_total().worst_tokens] == [2.0, 1.0]


def test_a_total_knows_no_maximum_of_a_bucket_whose_worst_tokens_were_left_out() -> None:
    """Kills: d = 4 of e1 lost to d = 5 of the same sample, and d = 1 told as the exact maximum of e1."""
    auditor = Auditor(AuditConfig(worst_per_sample=1, breakdowns={"engine": 2}))
    labels = {"engine": torch.tensor([0, 1, 1])}
    auditor.update([-6.0, -5.0, -2.0], [-1.0] * 3, [1] * 3, sample_index=torch.tensor([0, 0, 1]), labels=labels)
    auditor.step(1)
    bucket = auditor.run_total().breakdowns["engine"][2]
    assert math.isnan(bucket.abs_dlogp_max)
    assert bucket.abs_dlogp_p99 == pytest.approx(4.0, rel=0.06)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_total_of_ranks_that_keep_one_worst_token_names_one(resumed: bool) -> None:
    """The second worst of all may be another of the same rank."""
    config = AuditConfig(worst_k=4, breakdowns={"engine": 1})
    total = RunTotal(config)
    size = ONE_WORST_ABOVE + 1
    for drifts in ([5.0, 4.0], [1.0]):
        collector = Collector(config)
        collector.update([-1.0 - drift for drift in drifts], [-1.0] * len(drifts), [1] * len(drifts))
        vector = sum(Collector(config).pack(rank, size) for rank in range(1, size)) + collector.pack(0, size)
        total.add(vector, size)
    if resumed:
        saved, total = total.state_dict(), RunTotal(config)
        total.load_state_dict(saved)
    report = total.report()
    assert [token.abs_dlogp for token in report.worst_tokens] == [5.0]
    assert report.metrics["compared_token_count"] == 3 and report.metrics["abs_dlogp_max"] == 5.0


def test_a_run_is_resumed_where_its_steps_are_reduced() -> None:
    """The meta device stands for CUDA: the collector is on the CPU, the reduction on another device."""
    collector = Collector()
    collector.update(**ONE)
    first = RunTotal(AuditConfig())
    first.add(collector.pack(), 1)
    again = RunTotal(AuditConfig())
    again.load_state_dict(first.state_dict())
    again.add(collector.pack().to("meta"), 1)
    assert again._state.additive.device.type == "meta" and again.steps == 2


def test_a_log_that_fails_ends_no_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The figures are made where they are first read: on the writing rank alone."""

    def fail(*_: Any) -> None:
        raise OverflowError("math range error")

    monkeypatch.setattr("rlk_audit.warning_log.WarningLog.tell", fail)
    auditor = Auditor()
    auditor.update(**ONE)
    assert auditor.step(1).metrics["compared_token_count"] == 1
    assert caplog.messages == ["step 1 has no figures: math range error"]


def test_an_auditor_that_nobody_closes_is_closed_at_exit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registered: list[Any] = []
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("atexit.unregister", registered.remove)
    path = tmp_path / "audit.jsonl"
    auditor = Auditor(AuditConfig(lag=1), sinks=[JsonlSink(path)])
    auditor.update(**ONE)
    auditor.step(1)
    assert path.read_text() == ""
    registered[0]()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, None]
    assert registered == []
    with Auditor(sinks=[JsonlSink(path)]):
        assert len(registered) == 1
    assert registered == []
    Auditor()
    assert registered == [], "what writes nothing has nothing to lose"


@pytest.mark.parametrize("sink", ["console", object(), None, JsonlSink])
def test_what_is_no_sink_is_refused(sink: Any) -> None:
    with pytest.raises(TypeError, match="a sink must have write"):
        Auditor(sinks=[sink])


# --- megatron ---------------------------------------------------------------------------------------------------------


MODEL = SimpleNamespace(training=False)


def observing(audit: MegatronAudit) -> Any:
    """A forward step whose loss function observes one token."""
    return audit.wrap_forward_step(lambda data, model: (None, lambda output: audit.observe(*ONE.values())))


def test_evaluation_that_leaves_nothing_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    """Old log-probabilities are often recomputed under `model.eval()`: asked to, the audit counts them."""
    for evaluation, counted in ((False, 0), (True, 1)):
        caplog.clear()
        audit = register(config=AuditConfig(), evaluation=evaluation)
        wrapped = observing(audit)
        for number in (1, 2):
            wrapped(None, MODEL)[1](None)
            assert audit.step_end(number).metrics["compared_token_count"] == counted
        told = [message for message in caplog.messages if "left out as evaluation" in message]
        assert len(told) == (not evaluation)
        audit.close()


def run_twice(step: Any, forward_only: bool) -> None:
    for _ in range(2):
        step(None, MODEL)[1](None)


def test_a_batch_that_is_scored_in_parts_counts_whole() -> None:
    """Several forward-only schedules in a step; a training schedule that runs again counts once."""
    for forward_only, counted in ((True, 4), (False, 2)):
        audit = MegatronAudit(Auditor(), evaluation=True)
        schedule = audit.wrap_schedule(run_twice)
        step = observing(audit)
        for _ in range(2):
            schedule(step, forward_only=forward_only)
        assert audit.step_end(1).metrics["compared_token_count"] == counted


def test_versions_may_be_a_list() -> None:
    audit = MegatronAudit(Auditor())
    audit.weight_version = 5
    audit.observe([-1.0] * 3, [-1.0] * 3, [1] * 3, weight_version=[5, 3, -1])
    metrics = audit.step_end(1).metrics
    assert (metrics["updates_since_rollout_min"], metrics["updates_since_rollout_max"]) == (0, 2)


# --- settings, contracts, metadata ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("reduction_group", "glo", "reduction_group in code: expected one of training, gloo"),
        ("log_interval", 0, "log_interval in code: expected an integer of at least 1"),
        ("log_intervall", 2, "log_intervall in code: there is no such setting; did you mean log_interval"),
        ("sinks", "jsonl, consol", "sinks in code: expected one of"),
    ],
)
def test_settings_in_code_are_checked_like_the_others(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve_settings(None, AuditConfig(), {}, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("sentinel_floor", -1000), ("positive_tolerance", 0)])
def test_an_integer_is_the_same_setting_as_its_float(name: str, value: int) -> None:
    first, second = (AuditConfig(**{name: kind(value)}) for kind in (int, float))
    assert first.agreed_values() == second.agreed_values() and first.state_values() == second.state_values()
    Collector(first).merge(Collector(second))


def test_settings_in_code_are_read_like_the_others() -> None:
    settings = resolve_settings(None, AuditConfig(), {}, dump_on_fail="dumps", sinks="jsonl,console", cp_sharded="no")
    assert (settings.dump_on_fail, settings.sinks, settings.cp_sharded) == (Path("dumps"), ("jsonl", "console"), False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("limits: {abs_dlogp_p99: 0.1}\nlimits: {ess0: 0.9}\n", "limits is given twice"),
        ("breakdowns: {tool: true}\n", "breakdowns: "),
        ("breakdowns: {tool: [yes, no]}\n", "put yes, no, on and off in quotes"),
        ("limits: {abs_dlogp_p99: []}\n", "expected a bound or several, got an empty list"),
        ("prefix: 2026-13-45\n", "is no YAML: month must be in 1..12"),
        ("a: " + "[" * 5000, "is no YAML"),
    ],
)
def test_what_a_file_would_lose_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        resolve_settings(None, AuditConfig(), {"RLK_AUDIT_CONFIG": str(path)})
    assert told in str(refused.value) and str(path) in str(refused.value)


def test_arguments_are_those_of_a_parser() -> None:
    with pytest.raises(TypeError, match="args must be what a parser with add_rlk_args made, got dict"):
        resolve_settings({"rlk_consistency_mode": "audit"}, None, {})


@pytest.mark.parametrize("variable", ["BREAKDOWNS", "METADATA"])
def test_a_name_that_is_given_twice_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match="engine is given twice"):
        resolve_settings(None, AuditConfig(), {f"RLK_AUDIT_{variable}": "engine=a;engine=b"})


def changed(*path: str, to: Any) -> dict[str, Any]:
    contract = json.loads(json.dumps(CONTRACT))
    part = contract
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = to
    return contract


RULES = "chain_logprob_aggregates"
METRIC = (RULES, "metrics", "max_abs_dlogp")


@pytest.mark.parametrize(
    "contract",
    [
        changed("owner", to="x"),
        changed(RULES, "quantile_method", to="linear"),
        changed(*METRIC, "unit", to="bits"),
        changed(*METRIC, "by_execution_dtype", "bfloat16", "warn_only", to=True),
        changed(RULES, "metrics", to={}),
        changed(RULES, "require_all", to=False),
        changed(RULES, "default_clip_interval", to=[1.2, 0.8]),
        changed(RULES, "default_clip_interval", to=[True, False]),
    ],
    ids=str,
)
def test_what_a_contract_says_beyond_us_is_refused(contract: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(contract))
    with pytest.raises(ContractError, match=str(path)):
        apply_contract(AuditConfig(), path, "bfloat16")
    path.write_text(json.dumps(CONTRACT))
    assert apply_contract(AuditConfig(), path, "bfloat16").limits == {"abs_dlogp_max": ("<=0.06",)}


@pytest.mark.parametrize(
    "mask", [[True, False, True], torch.tensor([True, False, True]), np.array([True, False, True])]
)
def test_a_partition_may_be_a_mask(mask: Any) -> None:
    (part,) = partition_metadata({"engine": ["a", "b", "c"]}, [mask])
    assert part["rlk_audit_engine"] == ["a", "c"]
    with pytest.raises(TypeError):
        partition_metadata({"engine": ["a", "b"]}, [[0.0, 1.0]])


def test_the_trainer_s_version_may_be_a_tensor() -> None:
    metadata = {"rlk_audit_weight_version": [3, 5]}
    fields = batch_fields(metadata, AuditConfig(breakdowns={"weight_lag": 4}), torch.tensor(5))
    assert fields["labels"]["weight_lag"].tolist() == [2, 0]
    assert fields["updates_since_rollout"].tolist() == [2, 0]


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_histogram_takes_lists_and_outlives_inference_mode() -> None:
    with torch.inference_mode():
        histogram = LogHistogram()
    histogram.update([0.5, 0.25, 9.0], mask=[1, 1, 0])
    assert (histogram.count, histogram.max) == (2, 0.5)


@pytest.mark.parametrize("prefix", ["audit", "a/b"])
def test_a_prefix_ends_with_a_sign(prefix: str) -> None:
    """Or its keys run together: `auditabs_dlogp_mean`."""
    with pytest.raises(ValueError, match="one of which ends it"):
        AuditConfig(prefix=prefix)
    assert AuditConfig(prefix=prefix + "/").prefix and AuditConfig(prefix="").prefix == ""


@pytest.mark.parametrize("value", [1e999, "x", [1]])
def test_a_report_of_odd_values_is_refused_as_none(value: Any) -> None:
    for name in ("step", "group_size"):
        broken = observe(ONE).to_dict() | {name: value}
        with pytest.raises(ValueError, match=r"not a step report|invalid literal"):
            StepReport.from_dict(broken)


def test_strict_with_a_side_group_does_not_end_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = Auditor(AuditConfig(mode="strict"), side_group=True)
    auditor.update(**ONE)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr("rlk_audit.auditor.all_reduce", fail)
    with pytest.raises(RuntimeError, match="connection closed"):
        auditor.step(1)


def test_an_audit_that_ends_says_which_steps_are_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that reads a step late loses the one in flight too."""

    def fail(*_: Any) -> StepReport:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(Pending, "wait", fail)
    for lag in (0, 1):
        auditor = Auditor(AuditConfig(lag=lag), side_group=True)
        for number in (4, 5):
            auditor.update(**ONE)
            assert auditor.step(number) is None
    assert caplog.messages == [
        f"the audit ends without the figures of {told}, the training goes on: connection closed"
        for told in ("step 4", "step 4 and step 5")
    ]


# --- mistakes of a first hour -----------------------------------------------------------------------------------------


def test_what_no_step_took_is_told_at_the_close(caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor()
    auditor.update(**ONE)
    auditor.step(1)
    auditor.close()
    assert caplog.messages == []
    auditor.update(**ONE)
    auditor.update(**ONE)
    auditor.close()
    assert caplog.messages == ["2 micro-batches are lost: no step ended after them"]


def test_a_step_after_the_close_is_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    auditor = Auditor(sinks=[JsonlSink(tmp_path / "audit.jsonl")])
    auditor.close()
    for number in (1, 2):
        auditor.update(**ONE)
        auditor.step(number)
    told = [message for message in caplog.messages if "closed" in message]
    assert told == ["step 1 and later ones are not written: the audit was closed"]


@pytest.mark.parametrize("bounds", [[2, 3], [0, 3, 2], [1, 5]])
def test_bounds_that_are_no_sums_of_lengths_are_refused(bounds: list[int], caplog: pytest.LogCaptureFixture) -> None:
    batch = TokenBatch.from_packed([-1.0] * 5, [-1.0] * 5, [1] * 5, cu_seqlens=bounds)
    assert observe(batch).warnings["update_failed"] == 1
    assert "cu_seqlens must begin with 0 and never fall, as sums of lengths do" in caplog.text


@pytest.mark.parametrize(
    ("update", "told"),
    [
        ({"labels": {"engine": ["e0"]}}, "label engine must be integers in one array, got ['e0']"),
        ({"train_log_probs": [[-1.0], [-1.0, -2.0]]}, "samples of unequal lengths go through TokenBatch.from_lists"),
        ({"train_log_probs": [torch.zeros(1), torch.zeros(2)]}, "got tensors of different shapes; samples of unequal"),
    ],
)
def test_a_mistake_is_told_with_its_name(update: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture) -> None:
    assert observe({**ONE, **update}, config=AuditConfig(breakdowns={"engine": 2})).warnings["update_failed"] == 1
    assert told in caplog.text


@pytest.mark.parametrize(
    ("train", "rollout", "told"),
    [
        ([-1.0, -2.0], [-1.0, -2.0], "train_log_probs must be one list a sample, got -1.0 for the first sample"),
        ([[-1.0, -2.0]], [[(-1.0, 7, None), (-2.0, 8, None)]], "rollout_log_probs must be one number or None a token"),
    ],
)
def test_lists_of_another_kind_are_told(train: Any, rollout: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    """A flat list; and tuples of a log-probability, an id and a text, as SGLang gives them."""
    assert observe(TokenBatch.from_lists(train, rollout)).warnings["update_failed"] == 1
    assert told in caplog.text


def test_tensors_in_a_list_are_rows() -> None:
    rows = {"train_log_probs": [torch.tensor([-1.5, -1.0])] * 2, "rollout_log_probs": torch.full((2, 2), -1.0)}
    assert observe({**rows, "mask": torch.ones(2, 2)}).metrics["compared_token_count"] == 4


@pytest.mark.parametrize("number", ["1", 1.0, None])
def test_a_step_s_number_is_named(number: Any) -> None:
    with pytest.raises(TypeError, match="step must be an integer, got"):
        Auditor().step(number)


def test_an_auditor_made_before_the_process_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: two ranks that both think they are the one that writes."""
    auditor = Auditor()
    auditor.update(**ONE)
    monkeypatch.setattr("rlk_audit.auditor.group_place", lambda group: (1, 2))
    with pytest.raises(RuntimeError, match="made before the process group, so every rank would write: make it after"):
        auditor.step(1)


def test_limits_of_an_audit_that_is_off_are_told(caplog: pytest.LogCaptureFixture) -> None:
    register(config=AuditConfig(mode="off", limits={"abs_dlogp_max": 0.1}))
    assert caplog.messages == ["the audit is off, so its limits bound nothing: set the mode to audit or strict"]
    caplog.clear()
    register(config=AuditConfig(mode="off"))
    assert caplog.messages == []


def test_a_configuration_is_no_dict() -> None:
    with pytest.raises(TypeError, match="config must be an AuditConfig, got dict"):
        register(config={"mode": "audit"})


def test_a_limit_on_samples_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="'seq_ess0', which is not computed; it needs the table of samples"):
        Judge(AuditConfig(limits={"seq_ess0": 0.9}))
