"""The audit of a training with NeMo-RL: its logger, and its loss function, wrapped where a launch script makes them.

    grpo_train(..., loss_fn=AuditedLoss(loss_fn), ..., logger=AuditedLogger(logger), ...)

The logger is handed the whole batch of each step, both log-probabilities in it, and gives full reports. The loss
function runs in the workers, where no hook ends a step: it gives sums over the compared tokens and counts, which
NeMo-RL adds up. How many tokens the step compares is known only then, so the means are made of the added sums.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig, as_config, refuse_no_function
from rlk_audit.integrations.set_up import driver_auditor, needed
from rlk_audit.metrics import TOKEN_WARNINGS
from rlk_audit.ragged import as_tensor
from rlk_audit.report import StepReport
from rlk_audit.settings import resolve_settings
from rlk_audit.sinks import Sink
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault
from rlk_audit.warning_log import MEANINGS

logger = logging.getLogger(__name__)

SUMS = {
    "abs_dlogp_sum": "abs_dlogp_mean",
    "dlogp_sum": "dlogp_mean",
    "approx_kl0_sum": "approx_kl0",
    "clipfrac0_sum": "clipfrac0",
    "tail_frac_ln2_sum": "tail_frac_ln2",
    "prob_diff_sum": "prob_diff_mean",
}
"""Sums over compared tokens that the loss function returns -> the mean that each is of."""
COMPARED = "compared_token_count"
COUNTS = ("active_token_count", COMPARED, *(f"warning/{code}" for code in (*TOKEN_WARNINGS, "update_failed")))
"""Counts that it returns."""
ARGUMENTS = ("next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks")
"""The first arguments of a loss function; releases before 0.6 hand them over by place, the first as logits."""
_INTERFACES = "nemo_rl.algorithms.loss.interfaces"
_STEP = re.compile(r"train_data_step([0-9]+)\.jsonl$")


class AuditedLoss:
    """A loss function of NeMo-RL that also returns figures of its audit; loss and metrics are those of ``loss_fn``.

    The figures are SUMS and COUNTS of a micro-batch, behind the prefix; ``step_means`` makes means of what NeMo-RL
    added up. Everything else about it (``loss_type``, ``input_type``, ...) is asked of ``loss_fn``, and it can be
    pickled if that can.

    Args:
        loss_fn: the loss function, called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and what its
            ``input_type`` asks for.
        config: the audit's settings; the environment of this process and a YAML file go before it. None that needs a
            verdict: what those two say of verdicts is for the ``AuditedLogger``, and a line of the log says so.

    Raises:
        TypeError: ``loss_fn`` is no function.
        ValueError, ImportError: a setting is wrong, or needs a verdict.
    """

    def __init__(self, loss_fn: Callable[..., Any], config: AuditConfig | None = None) -> None:
        refuse_no_function("loss_fn", loss_fn)
        unheeded = _unheeded(as_config(config))
        if unheeded:
            raise ValueError(f"{unheeded}; give them to an AuditedLogger")
        self.loss_fn = loss_fn
        self.config = resolve_settings(None, as_config(config)).config
        unheeded = _unheeded(self.config)
        if unheeded:
            logger.warning("%s; an AuditedLogger does", unheeded)
        self._collector: Collector | None = None
        self._told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in ("loss_fn", "config") or name.startswith("__"):  # not yet set, while it is unpickled
            raise AttributeError(name)
        return getattr(self.loss_fn, name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_collector": None}

    @property
    def metric_normalizations(self) -> dict[str, Any]:
        """What each metric was divided by, in NeMo-RL's own terms: the audit's by nothing.

        A NeMo-RL that has no such terms reads none; one that has them divides what is not named.
        """
        theirs = getattr(self.loss_fn, "metric_normalizations", None)
        named = dict(theirs) if isinstance(theirs, dict) else {}
        terms = getattr(sys.modules.get(_INTERFACES), "MetricNormalizer", None)
        if terms is None:
            return named
        return named | {self.config.prefix + name: terms.NONE for name in (*SUMS, *COUNTS)}

    def __call__(self, *args: Any, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Return what ``loss_fn`` returns of these arguments, with the audit's figures among the metrics.

        By place they are those of ARGUMENTS, in this order.
        """
        audited = self._figures(dict(zip(ARGUMENTS, args, strict=False)) | given)
        loss, metrics = self.loss_fn(*args, **given)
        return loss, {**metrics, **audited}

    def _figures(self, given: Mapping[str, Any]) -> dict[str, float]:
        if self.config.mode == "off":
            return {}

        def build() -> TokenBatch:
            (data,) = needed(given, "data")
            if getattr(self.loss_fn, "force_on_policy_ratio", False):
                return sequences_batch(needed(given, "next_token_logprobs")[0], data)
            return sequences_batch(needed(data, "prev_logprobs")[0][:, 1:], data)

        report = self._measured(or_fault(build))
        self._tell(report)
        found = report.metrics
        # 0 tokens have the sum 0, whatever their mean is.
        sums = {name: found[mean] * found[COMPARED] if found[COMPARED] else 0.0 for name, mean in SUMS.items()}
        counts = {name: float(found[name]) for name in COUNTS}
        return {self.config.prefix + name: value for name, value in (sums | counts).items()}

    def _measured(self, batch: TokenBatch) -> StepReport:
        """Return the report of one batch; the collector is kept for what it logs now and then."""
        device = torch.device(getattr(batch.train_log_probs, "device", "cpu"))
        if self._collector is None or self._collector.device != device:
            self._collector = Collector(self.config, device)
        self._collector.reset()
        self._collector.update(batch)
        return self._collector.compute()

    def _tell(self, report: StepReport) -> None:
        """Log each warning once; a micro-batch that is masked as a whole, or failed, does not lack values."""
        if not report.metrics["active_token_count"]:
            return
        for code, count in report.warnings.items():
            if code not in self._told:
                self._told.add(code)
                logger.warning("in a micro-batch of the loss %s=%s: %s", code, count, MEANINGS[code])


def _unheeded(config: AuditConfig) -> str:
    """Return a sentence on settings that need a verdict, which no micro-batch can have; empty where there are none."""
    asked = {
        "mode strict": config.mode == "strict",
        "limits": config.limits,
        "a contract": config.contract is not None,
        "expect_identical": config.expect_identical,
    }
    named = ", ".join(name for name, given in asked.items() if given)
    return named and f"AuditedLoss sees one micro-batch at a time and judges nothing, so it does not heed {named}"


def step_means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics that NeMo-RL added up, with the audit's means in the place of its sums.

    A mean is over the compared tokens. Where none was compared there is no mean, and ``warning/nothing_compared`` is 1.
    """
    means = dict(metrics)
    for key in [key for key in metrics if str(key).endswith(COMPARED)]:
        prefix, compared = key.removesuffix(COMPARED), metrics[key]
        sums = {mean: means.pop(prefix + name) for name, mean in SUMS.items() if prefix + name in metrics}
        if compared:
            means |= {prefix + mean: value / compared for mean, value in sums.items()}
        elif sums:
            means[prefix + "warning/nothing_compared"] = 1.0
    return means


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

    def log_metrics(self, metrics: Mapping[str, Any], *args: Any, **given: Any) -> Any:
        """Log as ``logger`` does, with the means of an ``AuditedLoss`` in the place of its sums."""
        return self.logger.log_metrics(step_means(metrics), *args, **given)

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
    train, mask, kept = map(as_tensor, needed(logged, "prev_logprobs", "token_loss_mask", "sample_loss_mask"))
    rollout = logged.get("generation_logprobs")
    named = {
        "input_ids": logged.get("token_ids"),
        "token_mask": mask,
        "sample_mask": kept,
        "generation_logprobs": None if rollout is None else as_tensor(rollout),
        "input_lengths": logged.get("input_lengths"),
    }
    index = torch.arange(len(mask), device=mask.device)
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
        length = as_tensor(data["input_lengths"]).to(response.device)[:, None]
        fields["valid"] = (column >= start[:, None]) & (column + 1 < length)
    if data.get("input_ids") is not None:
        fields["token_ids"] = as_tensor(data["input_ids"])[:, 1:]
    return TokenBatch.from_padded(
        train,
        None if rollout is None else rollout[:, 1:],
        response & (kept != 0)[:, None],
        response_start=start,
        **fields,
    )
