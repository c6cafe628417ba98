"""The real vLLM on the CPU, in a process of its own: it sets up torch.distributed itself, which a rank of the trainer
already has."""

import dataclasses
import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from torch import Tensor

from engines import Completion, LlamaShape

_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# What torchrun sets for its ranks must not reach vLLM's own set-up.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmEngine:
    """Starts at once and loads in the background; the first request waits for it."""

    def __init__(self, shape: LlamaShape) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _RANK_VARIABLES and not name.startswith("TORCHELASTIC")
        }
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engines.vllm_worker", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            env=inherited | _SETTINGS,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()  # so that the worker's end is the only one: its death ends our wait
        self.connection.send(dataclasses.asdict(shape))

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        # numpy arrays: torch would hand tensors over through shared memory
        self._request("load_weights", {name: value.numpy() for name, value in weights.items()})

    def generate(self, prompts: list[list[int]], seed: int) -> list[Completion]:
        return [Completion(*sampled) for sampled in self._request("generate", prompts, seed)]

    def _request(self, method: str, *arguments: Any) -> Any:
        try:
            self.connection.send((method, *arguments))
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the vLLM process ended with status {self.process.wait()}") from error

    def close(self) -> None:
        self.connection.close()
        self.process.wait()
