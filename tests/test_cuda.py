"""What only a CUDA device shows: no host synchronisation up to the moment that a number is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlk_audit import AuditConfig, Auditor, Collector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = (8, 1024)


def batch(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    rollout = -3 * torch.rand(SHAPE, generator=generator, device="cuda") - 0.1
    train = rollout + 0.01 * torch.randn(SHAPE, generator=generator, device="cuda")
    mask = torch.rand(SHAPE, generator=generator, device="cuda") < 0.9
    return {"train_log_probs": train, "rollout_log_probs": rollout, "mask": mask}


def test_updates_and_late_steps_wait_for_nothing() -> None:
    """64 micro-batches a step; each report is read after the next step has begun."""
    given = [batch(seed) for seed in range(64)]
    auditor = Auditor(AuditConfig(lag=1), device="cuda", writer=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2, 3):
            for microbatch, fields in enumerate(given):
                auditor.update(**fields, microbatch=microbatch)
            report = auditor.step(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    active = sum(int(fields["mask"].sum()) for fields in given)
    assert report is not None
    assert (report.step, report.metrics["compared_token_count"]) == (2, active)


def test_figures_are_those_of_the_cpu() -> None:
    """Counts, sketch, extremes and sums of d, T and R in every bit; exponential sums by another `exp`."""
    collectors = {device: Collector(device=device) for device in ("cuda", "cpu")}
    for device, collector in collectors.items():
        collector.update(**{name: value.to(device) for name, value in batch().items()})
    cuda, cpu = (collectors[device].compute().metrics for device in ("cuda", "cpu"))
    for name, value in cpu.items():
        if name.startswith(("abs_dlogp", "dlogp", "worst", "warning")) or name.endswith("count"):
            assert cuda[name] == value or value != value, name
        else:
            assert cuda[name] == pytest.approx(value, rel=2**-20, nan_ok=True), name


def test_a_late_report_is_the_one_of_an_early_read() -> None:
    reports = []
    for lag in (0, 1):
        auditor = Auditor(AuditConfig(lag=lag), device="cuda")
        read = []
        for step in (1, 2, 3):
            auditor.update(**batch(step))
            read.append(auditor.step(step))
        reports.append([report.to_dict() for report in read if report is not None][:2])
    assert reports[0] == reports[1]


def packed(kernel: str, dtype: torch.dtype) -> torch.Tensor:
    collector = Collector(AuditConfig(kernel=kernel, breakdowns={"confidence": "auto"}), device="cuda")
    for seed in range(4):
        fields = batch(seed)
        fields["train_log_probs"][0, ::7] = torch.nan
        fields["rollout_log_probs"][1, ::5] = -torch.inf
        collector.update(**{name: v if name == "mask" else v.to(dtype) for name, v in fields.items()})
    assert collector.last_error is None
    return collector.pack()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_triton_gives_every_bit_of_the_reference(dtype: torch.dtype) -> None:
    """Compiled, on the device, where the interpreter of test_kernels.py cannot tell."""
    assert torch.equal(packed("triton", dtype), packed("reference", dtype))


def test_triton_waits_for_nothing_and_can_be_captured() -> None:
    collector, replayed = (Collector(AuditConfig(kernel="triton"), device="cuda") for _ in range(2))
    given = batch()
    collector.update(**given)  # compiles
    collector.reset()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            collector.update(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.update(**given)
    for _ in range(3):
        graph.replay()
    assert torch.equal(replayed.pack(), collector.pack())
