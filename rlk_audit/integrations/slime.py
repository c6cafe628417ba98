"""The audit of a training with slime, or with a fork of it, through functions that its options name.

Where slime recomputes the log-probabilities of a rollout before it trains on it:

    --rollout-data-postprocess-path rlk_audit.integrations.slime.rollout_data_postprocess

Where the training forward alone has them, and in miles:

    --use-tis --custom-tis-function-path rlk_audit.integrations.slime.tis
    --rollout-data-postprocess-path rlk_audit.integrations.slime.begin_rollout

slime knows functions by their names, so one ``SlimeAudit`` serves the process. A module of yours may make another, with
settings in code, and give names to its methods: slime imports all of an option's path but its last part.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlk_audit.allreduce import agree_on_layout, group_place
from rlk_audit.auditor import integer
from rlk_audit.config import AuditConfig, as_config, refuse_no_function
from rlk_audit.integrations.set_up import needed
from rlk_audit.integrations.slime_samples import Rollout, Slices, refuse_unequal
from rlk_audit.megatron_groups import ParallelGroups, resolve_groups
from rlk_audit.megatron_plugin import MegatronAudit, register
from rlk_audit.metadata import FIELDS, partition_metadata, undeclared_names
from rlk_audit.places import Shard
from rlk_audit.report import StepReport
from rlk_audit.sinks.base import logged_values
from rlk_audit.tokens import TokenBatch, or_fault

logger = logging.getLogger(__name__)

TisResult = tuple[Tensor, list[Tensor] | None, dict[str, Tensor]]
TisFunction = Callable[..., TisResult]

TRACKERS = (
    "slime.observability.logging_utils",
    "slime.utils.logging_utils",
    "vime.observability.logging_utils",
    "vime.utils.logging_utils",
    "miles.utils.tracking_utils.tracking",
)
"""Modules whose ``log(args, metrics, step_key)`` writes to the trackers of the training, where they are loaded."""
TOP_P_REPLAY = "rollout_top_p_token_ids"
"""The column with the tokens that the engine kept, over which the trainer renormalises too."""

NAMES_SHOWN = 8
"""Undeclared names of a label that its warning lists."""


@dataclass(frozen=True)
class Dialect:
    """What differs between slime and a fork.

    Attributes:
        mode: parsed arguments -> the mode where no setting of the audit gives one.
        values: report -> what goes to the training's trackers, by key.
        step_key: the key of the step there.
    """

    mode: Callable[[Any], str] = lambda args: "audit"
    values: Callable[[StepReport], dict[str, float]] = logged_values
    step_key: str = "rollout/step"


class SlimeAudit:
    """The audit of one process of a training with slime; a step of it is a rollout, by its ``rollout_id``.

    It registers at the first call of ``rollout_data_postprocess`` or ``begin_rollout``, of which a training uses one.
    The settings are those of ``megatron_plugin.register``: attributes of slime's arguments (of a
    ``--custom-config-path``), variables ``RLK_AUDIT_<NAME>``, a YAML file, and what is given here.

    Args:
        config: the audit's settings; if not given the clip interval is that of the training's arguments.
        dialect: what the framework calls things.
        options: further keyword arguments of ``register``, such as ``sinks``.
    """

    def __init__(self, config: AuditConfig | None = None, dialect: Dialect | None = None, **options: Any) -> None:
        self.audit: MegatronAudit | None = None
        """The registered audit, from the first rollout on."""
        self.report: StepReport | None = None
        """The report of the last step that ended, on ranks of the last pipeline stage."""
        self._config = None if config is None else as_config(config)
        self._dialect = dialect or Dialect()
        self._options = options
        self._groups = ParallelGroups()
        self._forward = ""
        self._open: Rollout | None = None
        self._told: set[str] = set()

    def rollout_data_postprocess(self, args: Any, rollout_id: int, rollout_data: Mapping[str, Any] | None) -> None:
        """Collective: every rank of the training must call this. Audits the rollout's recomputed log-probabilities.

        Columns that are absent, or of another length, raise nothing: they are missing values or a failed update.

        Args:
            args: slime's parsed arguments.
            rollout_id: the rollout's number.
            rollout_data: slime's columns, one entry a sample: ``log_probs, rollout_log_probs`` (float [this
                context-parallel rank's response tokens]), ``loss_masks, tokens`` (whole), ``total_lengths,
                response_lengths, micro_batch_indices``, and what is known of the samples. Nothing of it is changed.

        Raises:
            ConsistencyError: the mode is ``strict`` and the rollout failed its verdict.
            RuntimeError: ``begin_rollout`` was called before.
            TypeError: ``rollout_id`` is no integer.
            LayoutMismatchError, ValueError, ImportError, OSError: as ``register``, at the first call.
        """
        number = integer("rollout_id", rollout_id)
        data = {} if rollout_data is None else rollout_data
        audit = self._registered(args, data, "old")
        rollout = self._rollout(audit, number, data)
        if audit.owns_report:
            self._observe_rollout(audit, rollout, data)
        self._end(audit, args, rollout)

    def begin_rollout(
        self, args: Any, rollout_id: int | None = None, rollout_data: Mapping[str, Any] | None = None
    ) -> None:
        """Collective: every rank of the training must call this before each rollout is trained on.

        Ends the step of the rollout before, of which ``tis`` saw the log-probabilities, and notes whose tokens ``tis``
        will see. miles calls it with ``args`` alone: then rollouts are counted from 0, and samples have no index.

        Raises:
            ConsistencyError: the mode is ``strict`` and the rollout before failed its verdict.
            RuntimeError: ``rollout_data_postprocess`` was called before.
            TypeError: ``rollout_id`` is no integer.
            LayoutMismatchError, ValueError, ImportError, OSError: as ``register``, at the first call.
        """
        given = None if rollout_id is None else integer("rollout_id", rollout_id)
        data = {} if rollout_data is None else rollout_data
        audit = self._registered(args, data, "current")
        before, self._open = self._open, None
        if before is not None:
            self._end(audit, args, before)
        number = given if given is not None else 0 if before is None else before.number + 1
        self._open = self._rollout(audit, number, data)

    def tis(
        self,
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: Sequence[Tensor] | None = None,
        rollout_log_probs: Sequence[Tensor | None] | None = None,
        loss_masks: list[Tensor] | None = None,
        total_lengths: Sequence[int] | None = None,
        response_lengths: Sequence[int] | None = None,
        max_seq_lens: Sequence[int] | None = None,
        **others: Any,
    ) -> TisResult:
        """Audit one micro-batch of the policy loss; no communication.

        Rollout log-probabilities that are not there count as missing; without another argument the update fails, and
        the training goes on.

        Args:
            args: slime's parsed arguments.
            pg_loss: the policy loss of each token.
            train_log_probs, rollout_log_probs: one float tensor a sample, this context-parallel rank's tokens of it.
            loss_masks: one tensor a sample, of its whole response.
            total_lengths, response_lengths: tokens of each sample and of its response.
            max_seq_lens: lengths of the padded rows, where miles trains in the format ``bshd``.
            others: what else the framework hands over.

        Returns:
            ``(pg_loss, loss_masks, {})``: the caller's own loss and masks, untouched, and no metrics.

        Raises:
            RuntimeError: no ``begin_rollout`` came before, so that no step would end.
        """
        if self.audit is None or self._open is None:
            raise RuntimeError(
                "the audit's TIS function needs --rollout-data-postprocess-path "
                "rlk_audit.integrations.slime.begin_rollout, which ends its steps"
            )
        if self.audit.owns_report:
            self._tell_of_reuse(train_log_probs, rollout_log_probs)
            padded = max_seq_lens if getattr(args, "qkv_format", "thd") != "thd" else None
            slices = Slices(train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, padded)
            self._observe_microbatch(self.audit, self._open, slices)
        return pg_loss, loss_masks, {}

    def wrap_tis(self, tis_function: TisFunction) -> TisFunction:
        """Return a TIS function that audits, and returns what the given one makes of the same arguments."""
        refuse_no_function("tis_function", tis_function)

        @functools.wraps(tis_function)
        def audited(args: Any, **given: Any) -> TisResult:
            self.tis(args, **given)
            return tis_function(args, **given)

        return audited

    # --- set-up and end of a step -------------------------------------------------------------------------------------

    def _registered(self, args: Any, data: Mapping[str, Any], forward: str) -> MegatronAudit:
        if self._forward not in ("", forward):
            raise RuntimeError(
                "rollout_data_postprocess and begin_rollout came to one audit, which would count each token twice: "
                "name one of them, or make a SlimeAudit for each"
            )
        self._forward = forward
        if self.audit is None:
            self._groups = resolve_groups()
            try:
                config = self._settings(args, data)
            except ValueError as error:  # of a variable of this rank alone: the others must not wait for it
                agree_on_layout(None, failure=error)
                raise
            self.audit = register(args, config=config, forward=forward, **self._options)
        return self.audit

    def _settings(self, args: Any, data: Mapping[str, Any]) -> AuditConfig:
        config = self._config or AuditConfig(mode=self._dialect.mode(args), **_clip_interval(args))
        sampling = {name: getattr(args, name, None) for name in ("rollout_top_p", "rollout_top_k")}
        replayed = TOP_P_REPLAY in data
        if _filters(**sampling) and not replayed:
            self._warn(
                f"the engine samples from filtered tokens ({sampling}) and the trainer scores over all: where the "
                "engine's log-probabilities are those of the filtered distribution, every d is low by the log of "
                "the kept mass"
            )
        told = {name: str(value) for name, value in sampling.items() if value is not None}
        return dataclasses.replace(
            config, train_filter=config.train_filter or replayed, metadata={**told, **config.metadata}
        )

    def _end(self, audit: MegatronAudit, args: Any, rollout: Rollout) -> None:
        self.report = audit.step_end(rollout.number)
        if self.report is not None and self._is_main_rank:
            self._track(args, self.report, rollout.steps)

    @property
    def _is_main_rank(self) -> bool:
        """Whether this is the rank that slime logs from."""
        return group_place(self._groups.dp_cp)[0] == 0 and (
            self._groups.tp is None or group_place(self._groups.tp)[0] == 0
        )

    def _track(self, args: Any, report: StepReport, steps: int) -> None:
        """Write the report to the training's own trackers, and never let them stop it."""
        log = next((sys.modules[name].log for name in TRACKERS if name in sys.modules), None)
        if log is None or report.step is None:
            return
        key = self._dialect.step_key
        try:
            log(args, {**self._dialect.values(report), key: report.step * steps}, step_key=key)
        except Exception as error:
            self._warn(f"the trackers of the training took no report of the audit: {error}")

    def _warn(self, sentence: str, subject: str = "") -> None:
        """Log once, a subject that may have many sentences too."""
        if (subject or sentence) not in self._told:
            self._told.add(subject or sentence)
            logger.warning("%s", sentence)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _observe_rollout(self, audit: MegatronAudit, rollout: Rollout, data: Mapping[str, Any]) -> None:
        if data.get("log_probs") is None:
            self._warn(
                "slime did not recompute log_probs, so there is nothing to compare: it does with "
                "--get-mismatch-metrics; the training forward's are audited by begin_rollout and tis"
            )
            return
        parts = data.get("micro_batch_indices")
        whole = [range(len(data["log_probs"]))]
        for number, rows in enumerate(parts if parts and isinstance(parts, (list, tuple)) else whole):

            def build(rows: Sequence[int] = rows) -> TokenBatch:
                slices = Slices.of_rows(data, rows)
                return slices.batch(self._shard, **rollout.fields(rows, self._config_of(audit)))

            audit.observe(or_fault(build), microbatch=number)

    def _observe_microbatch(self, audit: MegatronAudit, rollout: Rollout, slices: Slices) -> None:
        """Observe a micro-batch of the loss, unless it is evaluated a second time, as recomputation does."""
        key = _places(slices.rollout) or _places(slices.masks)
        if key and key in rollout.seen:
            return
        number = rollout.seen.setdefault(key or ((-1, len(rollout.seen)),), len(rollout.seen))

        def build() -> TokenBatch:
            rows = [None] if slices.rollout is None else [rollout.rows.get(id(values)) for values in slices.rollout]
            return slices.batch(self._shard, **rollout.fields(rows, self._config_of(audit)))

        audit.observe(or_fault(build), microbatch=number)

    def _rollout(self, audit: MegatronAudit, number: int, data: Mapping[str, Any]) -> Rollout:
        """Return what is to be known of a rollout while it is trained on; no tensor of it is kept."""
        config = self._config_of(audit)
        rollout = Rollout(number)
        if config is None or not data:
            return rollout
        named = {"sample_index": data.get("partition"), **data} if data.get("sample_indices") is None else data
        try:
            rollout.steps = max(len(data.get("num_microbatches") or ()), 1)
            (lengths,) = needed(data, "response_lengths")
            rows = data.get("rollout_log_probs") or ()
            slots = data.get("partition")
            refuse_unequal({"response_lengths": lengths, "rollout_log_probs": rows or None, "partition": slots})
            rollout.slots = None if slots is None else [int(slot) for slot in slots]
            rollout.rows = {id(values): row for row, values in enumerate(rows) if values is not None}
            samples = range(len(lengths))
            (rollout.metadata,) = partition_metadata(named, [samples], (*FIELDS, *config.caller_labels))
            self._tell_of_undeclared(rollout.metadata, config)
        except (ValueError, TypeError) as error:
            self._warn(f"what the rollout tells of its samples cannot be used: {error}")
        return rollout

    def _tell_of_undeclared(self, metadata: Mapping[str, Any], config: AuditConfig) -> None:
        for label, names in undeclared_names(metadata, config).items():
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            self._warn(
                f"samples have the {label} {shown}, which AuditConfig.breakdowns[{label!r}] does not declare: "
                "they count as unknown",
                f"undeclared {label}",
            )

    @staticmethod
    def _config_of(audit: MegatronAudit) -> AuditConfig | None:
        return None if audit.auditor is None else audit.auditor.config

    @property
    def _shard(self) -> Shard:
        rank, size = (0, 1) if self._groups.cp is None else group_place(self._groups.cp)
        return Shard(rank, size, "zigzag")

    def _tell_of_reuse(self, train: Sequence[Tensor] | None, rollout: Sequence[Tensor | None] | None) -> None:
        pairs = zip(_places(train), _places(rollout), strict=False)
        same = [t[0] == r[0] for t, r in pairs if t[1]]
        if same and all(same):
            self._warn(
                "the training hands the rollout's log-probabilities over as the trainer's (--use-rollout-logprobs), so "
                "the audit compares them with themselves: no drift can show"
            )


def _places(column: Sequence[Any] | None) -> tuple[tuple[int, int], ...]:
    """Return where the tensors of a column lie, and their sizes."""
    if not isinstance(column, (list, tuple)):
        return ()
    return tuple((values.data_ptr(), values.numel()) for values in column if isinstance(values, Tensor))


def _clip_interval(args: Any) -> dict[str, Any]:
    """Return the training's clip interval where the audit can take it."""
    low, high = getattr(args, "eps_clip", None), getattr(args, "eps_clip_high", None)
    if low is None or not 0 <= low < 1:
        return {}
    return {"eps_low": float(low), "eps_high": float(low if high is None else high)}


def _filters(rollout_top_p: float | None, rollout_top_k: int | None) -> bool:
    return (rollout_top_p or 1.0) < 1.0 or (rollout_top_k or 0) > 0


@functools.cache
def _process_audit() -> SlimeAudit:
    return SlimeAudit()


def rollout_data_postprocess(args: Any, rollout_id: int, rollout_data: Mapping[str, Any] | None) -> None:
    """Collective: every rank of the training must call this; see ``SlimeAudit.rollout_data_postprocess``."""
    _process_audit().rollout_data_postprocess(args, rollout_id, rollout_data)


def begin_rollout(args: Any, rollout_id: int | None = None, rollout_data: Mapping[str, Any] | None = None) -> None:
    """Collective: every rank of the training must call this; see ``SlimeAudit.begin_rollout``."""
    _process_audit().begin_rollout(args, rollout_id, rollout_data)


def tis(args: Any, **given: Any) -> TisResult:
    """Audit one micro-batch of the policy loss and return it untouched; see ``SlimeAudit.tis``."""
    return _process_audit().tis(args, **given)
