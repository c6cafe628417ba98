"""Launches tests/distributed under torchrun at 1, 2 and 4 ranks, and sees that tests ran and passed on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "distributed"
TIMEOUT = 240
TEST_TIMEOUT = 90
"""Above the 60 s of the process group, so that a hang ends with the group's own message."""
GRACE = 60
"""torchrun waits 30 s for its ranks."""
TAIL = 60


def complaints(folder: Path, ranks: int, skips_allowed: bool) -> dict[int, str]:
    """Return rank -> what is wrong with its outcome."""
    found = {}
    for rank in range(ranks):
        path = folder / f"rank{rank}.json"
        if not path.exists():
            found[rank] = "ended without an outcome"
            continue
        counts = json.loads(path.read_text())
        if counts["failed"] or counts["error"]:
            found[rank] = f"{counts['failed'] + counts['error']} tests failed"
        elif not counts["passed"]:
            found[rank] = "no test passed"
        elif counts["skipped"] and not skips_allowed:
            found[rank] = f"{counts['skipped']} tests were skipped"
    return found


def run(ranks: int, folder: Path) -> int | None:
    """Run the tests on this many ranks; return torchrun's exit code, None if it had to be ended."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "--log-dir", str(folder / "logs"), "--redirects", "3",
        "-m", "pytest", str(TESTS), "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_TIMEOUT}",
    ]  # fmt: skip
    own = {"OMP_NUM_THREADS": "1", "RLK_TEST_OUTCOMES": str(folder), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    process = subprocess.Popen(command, env=os.environ | own)
    try:
        return process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs; asked to, it ends its ranks, which are in sessions of their own."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def log_tail(folder: Path, rank: int) -> str:
    lines = [
        line
        for name in ("stdout.log", "stderr.log")
        for path in sorted(folder.glob(f"logs/*/attempt_0/{rank}/{name}"))
        for line in path.read_text(errors="replace").splitlines()[-TAIL:]
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_under_torchrun(ranks: int, tmp_path: Path) -> None:
    code = run(ranks, tmp_path)
    found = complaints(tmp_path, ranks, skips_allowed=ranks < 4)
    for rank, complaint in found.items():
        print(f"--- rank {rank} of {ranks}: {complaint}\n{log_tail(tmp_path, rank)}")
    assert not found
    assert code == 0


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        ({"passed": 5, "failed": 0, "error": 0, "skipped": 0}, None),
        ({"passed": 5, "failed": 1, "error": 0, "skipped": 0}, "1 tests failed"),
        ({"passed": 5, "failed": 0, "error": 2, "skipped": 0}, "2 tests failed"),
        ({"passed": 0, "failed": 0, "error": 0, "skipped": 0}, "no test passed"),
        ({"passed": 5, "failed": 0, "error": 0, "skipped": 1}, "1 tests were skipped"),
        (None, "ended without an outcome"),
    ],
)
def test_an_outcome_that_is_not_a_pass_is_seen(tmp_path: Path, outcome: dict | None, complaint: str | None) -> None:
    """On the last rank as well as on the first, and never because nothing ran."""
    good = {"passed": 5, "failed": 0, "error": 0, "skipped": 0}
    for rank, counts in enumerate([good, outcome]):
        if counts is not None:
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(counts))
    assert complaints(tmp_path, 2, skips_allowed=False) == ({} if complaint is None else {1: complaint})
