"""The page of promises is that of the table, and every change that it tells of still fits the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.promises import HEADINGS, PROMISES, Promise, broken, page  # noqa: E402


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs" / "promises.md").read_text(encoding="utf-8") == page()


def test_every_promise_of_the_readme_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"{number}. **{heading}.**" in text for number, heading in HEADINGS.items())
    assert {promise.number for promise in PROMISES} == set(HEADINGS)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.says)
def test_the_change_fits_the_code_and_the_test_exists(promise: Promise) -> None:
    """That the test fails by the change is shown by ``python tools/promises.py``, which takes minutes."""
    path = ROOT / "rlk_audit" / promise.file
    compile(broken(promise, path.read_text(encoding="utf-8")), path, "exec")
    file, _, name = promise.test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")
