"""Keeps what each rank observed, token by token, so that another program can recompute the audit's figures."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class Recorder:
    """Takes the same `observe` calls as the audit. `rank<r>.pt` holds one list of micro-batches a step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank{dist.get_rank()}.pt"
        self.steps: dict[int, list[dict[str, Any]]] = {}
        self.current: list[dict[str, Any]] = []

    def observe(
        self,
        train_log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        *,
        sample_index: Tensor,
        rollout_id: Tensor,
        token_position: Tensor,
        token_ids: Tensor,
        labels: dict[str, Tensor],
        **_: Any,
    ) -> None:
        fields = {
            "train_log_probs": train_log_probs,
            "rollout_log_probs": rollout_log_probs,
            "mask": mask,
            "sample_index": sample_index,
            "rollout_id": rollout_id,
            "token_position": token_position,
            "token_ids": token_ids,
            **labels,
        }
        shape = train_log_probs.shape
        self.current.append({name: value.detach().cpu().expand(shape).clone() for name, value in fields.items()})

    def step_end(self, step: int) -> None:
        self.steps[step], self.current = self.current, []
        ranks = {
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "cp_rank": parallel_state.get_context_parallel_rank(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
        }
        torch.save({**ranks, "steps": self.steps}, self.path)
