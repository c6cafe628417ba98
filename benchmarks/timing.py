"""Timing by turns: on a shared machine only variants that took turns in one run can be compared."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], object]


def by_turns(
    variants: Mapping[str, Run], rounds: int, *, warmup: int = 1, seconds: float | None = None
) -> dict[str, list[float]]:
    """Return each variant's seconds, one a round; all variants take their turn in every round.

    Args:
        variants: name -> what is timed.
        rounds: how many are kept.
        warmup: rounds before them.
        seconds: no round begins after this time, but for the first three.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    began = time.perf_counter()
    for number in range(warmup + rounds):
        if seconds is not None and number >= warmup + 3 and time.perf_counter() - began > seconds:
            break
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            if number >= warmup:
                taken[name].append(time.perf_counter() - start)
    return taken


def summary(values: list[float]) -> dict[str, float]:
    """Return median, quartiles and number of values."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0], "rounds": len(values)}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "rounds": len(values)}


def summaries(taken: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the summary of every variant."""
    return {name: summary(values) for name, values in taken.items()}


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine and its software."""
    packages = ("torch", "numpy", "numba", "torchmetrics", "ddsketch", "datasketches", "fastdigest", "megatron-core")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name))},
        "threads": torch.get_num_threads(),
    }


def made() -> dict[str, Any]:
    """Return when and where a group was measured."""
    return {"date": datetime.now(timezone.utc).date().isoformat(), "machine": machine()}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
