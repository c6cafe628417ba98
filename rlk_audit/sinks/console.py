"""One line a step for people."""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import TextIO

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import refuse_rank_scope

CAUSES_SHOWN = 3
LINE_METRICS = {
    "mean": "abs_dlogp_mean",
    "p50": "abs_dlogp_p50",
    "p99": "abs_dlogp_p99",
    "max": "abs_dlogp_max",
    "kl0": "approx_kl0",
    "clip0": "clipfrac0",
}
"""Name in the line -> metric; those that the configuration does not compute are left out."""


class ConsoleSink:
    """Writes one line a report to a text stream, standard output if none is given, and one more a cause it found.

    On a terminal, where rich is installed, warnings are yellow and failures red.
    """

    def __init__(self, stream: TextIO | None = None, *, accept_rank_scope: bool = False) -> None:
        self._stream = stream
        self._accept_rank_scope = accept_rank_scope
        self._has_rich = importlib.util.find_spec("rich") is not None

    def write(self, report: StepReport) -> None:
        """Write the report's line."""
        refuse_rank_scope(report, self._accept_rank_scope)
        # Looked up each time: a training may redirect its output.
        stream = self._stream or sys.stdout
        for line in (summary_line(report), *cause_lines(report)):
            if self._has_rich and stream.isatty():
                _print_coloured(line, _style(report), stream)
            else:
                print(line, file=stream, flush=True)

    def close(self) -> None:
        """Do nothing: the stream is the caller's."""


def summary_line(report: StepReport) -> str:
    """Return the step in one line: its number, tokens, drift, worst token, warnings and what failed."""
    metrics = report.metrics
    name = "run" if report.kind == "run" else f"step {'-' if report.step is None else report.step}"
    parts = [f"{report.prefix.rstrip('/')} {name}".lstrip(), f"tokens {metrics['compared_token_count']}"]
    parts += [f"{name} {_short(metrics[key])}" for name, key in LINE_METRICS.items() if key in metrics]
    if report.worst_tokens:
        worst = report.worst_tokens[0]
        labels = "".join(f" {label} {code}" for label, code in worst.labels.items())
        parts.append(f"worst sample {worst.sample_index} pos {worst.token_position} rank {worst.rank}{labels}")
    parts += [f"{code}={count}" for code, count in report.warnings.items()]
    parts += report.notes
    if report.failures:
        parts.append(f"FAILED {'; '.join(report.failures)}")
    return " | ".join(parts)


def cause_lines(report: StepReport) -> list[str]:
    """Return a line for each of the strongest causes of a step that failed its verdict, or one that none is known."""
    if not report.failures:
        return []
    causes = [f"    cause: {finding}" for finding in report.findings if finding.names_cause]
    if not causes and report.findings:
        return [f"    no known cause matches: {report.findings[0].summary}"]
    return causes[:CAUSES_SHOWN]


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _style(report: StepReport) -> str:
    if report.failures:
        return "bold red"
    return "yellow" if report.warnings else ""


def _print_coloured(line: str, style: str, stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    # Soft wrap: the terminal may fold the line, but it stays one.
    Console(file=stream).print(Text(line, style=style), soft_wrap=True)
