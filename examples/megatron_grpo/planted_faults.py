"""Faults that people meet, planted on purpose. Nothing else in the run knows of them, as it is in practice."""

import argparse
from collections import defaultdict
from dataclasses import replace

from rollout import Rollout

IN_ENGINES = ("stale_engine", "temperature")
"""Planted where the engines are: e1 misses its weight updates; both sample at another temperature."""


def shift(rollouts: list[Rollout]) -> list[Rollout]:
    """Each log-probability stands one token late."""
    return [replace(r, log_probs=r.log_probs[:1] + r.log_probs[:-1]) for r in rollouts]


def zero_fill(rollouts: list[Rollout]) -> list[Rollout]:
    """The second half of every other response was never sampled, and is in the mask all the same."""
    return [
        replace(r, log_probs=[0.0 if 2 * i >= len(r.log_probs) else value for i, value in enumerate(r.log_probs)])
        if r.sample_index % 2
        else r
        for r in rollouts
    ]


def row_order(rollouts: list[Rollout]) -> list[Rollout]:
    """Each response has the log-probabilities of another one of its length."""
    by_length = defaultdict(list)
    for rollout in rollouts:
        by_length[len(rollout.response)].append(rollout)
    moved = []
    for same in by_length.values():
        moved += [replace(r, log_probs=other.log_probs) for r, other in zip(same, same[1:] + same[:1], strict=True)]
    return sorted(moved, key=lambda r: r.sample_index)


IN_ROLLOUTS = {"shift": shift, "zero_fill": zero_fill, "row_order": row_order}
FAULTS = (*IN_ENGINES, *IN_ROLLOUTS)


def plant(args: argparse.Namespace, step: int, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts as the trainer gets them."""
    if args.fault not in IN_ROLLOUTS or step < args.fault_step:
        return rollouts
    return IN_ROLLOUTS[args.fault](rollouts)
