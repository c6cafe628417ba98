"""A rank that SIGKILL ends in the middle of a step, under torchrun: the log stays valid and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from killed_rank_job import FATAL_STEP, MICRO_BATCHES, TOKENS
from test_distributed import end

from rlk_audit import StepReport

JOB = Path(__file__).with_name("killed_rank_job.py")
RANKS = 3
TIMEOUT = 120
MARK = "RLK_TEST_MARK"


def processes_with(mark: str) -> list[int]:
    """Processes whose environment says so: a rank is in a session of its own, so no group has them all."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if f"{MARK}={mark}".encode() in environment:
            found.append(int(path.parent.name))
    return found


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("victim", "lag", "group"), [(0, 0, "training"), (1, 0, "training"), (2, 1, "side")])
def test_a_killed_rank_leaves_a_valid_log_and_no_process(victim: int, lag: int, group: str, tmp_path: Path) -> None:
    """Rank 0 writes. A step that lags, and is not reduced any more, is the only one lost."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    command += [JOB, tmp_path, victim, lag, group]
    log = tmp_path / "log"
    with log.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}
        process = subprocess.Popen(list(map(str, command)), env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        assert len(processes_with(mark)) == 1, "the launcher is found by its mark"
        process.wait(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 1, log.read_text()
    assert "Signal 9 (SIGKILL) received" in log.read_text()
    assert processes_with(mark) == []

    text = (tmp_path / "audit.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]
    steps = [StepReport.from_dict(line) for line in lines if line["kind"] == "step"]
    read = [report.step for report in steps]
    assert read == list(range(1, len(read) + 1))
    assert FATAL_STEP - 1 - lag <= len(read) < FATAL_STEP, (
        "every step whose report was read, and none that was not reduced"
    )
    for report in steps:
        assert report.metrics["compared_token_count"] == RANKS * MICRO_BATCHES * TOKENS
        assert report.metrics["abs_dlogp_max"] == pytest.approx(0.01 * report.step, rel=1e-5)
        assert report.complete and not report.warnings
