"""Lines of JSONL one by one, each of bounded length and nesting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from rlk_audit.dumps.bounds import MAX_LINE_BYTES, MAX_NESTING
from rlk_audit.dumps.faults import Faults

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_CHUNK = 2**20
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_RECOGNISED_LINES = 3


def records(path: Path, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of every line; a line that is no object of JSON is told and left out.

    ``NaN``, ``Infinity`` and ``-Infinity`` are read as numbers. Lines of white space are passed over.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"line {number}"
            if len(line) > MAX_LINE_BYTES:
                faults.add(place, f"a line must be at most {MAX_LINE_BYTES} bytes long")
                _skip_line(file, line)
            elif line.strip():
                try:
                    yield place, _record(line)
                except _LineError as error:
                    faults.add(place, str(error))


def has_keys(path: Path, *alternatives: tuple[str, ...]) -> bool:
    """Return whether one of the first lines is an object with all the keys of one of the alternatives."""
    with path.open("rb") as file:
        for _ in range(_RECOGNISED_LINES):
            line = file.readline(MAX_LINE_BYTES)
            if line.lstrip().startswith(b"{") and any(
                all(_has_key(line, key) for key in keys) for keys in alternatives
            ):
                return True
    return False


class _LineError(ValueError):
    pass


def _record(line: bytes) -> dict[str, Any]:
    if nesting_exceeds(line, MAX_NESTING):
        raise _LineError(f"lists and objects must be nested at most {MAX_NESTING} deep")
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise _LineError("it is not UTF-8") from error
    except ValueError as error:  # also of numbers with too many digits
        raise _LineError("it is not JSON, or cut off") from error
    if not isinstance(record, dict):
        raise _LineError("a line must be an object of JSON")
    return record


def nesting_exceeds(line: bytes, depth: int) -> bool:
    """Return whether brackets outside of strings stand deeper than ``depth``, without recursion."""
    if line.count(b"[") + line.count(b"{") <= depth:
        return False
    brackets = np.frombuffer(_STRING.sub(b"", line), dtype=np.uint8)
    above = 0
    for start in range(0, len(brackets), _CHUNK):
        running = np.cumsum(_STEPS[brackets[start : start + _CHUNK]], dtype=np.int64) + above
        if running.max() > depth:
            return True
        above = int(running[-1])
    return False


def _has_key(line: bytes, key: str) -> bool:
    return re.search(rb'"' + re.escape(key.encode()) + rb'"\s*:', line) is not None


def _skip_line(file: IO[bytes], piece: bytes) -> None:
    while piece and not piece.endswith(b"\n"):
        piece = file.readline(_CHUNK)
