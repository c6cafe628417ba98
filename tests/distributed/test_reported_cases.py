"""Faults that people met in public while reducing such figures over ranks, each as a small input."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agreement import agreed
from strategies import bits, without_layout

from rlk_audit import AuditConfig, Collector, StepReport, all_reduce
from rlk_audit.sketch import relative_accuracy

pytestmark = pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")

ENGINES = AuditConfig(breakdowns={"engine": ("e0", "e1")})
WITHIN_A_BIN = relative_accuracy(6) * (1 + 1e-12)


def collected(dlogps: list[float], config: AuditConfig | None = None, **fields: Any) -> Collector:
    """A collector of tokens with these drifts, all active."""
    collector = Collector(config)
    dlogp = torch.tensor(dlogps, dtype=torch.float64)
    collector.update(dlogp - 10.0, torch.full_like(dlogp, -10.0), torch.ones_like(dlogp), **fields)
    return collector


def figures(report: StepReport) -> Any:
    return bits(without_layout(report))


def test_b16_ranks_without_tokens_do_not_pull_the_mean() -> None:
    collector = collected([1.0] * 3) if dist.get_rank() % 2 == 0 else Collector()
    report = all_reduce(collector)
    assert report.metrics["abs_dlogp_mean"] == report.metrics["abs_dlogp_p50"] == 1.0
    assert "nothing_compared" not in report.warnings


def b20_masked(collector: Collector) -> None:
    collector.update(torch.full((2, 3), -1.0), torch.full((2, 3), float("nan")), torch.zeros(2, 3))


def b20_new_kind(collector: Collector) -> None:
    """A warning and an engine that rank 0 never saw."""
    collector.update([-1.0, -2.0], [float("nan"), -9999.0], [1, 1], labels={"engine": [1, 1]})


@pytest.mark.parametrize(
    ("other", "warnings"),
    [
        (lambda collector: None, lambda ranks: {}),
        (b20_masked, lambda ranks: {}),
        (b20_new_kind, lambda ranks: {"rollout_sentinel": ranks, "rollout_nan": ranks}),
    ],
    ids=["no_update", "all_masked", "new_kind"],
)
def test_b20_a_rank_without_tokens_stays_in_the_reduction(other, warnings, gathered, collectives) -> None:
    collector = Collector(ENGINES)
    if dist.get_rank() == 0:
        collector = collected([0.1, 0.3], ENGINES, labels={"engine": 0})
    else:
        other(collector)
    agreed(collector)
    collectives.clear()
    report = all_reduce(collector)
    assert collectives == [("all_reduce", len(collector.pack(0, dist.get_world_size())), torch.int64)]
    assert gathered([name for name, *_ in collectives]) == [["all_reduce"]] * dist.get_world_size()
    assert report.metrics["compared_token_count"] == 2
    assert report.metrics["abs_dlogp_mean"] == pytest.approx(0.2)
    assert report.metrics["abs_dlogp_max"] == pytest.approx(0.3)
    assert report.warnings == warnings(dist.get_world_size() - 1)


def b21_values(rank: int) -> list[float]:
    if rank == 0:
        return [0.5, -0.25, 1e-7, 3.0, 0.0]
    if rank > 1:
        return []
    rng = random.Random(21)
    return [rng.choice([-1.0, 1.0]) * 10.0 ** rng.uniform(-9.0, 2.9) for _ in range(50_000)]


def test_b21_the_buffer_never_depends_on_the_values(collectives) -> None:
    """5 values, 50,000 over 12 decades, none: one shape, and the sketch of the union."""

    def of(values: list[float], collector: Collector) -> None:
        rollout = torch.full((len(values),), -990.0, dtype=torch.float64)
        rollout = torch.where(torch.tensor(values, dtype=torch.float64) > 0, rollout, -1.0)
        collector.update(rollout + torch.tensor(values, dtype=torch.float64), rollout, torch.ones(len(values)))

    collector, union = Collector(), Collector()
    of(b21_values(dist.get_rank()), collector)
    for rank in range(dist.get_world_size()):
        of(b21_values(rank), union)
    agreed(collector)
    collectives.clear()
    report = all_reduce(collector)
    assert collectives == [("all_reduce", len(Collector().pack(0, dist.get_world_size())), torch.int64)]
    assert union.compute().metrics["compared_token_count"] == 50_005
    assert figures(report) == figures(union.compute())


def test_b24_extremes_are_extremes() -> None:
    """Rank maxima .02, .05, .03 and 7.5 on the last: the average of them means nothing."""
    world_size = dist.get_world_size()
    largest = [*[0.02, 0.05, 0.03][: world_size - 1], 7.5]
    report = all_reduce(collected([0.01, largest[dist.get_rank()]]))
    assert report.metrics["abs_dlogp_max"] == report.metrics["dlogp_max"] == 7.5
    assert report.metrics["worst_rank"] == world_size - 1
    assert report.ranks[0].rank == world_size - 1
    assert [row.abs_dlogp_max for row in report.rank_table] == pytest.approx(largest)


def test_b24_a_maximum_of_negatives_is_negative() -> None:
    """Rank 0 has nothing: its initial values must not take part."""
    collector = Collector() if dist.get_rank() == 0 else collected([-0.5 * dist.get_rank(), -2.0])
    metrics = all_reduce(collector).metrics
    assert (metrics["dlogp_min"], metrics["dlogp_max"]) == (-2.0, -0.5)
    assert metrics["dlogp_p99"] <= metrics["dlogp_max"]


def test_b25_tensor_parallel_replicas_are_counted_once(gathered) -> None:
    """TP = 2: the two ranks of a pair hold the same tokens, and each reduces over its own data-parallel group."""
    tp_size, world_size = 2, dist.get_world_size()
    groups = [dist.new_group(list(range(tp_rank, world_size, tp_size))) for tp_rank in range(tp_size)]
    dp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    shares = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.6]][: world_size // tp_size]
    collector = collected(shares[dp_rank], rollout_missing=[dp_rank == 0] + [False] * (len(shares[dp_rank]) - 1))
    report = all_reduce(collector, groups[tp_rank])
    once = sum(map(len, shares))
    assert report.metrics["active_token_count"] == once
    assert report.metrics["compared_token_count"] == once - 1
    assert report.warnings == {"rollout_missing": 1}
    alone = Collector()
    for rank, share in enumerate(shares):
        alone.merge(collected(share, rollout_missing=[rank == 0] + [False] * (len(share) - 1)))
    assert figures(report) == figures(alone.compute())
    everywhere = gathered(figures(report))
    assert everywhere == [everywhere[0]] * world_size


def test_b28_quantiles_are_those_of_all_tokens() -> None:
    """960 x .01 on one rank, 10 x .01 and 30 x 5 on another: the average of the ranks' quantiles is 2.505."""
    share = {0: [0.01] * 960, 1: [0.01] * 10 + [5.0] * 30}.get(dist.get_rank(), [])
    metrics = all_reduce(collected(share)).metrics
    assert metrics["abs_dlogp_p50"] == pytest.approx(0.01, rel=WITHIN_A_BIN)
    assert metrics["abs_dlogp_p90"] == pytest.approx(0.01, rel=WITHIN_A_BIN)
    assert metrics["abs_dlogp_p99"] == pytest.approx(5.0, rel=WITHIN_A_BIN)
