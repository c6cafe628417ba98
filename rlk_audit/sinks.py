"""Where reports go. A sink fails at set-up; in a step, the auditor keeps its failure from stopping anything."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Protocol, TextIO

from rlk_audit.report import StepReport


class Sink(Protocol):
    """Takes the reports of a run, in order."""

    def write(self, report: StepReport) -> None:
        """Write one report."""

    def close(self) -> None:
        """Write what is held back, and let go of files."""


class JsonlSink:
    """Appends one line of strict JSON a report to a file, flushed at once.

    A partial last line, left by a process that died while writing, is cut off first, so every line can be read.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_partial_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, report: StepReport) -> None:
        """Append the report as one line."""
        self._file.write(report.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """Writes one line a report to a text stream, standard output if none is given."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def write(self, report: StepReport) -> None:
        """Write the report's line."""
        print(summary_line(report), file=self._stream or sys.stdout, flush=True)

    def close(self) -> None:
        """Do nothing: the stream is the caller's."""


LINE_METRICS = {
    "mean": "abs_dlogp_mean",
    "p50": "abs_dlogp_p50",
    "p99": "abs_dlogp_p99",
    "max": "abs_dlogp_max",
    "kl0": "approx_kl0",
    "clip0": "clipfrac0",
}
"""Name in the line -> metric; those that the configuration does not compute are left out."""


def summary_line(report: StepReport) -> str:
    """Return the step in one line: its number, tokens, drift, warnings and the worst token."""
    metrics = report.metrics
    parts = [f"step {'-' if report.step is None else report.step}", f"tokens {metrics['compared_token_count']}"]
    parts += [f"{name} {_short(metrics[key])}" for name, key in LINE_METRICS.items() if key in metrics]
    if report.worst_tokens:
        worst = report.worst_tokens[0]
        parts.append(f"worst sample {worst.sample_index} pos {worst.token_position} rank {worst.rank}")
        parts += [f"{name} {code}" for name, code in worst.labels.items()]
    parts += [f"{code}={count}" for code, count in report.warnings.items()]
    parts += report.notes
    return " | ".join(parts)


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _cut_partial_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            file.seek(keep - 1)
            if file.read(1) == b"\n":
                break
            keep -= 1
        if keep != end:
            file.truncate(keep)
