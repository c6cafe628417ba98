"""`labels=` training run by a stand-in of Megatron-LM's `pretrain` (pretrain_loops.py) on the real megatron-core."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pretrain_loops as loop
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_labels_job import FORMS, STEPS, AuditedForm, FormTrainer, labelled_batch
from torch import Tensor

import cpu_backend
import grpo
import model
import task
from recorder import Recorder
from rlk_audit.megatron_pretrain import PretrainAudit
from rlk_audit.sinks import JsonlSink

RERUN_ITERATION = 1


class Training(AuditedForm):
    """What a user of `pretrain` writes: providers, a forward step and a loss function."""

    def __init__(self, args: argparse.Namespace, form: str, folder: Path) -> None:
        self.args, self.form = args, FORMS[form]
        last_rank = dist.get_rank() == dist.get_world_size() - 1
        self.audit = PretrainAudit(sinks=[JsonlSink(folder / "audit.jsonl")] if last_rank else [])
        self.recorder = Recorder(folder / "record")
        self.trainer = FormTrainer(args, self.form)
        self.losses: list[float] = []
        self.runs = 0

    def model_provider(self) -> tuple[Any, Training]:
        return self.trainer.chunks, self

    def zero_grad(self) -> None:
        for chunk in self.trainer.chunks:
            chunk.zero_grad_buffer()
        self.trainer.optimizer.zero_grad()

    def step(self) -> None:
        self.trainer.optimizer.step()

    def dataset_provider(self) -> tuple[Any, Any]:
        return self.training_data, self.evaluation_data

    def training_data(self, iteration: int) -> Any:
        """A rerun computes other losses than the first run, so that it shows which one counts."""
        self.runs += 1
        self.counted = self.runs == 1
        if not self.counted:
            with torch.no_grad():
                for chunk in self.trainer.chunks:
                    for parameter in chunk.parameters():
                        parameter.mul_(1.25)
        return self.micro_batches(iteration + 1)

    def evaluation_data(self, iteration: int) -> Any:
        self.counted, self.runs = False, 0
        self.recorder.step_end(iteration + 1)
        return self.micro_batches(100 + iteration)

    def micro_batches(self, seed: int) -> Any:
        batch = labelled_batch(self.args, seed)
        size, device = self.args.micro_batch_size, cpu_backend.device()
        iterators = [grpo.micro_batches(batch, size, device) for _ in self.trainer.chunks]
        return iterators if len(iterators) > 1 else iterators[0]

    def loss(self, micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
        result = super().loss(micro, output)
        self.losses.append(float(result[0]))
        return result


def train_by_pretrain(args: argparse.Namespace) -> None:
    """Collective: the two ways to tell the audit, without it and with it."""
    samples = args.prompts * args.group_size // parallel_state.get_data_parallel_world_size()
    loop.get_forward_backward_func = get_forward_backward_func
    for form in ("sum", "observed"):
        for mode in ("off", "audit"):
            folder = args.out / form / mode
            training = Training(args, form, folder)
            sizes = {"train-iters": STEPS, "num-microbatches": samples // args.micro_batch_size}
            sizes |= {"seq-length": task.SEQ_LENGTH, "micro-batch-size": args.micro_batch_size}
            sizes |= {"rerun-iteration": RERUN_ITERATION, "rlk-consistency-mode": mode}
            loop.ARGUMENTS[:] = [f"--{name}={value}" for name, value in sizes.items()]
            pretrain = training.audit.wrap_pretrain(loop.pretrain_0_14)
            pretrain(training.dataset_provider, training.model_provider, None, training.forward_step)
            outcome = {"losses": training.losses, "weights_sha256": model.weights_digest(training.trainer.chunks)}
            if dist.get_rank() == dist.get_world_size() - 1:
                (folder / "run.json").write_text(json.dumps(outcome))
