"""Audited steps of which one never ends: a rank is killed while the others already wait for it in the reduction.

python killed_rank_job.py FOLDER VICTIM LAG GROUP
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlk_audit import AuditConfig, Auditor
from rlk_audit.allreduce import own_gloo_group
from rlk_audit.sinks import JsonlSink

STEPS = 8
FATAL_STEP = 5
MICRO_BATCHES = 2
TOKENS = 100


def main(folder: Path, victim: int, lag: int, side_group: bool) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    group = own_gloo_group(None) if side_group else None
    sinks = [JsonlSink(folder / "audit.jsonl")] if rank == 0 else []
    auditor = Auditor(AuditConfig(lag=lag), group, sinks, side_group=side_group)
    for step in range(1, STEPS + 1):
        for microbatch in range(MICRO_BATCHES):
            if step == FATAL_STEP and rank == victim and microbatch == 1:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
            train = torch.full((TOKENS,), -1.0 - 0.01 * step)
            auditor.update(train, torch.full((TOKENS,), -1.0), torch.ones(TOKENS), microbatch=microbatch)
        auditor.step(step)
        dist.barrier()  # the training's own
    auditor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "side")
