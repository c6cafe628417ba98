"""GrpoAudit: the audit of a TRL ``GRPOTrainer``, which it neither subclasses nor changes.

    trainer = GRPOTrainer(...)
    GrpoAudit(trainer)  # every process
    trainer.train()

The rollout side is the trainer's ``sampling_per_token_logps``, which TRL has with ``use_vllm=True`` or a
``rollout_func``; plain generation records none. The train side is what the loss takes for the old policy:
``old_per_token_logps``, or, where TRL leaves them out because no update lies between generation and loss, those of the
training forward. So it is always drift before any update.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlk_audit.allreduce import Group
from rlk_audit.config import AuditConfig
from rlk_audit.integrations.set_up import make_auditor, needed
from rlk_audit.report import StepReport
from rlk_audit.sinks import Sink
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault

try:
    from transformers import TrainerCallback
    from trl import GRPOTrainer
except ImportError as error:
    raise ImportError(f"GrpoAudit cannot be used ({error}): pip install 'rlk_audit[trl]'") from error

logger = logging.getLogger(__name__)

SAMPLE_INDEX = "rlk_audit_sample_index"
"""Key under which a generation batch carries the samples' places through TRL's shuffle."""

MARK = "rlk_audit"
"""Attribute by which a trainer's wrapped ``log`` is known."""

Batch = dict[str, Any]


def token_batch(batch: Batch, train_log_probs: Tensor | None) -> TokenBatch:
    """Return a batch of TRL's completions with the trainer's log-probabilities of them.

    Args:
        batch: ``completion_mask, completion_ids`` [samples, length], where known ``sampling_per_token_logps`` and
            ``tool_mask`` of that shape, and the samples' places under SAMPLE_INDEX.
        train_log_probs: float of that shape.

    Raises:
        ValueError: a column is missing.
    """
    if train_log_probs is None:
        raise ValueError("the trainer's log-probabilities are missing")
    valid, ids = needed(batch, "completion_mask", "completion_ids")
    tool = batch.get("tool_mask")
    return TokenBatch(
        train_log_probs,
        batch.get("sampling_per_token_logps"),
        valid if tool is None else valid * tool,
        valid=valid,
        sample_index=batch[SAMPLE_INDEX][:, None],
        token_position=torch.arange(valid.shape[1], device=valid.device),
        token_ids=ids,
    )


class GrpoAudit(TrainerCallback):
    """Collective: every process of the trainer must construct one, with the same arguments, before ``train``.

    It adds itself to the trainer's callbacks. A step of the audit is an optimizer step before which completions were
    generated; its figures go to the trainer's own log, where ``logging_steps`` passes over steps those of the last one,
    or of one that failed its verdict. Evaluation is left out.

    Args:
        trainer: the trainer.
        config: the audit's settings, ``AuditConfig()`` if None; ``RLK_AUDIT_*`` variables go before it.
        group: processes that hold different samples; all of them if None.
        sinks: where reports go beside the trainer's log.

    Attributes:
        auditor: the auditor, whose ``config.mode`` is ``off`` where a variable says so.

    Raises:
        TypeError: ``trainer`` is no GRPOTrainer.
        ValueError: the trainer has an audit already.
        LayoutMismatchError, ValueError, ImportError, OSError: as ``make_auditor``.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        config: AuditConfig | None = None,
        *,
        group: Group = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        if not isinstance(trainer, GRPOTrainer):
            raise TypeError(f"expected a GRPOTrainer of TRL, got {type(trainer).__name__}")
        if hasattr(getattr(trainer, "log", None), MARK):
            raise ValueError("the trainer already has a GrpoAudit; one counts each token, two would log it twice")
        self.auditor = make_auditor(
            AuditConfig() if config is None else config, group, sinks, trainer.accelerator.device
        )
        self._trainer = trainer
        self._generations = 0
        self._slices_to_score = 0
        self._in_loss: Batch | None = None
        self._expected: Tensor | int | None = 0
        self._unlogged: StepReport | None = None
        if self.auditor.collector is None:
            return
        if not trainer.use_vllm and trainer.rollout_func is None and trainer.accelerator.is_main_process:
            logger.warning(
                "TRL records the log-probabilities of sampling with use_vllm=True or a rollout_func alone, and this "
                "trainer has neither: nothing will be compared"
            )
        for name, wrap in (
            ("_generate_and_score_completions", self._wrap_generation),
            ("_compute_loss", self._wrap_loss),
            ("_get_per_token_logps_and_entropies", self._wrap_scoring),
            ("log", self._wrap_log),
        ):
            setattr(trainer, name, wrap(getattr(trainer, name)))
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective: every process comes here at the end of an optimizer step, and all of them after a generation.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict; every process raises it.
        """
        if not self._generations:
            return
        expected = None if self._expected is None else int(self._expected)
        self._expected, self._generations = 0, 0
        self._keep(self.auditor.step(state.global_step, expected_active_tokens=expected))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the run's total and close the sinks."""
        self.auditor.close()

    def _keep(self, report: StepReport | None) -> None:
        """Keep the report for the trainer's log, unless one that failed waits there."""
        waiting = self._unlogged
        if waiting is None or not waiting.failures:
            self._unlogged = report or waiting

    def _observe(self, batch: Batch, train_log_probs: Tensor | None) -> None:
        self.auditor.update(or_fault(lambda: token_batch(batch, train_log_probs)))

    def _sample_index(self, samples: int, device: torch.device) -> Tensor:
        """Return each sample's place among those that all processes generated for this step, int64 [samples]."""
        accelerator = self._trainer.accelerator
        first = samples * (accelerator.num_processes * self._generations + accelerator.process_index)
        return torch.arange(first, first + samples, device=device)

    def _wrap_generation(self, generate: Callable[..., Batch]) -> Callable[..., Batch]:
        @functools.wraps(generate)
        def generated(*args: Any, **kwargs: Any) -> Batch:
            batch = generate(*args, **kwargs)
            if not self._trainer.model.training:
                return batch
            ids, count = batch.get("completion_ids"), batch.get("num_items_in_batch")
            if ids is not None:
                batch[SAMPLE_INDEX] = self._sample_index(len(ids), ids.device)
            self._generations += 1
            self._expected = None if count is None or self._expected is None else self._expected + count
            self._slices_to_score = 0
            if batch.get("old_per_token_logps") is not None:
                self._observe(batch, batch["old_per_token_logps"])
            else:
                self._slices_to_score = self._trainer.args.steps_per_generation
            return batch

        return generated

    def _wrap_loss(self, compute_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(compute_loss)
        def loss(model: Any, inputs: Batch) -> Tensor:
            if self._slices_to_score and self._trainer.model.training:
                self._in_loss = inputs
            try:
                return compute_loss(model, inputs)
            finally:
                self._in_loss = None

        return loss

    def _wrap_scoring(self, score: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        @functools.wraps(score)
        def scored(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            result = score(*args, **kwargs)
            if self._in_loss is not None:
                inputs, self._in_loss = self._in_loss, None
                self._slices_to_score -= 1
                self._observe(inputs, result[0])
            return result

        return scored

    def _wrap_log(self, log: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(log)
        def logged(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if self._unlogged is not None and self._trainer.model.training:
                logs.update(logged_values(self._unlogged))
                self._unlogged = None
            log(logs, *args, **kwargs)

        setattr(logged, MARK, self)
        return logged
