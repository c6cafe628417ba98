"""The same tokens, cut in any way over data-parallel ranks, context-parallel ranks and micro-batches: the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from oracle import Expected, Sample, audit, sample_metrics
from strategies import assert_reports, bits, cut, random_samples, reduce, without_layout

from rlk_audit import AuditConfig, StepReport

CUTS = 500
CONFIG = AuditConfig(
    breakdowns={"engine": ("e0", "e1", "e2"), "position": "auto", "confidence": "auto"}, samples_per_step=18
)


def step(rng: random.Random) -> list[Sample]:
    """Samples of unequal lengths with faulty tokens, ties for the worst places, an engine each, and big ids."""
    group = random_samples(rng, 14, longest=40)
    group += [Sample([-1.0] * 3, [-4.0] * 3, sample_index=14 + i, token_ids=[5, 6, 7]) for i in range(4)]
    return [
        replace(
            sample, sample_index=2**40 + sample.sample_index, labels={"engine": i % 4 - 1},
            rollout_token_ids=sample.rollout_token_ids or sample.token_ids,
            updates_since_rollout=sample.updates_since_rollout or 0, slot=(5 * i) % 18,
        )
        for i, sample in enumerate(group)
    ]  # fmt: skip


def layouts(seed: int) -> tuple[int, int]:
    """(dp, cp) of a seed; large groups are rarer, since they take longer."""
    rng = random.Random(seed)
    return rng.choice([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (4, 1), (5, 1), (16, 1)])


def audited(group: list[Sample]) -> Expected:
    expected = audit(group)
    expected.metrics |= sample_metrics(group, expected)
    empty = int(expected.metrics["zero_active_sample_count"])
    expected.warnings |= {"zero_active_sample": empty} if empty else {}
    return expected


def cut_report(group: list[Sample], seed: int) -> StepReport:
    dp, cp = layouts(seed)
    return reduce(cut(group, random.Random(seed), dp, cp, CONFIG), CONFIG)


@pytest.fixture(scope="module")
def group() -> list[Sample]:
    return step(random.Random(20))


def test_the_uncut_step_is_that_of_the_oracle(group: list[Sample]) -> None:
    """What the cuts are compared with is right, and holds what makes cutting hard."""
    expected = audited(group)
    report = cut_report_whole(group)
    assert_reports(report, expected)
    assert len({len(sample) for sample in group}) > 8 and any(not len(sample) for sample in group)
    assert len(expected.warnings) > 4
    worst = [(t.abs_dlogp, t.sample_index, t.token_position, t.labels) for t in report.worst_tokens]
    assert len({distance for distance, *_ in worst}) == 1, "the last worst place should be a tie"


def cut_report_whole(group: list[Sample]) -> StepReport:
    return reduce(cut(group, random.Random(0), 1, 1, CONFIG), CONFIG)


@pytest.fixture(scope="module")
def whole(group: list[Sample]) -> dict[str, Any]:
    """The uncut step, by the path that is taken by default; every other must give its bits too."""
    return bits(without_layout(cut_report_whole(group)))


@pytest.mark.parametrize("block", range(10))
def test_every_bit_of_the_report_is_that_of_the_uncut_step(
    group: list[Sample], whole: dict[str, Any], block: int, kernel: str
) -> None:
    """500 random layouts, 50 a block; 20 where an interpreter runs the kernels.

    Kills: a float accumulated in order of arrival; an id local to its shard; a path that rounds otherwise.
    """
    assert len(whole["metrics"]) > 70 and len(whole["samples"]) == 4
    assert {name: len(buckets) for name, buckets in whole["breakdowns"].items()} == {
        "engine": 4,
        "position": 19,
        "confidence": 9,
    }
    per_block = CUTS // 10
    for seed in range(block * per_block, block * per_block + (2 if kernel == "triton" else per_block)):
        report = cut_report(group, seed)
        assert bits(without_layout(report)) == whole, f"layout {layouts(seed)} of seed {seed}"


def test_the_cuts_hold_every_kind_of_layout() -> None:
    """The 500 layouts cover each group size, and ranks without any token."""
    seen = {layouts(seed) for seed in range(CUTS)}
    assert {cp for _, cp in seen} == {1, 2, 4} and {dp for dp, _ in seen} == {1, 2, 3, 4, 5, 16}
    few = step(random.Random(3))[:3]
    report = reduce(cut(few, random.Random(1), 16, 4, CONFIG), CONFIG)
    assert bits(without_layout(report)) == bits(without_layout(cut_report_whole(few)))


@pytest.mark.parametrize("seed", range(12))
def test_other_steps_too(seed: int, kernel: str) -> None:
    """Other samples, few layouts each, against the oracle."""
    group = step(random.Random(100 + seed))
    dp, cp = layouts(seed)
    report = reduce(cut(group, random.Random(seed), dp, cp, CONFIG), CONFIG)
    assert_reports(report, audited(group))
