"""TensorBoard: a scalar a metric, a histogram of dlogp from the sketch's bins, findings as text."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import (
    FINDINGS_KEY,
    HISTOGRAM_KEY,
    load_package,
    logged_values,
    refuse_rank_scope,
    step_number,
)


class TensorBoardSink:
    """Writes scalars, which TensorBoard keeps as float32, and a histogram of dlogp.

    Args:
        log_dir: folder of the event files; needed without ``writer``.
        writer: a ``SummaryWriter`` of the caller's, who flushes and closes it.
        accept_rank_scope: take reports that cover this rank alone.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be written to.
        ValueError: neither or both of ``log_dir`` and ``writer`` are given.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        writer: Any = None,
        *,
        accept_rank_scope: bool = False,
    ) -> None:
        if (log_dir is None) == (writer is None):
            raise ValueError("TensorBoardSink needs either log_dir or writer")
        self._accept_rank_scope = accept_rank_scope
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._writer = writer if log_dir is None else _new_writer(log_dir)

    def write(self, report: StepReport) -> None:
        """Write a step's scalars and histogram; a run's total has no place in a chart over steps."""
        refuse_rank_scope(report, self._accept_rank_scope)
        if report.kind == "run":
            return
        if self._log_dir is None:
            _add(self._writer, report)
            return
        if self._writer is None or not self._log_dir.is_dir():
            self._let_go()
            self._writer = _new_writer(self._log_dir)
        try:
            _add(self._writer, report)
            # A process that dies loses no step, and a full disk shows here.
            self._writer.flush()
        except Exception:
            # Its thread is dead and its file may end in half a record: the next step begins another file.
            self._let_go()
            raise

    def close(self) -> None:
        """Close the event file; the caller's writer is flushed, since its thread dies with the process."""
        if self._log_dir is None:
            self._writer.flush()
        elif self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _new_writer(log_dir: str | os.PathLike[str]) -> Any:
    return load_package("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(log_dir))


def _add(writer: Any, report: StepReport) -> None:
    step = step_number(report)
    for key, value in logged_values(report).items():
        writer.add_scalar(key, value, global_step=step)
    if report.findings:
        text = "\n\n".join(f"**{f.code}** ({f.strength:.0%}) {f.advice}." for f in report.findings)
        writer.add_text(report.prefix + FINDINGS_KEY, text, global_step=step)
    histogram = report.histogram()
    if histogram is None:
        return
    metrics = report.metrics
    count = metrics["compared_token_count"]
    writer.add_histogram_raw(
        report.prefix + HISTOGRAM_KEY,
        min=metrics["dlogp_min"],
        max=metrics["dlogp_max"],
        num=count,
        sum=metrics["dlogp_mean"] * count,
        sum_squares=2 * metrics["kl0_k2"] * count,
        bucket_limits=list(histogram.edges[1:]),
        bucket_counts=list(histogram.counts),
        global_step=step,
    )
