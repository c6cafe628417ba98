"""VerlAudit: the audit of verl's batches, on its driver.

    RLK_AUDIT_MODE=audit python -m verl.trainer.main_ppo ... actor_rollout_ref.rollout.calculate_log_probs=True

verl finds ``verl_plugin`` by itself, as an entry point of the group ``verl.plugins``. It wraps verl's
``calculate_debug_metrics``, which the trainers call with the whole batch once ``old_log_probs`` were recomputed, and
adds the audit's figures to what that returns. In bypass mode ``old_log_probs`` are the rollout's own: two copies of one
thing are no comparison, so nothing is reported as compared.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from rlk_audit.auditor import Auditor
from rlk_audit.config import AuditConfig, as_config, refuse_no_function
from rlk_audit.integrations.set_up import make_auditor, needed
from rlk_audit.report import StepReport
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault

try:
    from verl import DataProto
except ImportError as error:
    raise ImportError(f"the audit of verl cannot be used ({error}): pip install 'rlk_audit[verl]'") from error

logger = logging.getLogger(__name__)


def token_batch(data: DataProto) -> TokenBatch:
    """Return a batch's tokens; a sample's index is its row.

    Args:
        data: ``batch`` holds ``old_log_probs``, ``rollout_log_probs`` and ``responses`` [samples, length], and
            ``response_mask`` of that shape, or ``attention_mask`` whose last columns are those of the responses.

    The rollout side is None where ``old_log_probs`` is the same tensor, as in bypass mode, and where there is none.

    Raises:
        TypeError: it is no DataProto.
        ValueError: a column is missing.
    """
    batch = getattr(data, "batch", None)
    if batch is None or not hasattr(batch, "get"):
        raise TypeError(f"expected verl's DataProto, got {type(data).__name__}")
    train, responses = needed(batch, "old_log_probs", "responses")
    rollout, attention = batch.get("rollout_log_probs", None), batch.get("attention_mask", None)
    samples, length = responses.shape
    attention = None if attention is None else attention[:, -length:]
    mask = batch.get("response_mask", None)
    return TokenBatch(
        train,
        None if is_bypassed(data) else rollout,
        attention if mask is None else mask,
        valid=attention,
        sample_index=torch.arange(samples, device=train.device)[:, None],
        token_position=torch.arange(length, device=train.device),
        token_ids=responses,
    )


def is_bypassed(data: Any) -> bool:
    """Return whether a batch's ``old_log_probs`` are the very tensor of the rollout's, as in bypass mode."""
    batch = getattr(data, "batch", None)
    if batch is None or not hasattr(batch, "get"):
        return False
    train, rollout = batch.get("old_log_probs", None), batch.get("rollout_log_probs", None)
    if train is None or rollout is None:
        return False
    return bool(train.data_ptr() == rollout.data_ptr() and train.numel())


class VerlAudit:
    """The audit of batches that one process holds whole, as verl's driver does; each batch is a step.

    The auditor and its sinks are made with the first batch, so that a process without one opens none.

    Args:
        config: the audit's settings; ``RLK_AUDIT_*`` variables go before it.

    Attributes:
        steps: batches so far; verl gives no number, so it is that of the next report.
    """

    def __init__(self, config: AuditConfig | None = None) -> None:
        self._config = None if config is None else as_config(config)
        self._auditor: Auditor | None = None
        self.steps = 0
        self._told_bypass = False

    def step(self, data: DataProto) -> StepReport | None:
        """Audit a batch (see ``token_batch``); return its report, None in mode ``off`` and, with ``lag=1``, at first.

        What is no batch, or lacks a column, raises nothing here: it is a failed update, and the log says of what.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict.
        """
        self._auditor = self._auditor or make_auditor(self._config)
        self.steps += 1
        if is_bypassed(data) and not self._told_bypass:
            self._told_bypass = True
            logger.warning(
                "old_log_probs are the rollout's own log-probabilities (bypass mode): there is nothing to compare them "
                "with; verl recomputes them with algorithm.rollout_correction.bypass_mode=False"
            )
        self._auditor.update(or_fault(lambda: token_batch(data)))
        return self._auditor.step(self.steps)

    def wrap_debug_metrics(self, calculate: Callable[[DataProto], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Return verl's function with the audit's figures beside its own."""
        refuse_no_function("calculate", calculate)

        @functools.wraps(calculate)
        def debug_and_audit(data: DataProto) -> dict[str, Any]:
            found = calculate(data)
            report = self.step(data)
            return found if report is None else found | logged_values(report)

        return debug_and_audit

    def wrap_bypass(self, apply_bypass_mode: Callable[..., None]) -> Callable[..., None]:
        """Return verl's function, after which the step is audited as one in which nothing can be compared."""
        refuse_no_function("apply_bypass_mode", apply_bypass_mode)

        @functools.wraps(apply_bypass_mode)
        def bypass_and_audit(batch: DataProto, *args: Any, **kwargs: Any) -> None:
            apply_bypass_mode(batch, *args, **kwargs)
            self.step(batch)

        return bypass_and_audit
