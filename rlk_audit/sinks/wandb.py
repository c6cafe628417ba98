"""Weights & Biases: metrics and a histogram a step, findings and, at an interval, the worst tokens as tables."""

from __future__ import annotations

from typing import Any

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import (
    FINDINGS_KEY,
    HISTOGRAM_KEY,
    STEP_KEY,
    TABLE_KEY,
    findings_table,
    load_package,
    logged_values,
    refuse_rank_scope,
    step_number,
    worst_table,
)


class WandbSink:
    """Logs to a W&B run over an axis of its own, ``<prefix>step``.

    W&B drops what is logged for a step behind its run's own counter, so ``step=`` is not passed, and in a run of the
    caller's the row that is open is not ended: the audit's values join it. Only if the caller has logged nothing since
    the last report is the row ended, which moves the run's counter on by one.

    Args:
        run: a run of the caller's, who finishes it, or the module ``wandb`` after its ``init``; None joins the active
            run of the process, or starts one.
        table_interval: every so many reports, the worst tokens are logged as a table.
        accept_rank_scope: take reports that cover this rank alone.
        init: arguments of ``wandb.init``, for a run that is started here.

    Raises:
        ImportError: wandb is not installed.
        ValueError: ``run`` and arguments of ``wandb.init`` are given.
    """

    def __init__(
        self, run: Any = None, *, table_interval: int = 100, accept_rank_scope: bool = False, **init: Any
    ) -> None:
        if run is not None and init:
            raise ValueError(f"the run was started by the caller, so {', '.join(init)} cannot be set here")
        self._wandb = load_package("wandb", "wandb")
        # With a run active, `init` would return that one, which is not to be finished here.
        run = self._wandb.run if run is None else getattr(run, "run", run)
        self._owns_run = run is None
        self._run = self._wandb.init(**init) if run is None else run
        self._table_interval = table_interval
        self._accept_rank_scope = accept_rank_scope
        self._keys: set[str] = set()
        self._reports = 0
        self._open_row: int | None = None

    def write(self, report: StepReport) -> None:
        """Log a step; a run's total has no place in a chart over steps."""
        refuse_rank_scope(report, self._accept_rank_scope)
        if report.kind == "run":
            return
        values = self._values(report)
        self._put_over_steps(values, report.prefix + STEP_KEY)
        self._log(values)
        self._reports += 1

    def close(self) -> None:
        """Finish the run if it was started here."""
        if self._owns_run:
            self._run.finish()

    def _values(self, report: StepReport) -> dict[str, Any]:
        values: dict[str, Any] = {report.prefix + STEP_KEY: step_number(report), **logged_values(report)}
        histogram = report.histogram()
        if histogram is not None:
            bins = (list(histogram.counts), list(histogram.edges))
            values[report.prefix + HISTOGRAM_KEY] = self._wandb.Histogram(np_histogram=bins)
        if report.worst_tokens and self._reports % self._table_interval == 0:
            columns, rows = worst_table(report)
            values[report.prefix + TABLE_KEY] = self._wandb.Table(columns=columns, data=rows)
        if report.findings:
            columns, rows = findings_table(report)
            values[report.prefix + FINDINGS_KEY] = self._wandb.Table(columns=columns, data=rows)
        return values

    def _put_over_steps(self, values: dict[str, Any], step_key: str) -> None:
        for key in values.keys() - self._keys:
            if key == step_key:
                self._run.define_metric(key, hidden=True)
            else:
                self._run.define_metric(key, step_metric=step_key)
        self._keys |= values.keys()

    def _log(self, values: dict[str, Any]) -> None:
        if self._owns_run:
            self._run.log(values)
            return
        if self._run.step == self._open_row:
            self._run.log({}, commit=True)
        self._run.log(values, commit=False)
        self._open_row = self._run.step
