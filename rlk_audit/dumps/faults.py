"""Tells what is bad about samples of one file: the first few of a kind by themselves, then how many more there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from rlk_audit.dumps.bounds import MAX_KINDS, TOLD_PER_KIND
from rlk_audit.dumps.sample import DumpSample, Tell

Record = TypeVar("Record")


class SampleError(ValueError):
    """One sample cannot be used; the text says why and holds nothing that differs between samples of one fault."""


class Faults:
    """Faults of the samples of one file; as a context manager it tells at its end how many were not told."""

    def __init__(self, path: Path, tell: Tell):
        self.path = path
        self._tell = tell
        self._counts: Counter[str] = Counter()

    def add(self, place: str, message: str) -> None:
        """Count a fault of one sample at ``place``, such as ``line 3``, and tell it if it is among the first."""
        if message not in self._counts and len(self._counts) >= MAX_KINDS:
            message = "other faults"
        self._counts[message] += 1
        if self._counts[message] <= TOLD_PER_KIND:
            self._tell(self.path, f"{place} is left out: {message}")

    def samples(
        self, records: Iterable[tuple[str, Record]], read: Callable[[Record], DumpSample]
    ) -> Iterator[DumpSample]:
        """Yield what ``read`` makes of every (place, record); what it refuses is counted and left out."""
        for place, record in records:
            sample = self._read(place, record, read)
            if sample is not None:
                yield sample

    def _read(self, place: str, record: Record, read: Callable[[Record], DumpSample]) -> DumpSample | None:
        try:
            return read(record)
        except SampleError as error:
            self.add(place, str(error))
            return None

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for message, count in self._counts.items():
            if count > TOLD_PER_KIND:
                self._tell(self.path, f"and {count - TOLD_PER_KIND} more are left out: {message}")
