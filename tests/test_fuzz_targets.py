"""The targets of the fuzzing, on what it begins with and on what it has found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz import seeds, targets
from fuzz.targets import KINDS, TARGETS

FOUND = sorted(Path(__file__).with_name("fuzz_inputs").glob("*"))
"""Inputs that once ended in a defect: ``<target>-<what it was>``."""


@pytest.mark.parametrize("target", TARGETS)
def test_what_it_begins_with(target: str) -> None:
    for data in seeds.of(target):
        TARGETS[target](data)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_what_it_found(path: Path) -> None:
    TARGETS[path.name.split("-")[0]](path.read_bytes())


def test_the_seeds_of_dumps_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the fuzzing would be of refusals alone."""
    read: list[int] = []
    monkeypatch.setattr(targets, "_check_sample", lambda sample: read.append(len(sample)))
    for number, (kind, data) in enumerate(zip(KINDS, seeds.of("dump"), strict=True)):
        read.clear()
        targets.dump(data)
        assert data[0] == number and bool(read) == (kind.writer != "skyrl"), kind
