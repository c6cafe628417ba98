"""StepReport: the numbers of one step, computed from a state vector when they are first asked for."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlk_audit.breakdowns import UNKNOWN, Bucket, bucket_of_confidence, bucket_of_position
from rlk_audit.config import TOKEN_CLASSES, AuditConfig
from rlk_audit.finding import Finding, plain
from rlk_audit.layout import ROW_HEADER, StateLayout, label_column
from rlk_audit.metrics import (
    Histogram,
    Totals,
    dlogp_histogram,
    rank_figures,
    step_breakdowns,
    step_metrics,
    step_notes,
    step_warnings,
)
from rlk_audit.samples import SampleFigures
from rlk_audit.verdict import Verdict
from rlk_audit.version import __version__
from rlk_audit.worst import worst_rows

RANKS_SHOWN = 8
"""Ranks kept in a report, the worst by mean abs(dlogp); ``rank_table`` gives all."""


WORST_IDS = ("sample_index", "rollout_id", "token_position", "token_id", "rank", "microbatch")


class LayoutMismatchError(RuntimeError):
    """Ranks of a group disagree on the configuration, or a vector was made by another one."""


@dataclass(frozen=True)
class WorstToken:
    """One of the tokens with the largest abs(dlogp); unknown ids are -1.

    Attributes:
        abs_dlogp, dlogp, train_logp, rollout_logp: nats.
        sample_index, rollout_id, token_id: as given by the caller.
        token_position: position in the response, global.
        labels: label name -> name of its code, or ``"unknown"``.
        rank: global rank of the process that held the token.
        microbatch: number of its micro-batch on that rank.
    """

    abs_dlogp: float
    dlogp: float
    train_logp: float
    rollout_logp: float
    sample_index: int
    rollout_id: int
    token_position: int
    token_id: int
    labels: Mapping[str, str]
    rank: int
    microbatch: int


@dataclass(frozen=True)
class RankSummary:
    """One rank's share of the step; means and extremes are NaN where it compared nothing.

    ``step`` is the number that the rank gave the step, -1 where it gave none; ``host`` is empty where unknown.
    """

    rank: int
    group_rank: int
    compared_token_count: int
    abs_dlogp_mean: float
    abs_dlogp_max: float
    dlogp_min: float
    dlogp_max: float
    update_failed: int
    step: int = -1
    host: str = ""


@dataclass(frozen=True)
class _Contents:
    metrics: dict[str, float | int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    worst_tokens: tuple[WorstToken, ...] = ()
    rank_table: tuple[RankSummary, ...] = ()
    breakdowns: Mapping[str, tuple[Bucket, ...]] = field(default_factory=dict)
    samples: tuple[SampleFigures, ...] = ()
    group_size: int = 1
    histogram: Histogram | None = None


class StepReport:
    """One step's plain numbers; ``from_vector`` and ``from_dict`` make one.

    Attributes:
        step: the step's number, or None.
        scope: ``group`` (all ranks) or ``rank`` (this one alone).
        kind: ``step``, or ``run`` for the total of a run.
        prefix: put before each metric's key by the sinks.
        metadata: the configuration's free texts.
        verdict: the outcome of the configuration's limits, or None where nothing judged the step.
        findings: what a diagnosis found, strongest first; empty where none was made.
    """

    def __init__(
        self,
        build: Callable[[], _Contents],
        *,
        scope: str,
        kind: str = "step",
        step: int | None = None,
        prefix: str = "",
        metadata: Mapping[str, str] | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        if scope not in ("rank", "group") or kind not in ("step", "run"):
            raise ValueError(f"scope must be 'rank' or 'group' and kind 'step' or 'run', got {scope!r}, {kind!r}")
        self._build = build
        self.scope = scope
        self.kind = kind
        self.step = step
        self.prefix = prefix
        self.metadata = dict(metadata or {})
        self.verdict = verdict
        self.findings: tuple[Finding, ...] = ()

    @classmethod
    def from_vector(
        cls,
        vector: Tensor,
        config: AuditConfig,
        group_size: int = 1,
        *,
        scope: str = "group",
        step: int | None = None,
        read: Callable[[], Tensor] | None = None,
        hosts: Mapping[int, str] | None = None,
        worst_have_gaps: bool = False,
    ) -> StepReport:
        """Make a report of a summed state vector; the numbers are computed when one is first read.

        Args:
            vector: int64 [layout.length], the SUM of the vectors that the ranks packed.
            config, group_size: those that every rank packed with.
            scope: what the vector covers, ``group`` or ``rank``.
            step: the step's number.
            read: returns the vector's values on the CPU, where a copy is under way; asked when a number is first read.
            hosts: global rank -> name of its host.
            worst_have_gaps: tokens may be missing between the worst ones, so that no bucket's maximum follows of them.

        Raises:
            ValueError: the vector has another length or dtype.
            LayoutMismatchError: a rank packed with other settings, or not at all.
        """
        layout = StateLayout(config, group_size)
        if vector.dtype != torch.int64 or vector.shape != (layout.length,):
            raise ValueError(
                f"expected an int64 vector of {layout.length} entries for {group_size} ranks, "
                f"got {vector.dtype} of shape {tuple(vector.shape)}"
            )
        vector = vector.detach()
        # On another device reading waits for it, so only who looks at the report pays for that.
        totals = _read(vector, layout) if vector.device.type == "cpu" else None

        def build() -> _Contents:
            if totals is not None:
                return _contents(totals, hosts or {}, worst_have_gaps)
            return _contents(_read(vector if read is None else read(), layout), hosts or {}, worst_have_gaps)

        return cls(build, scope=scope, step=step, prefix=config.prefix, metadata=config.metadata)

    @cached_property
    def _contents(self) -> _Contents:
        return self._build()

    @property
    def metrics(self) -> dict[str, float | int]:
        """Key (without prefix) -> plain float or int; NaN means there is nothing to say."""
        return self._contents.metrics

    @property
    def classes(self) -> dict[str, int]:
        """Token class -> number of active tokens; they add up to ``active_token_count``."""
        return self._contents.classes

    @property
    def warnings(self) -> dict[str, int]:
        """Warning code -> its count, only those that occurred."""
        return self._contents.warnings

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks that are no warnings, such as ``self_comparison``."""
        return self._contents.notes

    @property
    def worst_tokens(self) -> tuple[WorstToken, ...]:
        """The tokens of largest abs(dlogp), worst first."""
        return self._contents.worst_tokens

    @property
    def ranks(self) -> tuple[RankSummary, ...]:
        """The RANKS_SHOWN ranks of largest mean abs(dlogp), worst first; ranks without tokens come last."""
        return tuple(sorted(self.rank_table, key=_drift_first))[:RANKS_SHOWN]

    @property
    def rank_table(self) -> tuple[RankSummary, ...]:
        """Every rank, in group order; a report read back from JSON holds those of ``ranks``, a run's total none."""
        return self._contents.rank_table if self.kind == "step" else ()

    @property
    def breakdowns(self) -> Mapping[str, tuple[Bucket, ...]]:
        """Label -> its buckets, ``unknown`` first; their tokens add up to the compared ones."""
        return self._contents.breakdowns

    @property
    def samples(self) -> tuple[SampleFigures, ...]:
        """The samples of largest mean abs(dlogp), worst first; none without the table of samples."""
        return self._contents.samples

    @property
    def group_size(self) -> int:
        """Ranks of the group."""
        return self._contents.group_size

    def histogram(self) -> Histogram | None:
        """Return the counts of signed dlogp in bins; None where nothing was compared."""
        return self._contents.histogram

    @property
    def complete(self) -> bool:
        """Whether no update failed on any rank."""
        return "update_failed" not in self.warnings

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence on each thing for which the step failed its verdict; empty where it passed or was not judged."""
        return () if self.verdict is None else self.verdict.failures()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: NaN and infinities are None."""
        values = {
            "version": __version__,
            "kind": self.kind,
            "step": self.step,
            "scope": self.scope,
            "group_size": self.group_size,
            "complete": self.complete,
            "prefix": self.prefix,
            "metadata": self.metadata,
            "metrics": self.metrics,
            "classes": self.classes,
            "warnings": self.warnings,
            "notes": list(self.notes),
            "worst_tokens": [vars(token) for token in self.worst_tokens],
            "ranks": [vars(rank) for rank in self.ranks],
            "breakdowns": {name: [vars(bucket) for bucket in buckets] for name, buckets in self.breakdowns.items()},
            "samples": [vars(sample) for sample in self.samples],
            "histogram": None if (histogram := self.histogram()) is None else vars(histogram),
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
        }
        return {name: plain(value) for name, value in values.items()}

    def to_json(self) -> str:
        """Return ``to_dict`` as one line of strict JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepReport:
        """Make a report of ``to_dict``'s values; ``None`` among the numbers becomes NaN.

        Raises:
            ValueError: a part is missing or of another shape.
        """
        try:
            contents = _Contents(
                {str(name): _number(value) for name, value in values["metrics"].items()},
                {str(name): _integer(value) for name, value in values["classes"].items()},
                {str(name): _integer(value) for name, value in values["warnings"].items()},
                tuple(map(str, values["notes"])),
                tuple(_record(WorstToken, token) for token in values["worst_tokens"]),
                tuple(sorted((_record(RankSummary, r) for r in values["ranks"]), key=lambda r: r.group_rank)),
                {str(n): tuple(_record(Bucket, b) for b in buckets) for n, buckets in values["breakdowns"].items()},
                tuple(_record(SampleFigures, sample) for sample in values["samples"]),
                _integer(values["group_size"]),
                _histogram(values.get("histogram")),  # logs of earlier versions have none
            )
            report = cls(
                lambda: contents,
                scope=values["scope"],
                kind=values["kind"],
                step=None if values["step"] is None else operator.index(values["step"]),
                prefix=_text(values["prefix"]),
                metadata=_texts(values["metadata"]),
                verdict=None if values["verdict"] is None else Verdict.from_dict(values["verdict"]),
            )
            report.findings = tuple(map(Finding.from_dict, values["findings"]))
            return report
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a step report: {type(error).__name__} {error}") from error


def metric_names(config: AuditConfig) -> tuple[str, ...]:
    """Return the key of every metric that a report of this configuration has."""
    layout = StateLayout(config)
    nothing = Totals.of(np.zeros(layout.length, dtype=np.int64), layout)
    return tuple(_contents(nothing, {}).metrics)


def _read(vector: Tensor, layout: StateLayout) -> Totals:
    """Copy a vector to the host and refuse it if a rank packed with other settings."""
    totals = Totals.of(vector.cpu().numpy().copy(), layout)
    expected = totals.layout.fingerprint
    found = totals.column("fingerprint").tolist()
    other = [rank for rank, fingerprint in enumerate(found) if fingerprint != expected]
    if other:
        raise LayoutMismatchError(
            f"group ranks {', '.join(map(str, other[:RANKS_SHOWN]))} did not pack with this configuration "
            f"(fingerprint {expected:#x}, got {found[other[0]]:#x}); every rank needs the same AuditConfig and version"
        )
    return totals


def _contents(totals: Totals, hosts: Mapping[int, str], worst_have_gaps: bool = False) -> _Contents:
    worst = _worst_tokens(totals)
    warnings = step_warnings(totals)
    return _Contents(
        step_metrics(totals) | _worst_metrics(worst),
        {name: totals.counters[name] for name in TOKEN_CLASSES},
        {code: count for code, count in warnings.items() if count},
        step_notes(totals),
        worst,
        tuple(RankSummary(**figures, host=hosts.get(figures["rank"], "")) for figures in rank_figures(totals)),
        step_breakdowns(totals, {} if worst_have_gaps else _bucket_maxima(worst, totals.layout.config)),
        () if totals.samples is None or totals.samples.unplaced else totals.samples.worst(totals.layout.config.worst_k),
        totals.layout.group_size,
        dlogp_histogram(totals),
    )


def _worst_tokens(totals: Totals) -> tuple[WorstToken, ...]:
    layout = totals.layout
    rows = totals.rows[:, len(ROW_HEADER) :].reshape(-1, len(layout.worst_fields))
    chosen = worst_rows(torch.from_numpy(rows), layout.worst_k, layout.config.one_worst_per_sample)
    named = (dict(zip(layout.worst_fields, row, strict=True)) for row in chosen.tolist())
    return tuple(_worst_token(row, layout) for row in named if row["valid"])


def _worst_token(row: dict[str, int], layout: StateLayout) -> WorstToken:
    train_logp, rollout_logp = np.array([row["train_logp"], row["rollout_logp"]]).view(np.float64).tolist()
    labels = {}
    for name in layout.labels:
        code = row[label_column(name)]
        labels[name] = layout.config.breakdowns[name][code] if code >= 0 else UNKNOWN
    dlogp = train_logp - rollout_logp + 0.0
    ids = {name: row[name] for name in WORST_IDS}
    return WorstToken(abs(dlogp), dlogp, train_logp, rollout_logp, labels=labels, **ids)


def _bucket_maxima(worst: tuple[WorstToken, ...], config: AuditConfig) -> dict[str, dict[str, float]]:
    """Return label -> bucket -> abs(dlogp) of its worst token: the first of it among the worst tokens of all."""
    maxima: dict[str, dict[str, float]] = {name: {} for name in config.breakdowns}
    if config.one_worst_per_sample:
        return maxima  # a bucket's worst token may be left out for another of its sample
    for token in worst:
        buckets = dict(token.labels)
        buckets |= {"position": bucket_of_position(token.token_position)}
        buckets |= {"confidence": bucket_of_confidence(token.rollout_logp)}
        for name, known in maxima.items():
            known.setdefault(buckets[name], token.abs_dlogp)
    return maxima


def _worst_metrics(worst: tuple[WorstToken, ...]) -> dict[str, float | int]:
    values = ("abs_dlogp", "dlogp", "train_logp", "rollout_logp", *WORST_IDS)
    return {f"worst_{name}": getattr(worst[0], name) if worst else math.nan for name in values}


def _drift_first(rank: RankSummary) -> tuple[float, int]:
    return (-rank.abs_dlogp_mean if rank.compared_token_count else math.inf, rank.rank)


def _histogram(values: Mapping[str, Any] | None) -> Histogram | None:
    return None if values is None else Histogram(_integer(values["first"]), tuple(map(_integer, values["counts"])))


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise TypeError(f"expected an integer of 64 bits, got {value!r}")
    return value


def _number(value: Any) -> float | int:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number or null, got {value!r}")
    return value if isinstance(value, float) else _integer(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {value!r}")
    return value


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): _text(value) for name, value in values.items()}


_READERS: Mapping[Any, Callable[[Any], Any]] = {
    "int": _integer, "float": _number, "str": _text, "Mapping[str, str]": _texts,
}  # fmt: skip
"""Annotation of a record's field -> what reads its value."""


def _record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    readers = {field.name: _READERS[field.type] for field in fields(kind)}
    return kind(**{name: readers[name](value) if name in readers else value for name, value in values.items()})
