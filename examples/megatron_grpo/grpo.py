"""Group-relative policy optimisation: rollouts to tensors, advantages, loss."""

from collections import defaultdict
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

import task
from cpu_backend import known
from rollout import Rollout

CLIP = 0.2


def advantages(rollouts: list[Rollout]) -> list[float]:
    """Reward of each sample, normalised within the samples of its prompt."""
    groups = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout.reward)
    statistics = {group: (torch.tensor(r).mean(), torch.tensor(r).std()) for group, r in groups.items()}
    return [float((r.reward - statistics[r.group][0]) / (statistics[r.group][1] + 1e-4)) for r in rollouts]


def build_batch(rollouts: list[Rollout], sample_advantages: list[float] | None = None) -> dict[str, Tensor]:
    """All samples of the step. Column i of a [N, S] tensor belongs to the label i, that is to token i + 1."""
    shape = (len(rollouts), task.SEQ_LENGTH)
    tokens = torch.full((shape[0], shape[1] + 1), task.PAD)
    mask, rollout_log_probs = torch.zeros(shape), torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        sequence = rollout.prompt + rollout.response
        tokens[row, : len(sequence)] = torch.tensor(sequence)
        response = slice(len(rollout.prompt) - 1, len(sequence) - 1)
        mask[row, response] = 1.0
        rollout_log_probs[row, response] = torch.tensor(rollout.log_probs)
    columns = torch.arange(shape[1]).expand(shape)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "mask": mask,
        "rollout_log_probs": rollout_log_probs,
        "position_ids": columns,
        "token_position": columns + 1 - torch.tensor([[len(r.prompt)] for r in rollouts]),
        "advantage": torch.tensor(sample_advantages or [0.0] * shape[0])[:, None],
        "sample_index": torch.tensor([[r.sample_index] for r in rollouts]),
        "rollout_id": torch.tensor([[r.group] for r in rollouts]),
        "engine": torch.tensor([[r.engine] for r in rollouts]),
    }


def micro_batches(batch: dict[str, Tensor], size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """This rank's share: its block of the samples (data parallel), its chunks of the sequence (context parallel)."""
    # Without the group, releases from 0.18 on cut over all ranks.
    group = parallel_state.get_context_parallel_group()
    options = known(get_batch_on_this_cp_rank, is_hybrid_cp=False, cp_group=group)
    share = len(batch["tokens"]) // parallel_state.get_data_parallel_world_size()
    first = share * parallel_state.get_data_parallel_rank()
    for start in range(first, first + share, size):
        rows = {name: value[start : start + size].to(device) for name, value in batch.items()}
        cut = {name: value.contiguous() for name, value in rows.items() if value.size(1) == task.SEQ_LENGTH}
        yield {**rows, **get_batch_on_this_cp_rank(cut, **options)}


def grpo_loss(log_probs: Tensor, micro: dict[str, Tensor]) -> Tensor:
    """Clipped surrogate, summed over tokens. The ratio is taken against the engine's log-probabilities, so drift
    between engine and trainer enters the gradient as if it were a policy update."""
    ratio = torch.exp(log_probs - micro["rollout_log_probs"])
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * micro["advantage"], clipped * micro["advantage"])
    return -(surrogate * micro["mask"]).sum()
