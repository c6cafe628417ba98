"""Nothing of an update is read on the host, unless the state itself lives there.

The meta device holds shapes and no values, so whatever reads a value (`.item()`, `nonzero`, a boolean index, a branch
on a tensor) raises there. It stands in for CUDA, where the same read would wait for the device.
"""

from __future__ import annotations

import pytest
import torch

from rlk_audit import AuditConfig, Collector, TokenBatch
from rlk_audit.run_total import RunTotal

CONFIG = AuditConfig(breakdowns={"engine": 2})


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def batches() -> dict[str, TokenBatch]:
    ids = {"sample_index": on_meta(4, dtype=torch.int64), "labels": {"engine": on_meta(4, dtype=torch.int64)}}
    padded = (on_meta(4, 8, dtype=torch.bfloat16), on_meta(4, 8), on_meta(4, 8, dtype=torch.bool))
    packed = (on_meta(32), on_meta(32), on_meta(32))
    bounds = on_meta(5, dtype=torch.int64)
    shard = {"cp_rank": 1, "cp_size": 2}
    tokens = {"token_ids": on_meta(32, dtype=torch.int64), "rollout_token_ids": on_meta(32, dtype=torch.int64)}
    return {
        "padded": TokenBatch.from_padded(*padded, response_start=on_meta(4, dtype=torch.int64), **ids),
        "packed": TokenBatch.from_packed(*packed, cu_seqlens=bounds, **ids, **tokens),
        "shard": TokenBatch.from_cp_shard(*padded, **shard, seq_length=16, updates_since_rollout=1, **ids),
        "packed_shard": TokenBatch.from_cp_shard(*packed, **shard, cu_seqlens_padded=bounds, cu_seqlens=bounds, **ids),
        "no_rollout": TokenBatch(padded[0], None, padded[2], valid=padded[2]),
        "refused": TokenBatch.from_packed(packed[0], on_meta(31), packed[2], cu_seqlens=bounds),
    }


@pytest.mark.parametrize("per_sample", [None, 1])
@pytest.mark.parametrize("form", batches())
def test_an_update_reads_nothing_on_the_host(form: str, per_sample: int | None) -> None:
    """Kills: `.item()`, boolean indexing or a branch on a value anywhere between `update` and `pack`."""
    config = AuditConfig(breakdowns={"engine": 2}, worst_per_sample=per_sample)
    collector = Collector(config, device="meta")
    collector.update(batches()[form], microbatch=0)
    assert collector.last_error is None or "is refused" in collector.last_error
    assert (collector.last_error is None) == (form != "refused")
    assert collector.digest().shape == ()
    vector = collector.pack(1, 4)
    assert vector.device.type == "meta"
    total = RunTotal(config)
    total.add(vector, 4)
    total.add(vector, 4)
    collector.reset()


def test_a_read_would_be_seen() -> None:
    """The meta device does refuse: without that the test above could not fail."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_meta(3).sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_meta(3)[on_meta(3, dtype=torch.bool)]
