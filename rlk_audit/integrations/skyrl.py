"""The audit of a training with SkyRL, as one of its callbacks.

    RayPPOTrainer(..., callbacks=[SkyRLAudit()])

It runs in the process of the trainer, where the batch of a step is whole, so nothing is reduced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlk_audit.config import AuditConfig
from rlk_audit.integrations.set_up import driver_auditor, needed
from rlk_audit.report import StepReport
from rlk_audit.sinks import Sink
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault

try:
    from skyrl.train.utils.callbacks import TrainingCallback
except ImportError as error:
    raise ImportError(f"SkyRLAudit cannot be used ({error}): it needs the skyrl of the training") from error

logger = logging.getLogger(__name__)


class SkyRLAudit(TrainingCallback):  # type: ignore[misc, unused-ignore]
    """Audits the policy's recomputed log-probabilities of each step; a report's step is SkyRL's global step.

    The figures also go to SkyRL's own tracker, with the metrics of the step.

    Args:
        config: the audit's settings; the environment and a YAML file go before it.
        sinks: where reports go, beside those that the settings name.

    Raises:
        ValueError, ImportError, OSError: a setting is wrong, or a sink cannot be set up.
    """

    def __init__(self, config: AuditConfig | None = None, sinks: Sequence[Sink] = ()) -> None:
        self.auditor = driver_auditor(config, sinks)
        self.report: StepReport | None = None
        """The report of the last step."""
        self._unlogged: dict[str, float] = {}
        self._told = False

    def on_step_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Audit the step's batch.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict.
        """
        batch = callback_input.batch
        if batch is None or batch.get("action_log_probs") is None:
            self._tell_of_skipped_forward()
        else:
            self.auditor.update(or_fault(lambda: batch_of(batch)))
        self.report = self.auditor.step(callback_input.global_step)
        if self.report is not None:
            self._unlogged = logged_values(self.report)

    def on_log(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Add the step's figures to what the trainer logs."""
        if callback_input.logs is not None:
            callback_input.logs.update(self._unlogged)
            self._unlogged = {}

    def on_train_end(self, trainer: Any, callback_input: Any, control: Any) -> None:
        """Write the run's total and close the sinks."""
        self.auditor.close()

    def _tell_of_skipped_forward(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "SkyRL skipped the policy's forward pass before training, so its batch has no action_log_probs and "
                "there is nothing to compare"
            )


def batch_of(batch: Any) -> TokenBatch:
    """Return a training batch of SkyRL as a batch of the audit.

    Args:
        batch: its columns: ``action_log_probs, rollout_logprobs`` (None if the engine gave none), ``loss_mask,
            response_mask`` [samples, response], right-aligned, and ``sequences`` [samples, prompt and response].

    Raises:
        ValueError: a column is missing.
    """
    train, mask, response = needed(batch, "action_log_probs", "loss_mask", "response_mask")
    samples, width = train.shape
    sequences = batch.get("sequences")
    return TokenBatch.from_padded(
        train,
        batch.get("rollout_logprobs"),
        mask,
        response_start=width - (response != 0).sum(1),
        valid=response,
        sample_index=torch.arange(samples, device=train.device),
        sample_slot=torch.arange(samples, device=train.device),
        token_ids=None if sequences is None else sequences[:, -width:],
    )
