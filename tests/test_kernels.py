"""Every faster path gives the state of the readable reference in every bit, and is taken where it should be."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlk_audit import AuditConfig, Collector
from rlk_audit.config import KERNELS, TOKEN_CLASSES
from rlk_audit.kernels.choice import measure_for
from rlk_audit.layout import COUNTER_INDEX, COUNTERS, TOKEN_COUNTS
from rlk_audit.measure import measure

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
ODD = (
    0.0, -0.0, math.nan, math.inf, -math.inf, -1000.0, -2000.0, -999.9, 1e-3, 5e-4, 1e-2, -1e-40, -1e-20, -2.0**-6,
    -300.0, -88.0, -104.0, -700.0, -44.0, -89.0,
)  # fmt: skip
"""Values at the edges of classes, of float32 and of its squares."""
PARTS: dict[str, Any] = {
    "breakdowns": {"engine": 3, "position": "auto", "confidence": "auto"},
    "samples_per_step": 16,
}


def batch(count: int, seed: int, dtype: torch.dtype, optional: bool = True) -> dict[str, Any]:
    """Tokens of which every tenth has an odd value on either side."""
    generator = torch.Generator().manual_seed(seed)

    def chance(share: float) -> Tensor:
        return torch.rand(count, generator=generator) < share

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    rollout = -3 * torch.rand(count, generator=generator)
    train = rollout + 0.3 * torch.randn(count, generator=generator) * torch.randint(0, 2, (count,), generator=generator)
    odd = torch.tensor(ODD)
    for side in (rollout, train):
        side.copy_(torch.where(chance(0.1), odd[whole(0, len(ODD))], side))
    ids = whole(0, 9)
    fields = {
        "train_log_probs": train.to(dtype),
        "rollout_log_probs": rollout.to(dtype),
        "mask": chance(0.9),
        "labels": {"engine": whole(-1, 4)},
        "token_position": whole(-1, 100_000),
        "sample_slot": whole(-1, 20),
        "sample_index": whole(-1, 20),
        "token_ids": ids,
    }
    if optional:
        fields |= {"rollout_missing": chance(0.02), "rollout_token_ids": torch.where(chance(0.02), ids + 1, ids)}
    return fields


def pair(path: Any, **settings: Any) -> tuple[Collector, Collector]:
    """A collector of the reference and one of another path."""
    reference, other = (Collector(AuditConfig(kernel="reference", **settings)) for _ in range(2))
    other._measure_tokens = path
    return reference, other


def assert_equal_states(reference: Collector, other: Collector) -> None:
    assert (reference.last_error, other.last_error) == (None, None)
    expected, found = reference.pack(), other.pack()
    fields = reference.layout.fields.values()
    assert not [f.name for f in fields if not torch.equal(expected[f.slice], found[f.slice])]
    assert torch.equal(expected, found)


@pytest.mark.parametrize("per_sample", [None, 1])
@pytest.mark.parametrize("grouping_power", [5, 6, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numba_gives_every_bit_of_the_reference(
    dtype: torch.dtype, grouping_power: int, per_sample: int | None
) -> None:
    """Sizes around those of a chunk, of a block and of a vector register."""
    path = measure_for("numba", CPU)
    assert path is not measure
    settings = {"grouping_power": grouping_power, "worst_per_sample": per_sample}
    reference, other = pair(path, **settings, **PARTS)
    for seed, count in enumerate((0, 1, 2, 7, 100, 1023, 1025, 16_383, 16_384, 16_385, 40_000)):
        for optional in (True, False):
            fields = batch(count, 2 * seed + optional, dtype, optional)
            reference.update(**fields)
            other.update(**fields)
            assert_equal_states(reference, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_gives_every_bit_of_the_reference(dtype: torch.dtype, interpreted: ModuleType) -> None:
    """By Triton's interpreter on the CPU; on a GPU see test_cuda.py."""
    reference, other = pair(interpreted.measure, **PARTS)
    for seed, count in enumerate((0, 1, 2, 7, 1023, 1024, 1025, 3000)):
        fields = batch(count, seed, dtype, optional=seed % 2 == 0)
        reference.update(**fields)
        other.update(**fields)
        assert_equal_states(reference, other)


def test_more_programs_than_copies_of_the_tables(interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreted, "COPIES", 2)
    reference, other = pair(interpreted.measure, grouping_power=5)
    fields = batch(5000, 5, torch.float32)
    for name in ("labels", "sample_slot"):
        fields.pop(name)
    reference.update(**fields)
    other.update(**fields)
    assert_equal_states(reference, other)


def test_the_triton_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """To machine code of an H100, where thresholds are exact and nothing is contracted; it needs no GPU."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_compile_job.py"))],
        capture_output=True, text=True, timeout=300, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "kernels": 5,
        "thresholds": [4] * 4,
        "ln2": [True] * 4,
        "fused multiply-adds": 0,
        "integer additions": [True] * 5,
    }


def test_the_batches_hold_every_class_and_count() -> None:
    """Else the tests above could not see a path that forgets one."""
    collector = Collector(AuditConfig(kernel="reference", **PARTS))
    for seed in range(4):
        collector.update(**batch(40_000, seed, torch.float32))
    counters = collector.pack()[: len(COUNTERS)]
    for name in (*TOKEN_CLASSES, *TOKEN_COUNTS, "inactive"):
        assert counters[COUNTER_INDEX[name]] > 0, name


LOG_PROBS = st.one_of(st.floats(-60, 1e-3), st.floats(width=32), st.sampled_from(ODD))


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.booleans()), min_size=1, max_size=40))
def test_numba_agrees_on_any_tokens(tokens: list[tuple[float, float, bool]]) -> None:
    train, rollout, mask = zip(*tokens, strict=True)
    reference, other = pair(measure_for("numba", CPU))
    for collector in (reference, other):
        collector.update(
            torch.tensor(train, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64), torch.tensor(mask)
        )
    assert_equal_states(reference, other)


def test_what_takes_no_contiguous_tensors_is_given_them(kernel: str) -> None:
    """Transposed, strided, expanded and requiring gradients, as a training hands them over."""
    fields = batch(600, 3, torch.float32)
    train, rollout = (fields[name].reshape(20, 30) for name in ("train_log_probs", "rollout_log_probs"))
    mask = torch.ones(1, 20, dtype=torch.bool).expand(30, 20)
    plain, strided = Collector(), Collector()
    plain.update(train.t().contiguous(), rollout.t().contiguous(), mask.contiguous())
    wide = torch.zeros(30, 40)
    wide[:, ::2] = rollout.t()
    strided.update(train.t().requires_grad_(), wide[:, ::2], mask)
    assert_equal_states(plain, strided)
    negated = Collector()
    values = torch._neg_view(-train.t().contiguous())
    assert values.is_neg() and values.is_contiguous(), "as the imaginary part of a conjugate, yet to be negated"
    negated.update(values, rollout.t(), mask)
    assert_equal_states(plain, negated)


def test_the_default_is_numba_on_a_cpu_and_the_reference_elsewhere() -> None:
    assert measure_for("auto", CPU) is measure_for("numba", CPU)
    assert measure_for("auto", torch.device("meta")) is measure
    assert measure_for("auto", torch.device("cuda")) is measure, "Triton is taken only when it is asked for"
    assert measure_for("reference", CPU) is measure


@pytest.mark.parametrize(("name", "device"), [("numba", "cuda"), ("triton", "cpu")])
def test_a_kernel_of_another_device_is_refused(name: str, device: str) -> None:
    with pytest.raises(ValueError, match=rf"kernel {name} runs on \w+, got {device}"):
        measure_for(name, torch.device(device))


def test_no_step_waits_for_a_compilation() -> None:
    """Whatever the sizes and fields, all functions are compiled, or read, when the first collector is made."""
    path = sys.modules[measure_for("numba", CPU).__module__].__file__
    spec = importlib.util.spec_from_file_location("numba_cpu_made_anew", path)  # other tests have used the other
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {name: f for name, f in vars(module).items() if hasattr(f, "signatures")}
    module.compile_all()
    compiled = {name: list(f.signatures) for name, f in functions.items()}
    assert len(compiled) >= 12
    assert len(compiled["_classify"]) == 2
    _, other = pair(module.measure, **PARTS)
    for seed, count in enumerate((1, 5, 16_384, 40_000)):
        for optional in (True, False):
            for dtype in DTYPES:
                fields = batch(count, seed, dtype, optional)
                other.update(**fields | {"labels": {"engine": 1}})
    assert {name: list(f.signatures) for name, f in functions.items()} == compiled


CACHED = """
import torch, rlk_audit.measure
rlk_audit.measure.ZERO_FILL_TRAIN_LOGP = {bound}
from rlk_audit import AuditConfig, Collector
from rlk_audit.kernels import numba_cpu
collector = Collector(AuditConfig(kernel="numba"))
collector.update(torch.tensor([-0.5, -3.0]), torch.zeros(2), torch.ones(2))
hits = [sum(function.stats.cache_hits.values()) for function in vars(numba_cpu).values() if hasattr(function, "stats")]
print(collector.compute().warnings.get("zero_fill_suspect"), sum(hits) > 0)
"""


def test_a_constant_of_another_module_is_never_stale_in_the_cache(tmp_path: Path) -> None:
    """Compiled code holds the constants' values, and numba only sees whether its own file has changed."""
    told = []
    for bound in (-1.0, -0.1, -1.0):
        command = [sys.executable, "-c", CACHED.format(bound=bound)]
        own = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        told.append(subprocess.run(command, capture_output=True, text=True, timeout=120, env=own).stdout.split())
    assert told == [["1", "False"], ["2", "False"], ["1", "True"]]


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel must be one of auto, reference, numba, triton, got 'fast'"):
        AuditConfig(kernel="fast")
    assert [AuditConfig(kernel=name).kernel for name in KERNELS] == list(KERNELS)


def test_ranks_may_differ_in_their_kernel() -> None:
    """The bits are the same, so it is no part of what ranks agree on."""
    names = ("reference", "numba")
    assert len({Collector(AuditConfig(kernel=name)).layout.fingerprint for name in names}) == 1


@pytest.mark.parametrize("broken", ["sys.modules['numba'] = None", "sys.modules['numba'] = type(sys)('numba')"])
def test_without_a_numba_that_works_the_reference_measures_silently(broken: str) -> None:
    script = (
        f"import sys, torch; {broken}\n"
        "from rlk_audit import AuditConfig, Collector\n"
        "collector = Collector(); collector.update(*(torch.full((3,), -1.0) for _ in range(2)), torch.ones(3))\n"
        "print(collector.compute().metrics['compared_token_count'], collector._measure_tokens.__module__)\n"
        "try: Collector(AuditConfig(kernel='numba'))\n"
        "except ImportError as error: print(error)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = result.stdout.splitlines()
    assert (lines[0], result.stderr) == ("3 rlk_audit.measure", "")
    assert "pip install 'rlk_audit[fast]'" in lines[1]
