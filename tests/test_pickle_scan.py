"""The look into a pickle, against the standard library's own walk through it."""

from __future__ import annotations

import collections
import datetime
import decimal
import mmap
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_audit.dumps.pickle_scan import COMPUTED, names_in
from rlk_audit.dumps.sample import DumpError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.decimals()
    | st.datetimes()
    | st.just(collections.OrderedDict)
    | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.text())
    ),
    max_leaves=20,
)


def by_the_library(pickled: bytes) -> set[str]:
    names = set()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            names.add(str(argument).replace(" ", ".", 1))
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            names.add(COMPUTED)
    return names


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_the_names_are_those_of_the_library(value: Any, protocol: int) -> None:
    pickled = pickle.dumps(value, protocol)
    assert names_in(pickled) == by_the_library(pickled)
    assert names_in(pickled + b"what follows the end") == by_the_library(pickled)


@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL), st.data())
def test_a_damaged_pickle_is_refused_or_hides_no_name(value: Any, protocol: int, data: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(pickled[: data.draw(st.integers(0, len(pickled)))])
    try:
        names = names_in(damaged)
    except DumpError:
        return
    try:
        told = by_the_library(damaged)
    except Exception:  # the library decodes arguments that nobody looks at here: what unpickles them refuses them
        return
    assert names == told


@pytest.mark.parametrize("length", range(6))
def test_an_end_within_an_argument(length: int) -> None:
    with pytest.raises(DumpError, match="the pickle is damaged"):
        names_in(b"\x80\x04" + b"Xabcd"[:length])


def test_an_argument_of_negative_length_does_not_walk_back() -> None:
    with pytest.raises(DumpError, match="-5 bytes"):
        names_in(b"T" + (-5).to_bytes(4, "little", signed=True) + b".")


@pytest.mark.parametrize("numbered", [b"r\xff\xff\xff\x7f", b"p99999999\n", b"r\x0a\x0a\x0a\x0a"])
def test_a_number_that_unpicklers_would_reserve_memory_for(numbered: bytes) -> None:
    with pytest.raises(DumpError, match="numbers more objects"):
        names_in(b"N" + numbered + b".")


def test_a_file_is_looked_into_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "it.pkl"
    path.write_bytes(pickle.dumps([decimal.Decimal(1), datetime.date(2000, 1, 1)], protocol=2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pickled:
        assert names_in(pickled) == {"decimal.Decimal", "datetime.date", "_codecs.encode"}
