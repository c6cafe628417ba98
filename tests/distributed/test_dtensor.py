"""DTensor log-probabilities of an FSDP2 model over a DeviceMesh: on every rank the figures of all shards' tokens."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlk_audit import AuditConfig, Auditor, Collector, TokenBatch

SAMPLES, LENGTH = 7, 12
"""Samples that 2 or 4 ranks cannot share evenly."""


def mesh_of(device: str, tp: int = 1) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


def whole_batch() -> dict[str, torch.Tensor]:
    """The same on every rank; responses of unequal lengths, the last one empty."""
    random = torch.Generator().manual_seed(5)
    rollout = -torch.rand(SAMPLES, LENGTH, generator=random)
    noise = 0.1 * torch.rand(SAMPLES, LENGTH, generator=random)
    lengths = torch.tensor([12, 1, 7, 3, 12, 5, 0])
    return {
        "train_log_probs": rollout - noise,
        "rollout_log_probs": rollout,
        "mask": torch.arange(LENGTH) < lengths[:, None],
        "sample_index": torch.arange(SAMPLES)[:, None].expand(SAMPLES, LENGTH).contiguous(),
        "token_position": torch.arange(LENGTH).expand(SAMPLES, LENGTH).contiguous(),
    }


def by_hand(batch: dict[str, torch.Tensor]) -> oracle.Expected:
    rows = zip(*(batch[name].tolist() for name in ("train_log_probs", "rollout_log_probs", "mask")), strict=True)
    samples = [oracle.Sample(*row, sample_index=place) for place, row in enumerate(rows)]
    return oracle.audit(samples, total_known=False)


def assert_whole(auditor: Auditor, batch: dict[str, torch.Tensor]) -> None:
    """The step's figures are the oracle's and, bit for bit, those of one process with all tokens."""
    report = auditor.step(1)
    expected = by_hand(batch)
    assert oracle.differences(report.metrics, expected) == []
    found = [(token.sample_index, token.token_position) for token in report.worst_tokens]
    assert found == [(token.sample_index, token.token_position) for token in expected.worst]
    alone = Collector(AuditConfig())
    alone.update(**batch)
    place = {"worst_rank": None}  # a fact of the group, which changes with it
    assert repr(report.metrics | place) == repr(alone.compute().metrics | place)


def sharded(batch: dict[str, torch.Tensor], mesh: DeviceMesh, *placements: object) -> dict[str, DTensor]:
    return {name: distribute_tensor(values.to(mesh.device_type), mesh, placements) for name, values in batch.items()}


def auditor_of(mesh: DeviceMesh, dimension: str, device: str) -> Auditor:
    return Auditor(AuditConfig(), group=mesh[dimension], device=device)


def test_shards_of_samples(device: str) -> None:
    mesh = mesh_of(device)
    auditor = auditor_of(mesh, "dp", device)
    auditor.update(**sharded(whole_batch(), mesh, Shard(0), Replicate()))
    assert_whole(auditor, whole_batch())


def test_shards_of_samples_on_tensor_parallel_ranks(device: str) -> None:
    if dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")
    mesh = mesh_of(device, tp=2)
    auditor = auditor_of(mesh, "dp", device)
    auditor.update(**sharded(whole_batch(), mesh, Shard(0), Replicate()))
    assert_whole(auditor, whole_batch())


def test_shards_of_sequences(device: str) -> None:
    """As with context parallelism: positions are sharded alike, so they are global."""
    mesh = mesh_of(device)
    auditor = auditor_of(mesh, "dp", device)
    auditor.update(**sharded(whole_batch(), mesh, Shard(1), Replicate()))
    assert_whole(auditor, whole_batch())


def test_a_token_batch_of_shards(device: str) -> None:
    mesh = mesh_of(device)
    auditor = auditor_of(mesh, "dp", device)
    auditor.update(TokenBatch(**sharded(whole_batch(), mesh, Shard(0), Replicate())))
    assert_whole(auditor, whole_batch())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_model_of_fsdp2(device: str) -> None:
    """Its log-probabilities are made into a DTensor; the rollout side is plain, the rank's own."""
    mesh = mesh_of(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).to(device)
    words = torch.randint(0, 16, (dist.get_world_size(), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        train = model(words[:, :-1].to(device)).log_softmax(-1).gather(2, words[:, 1:, None].to(device))[..., 0]
    fully_shard(model, mesh=mesh["dp"])
    rank = dist.get_rank()
    row = words[rank : rank + 1].to(device)
    own = model(row[:, :-1]).log_softmax(-1).gather(2, row[:, 1:, None])[..., 0]
    log_probs = DTensor.from_local(own, mesh, (Shard(0), Replicate()))
    auditor = auditor_of(mesh, "dp", device)
    mask = (torch.arange(LENGTH) <= rank)[None]
    auditor.update(log_probs, own.detach() - 0.125, mask, sample_index=rank, token_position=torch.arange(LENGTH))
    assert log_probs.requires_grad
    whole = {
        "train_log_probs": train.cpu(),
        "rollout_log_probs": train.cpu() - 0.125,
        "mask": torch.arange(LENGTH) <= torch.arange(dist.get_world_size())[:, None],
    }
    report = auditor.step(1)
    found = oracle.differences(report.metrics, by_hand(whole), relative=1e-5)
    assert [line for line in found if "worst" not in line and "std" not in line] == []
    own.sum().backward()


def test_partial_sums_are_refused(device: str) -> None:
    mesh = mesh_of(device)
    parts = DTensor.from_local(torch.zeros(2, 3, device=device), mesh, (Partial(), Replicate()))
    with pytest.raises(TypeError, match="parts of sums"):
        Collector(AuditConfig()).update(parts, torch.zeros(2, 3), torch.ones(2, 3))


def test_shards_outside_the_group_are_refused(device: str) -> None:
    if dist.get_world_size() < 4:
        pytest.skip("needs 4 ranks")
    mesh = mesh_of(device, tp=2)
    auditor = auditor_of(mesh, "dp", device)
    with pytest.raises(ValueError, match="sharded over 'tp'"):
        auditor.update(**sharded(whole_batch(), mesh, Shard(0), Shard(1)))


def test_copies_inside_the_group_are_refused(device: str) -> None:
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks")
    mesh = mesh_of(device)
    auditor = Auditor(AuditConfig(), device=device)
    with pytest.raises(ValueError, match="replicated over 'dp'"):
        auditor.update(**sharded(whole_batch(), mesh, Replicate(), Replicate()))
