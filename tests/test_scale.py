"""A group of 16,384 ranks: every rank's state is really packed, and their sum gives the report of all tokens."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import numpy as np
import oracle
import pytest
import torch

from rlk_audit import AuditConfig, Collector, StepReport

RANKS = 16_384
FIRST_RANK = 1_000
"""Global rank of the group's first rank: a place in the group is not a rank."""
DATA_SETS = 8
CONFIG = AuditConfig(max_state_bytes=1 << 23)


def tokens(rank: int) -> oracle.Sample:
    """A rank's own sample: as many tokens as no neighbour has, and one of them off by what no other rank has."""
    generator = np.random.default_rng(rank % DATA_SETS)
    count = rank % 11  # some ranks have none
    rollout = -generator.exponential(1.0, count).astype(np.float32)
    train = rollout - np.float32(0.001)
    if count:
        train[rank % count] = rollout[rank % count] - np.float32(0.01 + rank / (1 << 16))
    return oracle.Sample(train.tolist(), rollout.tolist(), sample_index=rank)


def packed(samples: list[oracle.Sample]) -> Iterator[torch.Tensor]:
    collector = Collector(CONFIG)
    for rank, sample in enumerate(samples):
        collector.reset()
        train, rollout = (torch.tensor(side, dtype=torch.float32) for side in (sample.train, sample.rollout))
        collector.update(
            train,
            rollout,
            torch.ones(len(train)),
            valid=torch.ones(len(train)),
            sample_index=rank,
            token_position=torch.arange(len(train)),
        )
        yield collector.pack(rank, RANKS, FIRST_RANK + rank)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixteen_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [tokens(rank) for rank in range(RANKS)]
    began = time.monotonic()
    total = torch.zeros_like(next(packed(samples[:1])))
    for vector in packed(samples):
        total += vector
    summed = time.monotonic()
    report = StepReport.from_vector(total, CONFIG, RANKS)
    metrics, table = report.metrics, report.rank_table
    built = time.monotonic()

    expected = oracle.audit(samples)
    assert oracle.differences(metrics, expected) == []
    for rank, (sample, row) in enumerate(zip(samples, table, strict=True)):
        drifts = [abs(t - r) for t, r in zip(sample.train, sample.rollout, strict=True)]
        assert (row.group_rank, row.rank, row.compared_token_count) == (rank, FIRST_RANK + rank, len(drifts))
        assert row.update_failed == 0
        if drifts:
            assert row.abs_dlogp_max == max(drifts)
            assert row.abs_dlogp_mean == pytest.approx(sum(drifts) / len(drifts), rel=1e-6)
        else:
            assert np.isnan(row.abs_dlogp_max)
    (worst,) = report.worst_tokens  # large groups keep one
    assert worst.rank == FIRST_RANK + worst.sample_index
    assert (worst.sample_index, worst.token_position) == (
        expected.worst[0].sample_index,
        expected.worst[0].token_position,
    )
    with capsys.disabled():
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"\n{RANKS} ranks: vector {8 * len(total):,} bytes; packed and summed in {summed - began:.0f} s, "
            f"report in {built - summed:.2f} s; peak memory {peak / 1e6:.0f} MB"
        )
