"""Strict JSON, one line a report: the record that everything else can be made of."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from rlk_audit.report import StepReport
from rlk_audit.sinks.base import refuse_rank_scope

if sys.platform != "win32":
    import fcntl

MAX_HELD_LINES = 256
"""Lines kept for later while the file cannot be written; the oldest are given up first."""
LOCK_SECONDS = 1.0
"""How long another process that writes to the file is waited for."""


class JsonlSink:
    """Appends one line of strict JSON a report to a file, at once and without a buffer.

    A partial last line, left by a process that died while writing, is cut off first, so every line can be read. A
    deleted file or folder is made anew. Lines that could not be written, as on a full disk, are held and go first once
    writing works again. Several processes may write to one file, where the file system has locks: each line stays
    whole.

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
        self._file: int | None = None
        with self._alone():  # to fail here rather than in a step
            pass

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
            try:
                self._make_room(len(line))
                with self._alone() as file:
                    _write_whole(file, line)
            except OSError:
                self._let_go()
                raise
            self._held.popleft()

    def _make_room(self, line_length: int) -> None:
        """Move the file aside if it would become too large."""
        if self._max_bytes is None:
            return
        with self._alone() as file:
            size = os.fstat(file).st_size
            if size > 0 and size + line_length > self._max_bytes:
                self.path.rename(_next_free(self.path))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the file that stands at the path against other processes; its last line is whole."""
        file = self._hold()
        try:
            _mend_last_line(file)
            yield file
        finally:
            _unlock(file)

    def _hold(self) -> int:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            if self._file is None:
                self._file = _open(self.path)
            if not _lock(self._file):
                time.sleep(0.001)
            elif _is_at(self._file, self.path):
                return self._file
            else:  # moved aside, perhaps by who held it until now
                self._let_go()
        raise TimeoutError(f"another process holds {self.path}")

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    if os.fstat(file).st_size and os.pread(file, 1, 0) != b"{":
        os.close(file)
        raise ValueError(f"{path} holds something else than lines of JSON objects, so nothing is appended to it")
    return file


def _lock(file: int) -> bool:
    """Return whether the file is this process's now; where there are no locks, it always is."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems have none
            pass
    return True


def _unlock(file: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


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


def _mend_last_line(file: int) -> None:
    """Cut off a last line that is not whole; a whole one that only lacks its end gets it."""
    end = os.fstat(file).st_size
    if end == 0 or os.pread(file, 1, end - 1) == b"\n":
        return
    start = _start_of_last_line(file, end)
    try:
        json.loads(os.pread(file, end - start, start))
    except ValueError:
        os.ftruncate(file, start)
    else:
        _write_whole(file, b"\n")


def _start_of_last_line(file: int, end: int) -> int:
    """Return where the text behind the last line's end begins."""
    block = 1 << 16
    while end > 0:
        begin = max(end - block, 0)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
