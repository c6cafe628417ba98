"""The targets of the fuzzing, on what it begins with and on what it has found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


ODD = [1e308, -1e308, 5e-324, -5e-324, 0, -1, 2**63, -(2**63), 2**200, None, True, "", "x", "\ud800", [], {}, [[]]]


def places(values: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value of a JSON document stands."""
    if isinstance(values, (dict, list)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield (*before, key)
            yield from places(value, (*before, key))


def with_value(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a document with another value at a place that it may no longer have."""
    copy = json.loads(json.dumps(values))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@given(st.data())
def test_a_report_with_an_odd_value_is_refused_or_shown(data: st.DataObject) -> None:
    """Reported: a text for a bucket's figure ended in a trace. Kills: values of records that are taken as they are."""
    whole = json.loads(seeds.report())
    changed = with_value(
        whole, data.draw(st.sampled_from(sorted(places(whole), key=str))), data.draw(st.sampled_from(ODD))
    )
    targets.report(json.dumps(changed).encode())
    targets.log(json.dumps(changed).encode() + b"\n")
