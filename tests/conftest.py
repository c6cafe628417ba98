"""Settings of the whole test suite: property tests are repeatable and have no deadline on a shared machine."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

# Asserts in the helpers explain themselves as those in tests do.
pytest.register_assert_rewrite("oracle", "strategies")

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Triton reads it when it is first imported, and megatron-core may import it in any test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A process that a test starts tells where it was when it aborts.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Small tensors gain nothing from threads, and several test processes may share the machine.
torch.set_num_threads(1)


@pytest.fixture
def interpreted() -> ModuleType:
    """The module of the Triton kernels, run by Triton's interpreter on the CPU; on a GPU see test_cuda.py."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("test_cuda.py runs the kernels themselves")
    return importlib.import_module("rlk_audit.kernels.triton_cuda")


@pytest.fixture(params=["reference", "numba", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every collector that the test makes measures by this path."""
    from rlk_audit.kernels.choice import measure_for

    name: str = request.param
    if name == "triton":
        measure = request.getfixturevalue("interpreted").measure
    else:
        measure = measure_for(name, torch.device("cpu"))
    monkeypatch.setattr("rlk_audit.collector.measure_for", lambda *_: measure)
    return name
