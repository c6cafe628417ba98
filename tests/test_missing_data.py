"""What a framework leaves out of its data never ends its training: each hook, each field, None, absent, too short."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slime_harness import Place, arguments, make_samples, rank_data
from slime_harness import alone as alone

from rlk_audit import AuditConfig, StepReport
from rlk_audit.integrations import slime, vime
from rlk_audit.integrations.megatron_rl import RLAudit
from rlk_audit.integrations.nemo_rl import AuditedLogger, AuditedLoss, step_means
from rlk_audit.integrations.slime import SlimeAudit

SAMPLES = make_samples(6, seed=3)
WAYS = ("absent", "None", "short", "None inside")
LOSS_ARGUMENTS = ("train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
COLUMNS = (
    "log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "tokens", "partition",
    "micro_batch_indices", "num_microbatches", "sample_indices", "rollout_ids", "metadata",
)  # fmt: skip
NEEDED = ("train_log_probs", "loss_masks", "total_lengths", "response_lengths")


def spoilt(data: dict[str, Any], field: str, way: str) -> dict[str, Any]:
    """The data without a field, with None in its place or in its first entry, or without its last entry."""
    left = {name: value for name, value in data.items() if name != field}
    if way == "absent":
        return left
    if way == "None inside":
        return {**left, field: [None, *data[field][1:]]}
    return {**left, field: None if way == "None" else data[field][:-1]}


def shown(report: StepReport | None) -> set[str]:
    """By which warnings a report says that something was missing."""
    assert report is not None
    return set(report.warnings)


def told_once(caplog: pytest.LogCaptureFixture) -> bool:
    """No sentence twice, none of several lines."""
    return len(set(caplog.messages)) == len(caplog.messages) and not any("\n" in line for line in caplog.messages)


# --- slime and vime ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", COLUMNS)
def test_the_rollout_hook(field: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    audit = SlimeAudit(AuditConfig(breakdowns={"engine": ("e0", "e1")}))
    with caplog.at_level(logging.WARNING):
        audit.rollout_data_postprocess(arguments(), 7, spoilt(rank_data(SAMPLES, Place()), field, way))
    found = shown(audit.report)
    if field == "log_probs" and way in ("absent", "None"):
        assert "nothing_compared" in found
    elif field == "rollout_log_probs" and way != "short":
        assert "rollout_missing" in found
        assert "update_failed" not in found
    elif field in COLUMNS[:5] or (field == "tokens" and way in ("short", "None inside")):
        assert "update_failed" in found
        assert told_once(caplog)
    else:
        assert audit.report.metrics["compared_token_count"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", COLUMNS)
def test_the_begin_of_a_rollout(field: str, way: str) -> None:
    """The loss is handed the tensors themselves, so its tokens count whatever the rollout's data lack."""
    audit = SlimeAudit(AuditConfig(breakdowns={"engine": ("e0", "e1")}))
    data = rank_data(SAMPLES, Place())
    given = loss_arguments(data)
    audit.begin_rollout(arguments(), 0, spoilt(data, field, way))
    audit.tis(arguments(), pg_loss=torch.zeros(1), **given)
    audit.begin_rollout(arguments(), 1, None)
    assert audit.report.metrics["active_token_count"] == sum(sum(sample.mask) for sample in SAMPLES)
    assert "update_failed" not in shown(audit.report)


def loss_arguments(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data["log_probs" if name == "train_log_probs" else name] for name in LOSS_ARGUMENTS}


@pytest.mark.parametrize("module", [slime, vime])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", [*LOSS_ARGUMENTS, "max_seq_lens"])
def test_the_policy_loss(module: Any, field: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(qkv_format="bshd", rlk_consistency_mode="audit")
    data = rank_data(SAMPLES, Place(), padded=64)
    given = spoilt(loss_arguments(data) | {"max_seq_lens": data["max_seq_lens"]}, field, way)
    loss = torch.zeros(3)
    module.begin_rollout(args, 0, data)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            result = module.tis(args, pg_loss=loss, **given)
            assert result[0] is loss
            assert result[1] is given.get("loss_masks")
            assert result[2] == {}
    module.begin_rollout(args, 1, data)
    found = shown(module._process_audit().report)
    if field == "rollout_log_probs" and way != "short":
        assert found == {"rollout_missing"} | ({"missing_rollout_log_probs"} if way != "None inside" else set()) | (
            {"nothing_compared"} if way != "None inside" else set()
        )
        assert module._process_audit().report.metrics["active_token_count"] == sum(sum(s.mask) for s in SAMPLES)
    elif field != "max_seq_lens" or way not in ("absent", "None"):
        assert "update_failed" in found
    if field in NEEDED and way in ("absent", "None"):
        assert f"{field} is missing" in caplog.text


@pytest.mark.parametrize("wrong", [{"log_probs": [torch.zeros(9)]}, None, "7"])
def test_a_rollout_id_that_is_none_is_named_first(wrong: Any) -> None:
    """Kills: an error that prints the data of a rollout, which stood in the number's place."""
    for hook in (SlimeAudit().rollout_data_postprocess, SlimeAudit().begin_rollout):
        if wrong is None and hook.__name__ == "begin_rollout":
            continue
        with pytest.raises(TypeError) as raised:
            hook(arguments(), wrong, rank_data(SAMPLES, Place()))
        assert str(raised.value) == f"rollout_id must be an integer, got {type(wrong).__name__}"


def test_a_rollout_of_one_column() -> None:
    audit = SlimeAudit()
    audit.rollout_data_postprocess(arguments(), 7, {"log_probs": [torch.zeros(3)]})
    assert "update_failed" in shown(audit.report)
    audit.rollout_data_postprocess(arguments(), 8, None)
    assert shown(audit.report) == {"nothing_compared"}


# --- NeMo-RL ----------------------------------------------------------------------------------------------------------


def nemo_data() -> dict[str, Any]:
    mask = torch.ones(3, 8)
    mask[:, :3] = 0
    return {
        "prev_logprobs": -torch.rand(3, 8),
        "generation_logprobs": -torch.rand(3, 8),
        "token_mask": mask,
        "sample_mask": torch.ones(3),
        "input_ids": torch.ones(3, 8, dtype=torch.long),
        "input_lengths": torch.full((3,), 8),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", [*nemo_data(), "global_valid_toks", "next_token_logprobs"])
@pytest.mark.parametrize("on_policy", [False, True])
def test_nemo_rls_loss(field: str, way: str, on_policy: bool) -> None:
    class Loss:
        force_on_policy_ratio = on_policy

        def __call__(self, **given: Any) -> tuple[str, dict[str, float]]:
            return "loss", {"theirs": 1.0}

    given: dict[str, Any] = {
        "data": nemo_data(), "global_valid_seqs": 3, "global_valid_toks": torch.tensor(15.0),
        "next_token_logprobs": -torch.rand(3, 7),
    }  # fmt: skip
    if way == "None inside" or (field == "global_valid_toks" and way == "short"):
        pytest.skip("one tensor")
    given = spoilt(given, field, way) if field in given else {**given, "data": spoilt(nemo_data(), field, way)}
    loss, metrics = AuditedLoss(Loss(), AuditConfig())(**given)
    assert (loss, metrics["theirs"]) == ("loss", 1.0)
    used = "next_token_logprobs" if on_policy else "prev_logprobs"
    unused = "prev_logprobs" if on_policy else "next_token_logprobs"
    failed = metrics["rlk_audit/warning/update_failed"]
    if field == "generation_logprobs" and way != "short":
        assert (failed, metrics["rlk_audit/active_token_count"]) == (0, 15)
    elif field in ("token_mask", "sample_mask", used) or (way == "short" and field != unused):
        assert failed == 1
        assert step_means(metrics)["rlk_audit/warning/nothing_compared"] == 1
    else:
        assert failed == 0


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize(
    "field",
    ["prev_logprobs", "generation_logprobs", "token_loss_mask", "sample_loss_mask", "token_ids", "input_lengths"],
)
def test_nemo_rls_logger(field: str, way: str) -> None:
    class Logger:
        def log_batched_dict_as_jsonl(self, to_log: Any, filename: str) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int) -> None: ...

    names = {"token_mask": "token_loss_mask", "sample_mask": "sample_loss_mask", "input_ids": "token_ids"}
    logged = {names.get(name, name): values.tolist() for name, values in nemo_data().items()}
    audit = AuditedLogger(Logger(), AuditConfig())
    audit.log_batched_dict_as_jsonl(spoilt(logged, field, way), "train_data_step4.jsonl")
    found = shown(audit.report)
    if field == "prev_logprobs" and way != "short":
        assert found == {"nothing_compared"}
    elif field == "generation_logprobs" and way != "short":
        assert "rollout_missing" in found and "update_failed" not in found
    elif field in ("token_ids", "input_lengths") and way != "short":
        assert found == set()
    else:
        assert "update_failed" in found


# --- Megatron-LM's reinforcement learning -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", ["inference_logprobs", "old_logprobs_for_data", "generation_masks"])
def test_megatron_rl(field: str, way: str) -> None:
    mask = torch.zeros(3, 9, dtype=torch.bool)
    mask[:, 3:] = True
    data = {
        "inference_logprobs": [-torch.rand(6) for _ in range(3)],
        "old_logprobs_for_data": -torch.rand(3, 8),
        "generation_masks": mask,
    }
    if way == "None inside" and field != "inference_logprobs":
        pytest.skip("one tensor")
    given = spoilt(data, field, way)
    theirs = SimpleNamespace(
        align_unpacked_inference_logprobs=lambda **given: "aligned",
        compute_packed_inference_logprobs_stats=lambda **given: None,
    )
    theirs.prepare_data_for_update = lambda: theirs.align_unpacked_inference_logprobs(**given)
    audit = RLAudit(AuditConfig())
    audit.wrap(theirs)
    assert theirs.prepare_data_for_update() == "aligned"
    expected = {"rollout_missing"} if field == "inference_logprobs" and way != "absent" else {"update_failed"}
    assert expected <= shown(audit.report)


# --- trl, where it is installed; of verl see test_verl.py -------------------------------------------------------------


def bare_trainer(given: dict[str, Any]) -> Any:
    """TRL's trainer with nothing but what the audit looks at; it generates this batch."""
    from trl import GRPOTrainer

    trainer = GRPOTrainer.__new__(GRPOTrainer)
    place = {"device": torch.device("cpu"), "num_processes": 1, "process_index": 0, "is_main_process": True}
    trainer.accelerator = SimpleNamespace(**place)
    trainer.use_vllm, trainer.rollout_func, trainer.model = True, None, SimpleNamespace(training=True)
    trainer.args = SimpleNamespace(steps_per_generation=1)
    trainer._generate_and_score_completions = lambda inputs: given
    trainer._compute_loss = lambda model, inputs: trainer._get_per_token_logps_and_entropies(model)[0]
    trainer._get_per_token_logps_and_entropies = lambda model: (torch.zeros(3, 4), None)
    trainer.log = lambda logs: None
    trainer.add_callback = lambda callback: None
    return trainer


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize(
    "field",
    ["completion_mask", "completion_ids", "num_items_in_batch", "sampling_per_token_logps", "old_per_token_logps"],
)
def test_trl(field: str, way: str) -> None:
    """The wrapped functions alone, as the trainer calls them: what they return is handed on."""
    pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
    from rlk_audit.integrations.trl import GrpoAudit

    batch = {
        "completion_mask": torch.ones(3, 4, dtype=torch.long),
        "completion_ids": torch.ones(3, 4, dtype=torch.long),
        "num_items_in_batch": torch.tensor(12),
        "sampling_per_token_logps": -torch.rand(3, 4),
        "old_per_token_logps": -torch.rand(3, 4),
    }
    if field == "num_items_in_batch" and way == "short":
        pytest.skip("one number")
    given = spoilt(batch, field, way)
    trainer = bare_trainer(given)
    audit = GrpoAudit(trainer, AuditConfig())
    assert trainer._generate_and_score_completions([]) is given
    assert trainer._compute_loss(None, given).shape == (3, 4)
    audit.on_step_end(None, SimpleNamespace(global_step=1), None)
    found = shown(audit._unlogged)
    if field == "sampling_per_token_logps" and way != "short":
        assert "rollout_missing" in found and "update_failed" not in found
    elif field == "num_items_in_batch" or (field == "old_per_token_logps" and way != "short"):
        assert found == set()
    else:
        assert "update_failed" in found


@pytest.mark.parametrize("wrong", [None, SimpleNamespace(training=True)])
def test_trl_takes_a_trainer(wrong: Any) -> None:
    pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
    from rlk_audit.integrations.trl import GrpoAudit

    with pytest.raises(TypeError, match=f"^expected a GRPOTrainer of TRL, got {type(wrong).__name__}$"):
        GrpoAudit(wrong)


def test_trl_takes_one_audit_a_trainer() -> None:
    pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
    from rlk_audit.integrations.trl import GrpoAudit

    trainer = bare_trainer({})
    GrpoAudit(trainer)
    with pytest.raises(ValueError, match="already has a GrpoAudit"):
        GrpoAudit(trainer)
    GrpoAudit(bare_trainer({}))
