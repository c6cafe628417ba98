"""Ranks whose settings differ: the same sentence on every rank, at set-up, instead of an abort in a reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import rlk_audit.allreduce
from rlk_audit import AuditConfig, Auditor, Collector, LayoutMismatchError, StepReport, all_reduce
from rlk_audit.allreduce import agree_on_layout, mark_agreed

pytestmark = pytest.mark.skipif("int(os.environ.get('WORLD_SIZE', '1')) < 2", reason="needs two ranks")

DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"eps_low": 0.3}, "eps_low is 0.2 on {others}, 0.3 on {odd}"),
    ({"quantiles": ("0.5",)}, 'quantiles is ["0.5", "0.9", "0.99", "0.999"] on {others}, ["0.5"] on {odd}'),
    ({"mode": "off"}, 'mode is "audit" on {others}, "off" on {odd}'),
    ({"worst_k": 9}, "worst_k is 4 on {others}, 9 on {odd}"),
    ({"breakdowns": {"engine": 2}}, 'breakdowns is {{}} on {others}, {{"engine": ["0", "1"]}} on {odd}'),
    (
        {"eps_low": 0.1, "mode": "strict"},
        'eps_low is 0.2 on {others}, 0.1 on {odd}; mode is "audit" on {others}, "strict" on {odd}',
    ),
]


def named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def sentence(difference: str, odd: int) -> str:
    others = [rank for rank in range(dist.get_world_size()) if rank != odd]
    return (
        f"the audit's settings differ over the ranks: {difference.format(others=named(others), odd=named([odd]))}; "
        "give every rank the same settings and version (an environment variable that did not reach one node is the "
        "common cause)"
    )


def refusal(config: AuditConfig, group: dist.ProcessGroup | None = None) -> str:
    with pytest.raises(LayoutMismatchError) as caught:
        agree_on_layout(config, group)
    return str(caught.value)


@pytest.mark.parametrize(("change", "difference"), DIFFERENCES)
def test_one_odd_rank_is_named_on_every_rank(change: dict[str, Any], difference: str, gathered) -> None:
    odd = dist.get_world_size() - 1
    told = refusal(AuditConfig(**(change if dist.get_rank() == odd else {})))
    assert told == sentence(difference, odd)
    assert gathered(told) == [told] * dist.get_world_size()
    for name in ("prefix", "sentinel_floor", "metadata", "group_size", "version is"):
        assert name not in told


def test_every_rank_different(gathered) -> None:
    """No majority: each value with its rank."""
    told = refusal(AuditConfig(worst_k=1 + dist.get_rank()))
    values = ", ".join(f"{1 + rank} on rank {rank}" for rank in range(dist.get_world_size()))
    assert f"worst_k is {values};" in told
    assert gathered(told) == [told] * dist.get_world_size()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = dist.get_world_size() - 1
    if dist.get_rank() == odd:
        monkeypatch.setattr(rlk_audit.allreduce, "__version__", "0.0.1")
    told = refusal(AuditConfig())
    assert f"0.0.1 on rank {odd};" in told
    assert "version is " in told
    assert "eps_low" not in told


def test_a_group_speaks_for_its_own_ranks(gathered) -> None:
    """A group of the last two ranks: global ranks are named, the others are not asked."""
    ranks = list(range(dist.get_world_size()))[-2:]
    group = dist.new_group(ranks)
    told = ""
    if dist.get_rank() in ranks:
        told = refusal(AuditConfig(eps_high=0.2 if dist.get_rank() == ranks[0] else 0.28), group)
        assert f"eps_high is 0.2 on rank {ranks[0]}, 0.28 on rank {ranks[1]};" in told
    assert gathered(told) == [""] * (dist.get_world_size() - 2) + [gathered(told)[-1]] * 2


def test_all_ranks_off_need_not_agree(collectives: list[tuple[Any, ...]]) -> None:
    """Nothing will be reduced, so nothing is wrong; the exchange is the only collective."""
    config = AuditConfig(mode="off", worst_k=1 + dist.get_rank())
    agree_on_layout(config)
    assert [name for name, *_ in collectives] == ["all_gather"]
    auditor = Auditor(config)
    collectives.clear()
    auditor.update([-1.0], [-1.5], [1])
    assert auditor.step(1) is None
    assert collectives == []


def test_free_texts_may_differ() -> None:
    config = AuditConfig(metadata={"host": f"node{dist.get_rank()}"})
    report = Auditor(config).step(1)
    assert isinstance(report, StepReport)
    assert report.metadata == {"host": f"node{dist.get_rank()}"}


def test_an_auditor_refuses_before_it_builds_anything() -> None:
    with pytest.raises(LayoutMismatchError, match=r"grouping_power is .*5 on rank 0[,;]"):
        Auditor(AuditConfig(grouping_power=5 if dist.get_rank() == 0 else 7))


def test_the_group_works_after_a_refusal(gathered) -> None:
    """The refusal leaves no rank behind in a collective."""
    refusal(AuditConfig(eps_low=0.1 * (1 + dist.get_rank() % 2)))
    assert all_reduce(Collector()).metrics["compared_token_count"] == 0
    assert gathered(dist.get_rank()) == list(range(dist.get_world_size()))


def test_vectors_of_other_settings_are_told_apart_after_the_sum() -> None:
    """Of one length but another meaning, reduced without an agreement: every rank sees it in the summed rows."""
    odd = dist.get_world_size() - 1
    collector = Collector(AuditConfig(eps_low=0.3 if dist.get_rank() == odd else 0.2))
    mark_agreed(collector)
    found = "ranks " + ("0" if dist.get_rank() == odd else str(odd))
    with pytest.raises(LayoutMismatchError, match=f"group {found}.* did not pack with this configuration"):
        all_reduce(collector)


def test_all_reduce_of_odd_collectors_raises_instead_of_ending_the_process() -> None:
    """Their vectors differ in length. Kills: an agreement that only an Auditor makes."""
    with pytest.raises(LayoutMismatchError, match="worst_k is"):
        all_reduce(Collector(AuditConfig(worst_k=4 + dist.get_rank() % 2)))


def test_a_collector_agrees_once_for_a_group(collectives: list[tuple[Any, ...]]) -> None:
    collector = Collector()
    for _ in range(3):
        all_reduce(collector)
    assert [name for name, *_ in collectives] == ["all_gather", "all_reduce", "all_reduce", "all_reduce"]


@pytest.mark.parametrize("name", ["node", "a-name-of-more-than-thirty-two-bytes-in-all", "knöten"])
def test_a_rank_s_host_is_known_on_every_rank(name: str, monkeypatch: pytest.MonkeyPatch, gathered) -> None:
    """Settled with the agreement, so that no step pays for it; a long name is cut."""
    monkeypatch.setattr("socket.gethostname", lambda: f"{dist.get_rank()}{name}")
    auditor = Auditor(AuditConfig())
    auditor.update([-1.5], [-1.0], [1])
    hosts = {rank.rank: rank.host for rank in auditor.step(1).rank_table}
    assert hosts == {rank: f"{rank}{name}"[:32] for rank in range(dist.get_world_size())}
    assert gathered(hosts) == [hosts] * dist.get_world_size()


def test_a_host_of_another_name_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: f"node{dist.get_rank()}")
    assert set(agree_on_layout(AuditConfig()).values()) == {f"node{rank}" for rank in range(dist.get_world_size())}


def test_failures_that_differ_are_all_told() -> None:
    """The first rank could be set up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    failure = None if rank == 0 else ValueError(f"fault {rank}")
    told = "; ".join(f"fault {odd} (on rank {odd})" for odd in range(1, size))
    with pytest.raises(LayoutMismatchError) as raised:
        agree_on_layout(AuditConfig() if failure is None else None, failure=failure)
    assert str(raised.value) == f"the audit is set up on no rank, since it failed on some: {told}"
