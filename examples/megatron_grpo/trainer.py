"""One process of the trainer: megatron-core's own schedule, DDP and optimizer around the policy."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import cpu_backend
import grpo
import model
import task
from rollout import Rollout

LossFunc = Callable[[dict[str, Tensor], Tensor], tuple[Any, ...]]


def token_sum(loss: Tensor, micro: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What megatron-core's schedule expects with a per-token loss: a sum, its number of tokens, a report."""
    tokens = micro["mask"].sum()
    divisor = tokens.int()
    if megatron.core.__version__.startswith("0.12."):
        # This release adds the tokens up over data-parallel ranks alone and leaves context-parallel ones to the loss.
        dist.all_reduce(divisor, group=parallel_state.get_context_parallel_group())
    return loss, divisor, {"loss": torch.stack([loss.detach(), tokens])}


def supervised_loss(micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
    return token_sum((output * micro["mask"]).sum(), micro)


def _keep_log_probs(micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
    report = {"row": micro["sample_index"], "column": micro["position_ids"], "log_probs": -output}
    return output.sum(), micro["mask"].sum().int(), report


def forward_step(loss_func: LossFunc, data_iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    micro = next(data_iterator)
    output = chunk(micro["tokens"], micro["position_ids"], None, labels=micro["labels"])
    return output, partial(loss_func, micro)


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.config = model.transformer_config(args)
        self.chunks = model.build_model(self.config, args.seed)
        self.optimizer = model.build_optimizer(self.chunks, args.lr)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def run(self, schedule: Callable[..., Any], step: Callable[..., Any], batch: dict[str, Tensor], **options: Any):
        """Forward and backward over this rank's micro-batches; the reports of the loss, on the last stage only."""
        size = self.args.micro_batch_size
        device = cpu_backend.device()
        iterators = [grpo.micro_batches(batch, size, device) for _ in self.chunks]
        return schedule(
            forward_step_func=step,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batch["tokens"]) // parallel_state.get_data_parallel_world_size() // size,
            seq_length=task.SEQ_LENGTH,
            micro_batch_size=size,
            **options,
        )

    def train(self, schedule: Callable[..., Any], step: Callable[..., Any], batch: dict[str, Tensor]) -> float:
        """Collective: one optimizer step. Mean loss over all tokens of the step on the last stage, 0 elsewhere."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self.run(schedule, step, batch)
        self.optimizer.step()
        total = sum((report["loss"] for report in reports), torch.zeros(2, device=cpu_backend.device()))
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return float(total[0] / total[1].clamp(min=1))

    def warm_up(self, batch: dict[str, Tensor]) -> float:
        """One supervised step, by the same schedule and optimizer."""
        return self.train(get_forward_backward_func(), partial(forward_step, supervised_loss), batch)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout]) -> Tensor:
        """Collective: float32 log-probs [N, S] of every label on every rank, by a forward-only schedule."""
        step = partial(forward_step, _keep_log_probs)
        batch = grpo.build_batch(rollouts)
        reports = self.run(get_forward_backward_func(), step, batch, forward_only=True)
        scores = torch.zeros(batch["tokens"].shape, device=cpu_backend.device())
        if parallel_state.get_tensor_model_parallel_rank() == 0:  # tensor-parallel ranks hold the same values
            for report in reports:
                scores[report["row"], report["column"]] = report["log_probs"]
        dist.all_reduce(scores)
        return scores.cpu()
