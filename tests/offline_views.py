"""Dumps and views of them that the tests of the offline audit share."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from dump_writers import Given, rows
from oracle import Sample
from strategies import bits

from rlk_audit.run_view import RunView


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def record(train: Sequence[float | None], rollout: Sequence[float | None], **more: Any) -> dict[str, Any]:
    return {"train_log_probs": list(train), "rollout_log_probs": list(rollout)} | more


def steady(index: int, length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A record whose values depend on its index and seed alone."""
    rng = np.random.default_rng([seed, index])
    train = -rng.exponential(1.0, length).astype(np.float32)
    rollout = np.minimum(train + rng.normal(0, 0.02, length), 0).astype(np.float32)
    ids = rng.integers(0, 500, length).tolist()
    return record(train.tolist(), rollout.tolist(), sample_index=index, token_ids=ids, **more)


def given_rows(samples: Sequence[Given], step: int) -> list[dict[str, Any]]:
    return rows(samples, step)


def oracle_sample(given: Given, slot: int) -> Sample:
    return Sample(
        given.train.tolist(), given.rollout_list(), given.mask.astype(int).tolist(), sample_index=given.index,
        rollout_id=given.index // 2, token_ids=given.tokens, slot=slot,
    )  # fmt: skip


def everything(view: RunView, *, ids: bool = True) -> Any:
    """All bits of a view but what tells of its files; without `ids` also but what not every format has."""
    values = view.to_dict()
    for name in ("title", "notes", "problems"):
        values.pop(name)
    values["excerpts"] = [asdict(excerpt) for excerpt in view.excerpts]
    values["density"] = None if view.density is None else view.density.counts.tolist()
    means = np.zeros(0) if view.sample_means is None else view.sample_means
    values["means"] = means.tolist()
    if not ids:
        forget(values, {"rollout_id", "worst_rollout_id", "slot", "sample_slot", "samples"})
        values["means"].sort()
    return bits(values)


def forget(value: Any, names: set[str]) -> None:
    if isinstance(value, dict):
        for name in names & set(value):
            del value[name]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        forget(part, names)


def plain(given: Given) -> Given:
    """The sample without what only some formats can hold."""
    train, rollout = (np.nan_to_num(side, nan=-1.0, posinf=0.0, neginf=-2.0) for side in (given.train, given.rollout))
    return replace(given, train=train, rollout=rollout).without_missing()


def assert_same_view(a: RunView, b: RunView, **how: bool) -> None:
    ours, theirs = everything(a, **how), everything(b, **how)
    for name in ours:
        assert ours[name] == theirs[name], name


def heed_interrupts() -> None:
    """Run in a child before it starts: jobs in the background of a script are started with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
