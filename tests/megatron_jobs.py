"""Runs the jobs of test_megatron_layouts.py: imports megatron-core once, then forks each job and its ranks.

Reads one request a line, `{"job": ..., "ranks": ..., "arguments": [...], "log": ...}`, and answers with a line
`{"status": ..., "left_running": ...}`: the exit status (negative: the signal) and whether a process outlived the job.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron_labels_job import train_on_labels
from megatron_pretrain_loop_job import train_by_pretrain

import engines.hf  # noqa: F401  # so that no rank has to import it
import fork_launch
import train
from rlk_audit import ConsistencyError

TIMEOUT = 150


def strict_example(arguments: list[str]) -> None:
    """The example; each rank writes down what stopped it, and is left to end by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        train.main(arguments)
    except ConsistencyError as stop:
        (train.parse_args(arguments).out / f"stopped{dist.get_rank()}").write_text(str(stop))
        raise


def train_on_batches(training: Callable[[argparse.Namespace], None], arguments: list[str]) -> None:
    args = train.parse_args(arguments)
    train.start_parallel(args)
    training(args)
    dist.barrier()
    dist.destroy_process_group()


JOBS = {
    "example": train.main,
    "strict_example": strict_example,
    "labels": partial(train_on_batches, train_on_labels),
    "pretrain": partial(train_on_batches, train_by_pretrain),
}


def run(job: str, ranks: int, arguments: list[str], log: str) -> dict[str, int | bool]:
    launcher = os.fork()
    if launcher == 0:
        status = 1
        try:
            os.setsid()
            with Path(log).open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            status = fork_launch.launch(ranks, lambda: JOBS[job](arguments))
        finally:
            os._exit(status)
    status = wait(launcher)
    return {"status": status, "left_running": end_group(launcher)}


def wait(process: int) -> int:
    """The exit status of a child; one that takes too long is ended with its group."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def end_group(leader: int) -> bool:
    """Whether processes of the group still ran."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
