"""Limits and contract files -> a verdict on one step's report.

A limit bounds one metric: ``abs_dlogp_p99=0.05``, ``ess0>=0.9``, or, relative to the run itself,
``abs_dlogp_p99=3x_median_50`` (three times the median of the last 50 steps). A plain value bounds from above, except
for the metrics of LOW_IS_BAD, which it bounds from below.
"""

from __future__ import annotations

import difflib
import math
import re
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlk_audit.config import AuditConfig, Bound
from rlk_audit.report import StepReport, metric_names
from rlk_audit.verdict import FAIL, NO_DATA, PASS, PENDING, LimitResult, Verdict

LOW_IS_BAD = (
    "ess0",
    "seq_ess0",
    "prob_pearson",
    "mask_coverage",
    "compared_coverage",
    "identical_frac",
    "ratio0_min",
    "seq_ratio0_geo_min",
    "seq_log_ratio0_min",
    "dlogp_min",
    "dlogp_p01",
    "total_token_count",
    "active_token_count",
    "compared_token_count",
    "sample_count",
)
"""Metrics that a plain limit bounds from below."""

SIGNED = ("dlogp_", "kl0_k1", "log_ppl_diff", "prob_pearson", "chi2_0", "seq_chi2_0", "seq_log_ratio0", "worst_")
"""Beginnings of the keys of metrics of either sign, which a multiple of their median cannot bound."""

MIN_HISTORY = 20
"""Steps that must exist before a relative limit gives a verdict."""

_BOUND = re.compile(r"\s*(<=|>=)?\s*(\S+)\s*")
_RELATIVE = re.compile(r"(?P<factor>[0-9.eE+-]+)x_median_(?P<window>[0-9]+)")
_ASSIGNMENT = re.compile(r"\s*(?P<metric>[A-Za-z0-9_./-]+?)\s*(?P<relation>=|<=|>=)\s*(?P<bound>\S+)\s*")


class ConsistencyError(RuntimeError):
    """A step of a ``strict`` audit failed its verdict; every rank raises it in the same step."""


@dataclass(frozen=True)
class Limit:
    """A bound on one metric.

    Attributes:
        metric: key without prefix. relation: ``<=`` or ``>=``, which must hold.
        value: the bound, or the factor of the median when ``window`` (steps) is not None.
    """

    metric: str
    relation: str
    value: float
    window: int | None = None

    @classmethod
    def parse(cls, metric: str, bound: float | str) -> Limit:
        """Make a limit of a metric's key and a bound: a number, ``"<=0.05"``, ``">=0.9"`` or ``"3x_median_50"``.

        Raises:
            ValueError: the bound cannot be read.
        """
        if isinstance(bound, bool):
            raise ValueError(f"the limit of {metric} must be a number or a text, got {bound!r}")
        match = _BOUND.fullmatch(str(bound))
        relation, text = match.groups() if match else (None, str(bound))
        relation = relation or (">=" if metric in LOW_IS_BAD else "<=")
        relative = _RELATIVE.fullmatch(text)
        try:
            value = float(relative["factor"] if relative else text)
        except ValueError:
            value = math.nan
        window = int(relative["window"]) if relative else None
        if not math.isfinite(value) or (window is not None and (window < MIN_HISTORY or value <= 0)):
            raise ValueError(
                f"the limit of {metric} must be a number, '<=0.05', '>=0.9' or '3x_median_50' (a positive factor, "
                f"at least {MIN_HISTORY} steps), got {bound!r}"
            )
        if relative:
            _refuse_useless_relative(metric, relation, value, bound)
        return cls(metric, relation, value, window)

    @classmethod
    def parse_assignment(cls, text: str) -> Limit:
        """Make a limit of one text such as ``abs_dlogp_p99=0.05`` or ``ess0>=0.9``.

        Raises:
            ValueError: the text is no limit.
        """
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"expected METRIC=BOUND, METRIC<=BOUND or METRIC>=BOUND, got {text!r}")
        relation = "" if match["relation"] == "=" else match["relation"]
        return cls.parse(match["metric"], relation + match["bound"])

    def __str__(self) -> str:
        bound = f"{self.value:g}" if self.window is None else f"{self.value:g}x_median_{self.window}"
        return f"{self.metric}{self.relation}{bound}"


def _refuse_useless_relative(metric: str, relation: str, factor: float, bound: object) -> None:
    """Refuse a relative limit that every usual step would cross, or whose median may be negative."""
    if any(metric.startswith(prefix) for prefix in SIGNED):
        raise ValueError(f"the limit {bound!r} of {metric} is relative, but a median of it may be negative or near 0")
    if (factor < 1) if relation == "<=" else (factor > 1):
        side = "at least 1" if relation == "<=" else "at most 1"
        raise ValueError(
            f"the limit {bound!r} of {metric} must have a factor of {side}, or every usual step crosses it"
        )


def parse_limits(limits: Mapping[str, Bound | tuple[Bound, ...]]) -> tuple[Limit, ...]:
    """Make limits of a mapping; a metric may have several bounds in a tuple."""
    parsed = []
    for metric, bounds in limits.items():
        several = bounds if isinstance(bounds, tuple) else (bounds,)
        parsed += [Limit.parse(metric, bound) for bound in several]
    return tuple(parsed)


class Judge:
    """Judges the reports of a run, in order, against the configuration's limits.

    A step that compared nothing passes nothing. In mode ``strict``, and where a contract was loaded, it also demands
    that the classes of ``config.classes_not_allowed`` are empty, that no update failed and that all ranks ended the
    same step; ``strict`` takes a limited metric without data for a failure too.

    Attributes:
        limits: of the configuration.

    Raises:
        ValueError: a limit names no metric of this configuration.
    """

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self.limits = parse_limits(config.limits)
        _refuse_unknown_metrics(self.limits, config)
        self._demands = config.mode == "strict" or config.contract is not None
        windows: dict[str, int] = {}
        for limit in self.limits:
            if limit.window is not None:
                windows[limit.metric] = max(limit.window, windows.get(limit.metric, 0))
        self._history: dict[str, deque[float]] = {metric: deque(maxlen=size) for metric, size in windows.items()}

    def judge(self, report: StepReport) -> Verdict | None:
        """Return the verdict on a report, and take its metrics into the history of relative limits.

        None where nothing is to be judged: then no number of the report is computed.
        """
        if not self.limits and not self._demands and not self._config.expect_identical:
            return None
        results = tuple(self._check(limit, report.metrics) for limit in self.limits)
        verdict = Verdict(results, tuple(self._violations(report, results)))
        crossed = {result.metric for result in verdict.failed_limits}
        for metric, values in self._history.items():
            # A value that crossed its limit is no measure of what is usual: a drift that stays goes on failing.
            if metric not in crossed and not math.isnan(report.metrics[metric]):
                values.append(report.metrics[metric])
        return verdict

    def state_dict(self) -> dict[str, list[float]]:
        """Return the history of relative limits."""
        return {metric: list(values) for metric, values in self._history.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Take up a history; metrics without a relative limit are left out."""
        for metric, values in self._history.items():
            values.clear()
            values.extend(state.get(metric, ()))

    def _check(self, limit: Limit, metrics: Mapping[str, float]) -> LimitResult:
        value, bound = metrics[limit.metric], limit.value
        if limit.window is not None:
            values = list(self._history[limit.metric])[-limit.window :]
            bound = limit.value * statistics.median(values) if len(values) >= MIN_HISTORY else math.nan
        if math.isnan(value) and _overflowed(limit.metric, metrics):
            outcome, value = FAIL, math.inf
        elif math.isnan(value):
            outcome = NO_DATA
        elif math.isnan(bound):
            outcome = PENDING
        else:
            holds = value <= bound if limit.relation == "<=" else value >= bound
            outcome = PASS if holds else FAIL
        return LimitResult(limit.metric, limit.relation, bound, value, outcome)

    def _violations(self, report: StepReport, results: tuple[LimitResult, ...]) -> Iterator[str]:
        config = self._config
        if config.expect_identical and report.metrics["identical_frac"] < 1:
            share = 1 - report.metrics["identical_frac"]
            yield f"train and rollout were expected to be identical, a share of {share:.3g} of the tokens differs"
        if config.mode == "strict":
            yield from (f"{result.metric} has no data" for result in results if result.outcome == NO_DATA)
        if not report.metrics["compared_token_count"]:
            yield "nothing was compared"
        if not self._demands:
            return
        for name in config.classes_not_allowed:
            if report.classes[name]:
                yield f"{report.classes[name]} tokens of the class {name}, which must be empty"
        if not report.complete:
            yield f"{report.warnings['update_failed']} updates failed"
        if "step_mismatch" in report.warnings:
            yield "the ranks ended different steps"


def _overflowed(metric: str, metrics: Mapping[str, float]) -> bool:
    """Return whether a metric is null because it left the range of its numbers: then it is beyond any bound."""
    if metric in ("ratio0_min", "ratio0_max", "ess0"):
        return metrics["compared_token_count"] > 0
    if metric.startswith("seq_"):
        return not math.isnan(metrics["seq_ess0"])
    return metrics.get(f"overflow/{metric}", 0) > 0


def _refuse_unknown_metrics(limits: tuple[Limit, ...], config: AuditConfig) -> None:
    known = metric_names(config)
    for limit in limits:
        if limit.metric not in known:
            near = difflib.get_close_matches(limit.metric, known, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            if limit.metric in metric_names(replace(config, samples_per_step=1)):
                hint = "; it needs the table of samples: set samples_per_step"
            raise ValueError(f"a limit names the metric {limit.metric!r}, which is not computed{hint}")


def failure_message(report: StepReport) -> str:
    """Return what a failed step's error says: what failed, the worst token and where to look first."""
    parts = [f"step {report.step} failed its verdict: {'; '.join(report.failures)}"]
    if report.worst_tokens:
        worst = report.worst_tokens[0]
        labels = "".join(f", {name} {code}" for name, code in worst.labels.items())
        parts.append(
            f"worst token: sample {worst.sample_index}, position {worst.token_position}, rank {worst.rank}{labels}, "
            f"train {worst.train_logp:.6g}, rollout {worst.rollout_logp:.6g}"
        )
    causes = [finding for finding in report.findings if finding.names_cause]
    if causes:
        parts.append(f"likely cause: {causes[0]}")
    else:
        parts.append(f"look first at {_look_first(report)}")
    return ". ".join(parts)


def _look_first(report: StepReport) -> str:
    classes = report.classes
    if not report.complete:
        return "the log of the ranks whose update failed"
    if not report.metrics["compared_token_count"]:
        return "the mask, and whether the engine returns log-probabilities"
    if any(classes[name] for name in ("rollout_nan", "rollout_neginf", "rollout_missing", "rollout_sentinel")):
        return "the rollout engine: it returned no values, or some that are no log-probabilities"
    if any(classes[name] for name in ("train_nan", "train_neginf", "train_sentinel")):
        return "the training forward: its logits, and filters such as top-p that drop sampled tokens"
    return "the labels and ranks of the worst tokens (stale weights?), then temperature, mask and shift, then precision"
