"""A dump of 200 million tokens: read as a stream, in bounded memory, with progress shown."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

FILES, TOKENS, SAMPLES = 50, 4_000_000, 2_000
MAX_BYTES = 1_000_000_000
DISTINCT = 5
"""Files of their own content; the others are further links to them, which the reader cannot know."""

MEASURED = """
import resource, sys
from rlk_audit.cli.app import app
try:
    app(sys.argv[1:])
finally:
    print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def write(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for step in range(FILES):
        path = folder / f"step_{step}.npz"
        if step >= DISTINCT:
            path.hardlink_to(folder / f"step_{step % DISTINCT}.npz")
            continue
        rollout = -rng.exponential(1.0, TOKENS).astype(np.float32)
        train = np.minimum(rollout + rng.normal(0, 0.01, TOKENS).astype(np.float32), 0)
        columns = {"train_log_probs": train, "rollout_log_probs": rollout, "mask": rng.random(TOKENS) < 0.9}
        np.savez(path, **columns, lengths=np.full(SAMPLES, TOKENS // SAMPLES), sample_index=np.arange(SAMPLES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_million_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "dump"
    dump.mkdir()
    write(dump)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    master, follower = pty.openpty()
    shown = bytearray()
    command = [sys.executable, "-c", MEASURED, "report", str(dump), "--json", str(tmp_path / "run.json")]
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=follower)
    os.close(follower)

    def drain() -> None:
        try:
            while data := os.read(master, 1 << 16):
                shown.extend(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=drain)
    reader.start()
    assert process.wait() == 0
    seconds = time.monotonic() - start
    reader.join()
    os.close(master)
    told = shown.decode()
    peak = int(told.rsplit("peak ", 1)[1].split()[0])
    values = json.loads((tmp_path / "run.json").read_text())
    with capsys.disabled():
        speed = FILES * TOKENS / seconds
        print(f"\n{FILES * TOKENS:,} tokens in {seconds:.0f} s, {speed:,.0f} a second, peak {peak / 1e6:.0f} MB")
    assert peak < MAX_BYTES
    assert "auditing" in told and "scanning" in told
    assert len(values["steps"]) == FILES
    active = sum(int(np.count_nonzero(np.load(dump / f"step_{step}.npz")["mask"])) for step in range(DISTINCT))
    assert values["total"]["metrics"]["active_token_count"] == active * FILES // DISTINCT
    assert values["total"]["metrics"]["total_token_count"] == FILES * TOKENS
