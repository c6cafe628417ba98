"""Launches real_slime_job.py against a checkout of slime, whose folder RLK_SLIME_SOURCE names; else it is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.skipif("not os.environ.get('RLK_SLIME_SOURCE')", reason="RLK_SLIME_SOURCE names no checkout of slime")
@pytest.mark.parametrize(("ranks", "cp_size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_slimes_own_loss_and_cuts(ranks: int, cp_size: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(TESTS / "real_slime_job.py"), str(cp_size)]
    paths = f"{TESTS.parent}{os.pathsep}{TESTS}"
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths}
    )
    assert result.returncode == 0, result.stderr[-4000:]
    agreed = {line for line in result.stdout.splitlines() if "tokens agree" in line}
    assert len(agreed) == ranks
