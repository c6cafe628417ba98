"""Launches fault_job.py under torchrun, and reads what each rank saw."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_kinds import MOUNTS
from test_distributed import end

JOB = Path(__file__).with_name("fault_job.py")
RANKS = 3
TIMEOUT = 120
MARK = "RLK_TEST_MARK"
PRIVATE_MOUNTS = (
    ["unshare", "--mount", "--propagation", "private"],
    ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"],
)


@dataclass
class Launch:
    """How a launch ended, what it printed, and kind -> rank -> what that rank left; None where it left nothing."""

    code: int
    seconds: float
    log: str
    seen: dict[str, list[dict[str, Any] | None]]
    left_over: list[int]


@functools.cache
def own_mounts() -> list[str]:
    """What makes a command's mounts its own, so that none outlives it; nothing where that is not allowed."""
    for command in PRIVATE_MOUNTS:
        try:
            tried = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if tried.returncode == 0:
            return command
    return []


def launch(names: Sequence[str], folder: Path) -> Launch:
    """Run these kinds in one job of RANKS ranks."""
    command = [*own_mounts(), sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(JOB), str(folder), *names]
    mark, begin = uuid.uuid4().hex, time.monotonic()
    own = {"OMP_NUM_THREADS": "1", MARK: mark} | ({MOUNTS: "1"} if own_mounts() else {})
    with (folder / "log").open("w") as file:
        process = subprocess.Popen(command, env=os.environ | own, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(TIMEOUT)
        finally:
            end(process)
    seconds = time.monotonic() - begin
    seen = {name: [left_by(folder / name / f"rank{rank}.json") for rank in range(RANKS)] for name in names}
    return Launch(process.returncode, seconds, (folder / "log").read_text(), seen, processes_with(mark))


def left_by(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


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
