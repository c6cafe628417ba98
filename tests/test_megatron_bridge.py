"""The audit as a callback of Megatron-Bridge: the package's own callback manager where it is installed, else a HARNESS.

`pip install --no-deps megatron-bridge` is enough: its file of callbacks is loaded by itself, since the package as a
whole needs CUDA. The loop around it is a harness of Megatron-Bridge's `train`: the order of its events and calls.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from slime_harness import make_samples

from rlk_audit import AuditConfig, ConsistencyError, StepReport
from rlk_audit.integrations.megatron_bridge import BridgeAudit
from rlk_audit.megatron_pretrain import PretrainAudit

SAMPLES = make_samples(8, seed=5)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr("atexit.unregister", lambda call: None)


class HarnessManager:
    """Registers the methods that an object has by the names of the events."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def add(self, callbacks: list[Any]) -> None:
        self.callbacks += callbacks

    def fire(self, event: str, context: Any) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(context)


def real_manager() -> Any:
    """The package's own manager and context."""
    try:
        found = importlib.metadata.distribution("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed: pip install --no-deps megatron-bridge")
    path = Path(str(found.locate_file("megatron/bridge/training/callbacks.py")))
    spec = importlib.util.spec_from_file_location("bridge_callbacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bridge_callbacks"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["real", "harness"])
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    if request.param == "real":
        module = real_manager()
        yield module.CallbackManager(), module.CallbackContext
        del sys.modules["bridge_callbacks"]
    else:
        yield HarnessManager(), SimpleNamespace
    monkeypatch.undo()


def inject(forward_step: Any, state: Any) -> Any:
    """Megatron-Bridge hands its state to a forward step whose first parameter has its name."""
    first = next(iter(inspect.signature(forward_step).parameters))
    return functools.partial(forward_step, state) if first in ("state", "global_state") else forward_step


def train(callbacks: tuple[Any, Any], audit: BridgeAudit | None, forward_step: Any, batches: list[Any]) -> Any:
    """HARNESS of Megatron-Bridge's `train`: one iteration a list of micro-batches. Returns losses and the gradient."""
    manager, context = callbacks
    model = SimpleNamespace(weight=torch.zeros((), requires_grad=True), training=True)
    state = SimpleNamespace(train_state=SimpleNamespace(step=10))
    if audit is not None:
        manager.add([audit])
        forward_step = audit.wrap_forward_step(forward_step)
    step = inject(forward_step, state)
    losses = []
    manager.fire("on_train_start", context(state=state, model=[model], user_state={}))
    for microbatches in batches:
        data = iter(microbatches)
        for _ in microbatches:
            output, loss_func = step(data, model)
            loss = loss_func(output)[0]
            loss.backward()
            losses.append(loss.item())
        manager.fire(
            "on_train_step_end",
            context(state=state, model=[model], user_state={}, loss_dict={}, grad_norm=None, skipped_iter=False),
        )
        state.train_state.step += 1
    manager.fire("on_train_end", context(state=state, model=[model], user_state={}))
    return losses, model.weight.grad


def policy_step(audit: BridgeAudit, with_state: bool) -> Any:
    """A forward step of a policy, with or without Megatron-Bridge's state."""

    def loss_func(sample: oracle.Sample, train_log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        mask = torch.tensor(sample.mask)
        index = torch.full((len(sample),), sample.sample_index)
        audit.observe(
            train_log_probs, torch.tensor(sample.rollout), mask, valid=torch.ones(len(sample)), sample_index=index,
            token_position=torch.arange(len(sample)), token_ids=torch.tensor(sample.token_ids),
            rollout_id=sample.rollout_id,
        )  # fmt: skip
        return (train_log_probs * mask).sum(), mask.sum(), {}

    def forward_step(data: Any, model: Any) -> Any:
        sample = next(data)
        train_log_probs = torch.tensor(sample.train) + model.weight * torch.tensor(sample.train).cos()
        return train_log_probs, functools.partial(loss_func, sample)

    def stateful(state: Any, data_iterator: Any, model: Any) -> Any:
        assert state.train_state.step >= 10
        return forward_step(data_iterator, model)

    return stateful if with_state else lambda data_iterator, model: forward_step(data_iterator, model)


@pytest.mark.parametrize("with_state", [True, False])
def test_each_iteration_is_a_step(manager: tuple[Any, Any], with_state: bool) -> None:
    audit = BridgeAudit(config=AuditConfig())
    reports: list[StepReport] = []

    class Kept:
        def on_train_step_end(self, context: Any) -> None:
            assert audit.report is not None
            reports.append(audit.report)

    batches = [SAMPLES[:3], SAMPLES[3:]]
    step = policy_step(audit, with_state)
    first, context = manager
    first.add([audit])
    first.add([Kept()])
    audited = train((first, context), None, audit.wrap_forward_step(step), batches)
    assert [(report.step, report.prefix) for report in reports] == [
        (11, "rlk_audit_current/"),
        (12, "rlk_audit_current/"),
    ]
    for report, samples in zip(reports, batches, strict=True):
        assert oracle.differences(report.metrics, oracle.audit(samples)) == []
        assert "duplicate_microbatch" not in report.warnings
    plain = train((HarnessManager(), SimpleNamespace), None, policy_step(BridgeAudit(), with_state), batches)
    assert audited[0] == plain[0]
    assert torch.equal(audited[1], plain[1])


def test_labels_training_is_audited_too(manager: tuple[Any, Any]) -> None:
    audit = BridgeAudit(config=AuditConfig())

    def forward_step(state: Any, data_iterator: Any, model: Any) -> Any:
        sample = next(data_iterator)
        loss = -torch.tensor(sample.train) + 0 * model.weight
        audit.attach(torch.tensor(sample.rollout), torch.tensor(sample.mask))
        return loss, lambda output: (output.sum(), torch.tensor(1), {})

    train(manager, audit, forward_step, [SAMPLES])
    assert audit.report is not None
    unnamed = [oracle.Sample(s.train, s.rollout, s.mask) for s in SAMPLES]
    expected = oracle.audit(unnamed, total_known=False)
    positionless = {name for name in expected.metrics if "token_position" in name}
    expected.metrics = {name: value for name, value in expected.metrics.items() if name not in positionless}
    assert oracle.differences(audit.report.metrics, expected) == []


def test_strict_stops_the_training(manager: tuple[Any, Any]) -> None:
    audit = BridgeAudit(config=AuditConfig(mode="strict", limits={"abs_dlogp_max": 1e-6}))
    with pytest.raises(ConsistencyError, match="abs_dlogp_max"):
        train(manager, audit, policy_step(audit, True), [SAMPLES])


def test_off_costs_nothing(manager: tuple[Any, Any]) -> None:
    audit = BridgeAudit(config=AuditConfig(mode="off"))
    train(manager, audit, policy_step(audit, True), [SAMPLES])
    assert audit.report is None


def test_keywords_reach_the_forward_step_and_the_audit(manager: tuple[Any, Any]) -> None:
    audit = BridgeAudit(config=AuditConfig())

    def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        assert return_schedule_plan
        sample = next(data_iterator)
        audit.attach(torch.tensor(sample.rollout), torch.tensor(sample.mask), token_position=torch.arange(len(sample)))
        return -torch.tensor(sample.train) + 0 * model.weight, lambda output: (output.sum(), torch.tensor(1), {})

    wrapped = audit.wrap_forward_step(forward_step)
    train(manager, audit, functools.partial(wrapped, return_schedule_plan=True), [SAMPLES])
    assert audit.report is not None
    assert audit.report.metrics["worst_token_position"] == oracle.audit(SAMPLES).metrics["worst_token_position"]


def test_the_weight_version_counts_updates_and_goes_on_from_a_checkpoint() -> None:
    audit = BridgeAudit(config=AuditConfig())
    state = SimpleNamespace(train_state=SimpleNamespace(step=10))
    audit.on_train_start(SimpleNamespace(state=state, model=[]))
    assert audit.audit.weight_version == 10
    for skipped, version in ((False, 11), (True, 11)):
        audit.on_train_step_end(SimpleNamespace(state=state, skipped_iter=skipped))
        assert audit.audit.weight_version == version


def test_the_end_of_the_training_closes_the_sinks(manager: tuple[Any, Any]) -> None:
    kinds: list[str] = []
    sink = SimpleNamespace(write=lambda report: kinds.append(report.kind), close=lambda: kinds.append("closed"))
    audit = BridgeAudit(config=AuditConfig(), sinks=[sink])
    train(manager, audit, policy_step(audit, True), [SAMPLES])
    assert kinds == ["step", "run", "closed"]


def test_off_is_silent_and_a_stage_without_an_auditor_too(
    manager: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    audit = BridgeAudit(config=AuditConfig(mode="off"))
    audit.observe(torch.zeros(1), torch.zeros(1), torch.ones(1))
    train(manager, audit, policy_step(audit, True), [SAMPLES])
    BridgeAudit().observe(torch.zeros(1), torch.zeros(1), torch.ones(1))
    assert "never started" not in caplog.text


@pytest.mark.parametrize("mode", ["audit", "strict"])
@pytest.mark.parametrize("call", ["observe", "attach"])
@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize(
    ("handle", "hook"), [(BridgeAudit, r"on_train_start .* callbacks=\[audit\]"), (PretrainAudit, "wrap_pretrain")]
)
def test_an_audit_that_no_hook_started_says_so(
    handle: Any, hook: str, by_variable: bool, call: str, mode: str, monkeypatch: Any, caplog: Any
) -> None:
    if by_variable:
        monkeypatch.setenv("RLK_AUDIT_MODE", mode)
    audit = handle() if by_variable else handle(config=AuditConfig(mode=mode))
    for _ in range(3):
        getattr(audit, call)(torch.zeros(1), torch.ones(1))
    (line,) = caplog.messages
    assert re.search(f"never started.*{hook}", line)
