"""examples/fsdp2 under torchrun: its losses are those without the audit, and the stale sampler shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2" / "train.py"


def run(ranks: int, tp: int, mode: str, out: Path) -> tuple[list[str], list[dict]]:
    """The losses of every rank and step, and the reports of the steps."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(EXAMPLE), "--tp", str(tp), "--mode", mode, "--out", str(out), "--steps", "4",
    ]  # fmt: skip
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | own)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = out.read_text().splitlines() if out.exists() else []
    # Ranks share one output, so a line may begin where another has not ended.
    losses = sorted(re.findall(r"rank \d+ step \d+ loss -?0x[0-9a-f.]+p[+-]\d+", done.stdout))
    return losses, [report for line in lines if (report := json.loads(line))["kind"] == "step"]


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_the_example(ranks: int, tp: int, tmp_path: Path) -> None:
    losses, reports = run(ranks, tp, "audit", tmp_path / "audit.jsonl")
    assert len(losses) == 4 * ranks
    assert losses == run(ranks, tp, "off", tmp_path / "off.jsonl")[0]
    mean = [report["metrics"]["abs_dlogp_mean"] for report in reports]
    assert max(mean[:2]) < 0.01 < 0.1 < min(mean[2:])
