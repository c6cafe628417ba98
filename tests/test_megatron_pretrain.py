"""The audit of `pretrain` in one process: parameters of every release, steps, reruns, evaluation; on stand-ins of
Megatron-LM's loop and of megatron-core's schedule. With the real schedule: test_megatron_layouts.py; with the real
loop: test_real_pretrain.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pretrain_loops as loop
import pytest
import torch

from rlk_audit import AuditConfig, ConsistencyError, StepReport, megatron_plugin
from rlk_audit.megatron_plugin import add_rlk_args
from rlk_audit.megatron_pretrain import PretrainAudit
from rlk_audit.sinks import Sink

RELEASES = ("0_12", "0_14", "0_18", "0_19")
TRAINING, EVALUATION = 0.25, 100.0
"""abs(dlogp) of the first micro-batch's tokens there."""


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setattr("atexit.register", lambda function: function)


class Kept(Sink):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.closed = 0

    def write(self, report: StepReport) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.closed += 1


class Training:
    """A training of one chunk; micro-batch `i` of an iteration has 1 + i tokens."""

    def __init__(self, audit: PretrainAudit, monkeypatch: pytest.MonkeyPatch) -> None:
        self.audit = audit
        self.chunk = torch.nn.Linear(1, 1)
        self.updates = 0
        self.versions: list[int] = []
        self.losses: list[Any] = []
        monkeypatch.setattr(loop, "get_forward_backward_func", lambda: self.schedule)

    def schedule(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any
    ) -> Any:
        """megatron-core's order of calls, without pipeline stages."""
        reports = []
        for _ in range(num_microbatches):
            output, loss_func = forward_step_func(data_iterator, model[0])
            reports.append(loss_func(output))
        return reports

    def forward_step(
        self, data_iterator: Iterator[torch.Tensor], model: Any
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        return next(data_iterator), self.loss_func

    def loss_func(self, log_probs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        self.versions.append(self.audit.weight_version)
        self.audit.observe(log_probs, torch.full_like(log_probs, -1.0), torch.ones_like(log_probs))
        return log_probs.sum(), {}

    def data(self, first: float) -> Callable[[int], Iterator[torch.Tensor]]:
        return lambda iteration: (torch.full((1 + i,), -1.0 - first * (1 + i)) for i in range(10))

    def providers(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        optimizer = SimpleNamespace(zero_grad=lambda: None, step=self.step)
        return (lambda: (self.data(TRAINING), self.data(EVALUATION))), (lambda: ([self.chunk], optimizer))

    def step(self) -> None:
        self.updates += 1

    def run(self, release: str, *arguments: str, positional: bool = False) -> None:
        loop.ARGUMENTS[:] = arguments
        datasets, model = self.providers()
        pretrain = self.audit.wrap_pretrain(getattr(loop, f"pretrain_{release}"))
        if release >= "0_18":
            loop.parse_and_validate_args(add_rlk_args)
        container = ["config"] if release >= "0_18" else []
        if release == "0_19":
            given = [*container, datasets, "gpt", self.forward_step, model]
        else:
            given = [*container, datasets, model, "gpt", self.forward_step]
        if positional:
            pretrain(*given)
            return
        names = ["train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"]
        values = [datasets, model, "gpt", self.forward_step]
        pretrain(*container, **dict(zip(names, values, strict=True)))


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def training(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(PretrainAudit(sinks=[kept]), monkeypatch)


AUDITED = ("--rlk-consistency-mode", "audit")


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_each_step_is_reported_once(release: str, positional: bool, training: Training, kept: Kept) -> None:
    training.run(release, *AUDITED, "--train-iters", "3", positional=positional)
    *steps, total = kept.reports
    assert [report.step for report in steps] == [1, 2, 3], "as Megatron-LM numbers what it logs"
    assert total.kind == "run" and total.metrics["compared_token_count"] == 9
    for report in steps:
        assert report.metrics["compared_token_count"] == 3, "two micro-batches of one and two tokens"
        assert report.metrics["abs_dlogp_max"] == 2 * TRAINING, "evaluation does not count"
        assert report.warnings == {}
    assert training.updates == 3
    assert kept.closed == 1


@pytest.mark.parametrize("release", RELEASES)
def test_a_rerun_counts_nothing_twice(release: str, training: Training, kept: Kept) -> None:
    training.run(release, *AUDITED, "--rerun-iteration", "1")
    first, second, _ = kept.reports
    assert first.metrics["compared_token_count"] == second.metrics["compared_token_count"] == 3
    assert (first.warnings, second.warnings) == ({}, {"duplicate_microbatch": 2})


@pytest.mark.parametrize("release", RELEASES)
def test_a_skipped_update_is_reported_and_counts_as_none(release: str, training: Training, kept: Kept) -> None:
    training.run(release, *AUDITED, "--overflow-iteration", "1", "--train-iters", "3")
    assert [report.step for report in kept.reports] == [1, 2, 3, None]
    assert [report.metrics["compared_token_count"] for report in kept.reports] == [3, 3, 3, 9]
    # Two training and two evaluation micro-batches an iteration; evaluation follows the step's end.
    assert training.versions == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]


def test_a_resumed_run_goes_on_with_its_iteration(training: Training, kept: Kept) -> None:
    training.run("0_14", *AUDITED, "--iteration", "7", "--train-iters", "9")
    assert [report.step for report in kept.reports] == [8, 9, None]
    assert training.versions[0] == 7
    assert training.audit.weight_version == 9


def test_a_second_run_in_the_process_registers_anew(training: Training, kept: Kept) -> None:
    """As after a restart inside the process, whose groups are new."""
    training.run("0_14", *AUDITED)
    first = training.audit.audit
    training.run("0_14", *AUDITED)
    assert training.audit.audit is not first
    assert [report.step for report in kept.reports] == [1, 2, None, 1, 2, None]


@pytest.mark.parametrize("release", RELEASES)
def test_off_builds_nothing(release: str, training: Training, kept: Kept) -> None:
    training.run(release)
    assert training.audit.audit.auditor is None
    assert kept.reports == [] and training.updates == 2


def test_strict_ends_the_run_at_the_failed_step(training: Training, kept: Kept) -> None:
    with pytest.raises(ConsistencyError, match=r"step 1 failed its verdict: abs_dlogp_max is 0\.5, must be <= 0\.1"):
        training.run("0_14", "--rlk-consistency-mode", "strict", "--rlk-limit", "abs_dlogp_max=0.1")
    assert [report.step for report in kept.reports] == [1, None]
    assert kept.closed == 1


def test_what_was_wrapped_is_itself_again_afterwards(training: Training) -> None:
    names = ("train", "train_step", "get_forward_backward_func")
    before = [getattr(loop, name) for name in names]
    training.run("0_14", *AUDITED)
    assert [getattr(loop, name) for name in names] == before
    with pytest.raises(ConsistencyError):
        training.run("0_14", "--rlk-consistency-mode", "strict", "--rlk-limit", "abs_dlogp_max=0.1")
    assert [getattr(loop, name) for name in names] == before


def test_arguments_of_the_training_are_kept(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def provider(parser: Any) -> Any:
        parser.add_argument("--own", type=int)
        return parser

    loop.ARGUMENTS[:] = ["--own", "5", *AUDITED]
    datasets, model = training.providers()
    training.audit.wrap_pretrain(loop.pretrain_0_14)(
        datasets, model, "gpt", training.forward_step, extra_args_provider=provider
    )
    assert loop.get_args().own == 5
    assert training.audit.audit.owns_report


def test_a_wrapper_of_pretrain_is_seen_through(training: Training, kept: Kept) -> None:
    @functools.wraps(loop.pretrain_0_14)
    def decorated(*args: Any, **kwargs: Any) -> None:
        loop.pretrain_0_14(*args, **kwargs)

    loop.ARGUMENTS[:] = AUDITED
    datasets, model = training.providers()
    training.audit.wrap_pretrain(decorated)(datasets, model, "gpt", training.forward_step)
    assert len(kept.reports) == 3


def other_pretrain(forward_step_func: Any) -> None:
    """Of a module that has no train_step."""


def test_another_function_is_refused() -> None:
    with pytest.raises(
        TypeError, match="lacks train, train_step, get_forward_backward_func, get_args; in another loop use"
    ):
        PretrainAudit().wrap_pretrain(other_pretrain)
    with pytest.raises(TypeError, match="lacks the parameter forward_step_func"):
        PretrainAudit().wrap_pretrain(loop.parse_and_validate_args)
    with pytest.raises(TypeError, match="lacks train, train_step"):
        PretrainAudit().wrap_pretrain(print)


def test_the_report_says_which_forward_it_is(training: Training, kept: Kept) -> None:
    training.run("0_14", *AUDITED)
    assert kept.reports[0].prefix == "rlk_audit_current/"
    assert kept.reports[0].metadata["train_log_probs"] == "training forward"


def test_groups_are_those_of_the_step(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.19 hands them to the step; before, the model has them."""
    asked: list[Any] = []
    monkeypatch.setattr(
        megatron_plugin, "resolve_groups", lambda *given: asked.append(given) or megatron_plugin.ParallelGroups()
    )
    training.run("0_14", *AUDITED)
    loop.parse_and_validate_args(add_rlk_args)
    datasets, model = training.providers()
    training.audit.wrap_pretrain(loop.pretrain_0_19)(
        "config", datasets, "gpt", training.forward_step, model, pg_collection="groups"
    )
    assert asked == [([training.chunk], None), ([training.chunk], "groups")]


def test_settings_in_code(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    training = Training(PretrainAudit(config=AuditConfig(worst_k=1), sinks=[kept]), monkeypatch)
    training.run("0_14")
    assert [len(report.worst_tokens) for report in kept.reports] == [1, 1, 1]
