"""torchmetrics' own synchronisation of DlogpAudit: on every rank the core's figures of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlk_audit import AuditConfig, Collector, all_reduce
from rlk_audit.integrations.torchmetrics import DlogpAudit

CONFIG = AuditConfig(worst_k=6, breakdowns={"position": "auto"})


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    """A batch a rank, of unequal sizes; the last rank has nothing where there are several."""
    tokens = 40 * (rank + 1) if rank == 0 or rank < dist.get_world_size() - 1 else 0
    random = torch.Generator().manual_seed(rank)
    rollout = -torch.rand(tokens, generator=random, dtype=torch.float64)
    train = rollout - 0.1 * (rank + 1) * torch.rand(tokens, generator=random, dtype=torch.float64)
    place = torch.arange(tokens)
    return {
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "mask": torch.ones(tokens),
        "sample_index": place + 1000 * rank,
        "token_position": place,
    }


def test_compute_gives_the_figures_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, metric = Collector(CONFIG), DlogpAudit(CONFIG)
    for target in (collector, metric):
        target.update(**batch_of(dist.get_rank()))
    expected = all_reduce(collector).to_dict()
    gathers = []
    gather = dist.all_gather
    monkeypatch.setattr(dist, "all_gather", lambda *given, **options: gathers.append(1) or gather(*given, **options))
    values = metric.compute()
    assert len(gathers) == 2  # of shapes, of vectors
    assert metric.report is not None
    found = metric.report.to_dict()
    for part in ("metrics", "classes", "warnings", "worst_tokens", "breakdowns", "histogram"):
        assert found[part] == expected[part], part
    assert values[CONFIG.prefix + "abs_dlogp_max"].item() == expected["metrics"]["abs_dlogp_max"]


def test_without_sync_it_is_this_rank_alone() -> None:
    collector, metric = Collector(CONFIG), DlogpAudit(CONFIG, sync_on_compute=False)
    for target in (collector, metric):
        target.update(**batch_of(dist.get_rank()))
    metric.compute()
    assert metric.report is not None
    found, expected = metric.report.to_dict(), collector.compute().to_dict()
    assert found["metrics"] | {"worst_rank": None} == expected["metrics"] | {"worst_rank": None}


def test_sync_at_each_step_gives_the_batch_of_all_ranks() -> None:
    collector, metric = Collector(CONFIG), DlogpAudit(CONFIG, dist_sync_on_step=True)
    collector.update(**batch_of(dist.get_rank()))
    expected = all_reduce(collector).metrics
    for _ in range(2):
        values = metric(**batch_of(dist.get_rank()))
        assert values[CONFIG.prefix + "abs_dlogp_mean"].item() == expected["abs_dlogp_mean"]
