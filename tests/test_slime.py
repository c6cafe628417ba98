"""The audit in a slime training, on the HARNESS of slime_harness.py: slime, vime and miles cannot be installed here."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from slime_harness import Place, Training, arguments, make_samples, rank_data, vanilla_tis
from slime_harness import alone as alone

from rlk_audit import AuditConfig, Collector, ConsistencyError, StepReport, TokenBatch
from rlk_audit.integrations import slime, vime
from rlk_audit.integrations.slime import SlimeAudit
from rlk_audit.integrations.slime_samples import Slices
from rlk_audit.places import Shard

SAMPLES = make_samples(11)
CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1"), "position": "auto"}, samples_per_step=16, worst_k=8)
POST = "rlk_audit.integrations.{}.rollout_data_postprocess"
BEGIN = "rlk_audit.integrations.{}.begin_rollout"
TIS = "rlk_audit.integrations.{}.tis"
PLACES = ("rank", "microbatch", "worst_rank", "worst_microbatch")
"""What depends on how the tokens were cut."""


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, float], str]]:
    """What the framework's own tracker was given."""
    rows: list[tuple[dict[str, float], str]] = []
    module = SimpleNamespace(log=lambda args, metrics, step_key: rows.append((metrics, step_key)))
    monkeypatch.setitem(sys.modules, "slime.observability.logging_utils", module)
    return rows


def core_report(samples=SAMPLES, config: AuditConfig = CONFIG, **left_out: Any) -> dict[str, Any]:
    """The core's own report of these samples, given whole."""
    fields = {
        "sample_index": [s.sample_index for s in samples],
        "rollout_id": [s.rollout_id for s in samples],
        "sample_slot": [s.slot for s in samples],
        "token_ids": [s.token_ids for s in samples],
        "labels": {"engine": [s.labels["engine"] for s in samples]} if config.caller_labels else {},
    }
    collector = Collector(config)
    columns = [[torch.tensor(getattr(s, side)) for s in samples] for side in ("train", "rollout", "mask")]
    collector.update(TokenBatch.from_lists(*columns, **{**fields, **left_out}))
    return plain(collector.compute())


def plain(report: StepReport) -> dict[str, Any]:
    """A report's parts that do not depend on how tokens were cut, every float by its bits."""
    values = report.to_dict()

    def bits(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: bits(part) for name, part in value.items() if name not in PLACES}
        if isinstance(value, (list, tuple)):
            return [bits(part) for part in value]
        return value.hex() if isinstance(value, float) else value

    parts = ("metrics", "classes", "warnings", "worst_tokens", "breakdowns", "samples", "histogram")
    return {part: bits(values[part]) for part in parts}


def reported(audit: SlimeAudit) -> StepReport:
    assert audit.report is not None
    return audit.report


def by_tis(audit: SlimeAudit, tis: Callable[..., Any] | None = None, **given: Any) -> Any:
    return arguments(
        rollout_data_postprocess_path=audit.begin_rollout,
        custom_tis_function_path=tis or audit.tis,
        use_tis=True,
        **given,
    )


# --- the recomputed log-probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 20])
def test_the_rollout_hook_gives_the_bits_of_the_core(micro_batch: int) -> None:
    audit = SlimeAudit(CONFIG)
    training = Training(arguments(rollout_data_postprocess_path=audit.rollout_data_postprocess))
    training.train_actor(4, rank_data(SAMPLES, Place(), micro_batch=micro_batch))
    report = reported(audit)
    assert (report.step, report.prefix) == (4, "rlk_audit/")
    assert plain(report) == core_report()
    expected = oracle.audit(SAMPLES, worst_k=8)
    assert oracle.differences(report.metrics, expected) == []


def test_the_rollout_hook_by_its_name_changes_nothing() -> None:
    """Losses, gradients and the rollout's data are bit for bit those of a training without it."""
    plain_run, audited = Training(arguments()), Training(arguments(rollout_data_postprocess_path=POST.format("slime")))
    for training in (plain_run, audited):
        data = rank_data(SAMPLES, Place())
        before = copy.deepcopy(data)
        training.train_actor(0, data)
        assert set(data) == set(before) - {"recorded"}
        for name, column in data.items():
            kept = before[name]
            same = all(map(torch.equal, column, kept)) if isinstance(column[0], torch.Tensor) else None
            assert same if same is not None else list(column) == list(kept), name
    assert audited.losses == plain_run.losses
    assert torch.equal(audited.weight.grad, plain_run.weight.grad)
    assert slime._process_audit().report is not None


def test_several_rollouts_are_steps_of_their_own() -> None:
    audit = SlimeAudit(AuditConfig())
    training = Training(arguments(rollout_data_postprocess_path=audit.rollout_data_postprocess))
    for number in range(3):
        samples = make_samples(4 + number, seed=number)
        training.train_actor(number, rank_data(samples, Place()))
        assert oracle.differences(reported(audit).metrics, oracle.audit(samples)) == []
        assert reported(audit).step == number


def test_without_recomputed_log_probs_it_says_why(caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit()
    training = Training(arguments(rollout_data_postprocess_path=audit.rollout_data_postprocess))
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            training.train_actor(number, rank_data(SAMPLES, Place(), recomputed=False))
    assert reported(audit).warnings == {"nothing_compared": 1}
    assert sum("did not recompute log_probs" in line for line in caplog.messages) == 1


def test_odd_data_is_counted_and_never_raised() -> None:
    audit = SlimeAudit()
    data = rank_data(SAMPLES, Place(), micro_batch=2)
    data["loss_masks"][0] = None
    data["metadata"] = [None, 5]
    audit.rollout_data_postprocess(arguments(), 0, data)
    report = reported(audit)
    assert report.metrics["warning/update_failed"] == 1
    assert not report.complete
    assert report.metrics["active_token_count"] == sum(sum(s.mask) for s in SAMPLES[2:])


COLUMNS = ("log_probs", "rollout_log_probs", "loss_masks", "tokens")


@pytest.mark.parametrize("micro_batch", [1, 2, 20])
@pytest.mark.parametrize("short", COLUMNS)
def test_a_sample_of_unequal_arrays_is_refused_alone(
    short: str, micro_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``TokenBatch.from_lists`` does. Kills: one short row that costs its micro-batch, or the whole rollout."""
    audit = SlimeAudit(CONFIG)
    data = rank_data(SAMPLES, Place(), micro_batch=micro_batch)
    for row in (2, 5):
        data[short][row] = data[short][row][:-1]
    audit.rollout_data_postprocess(arguments(), 0, data)
    report = reported(audit)
    rows = [sample for row, sample in enumerate(SAMPLES) if row not in (2, 5)]
    expected = Collector(CONFIG)
    columns = [[torch.tensor(getattr(s, side)) for s in SAMPLES] for side in ("train", "rollout", "mask", "token_ids")]
    cut = columns[{"log_probs": 0, "rollout_log_probs": 1, "loss_masks": 2, "tokens": 3}[short]]
    for row in (2, 5):
        cut[row] = cut[row][:-1]
    labels = {"engine": [s.labels["engine"] for s in SAMPLES]}
    ids = {name: [getattr(s, name) for s in SAMPLES] for name in ("sample_index", "rollout_id")}
    slots = [s.slot for s in SAMPLES]
    expected.update(TokenBatch.from_lists(*columns[:3], token_ids=columns[3], labels=labels, sample_slot=slots, **ids))
    assert plain(report) == plain(expected.compute())
    assert report.warnings["length_mismatch"] == 2
    assert report.complete
    assert report.metrics["abs_dlogp_max"] == oracle.audit(rows).metrics["abs_dlogp_max"]
    assert any(f"sample_index {SAMPLES[2].sample_index} is refused" in line for line in caplog.messages)


def test_a_rollout_of_refused_samples_alone_compares_nothing() -> None:
    audit = SlimeAudit(CONFIG)
    data = rank_data(SAMPLES[:2], Place())
    data["log_probs"] = [values[:-1] for values in data["log_probs"]]
    audit.rollout_data_postprocess(arguments(), 0, data)
    assert reported(audit).warnings == {"length_mismatch": 2, "nothing_compared": 1}


def test_a_short_piece_of_a_sample_that_is_cut_fails_its_micro_batch() -> None:
    """The other ranks count their pieces of it, so that it cannot be refused whole."""
    whole = torch.zeros(8)
    slices = Slices([whole[:3]], [whole[:4]], [whole], [8], [8])
    with pytest.raises(ValueError, match="the piece of sample 0 on this context-parallel rank must have one length"):
        slices.batch(Shard(0, 2, "zigzag"))


def test_rollout_log_probs_that_are_not_there_are_missing() -> None:
    audit = SlimeAudit()
    data = rank_data(SAMPLES, Place())
    del data["rollout_log_probs"]
    audit.rollout_data_postprocess(arguments(), 0, data)
    assert reported(audit).metrics["compared_token_count"] == 0
    assert reported(audit).metrics["warning/missing_rollout_log_probs"] == 1


def test_without_micro_batches_and_indices_the_rollout_is_one_batch_numbered_by_its_places(tracked) -> None:
    audit = SlimeAudit(AuditConfig())
    data = rank_data(SAMPLES, Place())
    for name in ("micro_batch_indices", "num_microbatches", "sample_indices"):
        del data[name]
    data["partition"] = [20 + place for place in data["partition"]]
    audit.rollout_data_postprocess(arguments(), 6, data)
    placed = [copy.copy(sample) for sample in SAMPLES]
    for place, sample in enumerate(placed):
        sample.sample_index = 20 + place
    assert oracle.differences(reported(audit).metrics, oracle.audit(placed)) == []
    assert tracked[0][0]["rollout/step"] == 6


def test_columns_of_unequal_length_leave_the_samples_unnamed(caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit(AuditConfig())
    data = rank_data(SAMPLES, Place())
    data["rollout_ids"] = data["rollout_ids"][1:]
    audit.rollout_data_postprocess(arguments(), 0, data)
    assert any("cannot be used" in line for line in caplog.messages)
    assert reported(audit).metrics["worst_sample_index"] == -1
    assert reported(audit).metrics["abs_dlogp_max"] == oracle.audit(SAMPLES).metrics["abs_dlogp_max"]


def test_labels_of_the_settings_are_looked_up_in_the_rollout() -> None:
    audit = SlimeAudit(AuditConfig(breakdowns={"domain": ("code", "maths")}))
    audit.rollout_data_postprocess(arguments(), 0, rank_data(SAMPLES, Place()) | {"domain": ["maths"] * len(SAMPLES)})
    assert "missing_metadata" not in reported(audit).warnings


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("by_tis_function", [False, True])
def test_integers_of_a_label_index_its_names(kind: Any, by_tis_function: bool) -> None:
    """Kills: engines that are given by number and count as unknown."""
    audit = SlimeAudit(CONFIG)
    codes = [sample.labels["engine"] for sample in SAMPLES]
    data = rank_data(SAMPLES, Place()) | {"engine": kind(codes)}
    if by_tis_function:
        training = Training(by_tis(audit))
        training.train_actor(0, data)
        audit.begin_rollout(training.args, 1, rank_data([], Place()))
    else:
        audit.rollout_data_postprocess(arguments(), 0, data)
    found = {bucket.name: bucket.compared_token_count for bucket in reported(audit).breakdowns["engine"]}
    tokens = [sum(sum(s.mask) for s in SAMPLES if s.labels["engine"] == code) for code in (0, 1)]
    compared = reported(audit).metrics["compared_token_count"]
    assert found["unknown"] == 0
    assert found["e0"] + found["e1"] == compared
    assert 0 < found["e0"] <= tokens[0] and 0 < found["e1"] <= tokens[1]


def test_undeclared_names_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit(CONFIG)
    names = ["e0", None, -1, *(f"x{place}" for place in range(len(SAMPLES) - 3))]
    for number in range(2):
        data = rank_data(SAMPLES, Place()) | {"engine": names[number:] + names[:number]}
        audit.rollout_data_postprocess(arguments(), number, data)
    (told,) = [line for line in caplog.messages if "does not declare" in line]
    assert told.startswith(
        "samples have the engine x0, x1, x2, x3, x4, x5, x6, x7, which AuditConfig.breakdowns['engine']"
    )


# --- the policy loss --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_policy_loss_gives_the_bits_of_the_core(recompute: bool, recomputed: bool) -> None:
    """Also where the loss function is evaluated twice."""
    audit = SlimeAudit(CONFIG)
    training = Training(by_tis(audit, recompute_loss_function=recompute))
    training.train_actor(0, rank_data(SAMPLES, Place(), recomputed=recomputed))
    assert audit.report is None, "the rollout is not over before the next begins"
    training.train_actor(1, rank_data(SAMPLES[:3], Place(), recomputed=recomputed))
    report = reported(audit)
    assert (report.step, report.prefix) == (0, "rlk_audit_current/")
    assert plain(report) == core_report(token_ids=None)
    assert "duplicate_microbatch" not in report.warnings
    audit.begin_rollout(training.args, 2, rank_data([], Place()))
    assert oracle.differences(reported(audit).metrics, oracle.audit([without_ids(s) for s in SAMPLES[:3]])) == []


def without_ids(sample: oracle.Sample) -> oracle.Sample:
    other = copy.copy(sample)
    other.token_ids = None
    return other


@pytest.mark.parametrize("recompute", [False, True])
def test_the_policy_loss_stays_bit_for_bit(recompute: bool) -> None:
    without = Training(arguments(recompute_loss_function=recompute))
    audited = Training(
        arguments(
            rollout_data_postprocess_path=BEGIN.format("slime"),
            custom_tis_function_path=TIS.format("slime"),
            use_tis=True,
            recompute_loss_function=recompute,
        )
    )
    for training in (without, audited):
        training.train_actor(0, rank_data(SAMPLES, Place()))
    assert audited.losses == without.losses
    assert torch.equal(audited.weight.grad, without.weight.grad)
    assert audited.metrics == [{}] * len(audited.losses)


def test_a_correction_of_the_training_is_kept() -> None:
    audit = SlimeAudit()
    without = Training(arguments(use_tis=True))
    audited = Training(by_tis(audit, audit.wrap_tis(vanilla_tis)))
    for training in (without, audited):
        training.train_actor(0, rank_data(SAMPLES, Place()))
    audit.begin_rollout(audited.args, 1, rank_data([], Place()))
    assert audited.losses == without.losses
    assert audited.metrics == without.metrics
    assert torch.equal(audited.weight.grad, without.weight.grad)
    assert oracle.differences(reported(audit).metrics, oracle.audit([without_ids(s) for s in SAMPLES])) == []


def test_the_caller_gets_its_own_objects_back() -> None:
    audit = SlimeAudit()
    data = rank_data(SAMPLES[:1], Place())
    audit.begin_rollout(arguments(), 0, data)
    loss = torch.zeros(len(SAMPLES[0]))
    given = {name: data[name] for name in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")}
    result = audit.tis(arguments(), pg_loss=loss, train_log_probs=data["log_probs"], **given)
    assert result[0] is loss
    assert result[1] is data["loss_masks"]
    assert result[2] == {}


def test_no_tensor_of_the_rollout_is_kept() -> None:
    """Kills: an audit that keeps the rollout's log-probabilities on the device until the next."""
    import weakref

    audit = SlimeAudit()
    training = Training(by_tis(audit))
    data = rank_data(SAMPLES, Place())
    alive = [weakref.ref(values) for name in ("rollout_log_probs", "loss_masks", "tokens") for values in data[name]]
    training.train_actor(0, data)
    del data
    assert [ref for ref in alive if ref() is not None] == []


def test_a_tis_function_alone_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"needs --rollout-data-postprocess-path .*begin_rollout"):
        Training(arguments(custom_tis_function_path=SlimeAudit().tis, use_tis=True)).train_actor(
            0, rank_data(SAMPLES, Place())
        )


def test_a_tis_function_beside_the_other_hook_is_refused() -> None:
    audit = SlimeAudit()
    data = rank_data(SAMPLES, Place())
    audit.rollout_data_postprocess(arguments(), 0, data)
    with pytest.raises(RuntimeError, match="begin_rollout"):
        Training(arguments(custom_tis_function_path=audit.tis, use_tis=True)).train_actor(0, data)


@pytest.mark.parametrize("module", [slime, vime])
@pytest.mark.parametrize("first", ["rollout_data_postprocess", "begin_rollout"])
def test_two_hooks_of_one_audit_are_refused(module: Any, first: str) -> None:
    """Kills: a run's total in which each token is twice."""
    args, data = arguments(rlk_consistency="audit"), rank_data(SAMPLES, Place())
    hooks = {name: getattr(module, name) for name in ("rollout_data_postprocess", "begin_rollout")}
    hooks.pop(first)(args, 0, data)
    (other,) = hooks.values()
    with pytest.raises(
        RuntimeError, match="which would count each token twice: name one of them, or make a SlimeAudit"
    ):
        other(args, 0, data)


def test_an_audit_for_each_hook_counts_each_token_once() -> None:
    old, current = SlimeAudit(), SlimeAudit()
    training = Training(by_tis(current))
    for number in range(2):
        data = rank_data(SAMPLES, Place())
        old.rollout_data_postprocess(training.args, number, data)
        training.train_actor(number, data)
    current.begin_rollout(training.args, 2, rank_data([], Place()))
    for audit, prefix in ((old, "rlk_audit/"), (current, "rlk_audit_current/")):
        assert audit.audit is not None and audit.audit.auditor is not None
        total = audit.audit.auditor.run_total()
        assert total is not None
        assert total.metrics["active_token_count"] == 2 * sum(sum(s.mask) for s in SAMPLES)
        assert reported(audit).prefix == prefix


def test_micro_batches_of_equal_lengths_count_each() -> None:
    alike = [oracle.Sample([-1.0, -2.0], [-1.0 - 0.1 * i, -2.0], [1, 1], prompt_length=1, slot=i) for i in range(4)]
    audit = SlimeAudit(AuditConfig())
    for sample in alike:
        sample.labels, sample.token_ids = {"engine": 0}, [1, 2]
    training = Training(by_tis(audit))
    training.train_actor(0, rank_data(alike, Place(), micro_batch=1))
    audit.begin_rollout(training.args)
    assert reported(audit).metrics["compared_token_count"] == 8


@pytest.mark.parametrize("module", [slime, vime])
def test_the_functions_by_name_count_rollouts_as_slime_does(module: Any) -> None:
    args = arguments(
        rlk_consistency="audit", rollout_data_postprocess_path=module.begin_rollout,
        custom_tis_function_path=module.tis, use_tis=True,
    )  # fmt: skip
    training = Training(args)
    for number in (7, 8):
        training.train_actor(number, rank_data(SAMPLES, Place()))
    assert reported(module._process_audit()).step == 7
    assert reported(module._process_audit()).metrics["active_token_count"] == sum(sum(s.mask) for s in SAMPLES)


def test_a_self_comparison_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As older heads do under --use-rollout-logprobs: the rollout's tensors stand for the trainer's."""
    audit = SlimeAudit()
    args = arguments(use_rollout_logprobs=True)
    data = rank_data(SAMPLES, Place())
    audit.begin_rollout(args, 0, data)
    given = {name: data[name] for name in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")}
    views = [values.detach() for values in data["rollout_log_probs"]]
    with caplog.at_level(logging.WARNING):
        audit.tis(args, pg_loss=torch.zeros(1), train_log_probs=views, **given)
        audit.tis(args, pg_loss=torch.zeros(1), train_log_probs=views, **given)
    audit.begin_rollout(args, 1, data)
    assert sum("compares them with themselves" in line for line in caplog.messages) == 1
    assert "self_comparison" in reported(audit).notes


def test_use_rollout_logprobs_is_compared_where_the_trainer_scores(caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit()
    training = Training(by_tis(audit, use_rollout_logprobs=True))
    training.train_actor(0, rank_data(SAMPLES, Place(), recomputed=False))
    audit.begin_rollout(training.args, 1, rank_data([], Place()))
    assert oracle.differences(reported(audit).metrics, oracle.audit([without_ids(s) for s in SAMPLES])) == []
    assert not [line for line in caplog.messages if "themselves" in line]


# --- what a rollout says of itself ------------------------------------------------------------------------------------


def test_sampling_filters_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        audit = SlimeAudit()
        audit.rollout_data_postprocess(arguments(rollout_top_p=0.8), 0, rank_data(SAMPLES, Place()))
    assert reported(audit).metadata["rollout_top_p"] == "0.8"
    assert sum("log of the kept mass" in line for line in caplog.messages) == 1


def test_a_trainer_that_replays_the_filter_may_drop_a_token(caplog: pytest.LogCaptureFixture) -> None:
    """-inf of a dropped token is then no failure of a strict audit."""
    data = rank_data(SAMPLES, Place(), micro_batch=20)
    data["rollout_top_p_token_ids"] = [torch.zeros(0)] * len(SAMPLES)
    data["log_probs"][0][int(torch.nonzero(data["loss_masks"][0])[0])] = -torch.inf
    audit = SlimeAudit(AuditConfig(mode="strict"))
    audit.rollout_data_postprocess(arguments(rollout_top_p=0.8), 0, data)
    assert reported(audit).classes["train_neginf"] == 1
    assert not [line for line in caplog.messages if "kept mass" in line]
    del data["rollout_top_p_token_ids"]
    with pytest.raises(ConsistencyError, match="train_neginf"):
        SlimeAudit(AuditConfig(mode="strict")).rollout_data_postprocess(arguments(), 0, data)


def test_the_clip_interval_is_the_trainings() -> None:
    audit = SlimeAudit()
    audit.rollout_data_postprocess(arguments(eps_clip=0.01, eps_clip_high=0.03), 0, rank_data(SAMPLES, Place()))
    expected = oracle.audit(SAMPLES, eps_low=0.01, eps_high=0.03)
    assert expected.metrics["clipfrac0_low"] != expected.metrics["clipfrac0_high"]
    assert oracle.differences(reported(audit).metrics, expected) == []


@pytest.mark.parametrize("eps_clip", [None, 1.0, -0.1])
def test_a_clip_interval_that_the_audit_cannot_take_is_left_out(eps_clip: float | None) -> None:
    audit = SlimeAudit()
    audit.rollout_data_postprocess(arguments(eps_clip=eps_clip), 0, rank_data(SAMPLES, Place()))
    assert oracle.differences(reported(audit).metrics, oracle.audit(SAMPLES)) == []


@pytest.mark.parametrize(("top_p", "top_k", "told"), [(None, None, 0), (1.0, -1, 0), (1.0, 40, 1)])
def test_only_a_filter_is_told(top_p: Any, top_k: Any, told: int, caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit(AuditConfig(metadata={"rollout_top_k": "mine"}))
    args = arguments(rollout_top_p=top_p, rollout_top_k=top_k)
    audit.rollout_data_postprocess(args, 0, rank_data(SAMPLES, Place()))
    assert sum("log of the kept mass" in line for line in caplog.messages) == told
    assert reported(audit).metadata["rollout_top_k"] == "mine"
    assert reported(audit).metadata.get("rollout_top_p") == (None if top_p is None else "1.0")


def test_sinks_given_in_code_get_the_report() -> None:
    steps: list[int | None] = []
    sink = SimpleNamespace(write=lambda report: steps.append(report.step), close=lambda: None)
    SlimeAudit(sinks=[sink]).rollout_data_postprocess(arguments(), 3, rank_data(SAMPLES, Place()))
    assert steps == [3]


def test_settings_of_the_run_go_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_AUDIT_MODE", "off")
    audit = SlimeAudit()
    audit.rollout_data_postprocess(arguments(), 0, rank_data(SAMPLES, Place()))
    assert audit.report is None
    other = SlimeAudit()
    other.rollout_data_postprocess(arguments(rlk_consistency_mode="audit"), 0, rank_data(SAMPLES, Place()))
    assert other.report is not None


def test_the_trackers_of_the_training_get_the_report(tracked) -> None:
    SlimeAudit(AuditConfig()).rollout_data_postprocess(arguments(), 6, rank_data(SAMPLES, Place()))
    ((values, key),) = tracked
    assert key == "rollout/step"
    assert values[key] == 6
    assert oracle.differences({n.removeprefix("rlk_audit/"): v for n, v in values.items()}, finite(SAMPLES)) == []


def finite(samples) -> oracle.Expected:
    expected = oracle.audit(samples)
    expected.metrics = {name: value for name, value in expected.metrics.items() if value == value}
    return expected


def test_a_tracker_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "slime.observability.logging_utils", SimpleNamespace(log=lambda: None))
    audit = SlimeAudit()
    audit.rollout_data_postprocess(arguments(), 0, rank_data(SAMPLES, Place()))
    assert audit.report is not None
    assert any("took no report" in line for line in caplog.messages)


# --- forks ------------------------------------------------------------------------------------------------------------


def test_vime_goes_on_under_its_names(monkeypatch: pytest.MonkeyPatch, tracked) -> None:
    """Each figure that vime logs, by the oracle; three optimizer steps a rollout."""
    monkeypatch.setenv("VIME_RLK_CONSISTENCY_MODE", "audit-only")
    data = rank_data(SAMPLES, Place())
    data["num_microbatches"] = [2, 2, 2]
    Training(arguments(rollout_data_postprocess_path=POST.format("vime"))).train_actor(5, data)
    ((values, key),) = tracked
    assert (key, values.pop(key)) == ("train/step", 15)
    expected = oracle.audit(SAMPLES).metrics
    d = sorted(abs(token.d) for token in oracle.audit(SAMPLES).tokens)
    found = {name.removeprefix("train/rlk_audit_"): value for name, value in values.items()}
    assert found["dlogp_abs_mean"] == pytest.approx(expected["abs_dlogp_mean"], rel=1e-15)
    assert found["dlogp_abs_max"] == found["worst_abs_dlogp"] == d[-1]
    assert found["dlogp_abs_p99"] == pytest.approx(oracle.exact_quantile(d, "0.99"), rel=0.0078)
    for share in ("50", "90"):
        assert found[f"dlogp_abs_p{share}"] == pytest.approx(oracle.exact_quantile(d, f"0.{share}"), rel=0.0078)
    assert found["worst_rank"] == 0
    for name in ("approx_kl0", "ratio0_mean", "clipfrac0", "active_token_count", "mask_coverage"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    for name in ("worst_sample_index", "worst_rollout_id", "worst_token_position", "worst_dlogp"):
        assert found[name] == expected[name], name
    assert found["warning_count"] == 0
    assert "zero_active_sample_count" not in found, "it needs a table of samples"


def test_vime_leaves_out_what_does_not_exist(monkeypatch: pytest.MonkeyPatch, tracked) -> None:
    """Nothing compared was 0 in vime, which reads as agreement."""
    args = arguments(rlk_consistency="audit")
    vime.rollout_data_postprocess(args, 0, rank_data(SAMPLES, Place(), recomputed=False))
    ((values, _),) = tracked
    assert "train/rlk_audit_dlogp_abs_mean" not in values
    assert values["train/rlk_audit_active_token_count"] == 0


@pytest.mark.parametrize(
    ("attributes", "variables", "mode"),
    [
        ({}, {}, "off"),
        ({}, {"VIME_RLK_CONSISTENCY": "1"}, "audit"),
        ({}, {"VIME_RL_KERNEL_CONSISTENCY_MODE": "Strict"}, "strict"),
        ({"rl_kernel_consistency": True}, {"VIME_RLK_CONSISTENCY_MODE": "off"}, "audit"),
        ({"rlk_consistency": None}, {"VIME_RLK_CONSISTENCY_MODE": "audit_only"}, "audit"),
        ({"rlk_consistency": "no"}, {"VIME_RLK_CONSISTENCY_MODE": "strict"}, "off"),
        ({"rlk_consistency_mode": "off", "rlk_consistency": "audit"}, {}, "off"),
        ({"rlk_consistency": False}, {"VIME_RLK_CONSISTENCY_MODE": "strict"}, "off"),
        ({}, {"VIME_RLK_CONSISTENCY": "0"}, "off"),
        ({}, {"VIME_RLK_CONSISTENCY": " none "}, "off"),
        ({}, {"VIME_RLK_CONSISTENCY": "yes"}, "audit"),
    ],
)
def test_vimes_switches(attributes: dict[str, Any], variables: dict[str, str], mode: str) -> None:
    assert vime.vime_mode(SimpleNamespace(**attributes), variables) == mode


def test_a_switch_that_holds_no_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIME_RLK_CONSISTENCY", "loud")
    with pytest.raises(ValueError, match="VIME_RLK_CONSISTENCY: expected one of off, audit, strict, got 'loud'"):
        vime.begin_rollout(arguments(), 0, rank_data(SAMPLES, Place()))


def test_vime_is_off_unless_asked() -> None:
    vime.begin_rollout(arguments(), 0, rank_data(SAMPLES, Place()))
    vime.begin_rollout(arguments(), 1, rank_data(SAMPLES, Place()))
    assert vime._process_audit().report is None


@pytest.mark.parametrize("recompute", [False, True])
def test_miles_hands_over_less(recompute: bool) -> None:
    """Its hook gets the arguments alone, its TIS function detached tensors and two more arguments."""
    audit = SlimeAudit(AuditConfig())
    without = Training(arguments(recompute_loss_function=recompute), miles=True)
    training = Training(by_tis(audit, recompute_loss_function=recompute), miles=True)
    for run in (without, training):
        run.train_actor(0, rank_data(SAMPLES, Place(), padded=64))
    audit.begin_rollout(training.args)
    assert reported(audit).step == 0
    unnamed = [copy.copy(sample) for sample in SAMPLES]
    for sample in unnamed:
        sample.token_ids, sample.sample_index, sample.rollout_id = None, -1, -1
    assert oracle.differences(reported(audit).metrics, oracle.audit(unnamed)) == []
    assert "duplicate_microbatch" not in reported(audit).warnings
    assert training.losses == without.losses
    assert torch.equal(training.weight.grad, without.weight.grad)
    audit.begin_rollout(training.args)
    assert reported(audit).step == 1
