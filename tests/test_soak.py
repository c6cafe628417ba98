"""Very long audits: memory, open files and what a step takes on disk stay as they were, and so do the numbers."""

from __future__ import annotations

import gc
import json
import logging
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import Sample, audit
from strategies import as_lists, assert_reports, random_samples
from virtual_ranks import reducing_with

from rlk_audit import AuditConfig, Auditor, Collector, TokenBatch
from rlk_audit.evidence import EvidenceBuffer
from rlk_audit.sinks import ConsoleSink, JsonlSink, TensorBoardSink

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc"),
]

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
    steps = [1, SETTLED, STEPS - lag]
    assert [report.pop("step") for report in reports] == steps
    assert [rank.pop("step") for report in reports for rank in report["ranks"]] == steps
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


# --- 100,000 steps of four ranks --------------------------------------------------------------------------------------

RANKS = 4
DIFFERENT, ROUNDS = 1_000, 100
"""Steps that differ, and how often each comes, in another order each time."""
ROUNDS_SETTLED = 5
ROUNDS_OF_A_RUN = 20
"""Rounds after which the run is resumed from its state."""
MAX_BYTES = 2_000_000
EVIDENCE_BYTES = 1_000_000

Load = list[list[Sample]]


def loads(step: int) -> list[Load]:
    """Each rank's micro-batches: none to two, of few tokens or none, now and then with values that are none."""
    rng = random.Random(step)
    made = []
    for rank in range(RANKS):
        first = 100 * (RANKS * step + rank)
        groups = [random_samples(rng, rng.randrange(3), longest=4) for _ in range(rng.randrange(3))]
        made.append([[replace(s, sample_index=first + 10 * g + s.sample_index) for s in group]
                     for g, group in enumerate(groups)])  # fmt: skip
    return made


def given(load: Load) -> list[TokenBatch]:
    return [as_lists(group, random.Random(0))[0] for group in load]


def samples_in(step: list[Load]) -> list[Sample]:
    return [sample for load in step for group in load for sample in group]


class LongRun:
    """An audit that writes to a folder, whose files are moved aside and, once read, taken away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = AuditConfig(limits={"abs_dlogp_mean": 0.5, "abs_dlogp_max": "3x_median_50"})
        self.others = [Collector(self.config) for _ in range(RANKS - 1)]
        self.auditor = self._begin()
        self.steps_found = self.bytes_found = 0

    def _begin(self) -> Auditor:
        sinks = [JsonlSink(self.folder / "audit.jsonl", max_bytes=MAX_BYTES)]
        buffer = EvidenceBuffer(self.folder / "evidence", config=self.config, max_disk_bytes=EVIDENCE_BYTES)
        return Auditor(self.config, sinks=sinks, evidence=buffer)

    def resume(self) -> None:
        state = self.auditor.state_dict()
        self.auditor.close()
        self.auditor = self._begin()
        self.auditor.load_state_dict(state)

    def take(self, step: list[list[TokenBatch]]) -> None:
        for rank, batches in zip((self.auditor, *self.others), step, strict=True):
            for microbatch, batch in enumerate(batches):
                rank.update(batch, microbatch=microbatch)

    def take_away(self, pattern: str) -> None:
        """Read files and delete them; every step is there, in its place."""
        for path in sorted(self.folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
            for line in path.read_text().splitlines():
                report = json.loads(line)
                if report["kind"] == "step":
                    assert report["step"] == self.steps_found
                    self.steps_found += 1
                    self.bytes_found += len(line) + 1
            path.unlink()


def test_a_hundred_thousand_steps_of_four_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every step is that of the oracle when it first comes, and the run's total at the end."""
    caplog.set_level(logging.ERROR)
    step_loads = list(map(loads, range(DIFFERENT)))
    batches = [list(map(given, step)) for step in step_loads]
    run = LongRun(tmp_path)
    figures: list[tuple[int, int, float]] = []
    with reducing_with(run.others):
        for place, number in enumerate(numbers()):
            run.take(batches[number])
            report = run.auditor.step(place)
            assert report is not None and report.group_size == RANKS
            if place < DIFFERENT:
                assert_reports(report, audit(samples_in(step_loads[number])))
            if (place + 1) % DIFFERENT == 0:
                figures.append(after_a_round(run, (place + 1) // DIFFERENT))
        total = run.auditor.run_total()
        run.auditor.close()
    run.take_away("audit*.jsonl")
    assert_flat(figures)
    assert run.steps_found == DIFFERENT * ROUNDS

    expected = audit([sample for step in step_loads for sample in samples_in(step)])
    # Each token came as often as any other, so only counts differ from those of one round.
    counts = [name for name in expected.metrics if name.endswith("_token_count")]
    expected.metrics |= {name: ROUNDS * expected.metrics[name] for name in counts}
    expected.warnings = {code: ROUNDS * count for code, count in expected.warnings.items()}
    expected.worst = expected.worst[:1] * len(expected.worst)
    assert total is not None
    assert_reports(total, expected)


def numbers() -> Iterator[int]:
    """The steps' numbers, in an order of their own in each round."""
    rng = random.Random(0)
    for _ in range(ROUNDS):
        yield from rng.sample(range(DIFFERENT), DIFFERENT)


def after_a_round(run: LongRun, rounds: int) -> tuple[int, int, float]:
    """Resident bytes, open files, and bytes on disk a step."""
    run.take_away("audit.*.jsonl")
    if rounds % ROUNDS_OF_A_RUN == 0:
        run.resume()
    assert sum(path.stat().st_size for path in run.folder.glob("evidence/*")) <= EVIDENCE_BYTES
    assert sum(path.stat().st_size for path in run.folder.glob("audit*")) <= MAX_BYTES
    return resident_bytes(), open_files(), run.bytes_found / max(run.steps_found, 1)


def assert_flat(figures: list[tuple[int, int, float]]) -> None:
    (memory, files, a_step), last = figures[ROUNDS_SETTLED - 1], figures[-1]
    print(f"memory {memory} and {last[0]}, files {files} and {last[1]}, bytes a step {a_step:.1f} and {last[2]:.1f}")
    assert last[0] - memory < GROWTH_ALLOWED
    assert {files for _, files, _ in figures} == {files}
    assert abs(last[2] - a_step) < 0.01 * a_step
