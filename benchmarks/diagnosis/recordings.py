"""Recorded log-probabilities, read back as samples.

`pairs/tune` and `pairs/held_out` hold different seeds. A process that has called `forbid_held_out` cannot open a file
of `pairs/held_out`, whoever asks: thresholds are chosen in such processes only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAIRS = Path(__file__).parent / "pairs"
Sample = dict[str, np.ndarray]


def forbid_held_out() -> None:
    """Make this process fail on opening a held-out recording; a hook cannot be taken off again."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and "held_out" in str(arguments[0]):
            raise PermissionError(f"thresholds are tuned without held-out recordings, not with {arguments[0]}")

    sys.addaudithook(hook)


@dataclass(frozen=True)
class Recording:
    """One seed: condition -> its samples, each with columns of one length."""

    name: str
    vocabulary: int
    conditions: dict[str, list[Sample]]

    @property
    def from_vllm(self) -> bool:
        return self.name.startswith("vllm")


def read(path: Path) -> Recording:
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    conditions: dict[str, dict[str, np.ndarray]] = {}
    for name, column in columns.items():
        condition, _, part = name.partition("/")
        if part:
            conditions.setdefault(condition, {})[part] = column
    samples = {}
    for condition, parts in conditions.items():
        lengths = parts.pop("lengths", columns.get("lengths"))
        prompts = parts.pop("prompts", np.full(len(lengths), 8))
        engines = parts.pop("engines", np.full(len(lengths), -1))
        cuts = np.cumsum(lengths)[:-1]
        split = {part: np.split(column, cuts) for part, column in parts.items()}
        samples[condition] = [
            {part: pieces[i] for part, pieces in split.items()} | {"prompt": prompts[i], "engine": engines[i]}
            for i in range(len(lengths))
        ]
    return Recording(path.stem, int(columns["vocabulary"]), samples)


def recordings(split: str) -> list[Recording]:
    """Return the recordings of `tune` or `held_out`."""
    return [read(path) for path in sorted((PAIRS / split).glob("*.npz"))]
