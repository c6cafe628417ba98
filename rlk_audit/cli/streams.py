"""Where the commands write: standard output and error, pipes that end early, and bars on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from rlk_audit.allreduce import Group, group_place, on_first_rank
from rlk_audit.cli import tables

WIDTH = 140
"""Columns of a table where there is no terminal."""


@contextmanager
def progress_bars(group: Group) -> Iterator[Any]:
    """Show bars on a terminal's standard error, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console.is_terminal and group_place(group)[0] == 0
    with Progress(*columns, console=console, transient=True, disable=not shown) as bars:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


@contextmanager
def to_the_end_of_a_pipe() -> Iterator[None]:
    """Write no more once whoever reads has enough; the exit status stays what it is."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class PipeConsole(Console):
    """A console that leaves a closed pipe to its caller."""

    def on_broken_pipe(self) -> None:
        """Raise: rich would exit with 1, as if a limit was crossed."""
        raise BrokenPipeError


def show(*parts: Any) -> None:
    """Write texts and tables to standard output."""
    console = PipeConsole(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    with to_the_end_of_a_pipe():
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, (str, Text)))


def tell(sentence: str) -> None:
    """Write a sentence to standard error."""
    print(tables.plain_text(sentence), file=sys.stderr)


def refuse_places(files: Mapping[str, str | Path | None], group: Group) -> None:
    """Collective: every rank must call this. Refuse what the first rank cannot write, before the work to fill it.

    Args:
        files: option -> the file it names, None where it is not given.
        group: whose first rank writes.

    Raises:
        ValueError: a file's folder does not exist, or it is a folder itself.
    """
    on_first_rank(partial(_refuse_places, files), group)


def _refuse_places(files: Mapping[str, str | Path | None]) -> None:
    for option, file in files.items():
        if file is not None and file != "-":
            _refuse_place(option, file)


def _refuse_place(option: str, file: str | Path) -> None:
    if not Path(file).parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {Path(file).parent}; make it, or name a file elsewhere")
    if Path(file).is_dir():
        raise ValueError(f"{option} {file} is a folder; name a file in it")


def write_json(values: Any, file: str) -> None:
    """Write strict JSON to a file; ``-`` is standard output."""
    text = json.dumps(values, allow_nan=False)
    if file == "-":
        with to_the_end_of_a_pipe():
            print(text)
    else:
        Path(file).write_text(text + "\n", encoding="utf-8")
