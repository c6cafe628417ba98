"""Settings of the whole test suite: property tests are repeatable and have no deadline on a shared machine."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# Asserts in the helpers explain themselves as those in tests do.
pytest.register_assert_rewrite("oracle", "strategies")

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Small tensors gain nothing from threads, and several test processes may share the machine.
torch.set_num_threads(1)
