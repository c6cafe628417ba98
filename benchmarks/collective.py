"""What the end of a step costs over 2, 4 and 8 gloo processes, beside a bare all-reduce and other ways to synchronise.

python -m benchmarks.collective
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import processes, timing
from benchmarks.data import Batch, draw
from benchmarks.peers import TorchMetrics
from benchmarks.variants import audit_variants, default_audit
from rlk_audit import AuditConfig, Collector, StepReport, all_reduce

GROUPS = (2, 4, 8)
ROUNDS = 25
WARMUP = 2
REPEATS = 5
"""Calls in a turn, one after another: how soon a process wakes from a barrier is then a small part of the time."""
TOKENS_A_RANK = 65536
FIGURES = 34
"""Numbers that a step would reduce one by one: the means, shares, counts and extremes of a report."""
MICRO_BATCHES = 16
MICRO_BATCH_TOKENS = 4096
STEP_RANKS = 4
SWEEP_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes of a bare all-reduce, to which a model of its time is fitted."""


Runs = dict[str, Callable[[], object]]


class SplitReduction:
    """One reduction of an audit, with a time for each of its parts."""

    def __init__(self, config: AuditConfig, batch: Batch) -> None:
        self.config = config
        self.collector = Collector(config)
        self.collector.update(**batch.update_arguments())
        self.size = dist.get_world_size()
        self.vector = self.pack()
        self.reduced = self.vector.clone()
        dist.all_reduce(self.reduced)
        self.sent = self.vector.clone()

    def pack(self) -> torch.Tensor:
        return self.collector.pack(dist.get_rank(), self.size)

    def send(self) -> None:
        dist.all_reduce(self.sent.copy_(self.vector))

    def unpack(self) -> StepReport:
        return StepReport.from_vector(self.reduced, self.config, self.size)

    def whole(self) -> StepReport:
        """What a rank without a sink does: its report is not looked at."""
        return all_reduce(self.collector)


def _audit_parts(batch: Batch) -> Runs:
    split = SplitReduction(default_audit(), batch)
    split.whole()  # agrees on the settings
    bare = torch.zeros_like(split.vector)
    return {
        "rlk_audit: pack": split.pack,
        "rlk_audit: its all-reduce": split.send,
        "rlk_audit: unpack": split.unpack,
        "rlk_audit: unpack and figures": lambda: split.unpack().metrics,
        "rlk_audit: pack, reduce, unpack": split.whole,
        "bare all-reduce of as many bytes": lambda: dist.all_reduce(bare),
    }


def _number_by_number(values: list[torch.Tensor]) -> None:
    for value in values:
        dist.all_reduce(value)


def _own_batch(tokens: int) -> Batch:
    return draw(tokens, seed=dist.get_rank(), first_sample=1000 * dist.get_rank())


def audits() -> dict[str, list[float]]:
    """Time an audit's reduction and its parts beside a bare one, on one rank of the group."""
    return processes.by_turns(_audit_parts(_own_batch(TOKENS_A_RANK)), ROUNDS, WARMUP, REPEATS)


def others() -> dict[str, list[float]]:
    """Time other ways to synchronise beside the audit's, on one rank of the group."""
    batch = _own_batch(TOKENS_A_RANK)
    split = SplitReduction(default_audit(), batch)
    variants: Runs = {"rlk_audit: pack, reduce, unpack, all figures": lambda: split.whole().metrics}
    numbers = [torch.zeros((), dtype=torch.float64) for _ in range(FIGURES)]
    variants[f"{FIGURES} all-reduces of one number"] = lambda: _number_by_number(numbers)
    metrics = TorchMetrics()
    metrics.update(batch)
    variants["torchmetrics: sync and compute"] = partial(_sync, metrics)
    tokens = batch.abs_dlogp()[: int(0.89 * TOKENS_A_RANK)].float()  # as many on every rank
    parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    variants["gather of every abs(d)"] = lambda: dist.all_gather(parts, tokens)
    variants["gather of every abs(d), sorted"] = lambda: (dist.all_gather(parts, tokens), torch.cat(parts).sort())
    return processes.by_turns(variants, ROUNDS, WARMUP)


def _sync(metrics: TorchMetrics) -> None:
    for metric in metrics.metrics:
        metric._computed = None  # torchmetrics keeps what it computed
    metrics.compute()


def sweep() -> dict[str, list[float]]:
    """Time a bare all-reduce by size, on one rank of the group."""
    buffers = {str(size): torch.zeros(size // 8, dtype=torch.int64) for size in SWEEP_BYTES}
    variants: Runs = {n: partial(dist.all_reduce, buffer) for n, buffer in buffers.items()}
    return processes.by_turns(variants, ROUNDS, WARMUP, REPEATS)


def whole_steps() -> dict[str, list[float]]:
    """Time a step of micro-batches and its reduction, on one rank of the group."""
    parts = _own_batch(MICRO_BATCHES * MICRO_BATCH_TOKENS).micro_batches(MICRO_BATCHES)
    variants: Runs = {}
    for name, config in audit_variants().items():
        variants[name] = partial(_audit_step, Collector(config), parts)
    metrics = TorchMetrics()
    variants["torchmetrics"] = partial(_torchmetrics_step, metrics, parts)
    return processes.by_turns(variants, ROUNDS, WARMUP)


def _audit_step(collector: Collector, parts: list[Batch]) -> None:
    for part in parts:
        collector.update(**part.update_arguments())
    assert all_reduce(collector).metrics
    collector.reset()


def _torchmetrics_step(metrics: TorchMetrics, parts: list[Batch]) -> None:
    for part in parts:
        metrics.update(part)
    assert metrics.compute()
    metrics.reset()


def result() -> dict[str, Any]:
    """Return the group's results."""
    torch.set_num_threads(1)
    audit_variants()  # what they compile is compiled before processes are forked

    def measured(size: int, work: Callable[[], dict[str, list[float]]]) -> dict[str, dict[str, float]]:
        return timing.summaries(processes.slowest(processes.group(size, work)))

    measurements = {"groups": audits, "others": others, "sweep": sweep}
    found = {name: {str(size): measured(size, work) for size in GROUPS} for name, work in measurements.items()}
    sizes = {"tokens_a_rank": TOKENS_A_RANK, "micro_batches": MICRO_BATCHES, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    sizes["repeats"] = REPEATS
    return timing.made() | sizes | found | {"step_ranks": STEP_RANKS, "steps": measured(STEP_RANKS, whole_steps)}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(json.dumps(result()))
