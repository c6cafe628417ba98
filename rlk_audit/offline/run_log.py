"""Logs of runs: the JSONL that a running audit writes, one report a line."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.diagnose import diagnose
from rlk_audit.dumps.sample import DumpError
from rlk_audit.offline.plan import sort_steps
from rlk_audit.report import StepReport
from rlk_audit.run_view import Causes, RunView, join_causes

_MAX_LINE = 1 << 24
_POLL_SECONDS = 0.2


def is_run_log(path: Path) -> bool:
    """Return whether a file's first line is a report."""
    try:
        with path.open("rb") as file:
            first = file.readline(_MAX_LINE)
        values = json.loads(first)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"kind", "metrics", "classes", "warnings"} <= set(values)


def run_logs_in(paths: Sequence[Path]) -> list[Path]:
    """Return the logs of runs among files and in folders, with all folders in them."""
    return [file for path in paths for file in sorted([path, *path.rglob("*.jsonl")]) if is_run_log(file)]


def read_run_logs(paths: Sequence[Path]) -> RunView:
    """Read logs of one run, with the parts that were moved aside as they grew.

    Of a step that is there twice, as after a restart, the later report stands, and the earlier one is among those that
    were replaced; reports of unknown steps all stand. A total behind which steps follow, or of fewer tokens than its
    steps have, is none of this run.

    Raises:
        DumpError: no line is a report.
    """
    found: list[StepReport] = []
    problems: list[str] = []
    for path in dict.fromkeys(part for given in paths for part in _parts(given.resolve())):
        reports = list(_reports_in(path, problems))
        alone = sum(report.scope == "rank" for report in reports)
        if alone:
            problems.append(f"{path}: {alone} reports are of a single rank, not of the group")
        found += reports
    steps = [report for report in found if report.kind == "step"]
    if not steps:
        raise DumpError(f"{paths[0]} holds no report of a step")
    last = {report.step: report for report in steps}
    replaced = tuple(report for report in steps if report.step is not None and report is not last[report.step])
    notes = (
        [f"reports that a later one of their step replaces, as after a restart: {len(replaced)}"] if replaced else []
    )
    ordered = (
        *(report for report in steps if report.step is None),
        *(last[step] for step in sort_steps(last) if step is not None),
    )
    total = found[-1] if found[-1].kind == "run" and _holds(found[-1], ordered) else None
    # A run diagnoses steps that failed, and few others; what a report alone can say is said of each.
    causes = join_causes(Causes(report.step, report.step, report.findings or diagnose(report)) for report in ordered)
    title = ", ".join(map(str, paths))
    return RunView(title, ordered, total, causes, problems=tuple(problems), notes=tuple(notes), replaced=replaced)


def _holds(total: StepReport, steps: Sequence[StepReport]) -> bool:
    """Return whether a total may be of all these steps: a run that began anew without its state counts from there."""
    active = [report.metrics.get("active_token_count", 0) for report in (total, *steps)]
    return active[0] >= sum(active[1:])


def _reports_in(path: Path, problems: list[str]) -> Iterator[StepReport]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), 1):
            try:
                yield _report(line)
            except ValueError as error:
                problems.append(f"{path}: line {number} is left out: {error}")


def follow(path: Path, *, once: bool = False) -> Iterator[StepReport]:
    """Yield a log's reports, those there already and those to come, through rotation and restarts of the run.

    Args:
        path: the log; it need not exist yet.
        once: end where the file ends.
    """
    read = 0
    while True:
        file = _open_after(path, read)
        if file is None:
            if once:
                return
            time.sleep(_POLL_SECONDS)
            continue
        with file:
            yield from _reports_of(file, path, once)
            at = _number_of(file, path)
        if once and at is None:
            return
        read = read if at is None else at


def _open_after(path: Path, number: int) -> BinaryIO | None:
    """Open the part of a log that follows the one of a number; None where it is not made yet.

    The log is opened before its name as a moved part is looked for, since it may be moved aside, and be made anew, at
    any time.
    """
    file = _open(path)
    later = next((other for other in _numbers(path) if other > number), None)
    if later is None:
        return file
    if file is not None:
        file.close()
    return _open(_part(path, later))


def _open(path: Path) -> BinaryIO | None:
    try:
        return path.open("rb", buffering=0)  # a buffer would hold what is cut off meanwhile
    except FileNotFoundError:
        return None


def _reports_of(file: BinaryIO, path: Path, once: bool) -> Iterator[StepReport]:
    """Yield the reports of one file until another stands at the log's path."""
    start = 0
    last_round = False
    while True:
        file.seek(start)
        data = file.read(_MAX_LINE)
        lines, end, _ = data.rpartition(b"\n")
        for line in lines.split(b"\n") if end else ():
            try:
                yield _report(line)
            except ValueError:
                continue  # what a crash cut short
        # A line that is not whole is read again: it may grow, or be cut off by the run's restart.
        start += len(data) if len(data) == _MAX_LINE and not end else len(lines) + len(end)
        if end:
            continue
        if last_round:
            return
        # What was written before the file was moved aside is still to be read.
        last_round = once or _was_replaced(file, path)
        if os.fstat(file.fileno()).st_size < start:  # begun anew in its place
            start = 0
        if not last_round:
            time.sleep(_POLL_SECONDS)


def _was_replaced(file: BinaryIO, path: Path) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return True


def _number_of(file: BinaryIO, path: Path) -> int | None:
    """Return the number under which a log's file was moved aside, None if it was not."""
    for number in _numbers(path):
        if not _was_replaced(file, _part(path, number)):
            return number
    return None


def _parts(path: Path) -> list[Path]:
    """Return the files of one log, oldest first: NAME.1.jsonl, NAME.2.jsonl, ..., NAME.jsonl."""
    return [*(_part(path, number) for number in _numbers(path)), path]


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def _numbers(path: Path) -> list[int]:
    numbered = re.compile(rf"{re.escape(path.stem)}\.([1-9][0-9]{{0,17}}){re.escape(path.suffix)}")
    found = (numbered.fullmatch(other.name) for other in path.parent.glob("*"))
    return sorted(int(match[1]) for match in found if match)


def _report(line: bytes) -> StepReport:
    try:
        values: Any = json.loads(line)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a report, got {type(values).__name__}")
    report = StepReport.from_dict(values)
    if "compared_token_count" not in report.metrics or not set(TOKEN_CLASSES) <= set(report.classes):
        raise ValueError("not a step report: counts of tokens are missing")
    return report
