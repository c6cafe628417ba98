"""The audit of Megatron-LM's own reinforcement learning (``megatron.rl``), by one line in ``train_rl.py``.

    from megatron.rl import rl_utils
    RLAudit().wrap(rl_utils)

Every rank of a context-parallel group holds the log-probabilities of whole sequences there, so the group of the
reduction is the data-parallel one alone, and each token counts once. A token that the trainer added and the engine
never scored (the end of a text) is missing, not equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlk_audit.config import AuditConfig, as_config
from rlk_audit.megatron_plugin import MegatronAudit, register
from rlk_audit.report import StepReport
from rlk_audit.tokens import TokenBatch, or_fault

PREPARE = "prepare_data_for_update"
UNPACKED = "align_unpacked_inference_logprobs"
PACKED = "compute_packed_inference_logprobs_stats"


class RLAudit:
    """The audit of the log-probabilities that Megatron-LM recomputes for each batch of rollouts, before any update.

    Args:
        config: the audit's settings.
        options: further keyword arguments of ``megatron_plugin.register``, such as ``args``.
    """

    def __init__(self, config: AuditConfig | None = None, **options: Any) -> None:
        self.audit: MegatronAudit | None = None
        """The registered audit, from the first batch of rollouts on."""
        self.report: StepReport | None = None
        """The report of the last batch, on ranks of the last pipeline stage."""
        self._options = {"config": as_config(config), "cp_sharded": False, **options}
        self._batches = 0

    def wrap(self, rl_utils: Any) -> None:
        """Audit from here on what this module prepares; what its functions return is handed on untouched.

        Raises:
            TypeError: the module lacks one of the functions.
        """
        missing = [name for name in (PREPARE, UNPACKED, PACKED) if not callable(getattr(rl_utils, name, None))]
        if missing:
            name = getattr(rl_utils, "__name__", type(rl_utils).__name__)
            raise TypeError(f"expected megatron.rl.rl_utils, got {name}, which lacks {', '.join(missing)}")
        setattr(rl_utils, UNPACKED, self._observing(getattr(rl_utils, UNPACKED), unpacked_batch))
        setattr(rl_utils, PACKED, self._observing(getattr(rl_utils, PACKED), packed_batch))
        setattr(rl_utils, PREPARE, self._stepping(getattr(rl_utils, PREPARE)))

    def _observing(self, function: Callable[..., Any], batch: Callable[..., TokenBatch]) -> Callable[..., Any]:
        @functools.wraps(function)
        def audited(*args: Any, **kwargs: Any) -> Any:
            if self.audit is not None and self.audit.owns_report:
                self.audit.observe(or_fault(lambda: batch(*args, **kwargs)))
            return function(*args, **kwargs)

        return audited

    def _stepping(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def audited(*args: Any, **kwargs: Any) -> Any:
            """Collective: every rank of the training must call this."""
            if self.audit is None:
                self.audit = register(**self._options)
            result = prepare(*args, **kwargs)
            self.report = self.audit.step_end(self._batches)
            self._batches += 1
            return result

        return audited


def unpacked_batch(
    inference_logprobs: Sequence[Tensor | None] | None,
    old_logprobs_for_data: Tensor,
    generation_masks: Tensor,
    group_stats: Any = None,
) -> TokenBatch:
    """Return rows of whole sequences as a batch; the arguments are those of Megatron-LM's own function.

    Args:
        inference_logprobs: a row's engine log-probabilities, float [generated tokens, or fewer]; None is none at all.
        old_logprobs_for_data: float [rows, length - 1]; column i scores token i + 1.
        generation_masks: [rows, length or more], nonzero where the token was generated.
        group_stats: not used.
    """
    train = old_logprobs_for_data.detach()
    generated = generation_masks[:, 1 : 1 + train.shape[1]].to(train.device) != 0
    rollout = torch.zeros(train.shape, dtype=torch.float32, device=train.device)
    missing = generated.clone()
    for row, values in enumerate(inference_logprobs or ()):
        if values is None:
            continue
        places = generation_masks[row].nonzero()[:, 0].to(train.device) - 1
        given = values.reshape(-1)[: len(places)].to(rollout)
        places = places[: len(given)]
        inside = (places >= 0) & (places < train.shape[1])
        rollout[row, places[inside]] = given[inside]
        missing[row, places[inside]] = False
    start = (generation_masks.to(train.device) != 0).long().argmax(1)
    return TokenBatch.from_padded(
        train, rollout, generated, response_start=start, index_scores="next_token", rollout_missing=missing
    )


def packed_batch(
    old_logprobs: Tensor,
    packed_inference_logprobs: Tensor | None,
    packed_loss_mask: Tensor,
    group_stats: Any = None,
    filled_mask: Tensor | None = None,
) -> TokenBatch:
    """Return packed sequences as a batch; the arguments are those of Megatron-LM's own function.

    Args:
        old_logprobs, packed_inference_logprobs: float [bins, length - 1].
        packed_loss_mask: [bins, length], nonzero where the token is trained on.
        group_stats: not used.
        filled_mask: bool [bins, length - 1], where the engine gave a value; everywhere if None.
    """
    train = old_logprobs.detach()
    mask = packed_loss_mask[:, 1:].to(train.device) != 0
    missing = None if filled_mask is None else ~filled_mask.to(train.device)
    rollout = None if packed_inference_logprobs is None else packed_inference_logprobs.to(train.device)
    return TokenBatch(train, rollout, mask, rollout_missing=missing)
