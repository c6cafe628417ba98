"""Strict JSON, one line a report: the record that everything else can be made of."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import refuse_rank_scope

MAX_HELD_LINES = 256
"""Lines kept for later while the file cannot be written; the oldest are given up first."""


class JsonlSink:
    """Appends one line of strict JSON a report to a file, at once and without a buffer.

    A partial last line, left by a process that died while writing, is cut off first, so every line can be read. A
    deleted file or folder is made anew. Lines that could not be written, as on a full disk, are held and go first once
    writing works again.

    Args:
        path: the file; its folder is made.
        max_bytes: when a line would make the file larger, what it holds is moved to ``NAME.1.jsonl``, ``NAME.2.jsonl``
            and so on, oldest first; None never does.
        accept_rank_scope: take reports that cover this rank alone.

    Raises:
        OSError: the file cannot be opened for writing.
        ValueError: the file holds something else than lines of JSON objects.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int | None = None, accept_rank_scope: bool = False
    ) -> None:
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._accept_rank_scope = accept_rank_scope
        self._held: deque[bytes] = deque(maxlen=MAX_HELD_LINES)
        self._file: int | None = _open(self.path)

    def write(self, report: StepReport) -> None:
        """Append the report as one line, after those that are held."""
        refuse_rank_scope(report, self._accept_rank_scope)
        self._held.append(report.to_json().encode() + b"\n")
        self._write_held()

    def close(self) -> None:
        """Try once more to write what is held, and close the file."""
        try:
            self._write_held()
        finally:
            self._let_go()

    def _write_held(self) -> None:
        while self._held:
            line = self._held[0]
            file = self._file_for(len(line))
            try:
                _write_whole(file, line)
            except OSError:
                # Opened anew next time, which cuts off what was written of the line.
                self._let_go()
                raise
            self._held.popleft()

    def _file_for(self, line_length: int) -> int:
        if self._file is not None and not _is_at(self._file, self.path):
            self._let_go()
        if self._file is None:
            self._file = _open(self.path)
        size = os.fstat(self._file).st_size
        if self._max_bytes is not None and size > 0 and size + line_length > self._max_bytes:
            self._let_go()
            self.path.rename(_next_free(self.path))
            self._file = _open(self.path)
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        _mend_last_line(path)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def _write_whole(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file is still the one that stands at the path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _next_free(path: Path) -> Path:
    number = 1
    while (moved := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return moved


def _mend_last_line(path: Path) -> None:
    """Cut off a last line that is not whole; a whole one that only lacks its end gets it."""
    with path.open("rb+") as file:
        if file.read(1) not in (b"", b"{"):
            raise ValueError(f"{path} holds something else than lines of JSON objects, so nothing is appended to it")
        end = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(path)
        file.seek(start)
        tail = file.read()
        if not tail:
            return
        try:
            json.loads(tail)
        except ValueError:
            file.truncate(start)
        else:
            file.seek(end)
            file.write(b"\n")


def _start_of_last_line(path: Path) -> int:
    """Return where the text behind the last line's end begins."""
    block = 1 << 16
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(end - block, 0)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0
