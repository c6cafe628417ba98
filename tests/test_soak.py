"""10,000 steps of one audit with everything on: memory, files and numbers stay as they were after the first hundred."""

from __future__ import annotations

import gc
import json
import logging
import resource
from pathlib import Path

import pytest
import torch

from rlk_audit import AuditConfig, Auditor
from rlk_audit.evidence import EvidenceBuffer
from rlk_audit.sinks import ConsoleSink, JsonlSink, TensorBoardSink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, SETTLED = 10_000, 1_000
MICRO_BATCHES, SHAPE = 2, (4, 64)
GROWTH_ALLOWED = 4 << 20
"""Bytes; an 8-byte leak a token would be 40 MB."""


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("lag", [0, 1])
def test_ten_thousand_steps(lag: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    rollout = -0.5 - 3 * torch.rand(SHAPE, generator=generator)
    # The same tokens each step, so that its numbers must be the same; they require a gradient as a policy's do.
    train = (rollout + 0.01 * torch.randn(SHAPE, generator=generator)).requires_grad_()
    mask = torch.rand(SHAPE, generator=generator) < 0.9
    config = AuditConfig(
        lag=lag, limits={"abs_dlogp_p99": "3x_median_50", "abs_dlogp_max": 1.0}, breakdowns={"engine": 2}
    )
    console = (tmp_path / "console").open("w")
    sinks = [
        JsonlSink(tmp_path / "audit.jsonl", max_bytes=20_000_000),
        TensorBoardSink(tmp_path / "tensorboard"),
        ConsoleSink(console),
    ]
    evidence = EvidenceBuffer(tmp_path / "evidence", config=config)
    auditor = Auditor(config, sinks=sinks, evidence=evidence)
    reports, memory, files = [], 0, 0
    for step in range(1, STEPS + 1):
        for microbatch in range(MICRO_BATCHES):
            auditor.update(train + 0, rollout, mask, microbatch=microbatch, labels={"engine": microbatch})
        report = auditor.step(step)
        if report is not None and report.step in (1, SETTLED, STEPS - lag):
            reports.append(report.to_dict())
        if step == SETTLED:
            memory, files = resident_bytes(), open_files()
    grown = resident_bytes() - memory
    assert open_files() == files
    assert grown < GROWTH_ALLOWED, f"{grown} bytes in {STEPS - SETTLED} steps"
    auditor.close()
    console.close()
    assert [report.pop("step") for report in reports] == [1, SETTLED, STEPS - lag]
    for report in reports:
        # The relative limit has no verdict before it has a history.
        del report["verdict"]["limits"][0]
        del report["findings"]  # of every hundredth step
    assert reports[0] == reports[1] == reports[2]
    texts = [path.read_text() for path in tmp_path.glob("audit*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert sorted(line["step"] for line in lines if line["kind"] == "step") == list(range(1, STEPS + 1))
    (total,) = [line for line in lines if line["kind"] == "run"]
    assert total["metrics"]["compared_token_count"] == STEPS * MICRO_BATCHES * int(mask.sum())
    assert len((tmp_path / "console").read_text().splitlines()) == STEPS + 1
