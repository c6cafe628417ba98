"""Gloo processes of one machine, forked so that what was imported need not be imported again."""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class ProcessFailedError(RuntimeError):
    """A process of the group failed."""


def group(size: int, work: Callable[[], Any], *, initialise: bool = True) -> list[Any]:
    """Return what `work` returned on each rank of a new gloo group; the caller itself is in none.

    Without `initialise`, `work` makes the group itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes = [os.fork() or _run(rank, size, port, work, Path(folder), initialise) for rank in range(size)]
        failed = [rank for rank, process in enumerate(processes) if os.waitpid(process, 0)[1]]
        if failed:
            raise ProcessFailedError(f"ranks {failed} failed")
        return [torch.load(Path(folder) / str(rank), weights_only=True) for rank in range(size)]


def _run(rank: int, size: int, port: int, work: Callable[[], Any], folder: Path, initialise: bool) -> int:
    """Be one rank, and never return."""
    status = 1
    try:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        if initialise:
            dist.init_process_group("gloo")
        result = work()
        torch.save(result, folder / str(rank))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)  # the parent's exit handlers are not this process's


def by_turns(
    variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int, repeats: int = 1
) -> dict[str, list[float]]:
    """Return this rank's seconds a call of every round; every turn begins with all ranks together.

    The order changes from round to round, and is the same on every rank.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    for number in range(warmup + rounds):
        for name in order.sample(list(variants), len(variants)):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                variants[name]()
            if number >= warmup:
                taken[name].append((time.perf_counter() - start) / repeats)
    return taken


def slowest(rounds_of_ranks: list[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Return each variant's seconds, one a round: those of the slowest rank, for which the others wait."""
    return {
        name: [max(seconds) for seconds in zip(*(ranks[name] for ranks in rounds_of_ranks), strict=True)]
        for name in rounds_of_ranks[0]
    }
