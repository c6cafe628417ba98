"""The goals for speed, beside what was measured: computed from the numbers kept, nothing typed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.variants import NUMBA, REFERENCE

Results = Mapping[str, Any]
EXACT = "exact audit, torch.sort"
HELPER = "helper, sample by sample"
TORCHMETRICS = "torchmetrics"
BARE = "bare all-reduce of as many bytes"
UNPACKED = "pack, reduce, unpack"
WORK = ("update", "update and report")
LARGE = ("65536", "1048576")
SAMPLES_OF_1K = "65536"
"""Tokens of 64 samples."""
FEW = ("2", "4")


@dataclass(frozen=True)
class Measured:
    """A figure of medians, and the range that the quartiles leave it."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Goal:
    """One goal; `measured` is None where nothing was measured."""

    what: str
    limit: float
    measured: Measured | None
    unit: str = " x"
    at_least: bool = True

    @property
    def kept(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured.value >= self.limit if self.at_least else self.measured.value <= self.limit

    @property
    def unsure(self) -> bool:
        """Whether the limit lies within the range."""
        return self.measured is not None and self.measured.low < self.limit < self.measured.high


def found(results: Results, *path: str) -> Any:
    """Return what stands at the end of a path, or None."""
    place: Any = results
    for name in path:
        place = place.get(name) if place is not None else None
    return place


def quotient(times: Results | None, name: str, base: str) -> Measured | None:
    """Return by how much one exceeds another."""
    if times is None or name not in times or base not in times:
        return None
    one, other = times[name], times[base]
    return Measured(one["median"] / other["median"], one["low"] / other["high"], one["high"] / other["low"])


def of_updates(results: Results) -> Iterable[Goal]:
    """Speed-up of an update over others, with and without the report: what it is compared to does both at once."""
    asked = [(REFERENCE, EXACT, size, 1.0) for size in LARGE] + [(NUMBA, EXACT, size, 3.0) for size in LARGE]
    for ours, other, size, limit in [*asked, (NUMBA, HELPER, SAMPLES_OF_1K, 20.0)]:
        times = found(results, "update", "sizes", size, "times")
        for work in WORK:
            name = f"{ours}: {work}"
            yield Goal(f"`{name}`, {int(size):,} tokens: faster than {other}", limit, quotient(times, other, name))


def of_steps(results: Results) -> Iterable[Goal]:
    group = results.get("collective", {})
    for ours in (REFERENCE, NUMBA):
        step = f"a step of {group.get('micro_batches', 16)} micro-batches, {group.get('step_ranks', 4)} processes"
        yield Goal(
            f"`{ours}`, {step}: faster than {TORCHMETRICS}", 10.0, quotient(group.get("steps"), TORCHMETRICS, ours)
        )


def of_reductions(results: Results) -> Iterable[Goal]:
    for size in FEW:
        times = found(results, "collective", "groups", size)
        value = quotient(times, f"rlk_audit: {UNPACKED}", BARE)
        yield Goal(f"{UNPACKED}, {size} processes: time of bare all-reduces", 1.3, value, at_least=False)


def of_training(results: Results) -> Iterable[Goal]:
    added, off = found(results, "overhead", "differences", "audit"), found(results, "overhead", "off")
    value = None
    if added is not None and off is not None:
        value = Measured(*(100 * added[key] / off["median"] for key in ("median", "low", "high")))
    yield Goal("audit of the example: added to a training step", 1.0, value, " %", at_least=False)


def of_dumps(results: Results) -> Iterable[Goal]:
    lengths = found(results, "offline", "lengths") or {}
    dumps = {f"samples of {int(length):,} tokens": formats for length, formats in lengths.items()}
    dumps["large steps"] = found(results, "offline", "large") or {}
    for told, formats in dumps.items():
        for work in _OFFLINE:
            speed = None
            if (dump := formats.get("table parquet")) is not None:
                speed = Measured(*(dump["tokens"] / dump["times"][work][k] / 1e6 for k in ("median", "high", "low")))
            yield Goal(f"Parquet, {told}: {_OFFLINE[work]}", 20.0, speed, " million tokens/s")
    for told, formats in dumps.items():
        for work in _OFFLINE:
            value = quotient(found(formats, "slime", "times"), work, "library")
            yield Goal(f"slime, {told}: {_OFFLINE[work]}, in times of torch.load", 1.3, value, at_least=False)


_OFFLINE = {"audit": "audit", "reader": "one pass of the reader"}
GOALS: tuple[Callable[[Results], Iterable[Goal]], ...] = (
    of_updates,
    of_steps,
    of_reductions,
    of_training,
    of_dumps,
)


def goals(results: Results) -> list[Goal]:
    """Return every goal with what was measured of it."""
    return [goal for each in GOALS for goal in each(results)]
