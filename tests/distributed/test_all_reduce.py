"""The reduction itself: the same bits for every cut, one collective a step, any group, with or without waiting."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import agreed
from oracle import Sample
from strategies import bits, cut, random_samples, without_layout, worst_of

from rlk_audit import AuditConfig, Collector, Pending, StepReport, TokenBatch, all_reduce
from rlk_audit.layout import StateLayout

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1")}, worst_k=5)


def step(seed: int) -> list[Sample]:
    """Unequal lengths, faulty tokens, and ties for the worst places."""
    group = random_samples(random.Random(seed), 17, longest=30)
    group += [Sample([-1.0] * 3, [-4.0] * 3, sample_index=17 + i, token_ids=[5, 6, 7]) for i in range(3)]
    for index, sample in enumerate(group):
        sample.labels = {"engine": index % 3 - 1}
        sample.rollout_token_ids = sample.rollout_token_ids or sample.token_ids
        sample.updates_since_rollout = sample.updates_since_rollout or 0
    return group


def whole(group: list[Sample]) -> StepReport:
    """The report of the same samples, collected by one process without a group."""
    return cut(group, random.Random(0), 1, 1, CONFIG)[0].compute()


def figures(report: StepReport) -> Any:
    return bits(without_layout(report))


def add(collector: Collector, dlogps: list[float], **fields: Any) -> None:
    dlogp = torch.tensor(dlogps, dtype=torch.float64)
    collector.update(dlogp - 3.0, torch.full_like(dlogp, -3.0), torch.ones_like(dlogp), **fields)


def layouts(world_size: int) -> list[tuple[int, int]]:
    return [(world_size // cp, cp) for cp in (1, 2, 4) if cp <= world_size]


def test_every_cut_gives_the_bits_of_one_process(gathered, device: str) -> None:
    """Kills: a mean of means; a row written at the wrong place; ids local to a shard."""
    for seed in range(9):
        group, world_size = step(seed), dist.get_world_size()
        layout = layouts(world_size)[seed % len(layouts(world_size))]
        expected = whole(group)
        assert len(expected.metrics) > 50
        assert len(expected.worst_tokens) == 5
        collector = Collector(CONFIG, device)
        collector.merge(cut(group, random.Random(seed), *layout, CONFIG)[dist.get_rank()])
        report = all_reduce(collector)
        assert (report.scope, report.group_size) == ("group", world_size)
        assert figures(report) == figures(expected), f"layout {layout} of seed {seed}"
        assert worst_of(report) == worst_of(expected)
        everywhere = gathered(report.to_json())
        assert everywhere == [everywhere[0]] * world_size


def test_zigzag_shards_are_one_sequence(gathered) -> None:
    """Each rank holds two chunks of one sequence: positions are global, every token is counted by one rank."""
    cp_size, length = dist.get_world_size(), 16 * dist.get_world_size()
    rng = random.Random(1)
    train = torch.tensor([[-2.0 - rng.expovariate(1.0) for _ in range(length)]], dtype=torch.float64)
    rollout = train - torch.tensor([[rng.gauss(0.0, 0.1) for _ in range(length)]], dtype=torch.float64)
    valid = (torch.arange(length) >= 3)[None]
    mask = valid & (torch.arange(length) < length - 2)[None]
    chunks = torch.arange(length).chunk(2 * cp_size)
    mine = torch.cat([chunks[dist.get_rank()], chunks[2 * cp_size - 1 - dist.get_rank()]])
    collector, alone = Collector(CONFIG), Collector(CONFIG)
    collector.update(
        TokenBatch.from_cp_shard(
            train[:, mine], rollout[:, mine], mask[:, mine], valid=valid[:, mine], cp_rank=dist.get_rank(),
            cp_size=cp_size, seq_length=length, response_start=[3], sample_index=[40],
        )
    )  # fmt: skip
    alone.update(TokenBatch.from_padded(train, rollout, mask, valid=valid, response_start=[3], sample_index=[40]))
    report = all_reduce(collector)
    assert report.metrics["total_token_count"] == length - 3
    assert report.metrics["compared_token_count"] == length - 5
    assert figures(report) == figures(alone.compute())
    worst = int((train - rollout).abs().masked_fill(~mask, -1.0).argmax())
    token = report.worst_tokens[0]
    assert (token.sample_index, token.token_position) == (40, worst - 3)
    assert token.rank == next(rank for rank, held in enumerate(gathered(mine.tolist())) if worst in held)


@pytest.mark.parametrize("holder", [0, -1])
def test_all_tokens_on_one_rank(holder: int) -> None:
    """The other ranks never call update, and still see everything."""
    group = step(3)
    collector = Collector(CONFIG)
    if dist.get_rank() == holder % dist.get_world_size():
        collector = cut(group, random.Random(0), 1, 1, CONFIG)[0]
    report = all_reduce(collector)
    assert figures(report) == figures(whole(group))
    assert {token.rank for token in report.worst_tokens} == {holder % dist.get_world_size()}


def test_no_tokens_anywhere_is_not_no_drift() -> None:
    report = all_reduce(Collector(CONFIG))
    assert report.metrics["compared_token_count"] == 0
    assert report.metrics["abs_dlogp_mean"] != report.metrics["abs_dlogp_mean"], "NaN, not 0"
    assert report.to_dict()["metrics"]["abs_dlogp_p99"] is None
    assert report.warnings == {"nothing_compared": 1}
    assert report.worst_tokens == ()


SUBGROUPS = {1: [[0]], 2: [[1], [0], [0, 1]], 4: [[1], [1, 3], [0, 2], [1, 2, 3], [3], [2, 3]]}


def test_any_group_reduces_its_own_ranks_alone(collectives: list[tuple[Any, ...]]) -> None:
    """Also groups without rank 0. Kills: global ranks used as rows; the default group used for all."""
    for ranks in SUBGROUPS[dist.get_world_size()]:
        group = dist.new_group(ranks)
        collectives.clear()
        if dist.get_rank() not in ranks:
            continue
        collector = Collector(CONFIG)
        # rank r holds r + 1 tokens, the largest drift of the group on its last rank
        add(collector, [0.1 * (dist.get_rank() + 1)] * (dist.get_rank() + 1), sample_index=dist.get_rank())
        report = all_reduce(collector, group)
        assert report.group_size == len(ranks)
        assert report.metrics["compared_token_count"] == sum(rank + 1 for rank in ranks)
        assert report.metrics["abs_dlogp_max"] == pytest.approx(0.1 * (max(ranks) + 1))
        assert report.metrics["worst_rank"] == max(ranks) == report.metrics["worst_sample_index"]
        assert [(row.rank, row.group_rank, row.compared_token_count) for row in report.rank_table] == [
            (rank, place, rank + 1) for place, rank in enumerate(ranks)
        ]
        names = [name for name, *_ in collectives]
        assert names == ([] if len(ranks) == 1 else ["all_gather", "all_reduce"])


def test_one_all_reduce_a_step_of_one_length(gathered, collectives: list[tuple[Any, ...]]) -> None:
    """Whatever the ranks hold: none in update, pack or compute; none at all in a group of one."""
    size = dist.get_world_size()
    expected = [] if size == 1 else [("all_reduce", StateLayout(CONFIG, size).length, torch.int64)]
    for seed in range(4):
        collector = agreed(Collector(CONFIG))
        collectives.clear()
        for microbatch in range(dist.get_rank() * seed):
            add(collector, [0.1 * microbatch] * (1 + seed), microbatch=microbatch)
            collector.compute()
        assert collectives == []
        all_reduce(collector)
        assert collectives == expected
    assert gathered(len(collectives))[0] == len(expected)


def test_steps_do_not_leak_into_each_other(collectives: list[tuple[Any, ...]]) -> None:
    """Kills: a reduced vector written back to the collector, which a second read would reduce again."""
    size = dist.get_world_size()
    collector = Collector(CONFIG)
    add(collector, [0.2, 0.4])
    first, again = all_reduce(collector), all_reduce(collector)
    assert first.to_dict() == again.to_dict()
    assert first.metrics["compared_token_count"] == 2 * size
    assert collector.compute().metrics["compared_token_count"] == 2
    collector.reset()
    add(collector, [1.0])
    second = all_reduce(collector)
    assert second.metrics["compared_token_count"] == size
    assert second.metrics["abs_dlogp_mean"] == 1.0


def test_async_report_is_that_of_the_call(collectives: list[tuple[Any, ...]]) -> None:
    """What happens to the collector while the reduction goes on does not reach it."""
    size = dist.get_world_size()
    collector = agreed(Collector(CONFIG))
    collectives.clear()
    add(collector, [0.5] * (dist.get_rank() + 1))
    pending = all_reduce(collector, async_op=True)
    assert isinstance(pending, Pending)
    collector.reset()
    add(collector, [2.0] * 50)
    report = pending.wait()
    assert pending.done()
    assert pending.wait() is report
    assert [name for name, *_ in collectives] == ["all_reduce"] * (size > 1)
    assert report.metrics["compared_token_count"] == size * (size + 1) // 2
    assert report.metrics["abs_dlogp_max"] == 0.5
    assert all_reduce(collector).metrics["compared_token_count"] == 50 * size


@pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")
def test_async_call_does_not_wait_for_the_others(shared_dir: Path) -> None:
    """Rank 0 must come back from its call before any other rank makes one."""
    started = shared_dir / "started"
    collector = agreed(Collector(CONFIG))
    if dist.get_rank() == 0:
        pending = all_reduce(collector, async_op=True)
        assert not pending.done()
        started.touch()
    else:
        deadline = time.monotonic() + 30.0
        while not started.exists():
            assert time.monotonic() < deadline, "rank 0 waits inside its call"
            time.sleep(0.01)
        pending = all_reduce(collector, async_op=True)
    assert pending.wait().group_size == dist.get_world_size()
