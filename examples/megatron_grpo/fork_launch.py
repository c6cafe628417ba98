"""A quicker stand-in for torchrun on one machine: imports once, then forks the ranks.

    python fork_launch.py 4 -- --tp 2 --steps 2

Importing megatron-core takes longer than a short run; with torchrun every process pays for it.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist


def _run_rank(rank: int, world_size: int, port: int, target: Callable[[], None]) -> int:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    # As under torchrun, the launcher serves the store and every rank is a client: no port is guessed.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        target()
    except SystemExit as stop:
        return int(stop.code or 0)
    except BaseException:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    return 0


def launch(world_size: int, target: Callable[[], None]) -> int:
    """Fork `world_size` ranks that each call `target`; 0, or the exit status of the first rank to fail. When one
    fails the others are ended, since they would wait for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    running = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            status = _run_rank(rank, world_size, port, target)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # the parent's exit handlers are not this process's
        running[pid] = rank
    # Served only now: a process with threads must not fork.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    failed = 0
    while running:
        pid, status = os.wait()
        del running[pid]
        if status and not failed:
            failed = abs(os.waitstatus_to_exitcode(status))
            for other in running:
                os.kill(other, signal.SIGTERM)
    del store
    return failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    count, separator, *arguments = sys.argv[1:]
    if separator != "--":
        sys.exit(__doc__)
    import train  # the one import that the ranks share

    sys.exit(launch(int(count), lambda: train.main(arguments)))
