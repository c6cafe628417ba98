"""A running job's log in a terminal."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rlk_audit.cli.streams import tell
from rlk_audit.cli.tables import STEP_COLUMNS, figure, finding_lines, line, plain_text, table
from rlk_audit.offline.run_log import follow
from rlk_audit.report import StepReport
from rlk_audit.run_view import Causes
from rlk_audit.sinks.console import cause_lines, summary_line

STEPS_SHOWN = 20
BARS = " ▁▂▃▄▅▆▇█"


def watch_log(path: Path, console: Console) -> None:
    """Show a log as it grows until interrupted: a table that stays on a terminal, a line a step elsewhere."""
    try:
        if console.is_terminal:
            _watch_terminal(path, console)
        else:
            if not path.exists():
                tell(f"waiting for {path}")
            for report in follow(path):
                for told in (summary_line(report), *cause_lines(report)):
                    print(plain_text(told), flush=True)
    except KeyboardInterrupt:
        return


def _watch_terminal(path: Path, console: Console) -> None:
    reports: deque[StepReport] = deque(maxlen=STEPS_SHOWN)
    with Live(line(f"waiting for {path}"), console=console, auto_refresh=True) as live:
        for report in follow(path):
            if reports and report.kind == "step" == reports[-1].kind and _is_earlier(report, reports[-1]):
                reports.clear()  # the run was restarted from an earlier step
            reports.append(report)
            live.update(_screen(path, reports))


def _is_earlier(report: StepReport, last: StepReport) -> bool:
    return report.step is not None and last.step is not None and report.step <= last.step


def _screen(path: Path, reports: deque[StepReport]) -> RenderableType:
    rows = [
        (
            "run" if report.kind == "run" else str(report.step),
            *(figure(report, key) for key in STEP_COLUMNS),
            _verdict(report),
            ", ".join(f"{code}={count}" for code, count in report.warnings.items()),
        )
        for report in reports
    ]
    columns = ("step", "tokens", "mean", "p50", "p99", "max", "verdict", "warnings")
    steps = [report for report in reports if report.kind == "step"]
    last = steps[-1] if steps else None
    causes = [] if last is None else finding_lines(Causes(last.step, last.step, last.findings))
    trend = Text(f"p99 {spark([figure(report, 'abs_dlogp_p99') for report in steps])}")
    return Group(table(str(path), columns, rows), trend, *causes)


def _verdict(report: StepReport) -> str:
    return "-" if report.verdict is None else "passed" if report.verdict.passed else "FAILED"


def spark(values: list[float]) -> str:
    """Return values as a line of bars from 0 to the largest; a blank where there is none."""
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    return "".join(BARS[round(8 * value / top)] if 0 <= value <= top and top > 0 else BARS[0] for value in values)
