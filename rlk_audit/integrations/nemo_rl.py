"""The audit of a training with NeMo-RL: its logger, and its loss function, wrapped where a launch script makes them.

    grpo_train(..., loss_fn=AuditedLoss(loss_fn), ..., logger=AuditedLogger(logger), ...)

The logger is handed the whole batch of each step, both log-probabilities in it, and gives full reports. The loss
function runs in the workers, where no hook ends a step: it gives the figures that add up, and NeMo-RL adds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig, as_config, refuse_no_function
from rlk_audit.integrations.set_up import driver_auditor, needed
from rlk_audit.report import StepReport
from rlk_audit.settings import resolve_settings
from rlk_audit.sinks import Sink
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault

MEANS = ("abs_dlogp_mean", "dlogp_mean", "approx_kl0", "clipfrac0", "tail_frac_ln2", "prob_diff_mean")
"""Figures of a token's mean that the loss function returns, divided by the tokens of all workers."""
COUNTS = ("active_token_count", "compared_token_count", "warning/update_failed")
"""Figures that it returns as they are, to be summed."""
_STEP = re.compile(r"train_data_step([0-9]+)\.jsonl$")


class AuditedLoss:
    """A loss function of NeMo-RL that also returns figures of its audit; loss and metrics are those of ``loss_fn``.

    Everything else about it (``loss_type``, ``input_type``, ...) is asked of ``loss_fn``, and it can be pickled if that
    can.

    Args:
        loss_fn: the loss function, called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and what its
            ``input_type`` asks for.
        config: the audit's settings; the environment of this process and a YAML file go before it.

    Raises:
        TypeError: ``loss_fn`` is no function.
        ValueError, ImportError: a setting is wrong.
    """

    def __init__(self, loss_fn: Callable[..., Any], config: AuditConfig | None = None) -> None:
        refuse_no_function("loss_fn", loss_fn)
        self.loss_fn = loss_fn
        self.config = resolve_settings(None, as_config(config)).config

    def __getattr__(self, name: str) -> Any:
        if name in ("loss_fn", "config") or name.startswith("__"):  # not yet set, while it is unpickled
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """What each metric was divided by, in NeMo-RL's own terms; the audit's are those of its equals."""
        theirs: dict[str, Any] = dict(getattr(self.loss_fn, "metric_normalizations", None) or {})
        equals = {"token_mult_prob_error": MEANS, "num_valid_samples": COUNTS}
        for known, names in equals.items():
            if known in theirs:
                theirs |= {self.config.prefix + name: theirs[known] for name in names}
        return theirs

    def __call__(self, *args: Any, data: Mapping[str, Any], **given: Any) -> tuple[Any, dict[str, Any]]:
        """Return what ``loss_fn`` returns, with the audit's figures among the metrics."""
        current = args[0] if args else given.get("next_token_logprobs")
        audited = self._figures(current, data, given.get("global_valid_toks"))
        loss, metrics = self.loss_fn(*args, data=data, **given)
        return loss, {**metrics, **audited}

    def _figures(self, current: Tensor | None, data: Mapping[str, Any], global_valid_toks: Any) -> dict[str, float]:
        if self.config.mode == "off":
            return {}

        def build() -> TokenBatch:
            if global_valid_toks is None:
                raise ValueError("global_valid_toks is missing")
            on_policy = getattr(self.loss_fn, "force_on_policy_ratio", False)
            return sequences_batch(current if on_policy else needed(data, "prev_logprobs")[0][:, 1:], data)

        batch = or_fault(build)
        collector = Collector(self.config, getattr(batch.train_log_probs, "device", "cpu"))
        collector.update(batch)
        found = collector.compute().metrics
        compared = found["compared_token_count"]
        share = compared / max(float(global_valid_toks), 1.0) if compared else 0.0
        means = {name: found[name] * share if compared else 0.0 for name in MEANS}
        counts = {name: float(found[name]) for name in COUNTS}
        return {self.config.prefix + name: value for name, value in (means | counts).items()}


class AuditedLogger:
    """A logger of NeMo-RL that audits each step's batch as the trainer logs it; all else is done by ``logger``.

    Args:
        logger: the logger.
        config: the audit's settings; the environment and a YAML file go before it.
        sinks: where reports go, beside those that the settings name and the logger's own trackers.

    Raises:
        TypeError: ``logger`` is none of NeMo-RL.
        ValueError, ImportError, OSError: a setting is wrong, or a sink cannot be set up.
    """

    def __init__(self, logger: Any, config: AuditConfig | None = None, sinks: Sequence[Sink] = ()) -> None:
        missing = [name for name in ("log_batched_dict_as_jsonl", "log_metrics") if not hasattr(logger, name)]
        if missing:
            raise TypeError(
                f"expected a logger of NeMo-RL, got {type(logger).__name__}, which lacks {', '.join(missing)}"
            )
        self.logger = logger
        self.auditor = driver_auditor(config, sinks)
        self.report: StepReport | None = None
        """The report of the last step."""

    def __getattr__(self, name: str) -> Any:
        if name == "logger":
            raise AttributeError(name)
        return getattr(self.logger, name)

    def log_batched_dict_as_jsonl(self, to_log: Any, filename: str) -> None:
        """Log as ``logger`` does, and audit the training batch of a step.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict.
        """
        self.logger.log_batched_dict_as_jsonl(to_log, filename)
        step = _STEP.search(filename)
        if step is None:
            return
        if to_log.get("prev_logprobs") is not None:
            self.auditor.update(or_fault(lambda: logged_batch(to_log)))
        self.report = self.auditor.step(int(step[1]))
        if self.report is not None:
            self.logger.log_metrics(logged_values(self.report), int(step[1]))


def logged_batch(logged: Mapping[str, Any]) -> TokenBatch:
    """Return the batch that NeMo-RL logs; it has other names for what its loss functions are given."""
    train, mask, kept = map(_tensor, needed(logged, "prev_logprobs", "token_loss_mask", "sample_loss_mask"))
    rollout = logged.get("generation_logprobs")
    named = {
        "input_ids": logged.get("token_ids"),
        "token_mask": mask,
        "sample_mask": kept,
        "generation_logprobs": None if rollout is None else _tensor(rollout),
        "input_lengths": logged.get("input_lengths"),
    }
    index = torch.arange(len(mask))
    return sequences_batch(train[:, 1:], named, sample_index=index, sample_slot=index)


def sequences_batch(train: Any, data: Mapping[str, Any], **fields: Any) -> TokenBatch:
    """Return rows of whole sequences as a batch.

    Args:
        train: float [samples, length - 1]; column i scores token i + 1.
        data: ``generation_logprobs`` (None if the engine gave none)``, token_mask`` [samples, length], of which column
            i is of token i, ``sample_mask`` [samples], and where known ``input_ids`` [samples, length] and
            ``input_lengths`` [samples].
        fields: other fields of TokenBatch.

    Raises:
        ValueError: a column is missing.
    """
    mask, kept = needed(data, "token_mask", "sample_mask")
    rollout = data.get("generation_logprobs")
    response = mask[:, 1:] != 0
    width = response.shape[1]
    column = torch.arange(width, device=response.device)
    start = torch.where(response.any(1), response.long().argmax(1), width)
    if data.get("input_lengths") is not None:
        length = _tensor(data["input_lengths"]).to(response.device)[:, None]
        fields["valid"] = (column >= start[:, None]) & (column + 1 < length)
    if data.get("input_ids") is not None:
        fields["token_ids"] = _tensor(data["input_ids"])[:, 1:]
    return TokenBatch.from_padded(
        train,
        None if rollout is None else rollout[:, 1:],
        response & (kept != 0)[:, None],
        response_start=start,
        **fields,
    )


def _tensor(values: Any) -> Tensor:
    return torch.as_tensor(values)
