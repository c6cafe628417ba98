"""Where an update spends its time, stage by stage, beside reading its tokens once.

    python -m benchmarks.stages

The stages are functions of the package; each is timed without the stages that it calls. Each path has its own.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks import timing
from benchmarks.data import SIZES, draw
from benchmarks.variants import audit_variants
from rlk_audit import AuditConfig, Collector, StepReport, all_reduce, exact_sum, measure
from rlk_audit.state import State

BYTES_A_TOKEN = 9
"""Two float32 and a mask of one byte."""
ROUNDS = {4096: 41, 65536: 21, 1 << 20: 7}
REST = "the rest of update"
Stages = dict[str, list[tuple[Any, str]]]
"""Stage -> its functions."""
BEFORE: Stages = {
    "read, check, flatten": [(Collector, "as_batch"), (Collector, "_flatten"), (Collector, "_count_batch")],
}
AFTER: Stages = {
    "worst tokens": [(Collector, "_keep_worst")],
    "merge": [(State, "add"), (State, "clone")],
}
REFERENCE_STAGES: Stages = {
    "classes": [(measure, "classify"), (measure, "_threshold_counts")],
    "float64, sketch": [(measure, "_measure_chunk")],
    "exponentials, rounding": [(measure.Rounded, "of")],
    "exact sums": [
        (measure, "_add_sums"),
        (exact_sum, "split"), (exact_sum, "add_terms"), (exact_sum, "add_squares"), (exact_sum, "add_products"),
    ],
    "extremes": [(measure, "_widen_extremes")],
}  # fmt: skip


def stages_of(kernel: str) -> Stages:
    """Return the stages of an update by one path."""
    return BEFORE | (numba_stages() if kernel == "numba" else REFERENCE_STAGES) | AFTER


def numba_stages() -> Stages:
    from rlk_audit.kernels import numba_cpu

    return {
        "classes, d": [(numba_cpu, "_classify"), (numba_cpu, "_count_thresholds")],
        "exponentials": [(torch, "exp")],
        "rounding, extremes": [(numba_cpu, "_round"), (numba_cpu, "_widen")],
        "exact sums, sketch": [(numba_cpu, "_accumulate")],
        "calls": [(numba_cpu, "_measure_chunk")],
    }


class Stopwatch:
    """Time in each stage, without that of the stages it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[float] = []

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - start
                inner = self._open.pop()
                self.seconds[stage] = self.seconds.get(stage, 0.0) + taken - inner
                if self._open:
                    self._open[-1] += taken

        return run


@contextmanager
def watched(stages: Stages) -> Iterator[Stopwatch]:
    """Time the stages while this is open."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for stage, functions in stages.items():
            for place, name in functions:
                stack.enter_context(mock.patch.object(place, name, _wrapped(watch, stage, place, name)))
        yield watch


def _wrapped(watch: Stopwatch, stage: str, place: Any, name: str) -> Callable[..., Any]:
    timed = watch.timed(stage, getattr(place, name))
    return timed if not isinstance(place, type) else lambda *args, **kwargs: timed(*args, **kwargs)


def stages(config: AuditConfig, tokens: int) -> dict[str, float]:
    """Return each stage's median seconds in one update; `REST` is what no stage covers."""
    arguments = draw(tokens).update_arguments()
    collector = Collector(config)
    collector.update(**arguments)
    known = stages_of(config.kernel)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS.get(tokens, 3)):
        with watched(known) as watch:
            watch.timed(REST, collector.update)(**arguments)
        rounds.append(watch.seconds)
    return {stage: statistics.median(seconds.get(stage, 0.0) for seconds in rounds) for stage in (*known, REST)}


def after_updates(config: AuditConfig) -> dict[str, dict[str, float]]:
    """Return what ends a step in one process: packing, reduction, reading the vector, the figures."""
    collector = Collector(config)
    collector.update(**draw(SIZES[1]).update_arguments())
    vector = collector.pack()
    runs: dict[str, Callable[[], object]] = {
        "pack": collector.pack,
        "unpack and check": lambda: StepReport.from_vector(vector, config),
        "unpack, check and all figures": lambda: StepReport.from_vector(vector, config).metrics,
        "all_reduce of a group of one, with figures": lambda: all_reduce(collector).metrics,
    }
    return timing.summaries(timing.by_turns(runs, 41, warmup=3))


def bytes_a_second() -> float:
    """Return the measured bandwidth of reading memory on one core."""
    values = torch.ones(1 << 26, dtype=torch.float32)
    taken = timing.by_turns({"read": values.sum}, 9)["read"]
    return 4 * len(values) / statistics.median(taken)


def result() -> dict[str, Any]:
    """Return the group's results."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"bandwidth": bytes_a_second(), "variants": {}}
    for name, config in audit_variants().items():
        sizes = {str(tokens): stages(config, tokens) for tokens in SIZES}
        found["variants"][name] = {"stages": sizes, "after": after_updates(config)}
    return timing.made() | found


if __name__ == "__main__":
    print(json.dumps(result()))
