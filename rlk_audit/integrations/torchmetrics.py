"""DlogpAudit: the audit as a torchmetrics metric, for Lightning and MetricCollection.

Its only state is one int64 vector, whatever was added. torchmetrics synchronises it by its own means at ``compute``: a
barrier, all-gathers of its shape and of the vector, where the audit's own reduction is one all-reduce. The vectors
of all ranks are then merged, so quantiles, maxima and worst tokens are those of all ranks, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlk_audit.allreduce import global_rank
from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig, as_config, differences
from rlk_audit.layout import StateLayout
from rlk_audit.limits import Judge
from rlk_audit.report import StepReport
from rlk_audit.sinks.base import VERDICT_KEY, verdict_values
from rlk_audit.state import State
from rlk_audit.tokens import PerToken, TokenBatch, Values
from rlk_audit.version import __version__

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"DlogpAudit cannot be used ({error}): pip install 'rlk_audit[torchmetrics]'") from error

_MERGED_AT_ONCE = 64


def merge_vectors(vectors: Tensor, config: AuditConfig) -> Tensor:
    """Return the state of all vectors (int64 [n, length], each packed for a group of one) as one such vector."""
    if len(vectors) > _MERGED_AT_ONCE:  # a layout of many ranks is another, and may be larger than is allowed
        parts = [merge_vectors(part, config) for part in torch.split(vectors, _MERGED_AT_ONCE)]
        return merge_vectors(torch.stack(parts), config)
    layout = StateLayout(config)
    additive, rows = vectors[:, : layout.additive_length], vectors[:, layout.additive_length :]
    whole = torch.cat([additive.sum(0), rows.reshape(-1)])
    return State.of_vector(whole, StateLayout(config, len(vectors))).pack(layout, 0, -1)


def _refuse_meaningless(config: AuditConfig) -> None:
    """Refuse what a metric cannot do: it is computed whenever someone asks, of a rank's batch or of all ranks.

    Raises:
        ValueError: the mode is not ``audit``, or a limit is relative to the run, or names no metric.
    """
    if config.mode != "audit":
        meant = "leave the metric out" if config.mode == "off" else "raise where verdict/all is 0"
        raise ValueError(f"DlogpAudit stops nothing and is never off, got mode {config.mode}: {meant} instead")
    if any(limit.window is not None for limit in Judge(config).limits):
        raise ValueError("DlogpAudit knows no steps, so its limits cannot be relative to a median; give numbers")


class DlogpAudit(Metric):
    """Drift between train and rollout log-probabilities.

    ``compute`` returns every metric of a StepReport by its key, as a float64 scalar; NaN where there is nothing to say.
    ``report`` then holds the report with its worst tokens, breakdowns and verdict. With limits there are also
    ``verdict/all`` and ``verdict/<metric>``: 1 for a pass, 0 for a failure. A metric without data has the verdict NaN;
    ``verdict/all`` is 0 where nothing was compared, since that passes nothing.

    Args:
        config: the audit's settings; ``lag`` has no meaning here.
        kwargs: those of ``torchmetrics.Metric``, such as ``sync_on_compute`` and ``process_group``.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    vector: Tensor

    def __init__(self, config: AuditConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.config = as_config(config)
        _refuse_meaningless(self.config)
        self._collector: Collector | None = None
        self._report: dict[str, Any] | None = None
        merge = partial(merge_vectors, config=self.config)
        self.add_state("vector", default=Collector(self.config).pack(rank=-1), dist_reduce_fx=merge, persistent=True)

    def update(
        self,
        train_log_probs: Values | TokenBatch,
        rollout_log_probs: Values | None = None,
        mask: Values | None = None,
        *,
        valid: Values | None = None,
        rollout_missing: Values | None = None,
        sample_index: PerToken = None,
        sample_slot: PerToken = None,
        rollout_id: PerToken = None,
        token_position: PerToken = None,
        token_ids: PerToken = None,
        rollout_token_ids: PerToken = None,
        updates_since_rollout: PerToken = None,
        labels: Mapping[str, PerToken] | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Add a batch; the arguments are those of ``Collector.update``.

        Each has its name here, since a MetricCollection gives every metric the arguments that it names.
        """
        given = {
            "valid": valid,
            "rollout_missing": rollout_missing,
            "sample_index": sample_index,
            "sample_slot": sample_slot,
            "rollout_id": rollout_id,
            "token_position": token_position,
            "token_ids": token_ids,
            "rollout_token_ids": rollout_token_ids,
            "updates_since_rollout": updates_since_rollout,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        if self._collector is None or self._collector.device != self.vector.device:
            self._collector = Collector(self.config, self.vector.device)
        self._collector.reset()
        self._collector.update(train_log_probs, rollout_log_probs, mask, microbatch=microbatch, labels=labels, **fields)
        self.vector = merge_vectors(torch.stack([self.vector, self._collector.pack(rank=global_rank())]), self.config)

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics of all that was added, by key."""
        report = StepReport.from_vector(self.vector, self.config)
        report.verdict = Judge(self.config).judge(report)
        self._report = report.to_dict()
        judged = {VERDICT_KEY.format(name): math.nan for name in self.config.limits} | verdict_values(report)
        return {
            self.config.prefix + name: torch.tensor(value, dtype=torch.float64, device=self.device)
            for name, value in (report.metrics | judged).items()
        }

    @property
    def report(self) -> StepReport | None:
        """The report that the last ``compute`` was made of, over all ranks it synchronised; None before."""
        return None if self._report is None else StepReport.from_dict(self._report)

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add another metric's tokens, or those of its state.

        Raises:
            ValueError: the other's settings give its state another meaning.
        """
        given = incoming_state if isinstance(incoming_state, dict) else vars(incoming_state)
        if "vector" in given:
            saved = incoming_state.get_extra_state() if isinstance(incoming_state, DlogpAudit) else None
            self._refuse_anothers(given["vector"], saved)
        super().merge_state(incoming_state)

    def get_extra_state(self) -> Tensor:
        """Return what gives the state its meaning, as JSON in bytes: it is saved to tell what differs.

        A tensor, since some stores of states hold nothing else.
        """
        return torch.tensor(list(json.dumps(self._meaning()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: settings are those of the code, and a state of others was refused."""

    def _meaning(self) -> dict[str, str]:
        return self.config.state_values() | {"version": __version__}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        try:
            if prefix + "vector" in state_dict:
                self._refuse_anothers(state_dict[prefix + "vector"], state_dict.get(prefix + "_extra_state"))
        except ValueError as error:
            error_msgs.append(str(error))
            del state_dict[prefix + "vector"]
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _refuse_anothers(self, vector: Any, saved: Tensor | None) -> None:
        layout = StateLayout(self.config)
        fits = isinstance(vector, Tensor) and vector.dtype == torch.int64 and vector.shape == (layout.length,)
        if fits and layout.made(vector):
            return
        told = "" if saved is None else differences(json.loads(bytes(saved.tolist())), self._meaning())
        sentence = "this state was made with other settings of the AuditConfig, or by another version of rlk_audit"
        raise ValueError(f"{sentence}: {told}" if told else sentence)

    def reset(self) -> None:
        """Forget what was added."""
        super().reset()
        self._report = None

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot the values of ``compute``, or given ones; needs matplotlib."""
        return self._plot(val, ax)

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Any = "") -> Any:
        """Move the state with the module, and never cast it: its integers would not survive a float."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return tensor.to(result.device) if tensor.dtype == torch.int64 != result.dtype else result

        return super()._apply(moved, exclude_state)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_collector": None}
