"""Tokens that two dumps share, and those whose drift moved most between them."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpSample, ReadOptions
from rlk_audit.offline.plan import Reading, Step
from rlk_audit.offline.tokens import Tokens

MAX_TOKENS = 20_000_000
"""Tokens of A that are held to be found again."""
MOVED_SHOWN = 10

_Key = tuple[Any, ...]


@dataclass(frozen=True, order=True)
class MovedToken:
    """A token of both dumps; order by ``change``.

    Attributes:
        change: abs(dlogp of B - dlogp of A), nats.
        step, sample_index, token_position, token_id: -1 where unknown.
        dlogp_a, dlogp_b: nats.
    """

    change: float
    step: int
    sample_index: int
    token_position: int
    token_id: int
    dlogp_a: float
    dlogp_b: float


@dataclass(frozen=True)
class Shared:
    """What two dumps share.

    Attributes:
        samples: found in both, of the same tokens. samples_a, samples_b: in all.
        identical: whether the two hold the same samples with equal values.
        moved: tokens that moved most, largest change first.
        complete: whether all of A was held.
    """

    samples: int
    samples_a: int
    samples_b: int
    identical: bool
    moved: tuple[MovedToken, ...]
    complete: bool


def shared_tokens(a: Sequence[Path], b: Sequence[Path], format: str, options: ReadOptions) -> Shared:
    """Read two dumps and compare the samples that both hold.

    A sample is known by its step, index and rollout, or where it has no index by its tokens; it must have the same
    tokens on both sides.
    """
    held: dict[_Key, list[DumpSample]] = {}
    tokens = count_a = count_b = 0
    complete = True
    for step, sample in _samples(a, format, options):
        count_a += 1
        tokens += len(sample)
        if tokens > MAX_TOKENS:
            complete = False
        else:
            held.setdefault(_key(step, sample), []).append(sample)
    matched = equal = 0
    moved: list[MovedToken] = []
    for step, sample in _samples(b, format, options):
        count_b += 1
        others = held.get(_key(step, sample), [])
        other = next((one for one in others if _same_tokens(one, sample)), None)
        if other is None:
            continue
        others.remove(other)
        matched += 1
        if _equal(other, sample):
            equal += 1
        else:
            moved = heapq.nlargest(MOVED_SHOWN, [*moved, *_moved(step, other, sample)])
    identical = complete and equal == count_a == count_b
    return Shared(matched, count_a, count_b, identical, tuple(moved), complete)


def _samples(paths: Sequence[Path], format: str, options: ReadOptions) -> Iterable[tuple[Step, DumpSample]]:
    reading = Reading(options)
    for part in files.find(paths, format, tell=reading.tell):
        yield from reading.samples(part)


def _key(step: Step, sample: DumpSample) -> _Key:
    if sample.sample_index >= 0:
        return step, sample.sample_index, sample.rollout_id
    if sample.token_ids is None:
        return step, len(sample)
    return step, hashlib.sha256(np.ascontiguousarray(sample.token_ids).tobytes()).digest()


def _same_tokens(a: DumpSample, b: DumpSample) -> bool:
    if len(a) != len(b):
        return False
    return a.token_ids is None or b.token_ids is None or np.array_equal(a.token_ids, b.token_ids)


def _equal(a: DumpSample, b: DumpSample) -> bool:
    """Return whether all values are equal, whatever dtype holds them."""
    for name in ("train_log_probs", "rollout_log_probs", "mask", "rollout_missing"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and not np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f"):
            return False
    return True


def _moved(step: Step, a: DumpSample, b: DumpSample) -> list[MovedToken]:
    ours, theirs = (Tokens.join([(0, sample)]) for sample in (a, b))
    if len(ours) != len(theirs):
        return []
    change = np.where(ours.compared & theirs.compared, np.abs(theirs.dlogp - ours.dlogp), 0.0)
    worst = np.argsort(-change, kind="stable")[:MOVED_SHOWN]
    return [
        MovedToken(
            float(change[at]),
            -1 if step is None else step,
            a.sample_index,
            int(ours.position[at]),
            -1 if ours.token_ids is None else int(ours.token_ids[at]),
            float(ours.dlogp[at]),
            float(theirs.dlogp[at]),
        )
        for at in worst.tolist()
        if change[at] > 0
    ]
