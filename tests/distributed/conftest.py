"""What the tests under torchrun share. Plain pytest skips them here; tests/test_distributed.py launches them.

Every rank runs the same tests in the same order and asserts for itself. A rank that fails stops (``-x``) and torchrun
ends the others, which would otherwise wait for it in a collective.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
OUTCOMES = ("passed", "failed", "error", "skipped")
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Leave this rank's outcome where the launcher looks for it."""
    folder = os.environ.get("RLK_TEST_OUTCOMES")
    if folder:
        counts = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in OUTCOMES}
        Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(counts))


@pytest.fixture(scope="session", autouse=True)
def process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    if not dist.is_torchelastic_launched():
        pytest.skip("runs under torchrun; tests/test_distributed.py launches it")
    dist.init_process_group(backend(), timeout=TIMEOUT)
    yield
    # After a failure the other ranks may stand in another collective, and destroying the group would wait for them.
    if not request.session.testsfailed:
        dist.destroy_process_group()


def backend() -> str:
    """NCCL where every local rank can have a GPU of its own, else gloo."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "nccl"


@pytest.fixture
def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    """One folder for all ranks."""
    path = [str(tmp_path)]
    dist.broadcast_object_list(path, src=0)
    return Path(path[0])


@pytest.fixture
def gathered() -> Callable[[Any], list[Any]]:
    """Every rank's object, on every rank."""

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return gather


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What this rank communicates from here on: (name, element count and dtype of the first tensor)."""
    calls: list[tuple[Any, ...]] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            calls.append((name, *((tensors[0].numel(), tensors[0].dtype) if tensors else ())))
            return function(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            monkeypatch.setattr(dist, name, recorded(name, getattr(dist, name)))
    return calls
