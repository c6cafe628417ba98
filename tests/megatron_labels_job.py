"""Ordinary `labels=` training on real megatron-core, audited by `attach`: what a trainer does that computes no
log-probabilities of its own. Built of the example's model, trainer and data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import grpo
import model
import task
import trainer
from recorder import Recorder
from rlk_audit import AuditConfig, TokenBatch
from rlk_audit.megatron_plugin import MegatronAudit, register
from rlk_audit.megatron_pretrain import PretrainAudit
from rlk_audit.sinks import JsonlSink
from rollout import demonstrations

RERUN_STEP = 2
STEPS = 2


def mean_loss(micro: dict[str, Tensor], output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of two parts; megatron-core scales it in place."""
    total, tokens = (output * micro["mask"]).sum(), micro["mask"].sum()
    return total / tokens.clamp(min=1), {"loss": torch.stack([total.detach(), tokens])}


def counted_loss(micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
    """A shard without a token divides by 1: releases before 0.15 would divide by 0."""
    loss, tokens, report = trainer.supervised_loss(micro, output)
    return loss, tokens.clamp(min=1), report


def attach(audit: MegatronAudit, micro: dict[str, Tensor]) -> None:
    fields = {name: micro[name] for name in ("valid", "sample_index", "rollout_id", "token_position")}
    audit.attach(micro["rollout_log_probs"], micro["mask"], token_ids=micro["labels"], weight_version=0, **fields)


def observe_shard(audit: MegatronAudit, micro: dict[str, Tensor], output: Tensor) -> None:
    """The package's own arithmetic of positions on what megatron-core cut over context-parallel ranks."""
    first_response = micro["position_ids"][:, 0] + 1 - micro["token_position"][:, 0]
    batch = TokenBatch.from_cp_shard(
        -output, micro["rollout_log_probs"], micro["mask"], valid=micro["valid"], token_ids=micro["labels"],
        cp_rank=parallel_state.get_context_parallel_rank(), cp_size=parallel_state.get_context_parallel_world_size(),
        seq_length=task.SEQ_LENGTH, response_start=first_response, index_scores="next_token",
        sample_index=micro["sample_index"][:, 0], rollout_id=micro["rollout_id"][:, 0],
        updates_since_rollout=audit.weight_version,
    )  # fmt: skip
    audit.observe(batch)


@dataclass(frozen=True)
class Form:
    """How a trainer writes its loss: sum or mean, scaled by megatron-core over all tokens or by micro-batch; and
    whether the audit is told by `attach`, or by `observe` in the loss function."""

    loss: Callable[..., tuple[Any, ...]]
    per_token: bool
    attached: bool = True


FORMS = {
    "sum": Form(trainer.supervised_loss, per_token=True),
    "sum_by_microbatch": Form(counted_loss, per_token=False),
    "mean": Form(mean_loss, per_token=False),
    "observed": Form(trainer.supervised_loss, per_token=True, attached=False),
}


class FormTrainer(trainer.Trainer):
    def __init__(self, args: argparse.Namespace, form: Form) -> None:
        self.args = args
        self.config = model.transformer_config(args)
        self.config.calculate_per_token_loss = form.per_token
        self.chunks = model.build_model(self.config, args.seed)
        self.optimizer = model.build_optimizer(self.chunks, args.lr)


def labelled_batch(args: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """Samples whose log-probabilities an engine could have given; a fifth of the responses' tokens is masked, and
    where no token counts there is no value."""
    generator = torch.Generator().manual_seed(seed)
    batch = grpo.build_batch(demonstrations(args.prompts * args.group_size, generator))
    valid = batch["mask"]
    mask = valid * (torch.rand(valid.shape, generator=generator) < 0.8)
    log_probs = -5 * torch.rand(valid.shape, generator=generator)
    return batch | {
        "valid": valid,
        "mask": mask,
        "rollout_log_probs": log_probs.masked_fill(mask == 0, float("nan")),
        "rollout_id": batch["sample_index"] + 1000 * seed,
    }


class AuditedForm:
    """What one form hands to the schedule; `counted` is true while a loss is computed that the audit must count."""

    form: Form
    audit: MegatronAudit | PretrainAudit
    recorder: Recorder
    counted = False

    def forward_step(self, data_iterator: Iterator[dict[str, Tensor]], chunk: torch.nn.Module) -> tuple[Any, ...]:
        micro = next(data_iterator)
        if self.form.attached:
            attach(self.audit, micro)
        return trainer.forward_step(self.loss, iter([micro]), chunk)

    def loss(self, micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
        if not self.form.attached:
            observe_shard(self.audit, micro, output)
        if self.counted:
            names = ("rollout_log_probs", "mask", "sample_index", "rollout_id", "token_position")
            fields = {name: micro[name] for name in names}
            self.recorder.observe(-output, token_ids=micro["labels"], labels={}, **fields)
        return self.form.loss(micro, output)


class Job(AuditedForm):
    """One training."""

    def __init__(self, args: argparse.Namespace, form: Form, mode: str, folder: Path) -> None:
        self.args, self.form = args, form
        self.trainer = FormTrainer(args, form)
        last_rank = dist.get_rank() == dist.get_world_size() - 1
        sinks = [JsonlSink(folder / "audit.jsonl")] if mode == "audit" and last_rank else []
        self.audit = register(config=AuditConfig(mode=mode), model=self.trainer.chunks, sinks=sinks)
        self.schedule = self.audit.wrap_schedule(get_forward_backward_func())
        self.step_func = self.audit.wrap_forward_step(self.forward_step)
        self.recorder = Recorder(folder / "record")

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """The same functions on data that must not be counted."""
        for chunk in self.trainer.chunks:
            chunk.eval()
        self.trainer.run(self.schedule, self.step_func, labelled_batch(self.args, 100 + step), forward_only=True)
        for chunk in self.trainer.chunks:
            chunk.train()

    def train(self, step: int) -> float:
        """One optimizer step. A rerun computes other losses than the first run, so that it shows which one counts."""
        batch = labelled_batch(self.args, step)
        self.counted = True
        if step == RERUN_STEP:
            self.trainer.run(self.schedule, self.step_func, batch)
            self.counted = False
            with torch.no_grad():
                for chunk in self.trainer.chunks:
                    for parameter in chunk.parameters():
                        parameter.mul_(1.25)
        loss = self.trainer.train(self.schedule, self.step_func, batch)
        self.counted = False
        return loss

    def run(self) -> dict[str, Any]:
        losses = []
        for step in range(1, STEPS + 1):
            self.evaluate(step)
            losses.append(self.train(step))
            self.evaluate(step)
            self.audit.step_end(step)
            self.recorder.step_end(step)
        self.audit.close()
        return {"losses": losses, "weights_sha256": model.weights_digest(self.trainer.chunks)}


def train_on_labels(args: argparse.Namespace) -> None:
    """Collective: every form, without the audit and with it."""
    for name, form in FORMS.items():
        for mode in ("off", "audit"):
            folder = args.out / name / mode
            outcome = Job(args, form, mode, folder).run()
            if dist.get_rank() == dist.get_world_size() - 1:
                (folder / "run.json").write_text(json.dumps(outcome))
