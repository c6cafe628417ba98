"""The training plugin in one process, without megatron: arguments, groups, and wrappers that change nothing."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlk_audit import AuditConfig, Auditor, ConsistencyError, StepReport, TokenBatch
from rlk_audit.megatron_plugin import MegatronAudit, ParallelGroups, add_rlk_args, register, resolve_groups

CHUNK = SimpleNamespace(training=True)
GROUPS = ("dp", "dp_cp", "cp", "tp", "pp", "mp")


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would run when the process ends; here it must not run behind the tests."""
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", calls.append)
    monkeypatch.setattr("atexit.unregister", calls.remove)
    return calls


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)


@pytest.fixture
def audit() -> MegatronAudit:
    return MegatronAudit(Auditor(AuditConfig(worst_k=8)))


# --- arguments --------------------------------------------------------------------------------------------------------


def parsed(*arguments: str) -> argparse.Namespace:
    return add_rlk_args(argparse.ArgumentParser()).parse_args(arguments)


def test_the_argument_has_an_alias_and_no_default() -> None:
    """No default: a value that nobody gave must not hide an environment variable or a file."""
    assert parsed().rlk_consistency_mode is None
    assert parsed("--rlk-consistency-mode", "audit").rlk_consistency_mode == "audit"
    assert parsed("--rl-kernel-consistency-mode", "strict").rlk_consistency_mode == "strict"
    assert set(vars(parsed()).values()) == {None}
    assert [name for name in vars(parsed()) if "mode" in name] == ["rlk_consistency_mode"], "the alias is no second one"


def test_add_rlk_args_returns_the_parser() -> None:
    """As megatron-core's extra_args_provider must."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    assert add_rlk_args(parser) is parser
    assert parser.parse_args(["--lr", "1", "--rlk-consistency-mode=off"]).lr == 1.0


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--rlk-consistency-mode", "on")
    told = capsys.readouterr().err
    assert "argument --rlk-consistency-mode/--rl-kernel-consistency-mode: expected one of off, audit, strict" in told


@pytest.mark.parametrize(
    ("args", "config", "mode"),
    [
        (None, None, "off"),
        (parsed(), None, "off"),
        (SimpleNamespace(lr=1.0), None, "off"),
        (parsed("--rlk-consistency-mode", "audit"), None, "audit"),
        (None, AuditConfig(), "audit"),
        (parsed(), AuditConfig(), "audit"),
        (parsed("--rlk-consistency-mode", "off"), AuditConfig(), "off"),
        (parsed("--rlk-consistency-mode", "audit"), AuditConfig(mode="off", worst_k=7), "audit"),
    ],
)
def test_the_mode_of_the_arguments_goes_first(args: Any, config: AuditConfig | None, mode: str) -> None:
    audit = register(args, config=config)
    assert audit.owns_report is (mode != "off")
    if audit.auditor is not None:
        assert audit.auditor.config.mode == mode
        assert audit.auditor.config.worst_k == (4 if config is None else config.worst_k)


# --- groups -----------------------------------------------------------------------------------------------------------


class Holder:
    """A module, or a wrapper of one, that may hold a collection."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def collection(tag: str, *names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: f"{tag} {name}" for name in names or GROUPS})


def groups(tag: str) -> ParallelGroups:
    return ParallelGroups(**{name: f"{tag} {name}" for name in GROUPS})


def test_groups_of_an_explicit_collection_go_first() -> None:
    model = Holder(pg_collection=collection("model"))
    assert resolve_groups(model, collection("given")) == groups("given")


@pytest.mark.parametrize(
    "model",
    [
        Holder(pg_collection=collection("model")),
        Holder(module=Holder(module=Holder(pg_collection=collection("model")))),
        [Holder(module=Holder(pg_collection=collection("model"))), Holder()],
        (Holder(pg_collection=collection("model")),),
    ],
    ids=["bare", "wrapped_twice", "chunks", "tuple"],
)
def test_groups_of_the_model(model: Any) -> None:
    assert resolve_groups(model) == groups("model")


@pytest.mark.parametrize("model", [None, [], Holder(), Holder(module=None), Holder(pg_collection=None)])
def test_no_groups_anywhere(model: Any) -> None:
    """Not megatron's doing: this process, or the default group, is all there is."""
    assert resolve_groups(model) == ParallelGroups()
    assert resolve_groups(model).on_last_stage


def test_a_collection_of_several_modules_answers_with_the_language_model_s() -> None:
    several = SimpleNamespace(get_language_model_collection=lambda: collection("language"))
    assert resolve_groups(None, several) == groups("language")


def test_peers_that_share_weights_hold_other_data() -> None:
    """Then the data group is the one that spans them; an unset field is None or absent, by version."""
    full = collection("given", *GROUPS, "dp_cp_gtp_remat")
    assert resolve_groups(None, full).dp_cp == "given dp_cp_gtp_remat"
    full.dp_cp_gtp_remat = None
    assert resolve_groups(None, full).dp_cp == "given dp_cp"
    del full.mp
    assert resolve_groups(None, full).mp is None


@pytest.fixture
def parallel_state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for megatron.core.parallel_state that keeps what it was asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def getter(name: str) -> Callable[..., str]:
        def get(**kwargs: Any) -> str:
            asked.append((name, kwargs))
            return f"state {'dp_cp' if kwargs.get('with_context_parallel') else name}"

        return get

    state = SimpleNamespace(
        asked=asked,
        initialized=True,
        get_data_parallel_group=getter("dp"),
        get_context_parallel_group=getter("cp"),
        get_tensor_model_parallel_group=getter("tp"),
        get_pipeline_model_parallel_group=getter("pp"),
        get_model_parallel_group=getter("mp"),
    )
    state.model_parallel_is_initialized = lambda: state.initialized
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    return state


def test_parallel_state_is_asked_last(parallel_state: SimpleNamespace) -> None:
    assert resolve_groups() == groups("state")
    assert resolve_groups(None, collection("given", "dp", "pp")) == ParallelGroups(
        dp="given dp", dp_cp="state dp_cp", cp="state cp", tp="state tp", pp="given pp", mp="state mp"
    )
    assert resolve_groups(Holder(pg_collection=collection("model"))) == groups("model")
    assert not [name for name, kwargs in parallel_state.asked if kwargs.get("partial_data_parallel")]


def test_parallel_state_that_is_not_set_up_is_not_asked(parallel_state: SimpleNamespace) -> None:
    parallel_state.initialized = False
    assert resolve_groups() == ParallelGroups()
    assert parallel_state.asked == []
    assert resolve_groups(None, collection("given")) == groups("given")


# --- the policy loss --------------------------------------------------------------------------------------------------


def observe(audit: MegatronAudit, drift: float, count: int = 1, **fields: Any) -> None:
    audit.observe([-4.0 + drift] * count, [-4.0] * count, [1] * count, **fields)


def microbatches(report: StepReport) -> list[tuple[int, float]]:
    """(micro-batch, drift) of every token, in the order of the micro-batches."""
    return sorted((token.microbatch, token.dlogp) for token in report.worst_tokens)


def policy(audit: MegatronAudit, drifts: Iterator[float]) -> Callable[..., Any]:
    """A forward step whose loss function observes the next drift."""

    def forward_step(data_iterator: object, model: object) -> tuple[torch.Tensor, Callable[..., Any]]:
        def loss_func(output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            observe(audit, next(drifts))
            return output_tensor.sum(), {}

        return torch.zeros(1), loss_func

    return audit.wrap_forward_step(forward_step)


def run(forward_step: Callable[..., Any], *models: object) -> None:
    """What a schedule does on the last stage: forward, then the loss."""
    for model in models:
        output_tensor, loss_func = forward_step(iter(()), model)
        loss_func(output_tensor)


def test_micro_batches_are_numbered_in_a_step(audit: MegatronAudit) -> None:
    forward_step = policy(audit, iter([0.25, 0.5, 0.75, 1.0]))
    run(forward_step, CHUNK, CHUNK, CHUNK)
    report = audit.step_end(11)
    assert microbatches(report) == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert report.step == 11
    assert report.warnings == {}
    run(forward_step, CHUNK)
    assert microbatches(audit.step_end(12)) == [(0, 1.0)], "the next step begins at 0"


def test_b27_chunks_of_a_virtual_pipeline_are_numbered_apart(audit: MegatronAudit) -> None:
    """Two chunks see every micro-batch, interleaved; the loss is the last chunk's alone."""
    first, last = SimpleNamespace(training=True), SimpleNamespace(training=True)
    forward_step = policy(audit, iter([0.25, 0.5, 0.75]))
    for _ in range(3):
        forward_step(iter(()), first)
        forward_step(iter(()), first)
        run(forward_step, last)
    report = audit.step_end(1)
    assert microbatches(report) == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert report.metrics["compared_token_count"] == 3
    assert report.warnings == {}


def test_a_rerun_counts_the_first_evaluation_alone(audit: MegatronAudit) -> None:
    """Forward and backward may run again in a step, here with other values."""
    forward_step = policy(audit, iter([0.25, 0.5, 3.0, 3.5]))
    calls: list[tuple[Any, ...]] = []

    def forward_backward(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        run(forward_step, CHUNK, CHUNK)
        return "store"

    schedule = audit.wrap_schedule(forward_backward)
    assert schedule.__name__ == "forward_backward"
    assert [schedule(1, seq_length=8), schedule(2)] == ["store", "store"]
    assert calls == [((1,), {"seq_length": 8}), ((2,), {})]
    report = audit.step_end(1)
    assert microbatches(report) == [(0, 0.25), (1, 0.5)]
    assert report.warnings == {"duplicate_microbatch": 2}


def test_a_loss_computed_twice_counts_once(audit: MegatronAudit) -> None:
    """Recomputation evaluates the loss function again, with the same output."""
    forward_step = policy(audit, iter([0.25, 3.0, 0.5]))
    output_tensor, loss_func = forward_step(iter(()), CHUNK)
    loss_func(output_tensor)
    loss_func(output_tensor)
    run(forward_step, CHUNK)
    report = audit.step_end(1)
    assert microbatches(report) == [(0, 0.25), (1, 0.5)]
    assert report.warnings == {"duplicate_microbatch": 1}


def test_a_loss_computed_late_keeps_its_number(audit: MegatronAudit) -> None:
    """Two forwards first, then their losses in the other order."""
    forward_step = policy(audit, iter([0.25, 0.5]))
    (first, first_loss), (second, second_loss) = forward_step(iter(()), CHUNK), forward_step(iter(()), CHUNK)
    second_loss(second)
    first_loss(first)
    assert microbatches(audit.step_end(1)) == [(0, 0.5), (1, 0.25)]


def test_evaluation_is_not_counted(audit: MegatronAudit) -> None:
    forward_step = policy(audit, iter([0.25, 3.0, 3.0, 0.5]))
    evaluated = SimpleNamespace(training=False)
    schedule = audit.wrap_schedule(lambda *models: run(forward_step, *models))
    schedule(CHUNK)
    schedule(evaluated, evaluated)
    assert microbatches(audit.step_end(1)) == [(0, 0.25)]
    schedule(CHUNK)
    assert microbatches(audit.step_end(2)) == [(0, 0.5)]


def test_the_number_ends_with_the_loss_function(audit: MegatronAudit) -> None:
    """Also when it raises; an explicit number goes before the counted one."""

    def forward_step(data_iterator: object, model: object) -> tuple[torch.Tensor, Callable[..., Any]]:
        def loss_func(output_tensor: torch.Tensor) -> None:
            observe(audit, 0.25)
            observe(audit, 0.5, microbatch=40)
            raise FloatingPointError("nan in the loss")

        return torch.zeros(1), loss_func

    output_tensor, loss_func = audit.wrap_forward_step(forward_step)(iter(()), CHUNK)
    with pytest.raises(FloatingPointError, match=r"^nan in the loss$"):
        loss_func(output_tensor)
    observe(audit, 0.75)
    observe(audit, 0.75)
    assert microbatches(audit.step_end(1)) == [(-1, 0.75), (-1, 0.75), (0, 0.25), (40, 0.5)]


def test_a_batch_with_all_its_fields_may_be_observed(audit: MegatronAudit) -> None:
    audit.observe(TokenBatch.from_lists([[-1.0, -2.0]], [[-1.5, -2.0]], sample_index=[9]), microbatch=3)
    token = audit.step_end(1).worst_tokens[0]
    assert (token.sample_index, token.token_position, token.microbatch) == (9, 0, 3)


# --- training with labels: T is minus the loss ------------------------------------------------------------------------


def labelled(audit: MegatronAudit, loss_func: Callable[..., Any] | None, **attached: Any) -> Callable[..., Any]:
    """A forward step that attaches rollout values, as `labels=` training does."""
    fields = {"rollout_log_probs": torch.tensor([[-1.0, -2.0]]), "mask": torch.ones(1, 2)} | attached

    def forward_step(data_iterator: Any, model: object) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        audit.attach(**fields)
        return next(data_iterator), loss_func

    return audit.wrap_forward_step(forward_step)


def test_the_loss_is_read_before_it_is_changed(audit: MegatronAudit) -> None:
    """Kills: a late or uncopied read: the loss function and the schedule both divide in place."""

    def loss_func(output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        output_tensor.div_(1000.0)
        return output_tensor.sum(), {}

    loss = torch.tensor([[1.25, 2.5]])
    output_tensor, wrapped = labelled(audit, loss_func, sample_index=[[4]])(iter([loss]), CHUNK)
    scalar, _ = wrapped(output_tensor)
    scalar.div_(8.0)
    assert torch.allclose(loss, torch.tensor([[0.00125, 0.0025]])), "the caller's own tensor was divided"
    report = audit.step_end(1)
    assert [(t.train_logp, t.rollout_logp, t.sample_index, t.microbatch) for t in report.worst_tokens] == [
        (-2.5, -2.0, 4, 0), (-1.25, -1.0, 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("audited", [False, True])
def test_gradients_are_those_of_a_training_without_audit(audit: MegatronAudit, audited: bool) -> None:
    """Bitwise, and the graph is the caller's: no node is added, none is kept."""
    weight = torch.linspace(0.1, 0.9, 2).reshape(1, 2).requires_grad_()
    loss = (weight * 3.0).exp()

    def loss_func(output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return output_tensor.sum() / 7.0, {}

    forward_step = (
        labelled(audit, loss_func) if audited else lambda data_iterator, model: (next(data_iterator), loss_func)
    )
    output_tensor, wrapped = forward_step(iter([loss]), CHUNK)
    assert output_tensor is loss
    wrapped(output_tensor)[0].backward()
    expected = torch.linspace(0.1, 0.9, 2).reshape(1, 2).requires_grad_()
    ((expected * 3.0).exp().sum() / 7.0).backward()
    assert torch.equal(weight.grad, expected.grad)
    assert (audit.step_end(1).metrics["compared_token_count"] == 2) is audited


@pytest.mark.parametrize("outcome", [(torch.ones(1), {}), (torch.ones(1), torch.tensor(5), {"lm loss": torch.ones(2)})])
def test_what_the_loss_function_returns_is_the_caller_s_own(audit: MegatronAudit, outcome: tuple[Any, ...]) -> None:
    """2-tuples and 3-tuples, the objects themselves; arguments reach the loss function as they are."""
    received: list[Any] = []

    def loss_func(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        received.append((args, kwargs))
        return outcome

    loss = torch.ones(1, 2)
    output_tensor, wrapped = labelled(audit, loss_func)(iter([loss]), CHUNK)
    assert output_tensor is loss
    assert wrapped.__name__ == "loss_func"
    assert wrapped(output_tensor, 3, non_loss_data=False) is outcome
    ((args, kwargs),) = received
    assert args[0] is loss
    assert args[1:] == (3,)
    assert kwargs == {"non_loss_data": False}


def test_a_loss_function_of_bound_arguments_works(audit: MegatronAudit) -> None:
    """As pretrain scripts return it: a partial has no name."""
    loss_func = functools.partial(lambda mask, output_tensor: (output_tensor * mask).sum(), torch.tensor([[1.0, 0.0]]))
    output_tensor, wrapped = labelled(audit, loss_func)(iter([torch.tensor([[1.5, 2.0]])]), CHUNK)
    assert float(wrapped(output_tensor)) == 1.5
    assert audit.step_end(1).metrics["abs_dlogp_max"] == 0.5


@pytest.mark.parametrize("result", [(torch.ones(1), None), torch.ones(1), (torch.ones(1), len, 3), None, [1, len]])
def test_a_result_without_a_loss_function_passes_as_it_is(audit: MegatronAudit, result: Any) -> None:
    """Scoring passes return None for the loss function: nothing is counted."""

    def forward_step(data_iterator: object, model: object) -> Any:
        audit.attach(rollout_log_probs=torch.zeros(1), mask=torch.ones(1))
        return result

    assert audit.wrap_forward_step(forward_step)(iter(()), CHUNK) is result
    assert audit.step_end(1).metrics["active_token_count"] == 0


def test_arguments_of_the_forward_step_reach_it(audit: MegatronAudit) -> None:
    received: list[Any] = []

    def forward_step(data_iterator: object, model: object, *args: Any, **kwargs: Any) -> None:
        """The caller's own words."""
        received.append((data_iterator, model, args, kwargs))

    wrapped = audit.wrap_forward_step(forward_step)
    data_iterator = iter(())
    wrapped(data_iterator, CHUNK, True, return_schedule_plan=False)
    assert received == [(data_iterator, CHUNK, (True,), {"return_schedule_plan": False})]
    assert (wrapped.__name__, wrapped.__doc__) == ("forward_step", "The caller's own words.")


def test_what_was_attached_belongs_to_its_own_micro_batch(audit: MegatronAudit) -> None:
    """Kills: an attachment that the next forward step, which attaches nothing, inherits."""
    attach = iter([True, False])

    def forward_step(data_iterator: Any, model: object) -> tuple[torch.Tensor, Callable[..., Any]]:
        if next(attach):
            audit.attach(rollout_log_probs=torch.tensor([-1.0]), mask=torch.ones(1))
        return next(data_iterator), torch.sum

    wrapped = audit.wrap_forward_step(forward_step)
    data_iterator = iter([torch.tensor([1.5]), torch.tensor([9.0])])
    for _ in range(2):
        output_tensor, loss_func = wrapped(data_iterator, CHUNK)
        loss_func(output_tensor)
    assert microbatches(audit.step_end(1)) == [(0, -0.5)]


def test_attached_values_of_an_evaluation_are_not_counted(audit: MegatronAudit) -> None:
    output_tensor, loss_func = labelled(audit, torch.sum)(iter([torch.ones(1, 2)]), SimpleNamespace(training=False))
    assert float(loss_func(output_tensor)) == 2.0
    assert audit.step_end(1).metrics["active_token_count"] == 0


def test_attached_values_of_another_shape_stop_nothing(audit: MegatronAudit) -> None:
    output_tensor, loss_func = labelled(audit, torch.sum, mask=torch.ones(3))(iter([torch.ones(1, 2)]), CHUNK)
    assert float(loss_func(output_tensor)) == 2.0
    report = audit.step_end(1)
    assert report.warnings == {"update_failed": 1, "nothing_compared": 1}
    assert not report.complete


# --- mode off, and the end of a step ----------------------------------------------------------------------------------


def test_mode_off_hands_back_the_functions_themselves() -> None:
    audit = register(parsed())

    def forward_step() -> None:
        """Never called here."""

    assert audit.wrap_forward_step(forward_step) is forward_step
    assert audit.wrap_schedule(forward_step) is forward_step
    observe(audit, 0.5)
    audit.attach(rollout_log_probs=None, mask=None)
    assert audit.step_end(1) is None
    audit.close()


def test_without_a_process_group_this_process_is_the_writer() -> None:
    reports: list[StepReport] = []
    sink = SimpleNamespace(write=reports.append, close=lambda: reports.append(None))
    audit = register(parsed("--rlk-consistency-mode", "audit"), sinks=[sink])
    observe(audit, 0.5)
    report = audit.step_end(1)
    assert reports == [report]
    assert report.metrics["abs_dlogp_max"] == 0.5
    audit.close()
    assert reports[-1] is None


def test_strict_stops_at_the_step_that_failed() -> None:
    audit = register(config=AuditConfig(mode="strict", limits={"abs_dlogp_max": 0.4}))
    observe(audit, 0.25)
    assert audit.step_end(1).verdict.passed
    observe(audit, 0.5)
    with pytest.raises(ConsistencyError, match=r"^step 2 failed its verdict: abs_dlogp_max is 0.5, must be <= 0.4\. "):
        audit.step_end(2)


def test_a_training_that_ends_without_close_still_writes_what_is_there(at_exit: list[Callable[[], None]]) -> None:
    """Kills: an exit handler that is not registered, or that stays when the handle was closed."""
    written: list[str] = []
    sink = SimpleNamespace(write=lambda report: written.append(report.kind), close=lambda: written.append("closed"))
    with register(config=AuditConfig(), sinks=[sink]) as audit:
        observe(audit, 0.5)
        audit.step_end(1)
        assert at_exit == [audit.auditor.close]
    assert written == ["step", "run", "closed"]
    assert at_exit == []


def test_two_audits_of_one_step_keep_their_evidence_apart(tmp_path: Path) -> None:
    """Recomputed log-probabilities and the training forward fail in one step of one rank: neither hides the other."""
    config = AuditConfig(limits={"abs_dlogp_max": 0.4})
    for forward in ("old", "current"):
        audit = register(config=config, forward=forward, dump_on_fail=tmp_path)
        observe(audit, 0.5)
        audit.step_end(1)
        audit.close()
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl"))
    assert kept == [f"{forward}/evidence_step00000001_rank00000.jsonl" for forward in ("current", "old")]
