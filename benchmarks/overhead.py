"""What the audit adds to a training step of the example, by turns without and with it (4 processes, TP2 x DP2).

    python -m benchmarks.overhead [--rounds 60]

A step is forward, backward, optimizer and `step_end`; sampling and the export of weights are left out, so that the
audit's share is not hidden behind them. The same step without an audit runs twice a round: how much these two differ
says what cannot be told from nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import processes, timing
from benchmarks.variants import default_audit, default_kernel
from rlk_audit.sinks import JsonlSink

EXAMPLE = Path(__file__).parents[1] / "examples" / "megatron_grpo"
RANKS = 4
ROUNDS = 60
WARMUP = 3
LAYOUT = ["--tp", "2", "--engine", "recorded", "--warmup-steps", "0"]
CONFIDENCE = 0.95
RESAMPLES = 2000
OFF, OFF_AGAIN = "off", "off, once more"


def settings(args: argparse.Namespace, engines: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return what is asked of the audit in each kind of step."""
    asked = {
        "breakdowns": {"engine": engines, "position": "auto", "confidence": "auto"},
        "samples_per_step": args.prompts * args.group_size,
    }
    return {"audit": {}, "audit with breakdowns and samples": asked}


def steps(rounds: int) -> dict[str, list[float]]:
    """Run the example's training on one rank; return the seconds of each kind of step, one a round."""
    with tempfile.TemporaryDirectory() as folder:
        return processes.by_turns(_kinds(Path(folder)), rounds, WARMUP)


def _kinds(folder: Path) -> dict[str, Callable[[], None]]:
    import grpo
    import train
    from rollout import ENGINES, RecordedPool
    from trainer import Trainer

    args = train.parse_args(LAYOUT)
    train.start_parallel(args)
    trainer = Trainer(args)
    rollouts = RecordedPool(args, trainer.score).generate(1)
    batch = grpo.build_batch(rollouts, grpo.advantages(rollouts))
    kinds: dict[str, Callable[[], None]] = {}
    for name in (OFF, OFF_AGAIN):
        kinds[name] = _step(trainer, batch, _registered("off", folder, {}), "off")
    for name, asked in settings(args, ENGINES).items():
        kinds[name] = _step(trainer, batch, _registered("audit", folder / name, asked), name)
    return kinds


def _registered(mode: str, folder: Path, asked: dict[str, Any]) -> Any:
    """Collective: every rank must call this. Return a registered audit, which writes JSONL on the last rank."""
    from rlk_audit.megatron_plugin import add_rlk_args, register

    parser = argparse.ArgumentParser()
    add_rlk_args(parser)
    last = dist.get_rank() == dist.get_world_size() - 1
    sinks = [JsonlSink(folder / "audit.jsonl")] if mode == "audit" and last else []
    args = parser.parse_args(["--rlk-consistency-mode", mode])
    return register(args, config=default_audit(worst_k=4, **asked), sinks=sinks)


def _step(trainer: Any, batch: dict[str, torch.Tensor], audit: Any, name: str) -> Callable[[], None]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import train
    from trainer import forward_step

    observer = audit if "breakdowns" in name else _WithoutParts(audit)
    step_func = audit.wrap_forward_step(partial(forward_step, partial(train.policy_loss, [observer])))
    schedule = audit.wrap_schedule(get_forward_backward_func())

    numbers = itertools.count(1)

    def run() -> None:
        trainer.train(schedule, step_func, batch)
        audit.step_end(next(numbers))

    return run


class _WithoutParts:
    """Observes without the fields that a plain audit has no use for."""

    def __init__(self, audit: Any) -> None:
        self._audit = audit

    def observe(self, *log_probs: Any, labels: Any, sample_slot: Any, **fields: Any) -> None:
        self._audit.observe(*log_probs, **fields)


def difference(base: list[float], other: list[float]) -> dict[str, float]:
    """Return the median of the paired differences in seconds, and the interval that resampling rounds gives it."""
    pairs = [b - a for a, b in zip(base, other, strict=True)]
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return {"median": statistics.median(pairs), "low": medians[cut], "high": medians[-1 - cut], "rounds": len(pairs)}


def result(rounds: int) -> dict[str, Any]:
    """Return the group's results."""
    sys.path.insert(0, str(EXAMPLE))
    import train  # noqa: F401  # the one import that the ranks share

    torch.set_num_threads(1)
    kernel = default_kernel()  # compiled before processes are forked
    taken = processes.slowest(processes.group(RANKS, partial(steps, rounds), initialise=False))
    base = taken.pop(OFF)
    differences = {name: difference(base, seconds) for name, seconds in taken.items()}
    told = {"kernel": kernel, "ranks": RANKS, "off": timing.summary(base), "differences": differences}
    return timing.made() | told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    print(json.dumps(result(parser.parse_args().rounds)))
