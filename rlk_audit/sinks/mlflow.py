"""MLflow: metrics a step, findings and, at an interval, the worst tokens as table artifacts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import (
    FINDINGS_KEY,
    TABLE_KEY,
    findings_table,
    load_package,
    logged_values,
    refuse_rank_scope,
    step_number,
    worst_table,
)


class MlflowSink:
    """Logs to an MLflow run, by id, so that the process's active run does not matter.

    Args:
        run_id: a run of the caller's, who ends it; None starts a run.
        tracking_uri: the store; MLflow's own default if None. Recent versions refuse folders, take ``sqlite:///FILE``.
        experiment: name of the experiment that a run is started in; made if there is none.
        artifact_dir: where the artifacts of a new experiment go; the store's default if None.
        table_interval: every so many reports, the worst tokens are added to the table ``<prefix>worst_tokens.json``.
        accept_rank_scope: take reports that cover this rank alone.

    Raises:
        ImportError: mlflow is not installed.
        mlflow.exceptions.MlflowException: the store cannot be used, or has no such run.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str = "rlk_audit",
        artifact_dir: str | os.PathLike[str] | None = None,
        table_interval: int = 100,
        accept_rank_scope: bool = False,
    ) -> None:
        self._mlflow = load_package("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._owns_run = run_id is None
        run = self._start(experiment, artifact_dir) if run_id is None else self._client.get_run(run_id)
        self.run_id: str = run.info.run_id
        self._table_interval = table_interval
        self._accept_rank_scope = accept_rank_scope
        self._reports = 0

    def write(self, report: StepReport) -> None:
        """Log a step; a run's total has no place in a chart over steps."""
        refuse_rank_scope(report, self._accept_rank_scope)
        if report.kind == "run":
            return
        step, now = step_number(report), int(1000 * time.time())
        metric = self._mlflow.entities.Metric
        self._client.log_batch(
            self.run_id, metrics=[metric(key, value, now, step) for key, value in logged_values(report).items()]
        )
        if report.worst_tokens and self._reports % self._table_interval == 0:
            self._log_table(f"{report.prefix}{TABLE_KEY}.json", *worst_table(report))
        if report.findings:
            self._log_table(f"{report.prefix}{FINDINGS_KEY}.json", *findings_table(report))
        self._reports += 1

    def close(self) -> None:
        """End the run if it was started here."""
        if self._owns_run:
            self._client.set_terminated(self.run_id)

    def _log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        table = {column: list(values) for column, values in zip(columns, zip(*rows, strict=True), strict=True)}
        self._client.log_table(self.run_id, table, name)

    def _start(self, experiment: str, artifact_dir: str | os.PathLike[str] | None) -> Any:
        known = self._client.get_experiment_by_name(experiment)
        if known is not None:
            return self._client.create_run(known.experiment_id)
        location = None if artifact_dir is None else Path(artifact_dir).absolute().as_uri()
        return self._client.create_run(self._client.create_experiment(experiment, location))
