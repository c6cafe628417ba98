"""What sinks share: their protocol, the values that they log under which keys, and what they refuse."""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict
from typing import Any, Protocol

from rlk_audit.report import StepReport
from rlk_audit.verdict import FAIL, PASS

STEP_KEY = "step"
HISTOGRAM_KEY = "dlogp_histogram"
TABLE_KEY = "worst_tokens"
FINDINGS_KEY = "findings"
VERDICT_KEY = "verdict/{}"
BREAKDOWN_KEY = "breakdown/{}/{}/{}"
"""Keys beside those of the metrics; no key is a path prefix of another, which some stores cannot hold."""
LOGGED_FIGURES = ("compared_token_count", "tail_frac_ln2", "abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_p99")
LOGGED_CODES = 32
"""Labels with more codes are in JSONL alone."""


class Sink(Protocol):
    """Takes the reports of a run, in order."""

    def write(self, report: StepReport) -> None:
        """Write one report."""

    def close(self) -> None:
        """Write what is held back, and let go of files."""


class EveryNth:
    """Hands on to a sink every ``n``-th step, each step that failed its verdict, and the run's total.

    What counts is the step's number, so that a resumed run goes on as it would have.
    """

    def __init__(self, sink: Sink, n: int) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.sink = sink
        self.n = n

    def write(self, report: StepReport) -> None:
        """Write the report if it is its turn."""
        if report.failures or report.step is None or report.step % self.n == 0:
            self.sink.write(report)

    def close(self) -> None:
        """Close the sink."""
        self.sink.close()


def logged_values(report: StepReport) -> dict[str, float]:
    """Return key with prefix -> value of all that a store of numbers gets; what is null is left out.

    ``verdict/all`` and each limit's ``verdict/<metric>`` are 1 for a pass and 0 for a failure; a limit without data, or
    with too few steps, has no value. A breakdown's figures are ``breakdown/<label>/<bucket>/<figure>``.
    """
    values = {name: float(value) for name, value in report.metrics.items() if math.isfinite(value)}
    values |= _breakdown_values(report) | verdict_values(report)
    return {report.prefix + name: value for name, value in values.items()}


def _breakdown_values(report: StepReport) -> dict[str, float]:
    """Return each bucket's figures; of a label with many buckets none, since a key of a store lives for ever."""
    return {
        BREAKDOWN_KEY.format(label, bucket.name, figure): float(getattr(bucket, figure))
        for label, buckets in report.breakdowns.items()
        if len(buckets) - 1 <= LOGGED_CODES
        for bucket in buckets
        if bucket.compared_token_count
        for figure in LOGGED_FIGURES
    }


def verdict_values(report: StepReport) -> dict[str, float]:
    """Return ``verdict/all`` and each limit's ``verdict/<metric>`` that has an outcome; nothing without a verdict."""
    if report.verdict is None:
        return {}
    values = {VERDICT_KEY.format("all"): float(report.verdict.passed)}
    for result in report.verdict.limits:
        if result.outcome in (PASS, FAIL):
            key = VERDICT_KEY.format(result.metric)
            values[key] = min(values.get(key, 1.0), float(result.outcome == PASS))
    return values


def worst_table(report: StepReport) -> tuple[list[str], list[list[Any]]]:
    """Return column names and one row a worst token, the step's number first, each label in a column of its own."""
    rows = []
    for token in report.worst_tokens:
        values = asdict(token)
        labels = {f"label/{name}": code for name, code in values.pop("labels").items()}
        rows.append({STEP_KEY: report.step, **values, **labels})
    return (list(rows[0]) if rows else []), [list(row.values()) for row in rows]


def findings_table(report: StepReport) -> tuple[list[str], list[list[Any]]]:
    """Return column names and one row a finding, the step's number first, strongest first."""
    columns = [STEP_KEY, "code", "strength", "summary", "check_first"]
    rows = [[report.step, f.code, f.strength, f.summary, f.check_first] for f in report.findings]
    return columns, rows


def refuse_rank_scope(report: StepReport, accept: bool) -> None:
    """Refuse a report that covers this rank alone, which would pass for the group's.

    Raises:
        ValueError: the report's scope is ``rank`` and the sink was not made to accept it.
    """
    if report.scope == "rank" and not accept:
        raise ValueError("the report covers one rank, not the group; a sink takes it with accept_rank_scope=True only")


def step_number(report: StepReport) -> int:
    """Return the step's number.

    Raises:
        ValueError: the report has none, so no chart has a place for it.
    """
    if report.step is None:
        raise ValueError("the report has no step number, which this sink needs: set report.step")
    return report.step


def load_package(package: str, extra: str) -> Any:
    """Import an optional package.

    Raises:
        ImportError: it is not installed, or does not work; the text names the extra that installs it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} cannot be imported ({error}): pip install rlk_audit[{extra}]") from error
