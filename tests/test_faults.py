"""Faults under torchrun: no rank waits past its timeout, no number is wrong, and no line that was written is lost.

fault_kinds.py holds the kinds and what each rank asserts; docs/faults.md shows what was seen.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from fault_kinds import KINDS, Signalled
from fault_launch import MARK, RANKS, Launch, launch, processes_with

TOGETHER = [name for name, kind in KINDS.items() if not kind.alone]
ALONE = [name for name, kind in KINDS.items() if kind.alone]
TABLE = Path(__file__).parents[1] / "docs" / "faults.md"

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The kinds after which every rank goes on, one after another in one job."""
    return launch(TOGETHER, tmp_path_factory.mktemp("together"))


@needs_proc
def test_the_ranks_end_well(together: Launch) -> None:
    assert together.code == 0, together.log
    assert together.left_over == []


@needs_proc
@pytest.mark.parametrize("name", TOGETHER)
def test_every_rank_goes_on(name: str, together: Launch) -> None:
    told = told_by(together, name)
    assert len(told) == RANKS and len(set(told.values())) == 1, together.log


@needs_proc
@pytest.mark.parametrize("name", ALONE)
def test_a_rank_ends_or_stands_still(name: str, tmp_path: Path) -> None:
    act = KINDS[name].act
    assert isinstance(act, Signalled)
    launched = launch([name], tmp_path)
    told = told_by(launched, name)
    assert launched.code == 1, launched.log
    assert launched.left_over == []
    if act.ends:
        assert act.victim not in told and f"({act.sent.name}) received" in launched.log
    assert len(told) == RANKS - act.ends, launched.log


def told_by(launched: Launch, name: str) -> dict[int, str]:
    """Rank -> what it saw, of those that left something; none of them may have found a fault."""
    left = {rank: seen for rank, seen in enumerate(launched.seen[name]) if seen is not None}
    assert {rank: seen["error"] for rank, seen in left.items() if seen["error"]} == {}
    return {rank: seen["told"] for rank, seen in left.items()}


@needs_proc
def test_a_process_is_found_by_its_mark() -> None:
    """Otherwise nothing would ever be left over.

    A process that was just begun has no readable environment yet: this one is looked for once it has spoken.
    """
    begun = subprocess.Popen(["cat"], env=os.environ | {MARK: "mine"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with begun as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        assert processes_with("mine") == [process.pid]
        process.stdin.close()
    assert processes_with("mine") == []


def test_the_table_holds_every_kind() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)[2:]
    assert rows == [(kind.name, kind.done) for kind in KINDS.values()]
