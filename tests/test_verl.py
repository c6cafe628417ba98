"""VerlAudit on real DataProto batches: the core's bits, verl's own figures beside them, and verl finding the plugin.

The trainer's own code runs between recomputation and metrics; what stands in for it is the worker group, which here
returns recorded log-probabilities instead of running a model on Ray.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from core_bits import assert_same_bits

from rlk_audit import AuditConfig, Collector, ConsistencyError, StepReport

pytest.importorskip("verl", reason="verl is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl and Ray warn while they are imported
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.separation import ray_trainer
    from verl.trainer.ppo import rollout_corr_helper
    from verl.utils.debug import metrics as debug_metrics

    from rlk_audit.integrations.verl import VerlAudit

PREFIX = "rlk_audit/"
LENGTHS = (9, 1, 30, 17, 0, 4)


def recorded(seed: int = 0) -> dict[str, torch.Tensor]:
    """Responses of unequal lengths, one of them empty, in which every fifth token came from a tool."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    rollout = -torch.rand(shape, generator=random) * 3
    train = (rollout + 0.05 * torch.randn(shape, generator=random)).clamp(max=0.0)
    valid = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    prompts = torch.ones(len(LENGTHS), 3, dtype=torch.long)
    return {
        "rollout_log_probs": rollout * valid,
        "old_log_probs": train * valid,
        "responses": torch.randint(0, 1000, shape, generator=random),
        "response_mask": valid * (torch.arange(shape[1]) % 5 != 4),
        "attention_mask": torch.cat([prompts, valid], 1),
    }


def samples(values: dict[str, torch.Tensor]) -> list[oracle.Sample]:
    return [
        oracle.Sample(
            values["old_log_probs"][row, :length].tolist(),
            values["rollout_log_probs"][row, :length].tolist(),
            values["response_mask"][row, :length].tolist(),
            sample_index=row,
            token_ids=values["responses"][row, :length].tolist(),
        )
        for row, length in enumerate(LENGTHS)
    ]


def core(values: dict[str, torch.Tensor], mask: torch.Tensor, valid: torch.Tensor | None) -> StepReport:
    collector = Collector(AuditConfig())
    collector.update(
        values["old_log_probs"],
        values["rollout_log_probs"],
        mask,
        valid=valid,
        sample_index=torch.arange(len(LENGTHS))[:, None],
        token_position=torch.arange(max(LENGTHS)),
        token_ids=values["responses"],
    )
    return collector.compute()


def test_a_batch_has_the_figures_of_its_tokens() -> None:
    values = recorded()
    report = VerlAudit(AuditConfig()).step(DataProto.from_dict(values))
    assert_same_bits(report, core(values, values["response_mask"], values["attention_mask"][:, -max(LENGTHS) :]))
    expected = oracle.audit(samples(values))
    assert oracle.differences(report.metrics, expected) == []
    assert [(t.sample_index, t.token_position, t.token_id) for t in report.worst_tokens] == [
        (t.sample_index, t.token_position, t.token_id) for t in expected.worst
    ]


@pytest.mark.parametrize(("kept", "mask"), [("attention_mask", "attention_mask"), ("response_mask", "response_mask")])
def test_one_mask_is_enough(kept: str, mask: str) -> None:
    """Without `attention_mask`, as in verl's v1 trainer, it is not known what is a position of a response."""
    values = recorded()
    given = {name: value for name, value in values.items() if not name.endswith("_mask") or name == kept}
    shown = values[mask][:, -max(LENGTHS) :]
    report = VerlAudit(AuditConfig()).step(DataProto.from_dict(given))
    assert_same_bits(report, core(values, shown, shown if kept == "attention_mask" else None))


def test_each_batch_is_a_step() -> None:
    audit = VerlAudit(AuditConfig())
    for step in (1, 2, 3):
        report = audit.step(DataProto.from_dict(recorded(step)))
        assert report.step == step
        assert oracle.differences(report.metrics, oracle.audit(samples(recorded(step)))) == []


def test_a_batch_is_not_changed() -> None:
    data = DataProto.from_dict(recorded())
    VerlAudit(AuditConfig()).step(data)
    assert {name: value.tolist() for name, value in data.batch.items()} == {
        name: value.tolist() for name, value in recorded().items()
    }


def test_verls_figures_are_ours_of_probabilities() -> None:
    """verl's whole batch is in one process, so its mean and maximum are global too; they are of exp, not of nats."""
    values = recorded()
    data = DataProto.from_dict(values)
    theirs = debug_metrics.calculate_debug_metrics(data)
    ours = VerlAudit(AuditConfig()).step(data).metrics
    pairs = {"max": "prob_diff_max", "mean": "prob_diff_mean"}
    for figure, name in pairs.items():
        assert theirs[f"training/rollout_probs_diff_{figure}"] == pytest.approx(ours[name], rel=1e-5)
    assert theirs["training/rollout_actor_probs_pearson_corr"] == pytest.approx(ours["prob_pearson"], rel=1e-5)
    corrections = rollout_corr_helper.compute_rollout_corr_metrics_from_logprobs(
        values["old_log_probs"], values["rollout_log_probs"], values["response_mask"]
    )
    for key, name in {"kl": "kl0_k1", "k3_kl": "approx_kl0", "chi2_token": "chi2_0"}.items():
        assert corrections[f"rollout_corr/{key}"] == pytest.approx(ours[name], rel=1e-3)


def test_a_nan_is_verls_figure_and_our_count() -> None:
    values = recorded()
    values["rollout_log_probs"][2, 0] = math.nan
    data = DataProto.from_dict(values)
    assert math.isnan(debug_metrics.calculate_debug_metrics(data)["training/rollout_probs_diff_max"])
    report = VerlAudit(AuditConfig()).step(data)
    assert report.warnings == {"rollout_nan": 1}
    assert oracle.differences(report.metrics, oracle.audit(samples(values))) == []


@pytest.mark.parametrize("way", ["absent", "None", "short"])
@pytest.mark.parametrize("field", [*recorded(), "batch"])
def test_what_a_batch_lacks_never_ends_the_training(field: str, way: str, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[str, Any] = recorded()
    if field != "batch":
        values = {**values, field: values[field][:-1] if way == "short" else None}
        values = {name: value for name, value in values.items() if way != "absent" or name != field}
    data = SimpleNamespace(batch=None if field == "batch" else values)
    found = VerlAudit(AuditConfig()).wrap_debug_metrics(lambda data: {"theirs": 1.0})(data)
    assert found["theirs"] == 1.0
    failed = found[PREFIX + "warning/update_failed"]
    if way == "short" or field in ("old_log_probs", "responses", "batch"):
        assert failed == 1
        sentence = "expected verl's DataProto, got SimpleNamespace" if field == "batch" else f"{field} is missing"
        assert way == "short" or sentence in caplog.text
    else:
        assert failed == 0
        assert (found[PREFIX + "compared_token_count"] == 0) == (field == "rollout_log_probs")


def test_a_config_of_another_type_is_refused() -> None:
    for wrong in ("strict", {}):
        with pytest.raises(TypeError, match=f"config must be an AuditConfig, got {type(wrong).__name__}"):
            VerlAudit(wrong)


# --- in verl's own loop -----------------------------------------------------------------------------------------------


class RecordedTrainer(ray_trainer.SeparateRayPPOTrainer):
    """verl's trainer without its workers: what they would compute is recorded."""

    def __init__(self, old_log_probs: torch.Tensor, bypass: bool) -> None:
        self.config = OmegaConf.create(
            {
                "algorithm": {"rollout_correction": {"bypass_mode": bypass}},
                "actor_rollout_ref": {
                    "actor": {"policy_loss": {}, "loss_agg_mode": "token-mean", "loss_scale_factor": None}
                },
            }
        )
        self.metrics: dict[str, Any] = {}
        self.timing_raw: dict[str, float] = {}
        self._recorded = old_log_probs

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        entropy = torch.zeros_like(self._recorded)
        return DataProto.from_dict({"old_log_probs": self._recorded, "entropys": entropy}), 0.0


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> VerlAudit:
    audit = VerlAudit(AuditConfig())
    wrapped = audit.wrap_debug_metrics(debug_metrics.calculate_debug_metrics)
    monkeypatch.setattr(debug_metrics, "calculate_debug_metrics", wrapped)
    monkeypatch.setattr(
        rollout_corr_helper, "apply_bypass_mode", audit.wrap_bypass(rollout_corr_helper.apply_bypass_mode)
    )
    return audit


def before_recomputation(values: dict[str, torch.Tensor]) -> DataProto:
    return DataProto.from_dict({name: value for name, value in values.items() if name != "old_log_probs"})


def test_the_trainer_logs_our_figures_beside_its_own(plugged: VerlAudit) -> None:
    values = recorded()
    trainer = RecordedTrainer(values["old_log_probs"], bypass=False)
    batch = trainer._fit_compute_log_prob(before_recomputation(values))
    expected = core(values, values["response_mask"], values["attention_mask"][:, -max(LENGTHS) :]).metrics
    ours = {name: value for name, value in trainer.metrics.items() if name.startswith(PREFIX)}
    assert ours == {PREFIX + name: value for name, value in expected.items() if math.isfinite(value)}
    assert "training/rollout_probs_diff_max" in trainer.metrics
    assert torch.equal(batch.batch["old_log_probs"], values["old_log_probs"])


def test_bypass_mode_compares_nothing_and_says_so(plugged: VerlAudit, caplog: pytest.LogCaptureFixture) -> None:
    values = recorded()
    reports = []
    step = plugged.step
    plugged.step = lambda data: reports.append(step(data))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            RecordedTrainer(values["old_log_probs"], bypass=True)._fit_compute_log_prob(before_recomputation(values))
    assert caplog.text.count("bypass mode") == 1
    for report in reports:
        assert report.warnings["nothing_compared"] == 1
        assert report.metrics["active_token_count"] == int(values["response_mask"].sum())
        assert math.isnan(report.metrics["abs_dlogp_max"])


def test_strict_does_not_pass_what_it_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    values = recorded()
    audit = VerlAudit(AuditConfig(mode="strict", limits={"abs_dlogp_p99": 0.5}))
    assert audit.step(DataProto.from_dict(values)).verdict.passed
    values["old_log_probs"] = values["rollout_log_probs"]
    with pytest.raises(ConsistencyError, match="nothing was compared"):
        audit.step(DataProto.from_dict(values))


def test_equal_copies_get_the_note() -> None:
    values = recorded()
    values["old_log_probs"] = values["rollout_log_probs"].clone()
    assert VerlAudit(AuditConfig()).step(DataProto.from_dict(values)).notes == ("self_comparison",)


# --- how verl finds it ------------------------------------------------------------------------------------------------

PROBE = """
import json, sys, verl
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode
names = [calculate_debug_metrics.__code__.co_name, apply_bypass_mode.__code__.co_name]
print(json.dumps([names, "rlk_audit" in sys.modules]))
"""
ON, OFF = ["debug_and_audit", "bypass_and_audit"], ["calculate_debug_metrics", "apply_bypass_mode"]
ENTRY_POINT = "[verl.plugins]\nrlk_audit = rlk_audit.integrations.verl_plugin\n"


def probe(folder: Path, entry_point: bool, **variables: str) -> tuple[list[str], bool, str]:
    if entry_point:
        info = folder / "rlk_audit_probe-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlk_audit_probe\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINT)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RLK_", "VERL_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env=environment | {"PYTHONPATH": path} | variables,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names, loaded = json.loads(done.stdout.splitlines()[-1])
    return names, loaded, done.stderr


def test_the_projects_entry_point_is_the_plugin() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '[project.entry-points."verl.plugins"]\nrlk_audit = "rlk_audit.integrations.verl_plugin"\n' in text


def test_verl_loads_the_entry_point_and_one_variable_switches_it_on(tmp_path: Path) -> None:
    assert probe(tmp_path, True, RLK_AUDIT_MODE="audit")[0] == ON


def test_an_installed_plugin_that_nothing_switches_on_changes_nothing(tmp_path: Path) -> None:
    assert probe(tmp_path, True)[:2] == (OFF, True)


def test_verls_variable_loads_it_too(tmp_path: Path) -> None:
    module = "rlk_audit.integrations.verl_plugin"
    found = probe(
        tmp_path, False, RLK_AUDIT_MODE="audit", VERL_USE_EXTERNAL_MODULES=module, VERL_USE_EXTERNAL_PLUGINS="none"
    )
    assert found[0] == ON


def test_a_wrong_setting_is_told_although_verl_hides_it(tmp_path: Path) -> None:
    names, _, errors = probe(tmp_path, True, RLK_AUDIT_MODE="audit", RLK_AUDIT_WORST_K="many")
    assert names == OFF
    assert "RLK_AUDIT_WORST_K" in errors
    assert "not switched on" in errors


def test_the_v1_trainer_takes_the_audited_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transfer_queue", reason="verl's v1 trainer needs TransferQueue")
    pytest.importorskip("cachetools", reason="verl's v1 trainer needs cachetools")
    base = (
        "from verl.trainer.ppo.v1 import trainer_base as base; calculate_debug_metrics = base.calculate_debug_metrics"
    )
    monkeypatch.setattr(sys.modules[__name__], "PROBE", PROBE.replace("names =", f"{base}\nnames ="))
    assert probe(tmp_path, True, RLK_AUDIT_MODE="audit")[0] == ON
