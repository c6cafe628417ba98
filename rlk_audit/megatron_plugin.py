"""Audit of a megatron-core training: arguments, registration, a hook for the policy loss, the end of a step.

    audit = register(args, model=model)                                # every rank
    forward_step = audit.wrap_forward_step(forward_step)
    schedule = audit.wrap_schedule(get_forward_backward_func())
    ...
    audit.observe(train_log_probs, rollout_log_probs, mask, sample_index=...)   # inside loss_func
    ...
    audit.step_end(iteration)                                          # every rank

The modules of this name are the only ones that know megatron; they import nothing of it, and find what it loaded.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlk_audit.allreduce import (
    Group,
    agree_on_layout,
    global_rank,
    group_place,
    own_gloo_group,
    world_group,
)
from rlk_audit.auditor import Auditor, close_all, set_up_failure
from rlk_audit.config import AuditConfig, refuse_no_function
from rlk_audit.evidence import EvidenceBuffer
from rlk_audit.megatron_groups import ParallelGroups, Replicas, StrictGroup
from rlk_audit.megatron_groups import resolve_groups as resolve_groups
from rlk_audit.ragged import as_tensor
from rlk_audit.report import StepReport
from rlk_audit.settings import Settings, resolve_settings
from rlk_audit.settings import add_rlk_args as add_rlk_args
from rlk_audit.settings import validate_rlk_args as validate_rlk_args
from rlk_audit.sinks import Sink
from rlk_audit.tokens import TokenBatch, Values

logger = logging.getLogger(__name__)

ForwardStep = Callable[..., Any]

FORWARDS = {"old": "recomputed before any update", "current": "training forward"}
"""What may be audited -> what the reports say of it."""
_AGREED_SETTINGS = ("reduction_group", "cp_sharded", "tp_agreement_interval")
"""Settings of the run that decide which collectives a rank starts."""
CURRENT_PREFIX = "rlk_audit_current/"


def register(
    args: argparse.Namespace | None = None,
    *,
    config: AuditConfig | None = None,
    model: Any = None,
    pg_collection: Any = None,
    group: Group = None,
    forward: str = "old",
    sinks: Sequence[Sink] = (),
    device: str | torch.device | None = None,
    evaluation: bool = False,
    **in_code: Any,
) -> MegatronAudit:
    """Collective: every rank of the training must call this once, on every pipeline stage, whatever its mode.

    Args:
        args: parsed arguments of ``add_rlk_args``; they go before the environment, a YAML file and ``config``.
        config: the audit's settings as given in code; without any mode anywhere the audit is ``off``.
        model: model or model chunks, to find the groups by.
        pg_collection: megatron-core's ProcessGroupCollection, goes before the model's.
        group: the group to reduce over, goes before everything else.
        forward: which train log-probabilities will be observed: ``old``, recomputed before any update (a step is a
            rollout batch), or ``current``, those of the training forward (a step is an optimizer step), which are
            reported under the prefix ``rlk_audit_current/``. Register twice to audit both.
        sinks: where reports go, beside those that the settings name; the last rank, which owns a result, uses them.
        device: where the state lives; the current CUDA device if there is one, else the CPU.
        evaluation: also count what a model in evaluation mode computes inside a wrapped forward step, as old
            log-probabilities often are.
        in_code: other settings of the run as given in code (see ``settings.Settings``), such as ``cp_sharded=False``
            where log-probabilities were gathered over context parallelism.

    Raises:
        LayoutMismatchError: the configurations differ over the ranks, or some ranks could not be set up; every rank
            raises the same text.
        ValueError, ImportError, OSError: a setting is wrong, or a sink cannot be set up, on every rank.
    """
    if forward not in FORWARDS:
        raise ValueError(f"forward must be {' or '.join(map(repr, FORWARDS))}, got {forward!r}")
    try:
        prepared = _prepare(args, config, in_code, forward, resolve_groups(model, pg_collection), group, sinks)
    except Exception as error:  # the other ranks must not wait for this one
        close_all(sinks)
        agree_on_layout(None, failure=error)
        raise
    settings, config, groups, reduction_group = prepared.settings, prepared.config, prepared.groups, prepared.group
    try:
        hosts = agree_on_layout(config, further={name: getattr(settings, name) for name in _AGREED_SETTINGS})
    except Exception:
        close_all(prepared.sinks)
        raise
    if config.mode == "off":
        close_all(prepared.sinks)
        return MegatronAudit(None)
    strict = _strict_group(settings, groups)
    if not groups.on_last_stage:
        close_all(prepared.sinks)
        return MegatronAudit(None, strict)
    side_group = settings.reduction_group == "gloo"
    if side_group:
        reduction_group = own_gloo_group(reduction_group)
    auditor = Auditor(
        config,
        reduction_group,
        prepared.sinks,
        _device() if device is None else device,
        writer=_is_writer(),
        agreed=hosts,
        side_group=side_group,
        evidence=_evidence(settings, config, groups, forward),
    )
    return MegatronAudit(auditor, strict, Replicas(groups.tp, settings.tp_agreement_interval), evaluation=evaluation)


@dataclass(frozen=True)
class _Prepared:
    """What a rank can do for its registration without the others."""

    settings: Settings
    config: AuditConfig
    groups: ParallelGroups
    group: Group
    sinks: tuple[Sink, ...]


def _prepare(
    args: argparse.Namespace | None,
    config: AuditConfig | None,
    in_code: dict[str, Any],
    forward: str,
    groups: ParallelGroups,
    group: Group,
    sinks: Sequence[Sink],
) -> _Prepared:
    settings = resolve_settings(args, config, **in_code)
    config = _of_forward(settings.config, forward)
    reduction_group = group or (groups.dp_cp if settings.cp_sharded else groups.dp)
    built = tuple(sinks)
    if config.mode == "off" and config.limits and _is_writer():
        logger.warning("the audit is off, so its limits bound nothing: set the mode to audit or strict")
    # Also on a stage that reduces nothing, whose groups are as large: it must not go on alone.
    failure = set_up_failure(config, reduction_group, sinks)
    if failure is not None:
        raise failure
    if config.mode != "off" and _is_writer():
        built = settings.build_sinks(sinks, **_writers_of_the_training())
    return _Prepared(settings, config, groups, reduction_group, built)


def _is_writer() -> bool:
    """Return whether this is the last rank, which is on the last stage and so owns a result."""
    return global_rank() == group_place()[1] - 1


def _strict_group(settings: Settings, groups: ParallelGroups) -> StrictGroup | None:
    """Return the ranks that stop together: those of one model, or all where each replica has a verdict of its own."""
    if settings.config.mode != "strict":
        return None
    return StrictGroup(groups.mp or groups.pp if settings.cp_sharded else world_group())


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _evidence(settings: Settings, config: AuditConfig, groups: ParallelGroups, forward: str) -> EvidenceBuffer | None:
    """Return where a failed step's batches are kept; tensor-parallel replicas hold the same, so the first is enough.

    Each forward has a folder of its own, since both may be audited in one step.
    """
    if settings.dump_on_fail is None or (groups.tp is not None and group_place(groups.tp)[0] != 0):
        return None
    return EvidenceBuffer(settings.dump_on_fail / forward, config=config, max_disk_bytes=settings.dump_max_bytes)


def _writers_of_the_training() -> dict[str, Any]:
    """Return Megatron-LM's TensorBoard writer and W&B run where the training loaded and made them."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return {}
    return {
        "tensorboard_writer": global_vars.get_tensorboard_writer(),
        "wandb_run": global_vars.get_wandb_writer(),
    }


def _of_forward(config: AuditConfig, forward: str) -> AuditConfig:
    prefix = config.prefix
    if forward == "current" and prefix == AuditConfig().prefix:
        prefix = CURRENT_PREFIX
    return replace(config, prefix=prefix, metadata={**config.metadata, "train_log_probs": FORWARDS[forward]})


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation of a micro-batch's loss."""

    microbatch: int
    training: bool


class MegatronAudit:
    """A rank's handle on the audit; where nothing is to be done (mode ``off``, an earlier stage) its calls are free."""

    def __init__(
        self,
        auditor: Auditor | None,
        strict: StrictGroup | None = None,
        replicas: Replicas | None = None,
        evaluation: bool = False,
    ) -> None:
        self.auditor = auditor
        self.weight_version = 0
        """Optimizer updates of the trainer so far; ``step_end`` counts them, a resumed run sets it."""
        self._strict = strict
        self._replicas = replicas or Replicas()
        self._count_evaluation = evaluation
        self._left_out = self._counted = 0
        self._told_left_out = False
        self._steps = 0
        self._calls: Counter[int] = Counter()
        self._evaluation: _Evaluation | None = None
        self._attached: dict[str, Any] | None = None

    @property
    def owns_report(self) -> bool:
        """Whether ``step_end`` returns a report on this rank."""
        return self.auditor is not None

    def observe(
        self,
        train_log_probs: Values | TokenBatch,
        rollout_log_probs: Values | None = None,
        mask: Values | None = None,
        *,
        microbatch: int | None = None,
        weight_version: int | Values | None = None,
        **fields: Any,
    ) -> None:
        """Add one micro-batch's log-probabilities; the arguments are those of ``Collector.update``.

        Inside a loss function of ``wrap_forward_step`` the micro-batch's number is known, and evaluation is left out.
        ``weight_version`` is the trainer's ``weight_version`` whose weights sampled, for all or each token, -1 where it
        is unknown; from it come the updates since the rollout.
        """
        if self.auditor is None:
            return
        evaluation = self._evaluation
        if evaluation is not None and not evaluation.training and not self._count_evaluation:
            self._left_out += 1
            return
        if microbatch is None and evaluation is not None:
            microbatch = evaluation.microbatch
        if weight_version is not None:
            fields["updates_since_rollout"] = self._updates_since(weight_version)
        self._counted += 1
        self.auditor.update(train_log_probs, rollout_log_probs, mask, microbatch=microbatch, **fields)

    def _updates_since(self, version: int | Values) -> int | Tensor:
        if isinstance(version, int):
            return -1 if version < 0 else self.weight_version - version
        version = as_tensor(version)
        return torch.where(version < 0, -1, self.weight_version - version)

    def attach(self, rollout_log_probs: Values | None, mask: Values, **fields: Any) -> None:
        """Inside a wrapped forward step: give what ``labels=`` training lacks, shaped as the per-token loss.

        The wrapper takes minus the loss as the train log-probabilities and observes them.
        """
        if self.auditor is not None:
            self._attached = {"rollout_log_probs": rollout_log_probs, "mask": mask, **fields}

    def wrap_forward_step(self, forward_step_func: ForwardStep) -> ForwardStep:
        """Return a forward step that numbers its micro-batches and, after ``attach``, observes the per-token loss.

        What the forward step and its loss function return is handed on untouched.
        """
        refuse_no_function("forward_step_func", forward_step_func)
        if self.auditor is None:
            return forward_step_func

        @functools.wraps(forward_step_func)
        def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            evaluation = _Evaluation(self._calls[id(model)], getattr(model, "training", True))
            self._calls[id(model)] += 1
            self._attached = None
            result = forward_step_func(data_iterator, model, *args, **kwargs)
            attached, self._attached = self._attached, None
            if not (isinstance(result, tuple) and len(result) == 2 and callable(result[1])):
                return result
            return result[0], self._wrap_loss(result[1], evaluation, attached)

        return forward_step

    def wrap_schedule(self, forward_backward_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a schedule that numbers micro-batches from 0 each time it trains: a rerun counts nothing twice.

        With ``forward_only`` the numbers go on, since a batch may be scored in several parts and nothing reruns it.
        """
        refuse_no_function("forward_backward_func", forward_backward_func)
        if self.auditor is None:
            return forward_backward_func

        @functools.wraps(forward_backward_func)
        def schedule(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("forward_only", False):
                self._calls.clear()
            return forward_backward_func(*args, **kwargs)

        return schedule

    def step_end(
        self, iteration: int, updated: bool = True, *, expected_active_tokens: int | None = None
    ) -> StepReport | None:
        """Collective: every rank of every stage must call this at the end of a step, also of one that was skipped.

        Args:
            iteration: the step's number.
            updated: whether the optimizer changed the weights in this step.
            expected_active_tokens: see ``Auditor.step``; it shows, among others, a wrong ``cp_sharded``.

        Returns:
            The group's report on ranks of the last stage, else None.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict; every rank of every stage raises
                it, with the same text.
        """
        self._calls.clear()
        self._steps += 1
        self.weight_version += updated
        if self.auditor is not None:
            self._replicas.compare(self.auditor.collector, self._steps)
        report = None
        if self.auditor is not None:
            report = self.auditor.end_step(iteration, expected_active_tokens=expected_active_tokens)
            self._tell_left_out(iteration)
        if self._strict is not None:
            message = None
            if self.auditor is not None and report is not None:
                message = self.auditor.failure(report)
            self._strict.stop_if_failed(message)
        return report

    def _tell_left_out(self, iteration: int) -> None:
        """Say once why nothing was counted, where the model was in evaluation mode."""
        if self._left_out and not self._counted and not self._told_left_out:
            logger.warning(
                "step %s: %s micro-batches were left out as evaluation, since the model was not in training mode, and "
                "none was counted; old log-probabilities that are recomputed so need register(..., evaluation=True)",
                iteration,
                self._left_out,
            )
            self._told_left_out = True
        self._left_out = self._counted = 0

    def close(self) -> None:
        """Finish what is in flight, write the run's total and close the sinks. Starts no communication."""
        if self.auditor is not None:
            self.auditor.close()

    def __enter__(self) -> MegatronAudit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wrap_loss(
        self, loss_func: Callable[..., Any], evaluation: _Evaluation, attached: dict[str, Any] | None
    ) -> Callable[..., Any]:
        @functools.wraps(loss_func)
        def audited_loss(output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._evaluation = evaluation
            try:
                if attached is not None:
                    # Before the loss function and the schedule: both may change the tensor in place.
                    self.observe(-output_tensor.detach(), **attached)
                return loss_func(output_tensor, *args, **kwargs)
            finally:
                self._evaluation = None

        return audited_loss


class NotStarted(MegatronAudit):
    """Stands for an audit that a hook will register; what comes before that is lost, and the first time is told.

    Args:
        sentence: which hook is missing.
        args, config: what the mode is resolved of; where it is ``off`` nothing is told.
    """

    def __init__(
        self, sentence: str, args: argparse.Namespace | None = None, config: AuditConfig | None = None
    ) -> None:
        super().__init__(None)
        self._sentence: str | None = sentence
        self._settings = args, config

    def observe(self, *args: Any, **fields: Any) -> None:
        """Say once that nothing of this is audited."""
        self._tell()

    def attach(self, *args: Any, **fields: Any) -> None:
        """Say once that nothing of this is audited."""
        self._tell()

    def _tell(self) -> None:
        sentence, self._sentence = self._sentence, None
        if sentence is not None and self._mode() != "off":
            logger.warning("the audit was never started, so what it is given is lost: %s", sentence)

    def _mode(self) -> str | None:
        try:
            return resolve_settings(*self._settings).config.mode
        except Exception:  # a wrong setting is told where the audit is registered
            return None
