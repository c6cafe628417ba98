"""Core attention for megatron-core's layer spec: causal, grouped queries, context parallel (zigzag), on any device.

megatron-core's own DotProductAttention refuses context parallelism without Transformer Engine. A core attention in the
layer spec is its documented extension point.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def zigzag_positions(local_length: int, cp_rank: int, cp_size: int, device: torch.device) -> Tensor:
    """Global positions of a rank's tokens: of 2 * cp chunks, rank r owns chunks r and 2 * cp - 1 - r."""
    chunk = torch.arange(local_length * cp_size, device=device).chunk(2 * cp_size)
    return torch.cat([chunk[cp_rank], chunk[-1 - cp_rank]])


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; every rank's queries send a gradient back, hence the sum in backward."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class CoreAttention(MegatronModule):
    """softmax(Q K^T) V in float32; query [s, b, heads, d], key and value [s, b, groups, d]."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, pg_collection: Any = None, **__: Any):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        group, length = self.cp_group, query.size(0)
        positions = [zigzag_positions(length, rank, group.size(), query.device) for rank in range(group.size())]
        if group.size() > 1:
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
        heads_per_group = query.size(2) // key.size(2)
        key, value = (x.repeat_interleave(heads_per_group, 2) for x in (key, value))
        future = torch.cat(positions)[None, :] > positions[group.rank()][:, None]
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key).float() * self.scale
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).reshape(length, query.size(1), -1)
