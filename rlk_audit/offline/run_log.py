"""Logs of runs: the JSONL that a running audit writes, one report a line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlk_audit.dumps.naming import natural_key
from rlk_audit.dumps.sample import DumpError
from rlk_audit.offline.plan import sort_steps
from rlk_audit.report import StepReport
from rlk_audit.run_view import Causes, RunView

_MAX_LINE = 1 << 26
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


def read_run_logs(paths: Sequence[Path]) -> RunView:
    """Read logs of one run, with the parts that were moved aside as they grew.

    Of a step that is there twice, as after a restart, the later report stands.

    Raises:
        DumpError: no line is a report.
    """
    steps: dict[int | None, StepReport] = {}
    total, problems = None, []
    for path in dict.fromkeys(part for given in paths for part in (*_moved(given), given)):
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                report = _report(line)
            except ValueError as error:
                problems.append(f"{path}: line {number} is left out: {error}")
                continue
            if report.kind == "run":
                total = report
            else:
                steps[report.step] = report
    if not steps:
        raise DumpError(f"{paths[0]} holds no report of a step")
    ordered = tuple(steps[step] for step in sort_steps(steps))
    causes = tuple(Causes(report.step, report.step, report.findings) for report in ordered if report.findings)
    return RunView(", ".join(map(str, paths)), ordered, total, causes, problems=tuple(problems))


def follow(path: Path, *, once: bool = False) -> Iterator[StepReport]:
    """Yield a log's reports, those there already and those to come, through rotation and restarts of the run.

    Args:
        path: the log; it need not exist yet.
        once: end where the file ends.
    """
    known: set[Path] = set()
    followed = None
    while True:
        for part in _moved(path):
            if part not in known and (followed is None or not os.path.samestat(part.stat(), followed)):
                with part.open("rb") as file:
                    yield from _reports_of(file, part, once=True)
            known.add(part)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            followed = os.fstat(file.fileno())
            yield from _reports_of(file, path, once)
        if once:
            return
        time.sleep(_POLL_SECONDS)  # not there yet, or moved aside and not made anew


def _reports_of(file: BinaryIO, path: Path, once: bool) -> Iterator[StepReport]:
    """Yield the reports of one file until another stands in its place."""
    last_round = False
    while True:
        start = file.tell()
        line = file.readline(_MAX_LINE)
        if line.endswith(b"\n") or len(line) == _MAX_LINE:
            with contextlib.suppress(ValueError):  # a crash cut the line short
                yield _report(line)
            continue
        # The line is not whole: it is read again from its start, for a restarted run cuts off what a crash left.
        file.seek(start if os.fstat(file.fileno()).st_size >= start else 0)
        if last_round:
            return
        # What was written before the file was moved aside is still to be read.
        last_round = once or _was_replaced(file, path)
        if not last_round:
            time.sleep(_POLL_SECONDS)


def _was_replaced(file: BinaryIO, path: Path) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return True


def _moved(path: Path) -> list[Path]:
    """Return what a log moved aside as it grew, oldest first: NAME.1.jsonl, NAME.2.jsonl, ..."""
    parts = [other for other in path.parent.glob(f"{path.stem}.*{path.suffix}") if other.suffixes[-2][1:].isdecimal()]
    return sorted(parts, key=natural_key)


def _report(line: bytes) -> StepReport:
    values: Any = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected a report, got {type(values).__name__}")
    return StepReport.from_dict(values)
