"""The audit as a callback of SkyRL: the package's own handler where it is installed, else a HARNESS of it.

`pip install --no-deps skyrl` is enough: its file of callbacks is loaded by itself, since the package as a whole needs
ray. The loop around it is a harness of SkyRL's trainer: the order of its events, and the columns of its batch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from core_bits import assert_same_bits, core_report
from slime_harness import make_samples

from rlk_audit import AuditConfig, ConsistencyError

MODULE = "skyrl.train.utils.callbacks"
SAMPLES = make_samples(9, seed=6)
EVENTS = (
    "train_start", "train_end", "epoch_start", "epoch_end", "step_start", "step_end", "eval_start", "eval_end", "save",
    "log",
)  # fmt: skip


def real_module() -> ModuleType:
    try:
        found = importlib.metadata.distribution("skyrl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("skyrl is not installed: pip install --no-deps skyrl")
    spec = importlib.util.spec_from_file_location(
        MODULE, Path(str(found.locate_file("skyrl/train/utils/callbacks.py")))
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def harness_module() -> ModuleType:
    """A base class whose events do nothing, and a handler that calls each event on each callback."""
    module = ModuleType(MODULE)
    nothing = {f"on_{event}": lambda self, trainer, callback_input, control: None for event in EVENTS}
    base = type("TrainingCallback", (), nothing)

    class Handler:
        def __init__(self, callbacks: list[Any]) -> None:
            self.callbacks = callbacks

        def __getattr__(self, event: str) -> Any:
            return lambda *given: [getattr(callback, event)(*given) for callback in self.callbacks]

    vars(module).update(TrainingCallback=base, CallbackHandler=Handler, CallbackInput=SimpleNamespace)
    return module


@pytest.fixture(params=["real", "harness"])
def skyrl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, Any]]:
    """SkyRL's module of callbacks, and the audit made for it."""
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr("atexit.unregister", lambda call: None)
    for name in ("skyrl", "skyrl.train", "skyrl.train.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = real_module() if request.param == "real" else harness_module()
    monkeypatch.setitem(sys.modules, MODULE, module)
    ours = importlib.import_module("rlk_audit.integrations.skyrl")
    yield module, ours.SkyRLAudit
    del sys.modules["rlk_audit.integrations.skyrl"]


def batch_of(samples: list[oracle.Sample], **changed: Any) -> dict[str, Any]:
    """SkyRL's training batch: prompt and response as one block padded on the left, response columns right-aligned."""
    width = max(map(len, samples))
    total = max(sample.prompt_length + len(sample) for sample in samples)

    def column(name: str) -> torch.Tensor:
        made = torch.zeros(len(samples), width)
        for row, sample in enumerate(samples):
            made[row, width - len(sample) :] = torch.tensor(getattr(sample, name), dtype=torch.float32)
        return made

    response, sequences = torch.zeros(len(samples), width), torch.zeros(len(samples), total, dtype=torch.long)
    for row, sample in enumerate(samples):
        response[row, width - len(sample) :] = 1
        sequences[row, total - len(sample) :] = torch.tensor(sample.token_ids)
    columns = {"action_log_probs": column("train"), "rollout_logprobs": column("rollout"), "loss_mask": column("mask")}
    return {**columns, "response_mask": response, "sequences": sequences, **changed}


def train(module: ModuleType, audit: Any, batches: list[dict[str, Any]]) -> list[dict[str, float]]:
    """HARNESS of the trainer: an evaluation first, then steps from 1 on. Returns what each step gave to the tracker."""
    handler, control = module.CallbackHandler([audit]), SimpleNamespace()
    logged: list[dict[str, float]] = []

    def fire(event: str, step: int, **fields: Any) -> None:
        counters = {"global_step": step, "epoch": 0, "total_steps": len(batches), "steps_per_epoch": len(batches)}
        empty = dict.fromkeys(("batch", "metrics", "logs", "ckpt_path"))
        getattr(handler, event)("trainer", module.CallbackInput(**{**empty, **counters, **fields}), control)

    fire("on_train_start", 0)
    evaluation = {"eval/score": 0.5}
    fire("on_log", 0, logs=evaluation)
    assert set(evaluation) == {"eval/score"}
    for number, batch in enumerate(batches, start=1):
        fire("on_step_start", number)
        fire("on_step_end", number, batch=batch, metrics={})
        logs = {"loss": 1.0}
        fire("on_log", number, logs=logs)
        logged.append(logs)
        evaluation = {"eval/score": 0.5}
        fire("on_log", number, logs=evaluation)
        assert set(evaluation) == {"eval/score"}, "a step's figures are logged once"
    fire("on_train_end", len(batches))
    return logged


def numbered(samples: list[oracle.Sample]) -> list[oracle.Sample]:
    """As the driver knows them: by their row."""
    return [
        oracle.Sample(
            s.train, s.rollout, s.mask, sample_index=row, token_ids=s.token_ids, prompt_length=s.prompt_length
        )
        for row, s in enumerate(samples)
    ]


def test_each_step_gives_the_figures_of_its_batch(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    config = AuditConfig(samples_per_step=16, breakdowns={"position": "auto"}, worst_k=6)
    audit = audit_class(config)
    reports = []
    step_end = audit.on_step_end
    audit.on_step_end = lambda *given: (step_end(*given), reports.append(audit.report))
    batches = [SAMPLES[:4], SAMPLES[4:]]
    logged = train(module, audit, [batch_of(samples) for samples in batches])
    assert [report.step for report in reports] == [1, 2]
    for report, samples, logs in zip(reports, batches, logged, strict=True):
        expected = oracle.audit(numbered(samples), worst_k=6)
        assert oracle.differences(report.metrics, expected) == []
        assert logs["rlk_audit/abs_dlogp_max"] == expected.metrics["abs_dlogp_max"]
        assert logs["loss"] == 1.0
        assert_same_bits(report, core_report(samples, config))


def test_the_batch_is_left_alone(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    batch, before = batch_of(SAMPLES), batch_of(SAMPLES)
    train(module, audit_class(), [batch])
    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_a_skipped_forward_pass_is_told(skyrl: tuple[ModuleType, Any], caplog: pytest.LogCaptureFixture) -> None:
    module, audit_class = skyrl
    audit = audit_class()
    logged = train(module, audit, [batch_of(SAMPLES, action_log_probs=None)] * 2)
    assert audit.report.warnings == {"nothing_compared": 1}
    assert "rlk_audit/abs_dlogp_max" not in logged[0]
    assert sum("skipped the policy's forward pass" in line for line in caplog.messages) == 1


def test_missing_rollout_log_probs_are_counted(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    audit = audit_class()
    train(module, audit, [batch_of(SAMPLES, rollout_logprobs=None)])
    assert audit.report.metrics["warning/missing_rollout_log_probs"] == 1
    assert audit.report.metrics["compared_token_count"] == 0


def test_strict_stops_the_training(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    with pytest.raises(ConsistencyError, match="abs_dlogp_max"):
        train(module, audit_class(AuditConfig(mode="strict", limits={"abs_dlogp_max": 1e-6})), [batch_of(SAMPLES)])


def test_the_environment_turns_it_off(skyrl: tuple[ModuleType, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_AUDIT_MODE", "off")
    module, audit_class = skyrl
    audit = audit_class()
    assert train(module, audit, [batch_of(SAMPLES)]) == [{"loss": 1.0}]
    assert audit.report is None


def test_without_skyrl_it_says_so_in_one_sentence() -> None:
    script = "import sys; sys.modules['skyrl'] = None\nimport rlk_audit.integrations.skyrl"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "ImportError: SkyRLAudit cannot be used" in result.stderr.splitlines()[-1]


def test_sinks_get_the_steps_and_are_closed(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    kinds: list[str] = []
    sink = SimpleNamespace(write=lambda report: kinds.append(report.kind), close=lambda: kinds.append("closed"))
    train(module, audit_class(sinks=[sink]), [batch_of(SAMPLES)])
    assert kinds == ["step", "run", "closed"]


def test_odd_data_is_counted_and_never_raised(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    audit = audit_class()
    train(module, audit, [batch_of(SAMPLES, response_mask=None)])
    assert audit.report.metrics["warning/update_failed"] == 1


def test_columns_may_be_absent(skyrl: tuple[ModuleType, Any]) -> None:
    module, audit_class = skyrl
    audit = audit_class()
    batch = batch_of(SAMPLES)
    del batch["rollout_logprobs"], batch["sequences"]
    train(module, audit, [batch])
    assert audit.report.warnings["missing_rollout_log_probs"] == 1
    audit.on_log("trainer", SimpleNamespace(logs=None), None)
