"""A training script of Megatron-LM's own `pretrain` under the audit, as a user would write one, run on CPU and gloo.

Run as a program it imports once and then forks each job, see megatron_jobs.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import megatron_jobs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.training import pretrain
from torch import Tensor

import cpu_backend
from rlk_audit import ConsistencyError
from rlk_audit.megatron_plugin import add_rlk_args
from rlk_audit.megatron_pretrain import PretrainAudit
from rlk_audit.sinks import JsonlSink

SPLITS = ("train", "valid", "test")
MASKED = 0.2
FIELDS = ("rollout_log_probs", "mask", "sample_index", "token_position", "token_ids")


# --- shims for the CPU ------------------------------------------------------------------------------------------------


SHIMMED = (
    "core.rerun_state_machine",
    "core.timers",
    "training.checkpointing",
    "training.training",
    "training.utils.common_utils",
)


class CpuCuda:
    """`torch.cuda` as seen by those modules: nothing runs beside anything, so there is no waiting."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    class Stream:
        def wait_stream(self, stream: Any) -> None:
            pass

    def current_stream(self) -> Stream:
        return self.Stream()

    def stream(self, stream: Stream) -> Any:
        return nullcontext()

    def current_device(self) -> str:
        return "cpu"

    def synchronize(self) -> None:
        pass

    def get_rng_state(self) -> Tensor:
        return torch.empty(0)

    def set_rng_state(self, state: Tensor) -> None:
        pass


class CpuTorch:
    """`torch` as seen by those modules: the factories that they call for `cuda` ignore the device."""

    cuda = CpuCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(*args, **kwargs | {"device": "cpu"})

    def zeros(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(*args, **kwargs | {"device": "cpu"})


class CpuGPTModel(GPTModel):
    def cuda(self, device: Any = None) -> CpuGPTModel:
        """`pretrain` moves every model there."""
        return self


def install_cpu_shims() -> None:
    """Let `pretrain` start and run without CUDA; what a training step computes is left as it is."""
    cpu_backend.install()
    for name in SHIMMED:
        vars(importlib.import_module(f"megatron.{name}"))["torch"] = CpuTorch()
    training = importlib.import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # Decides which environment variables tensor parallelism needs: this one needs none.
    importlib.import_module("megatron.training.arguments").get_device_arch_version = lambda: 10
    # Warms up fused CUDA kernels.
    training.set_jit_fusion_options = lambda **_: None
    # Runs `make`, which a wheel has no file for.
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None


# --- the training script ----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("job")
    group.add_argument("--out", type=Path, required=True)
    group.add_argument("--tell", choices=("attach", "observe"), default="attach", help="how the audit is told")
    group.add_argument("--sink-in-code", action="store_true")
    group.add_argument("--reject-step", type=int, help="this one is run twice")
    return add_rlk_args(parser)


class Samples(torch.utils.data.Dataset):
    """Sequences of which an engine could have given the log-probabilities; NaN where no token counts."""

    def __init__(self, split: str, count: int, args: argparse.Namespace) -> None:
        self.split, self.count, self.args = SPLITS.index(split), count, args

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length, generator = self.args.seq_length, torch.Generator().manual_seed(1000 * index + self.split)
        tokens = torch.randint(self.args.vocab_size, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) >= MASKED).float()
        log_probs = -math.log(self.args.vocab_size) - torch.rand(length, generator=generator)
        return {
            "input_ids": tokens[:-1],
            "token_ids": tokens[1:],
            "mask": mask,
            "rollout_log_probs": log_probs.masked_fill(mask == 0, math.nan),
            "sample_index": torch.full((length,), index),
            "token_position": torch.arange(length),
        }


class Training:
    """What a user gives to `pretrain`, and a record of what it did."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        last_rank = args.rank == args.world_size - 1
        sinks = [JsonlSink(args.out / "audit.jsonl")] if args.sink_in_code and last_rank else []
        self.audit = PretrainAudit(sinks=sinks)
        self.chunks: list[CpuGPTModel] = []
        self.steps: dict[int, list[dict[str, Tensor]]] = {step: [] for step in range(1, args.train_iters + 1)}

    def datasets(self, counts: tuple[int, int, int], vp_stage: int | None = None) -> tuple[Samples, ...]:
        return tuple(Samples(split, count, self.args) for split, count in zip(SPLITS, counts, strict=True))

    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds them, none is sent a batch

    def model(self, pre_process: bool, post_process: bool, vp_stage: int | None = None, **_: Any) -> CpuGPTModel:
        config = core_transformer_config_from_args(self.args)
        config.batch_p2p_comm = False  # it would wait for the device
        chunk = CpuGPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=self.args.padded_vocab_size,
            max_sequence_length=self.args.seq_length,
            share_embeddings_and_output_weights=False,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        self.chunks.append(chunk)
        return chunk

    def forward_step(self, data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Any, ...]:
        batch = next(data_iterator)
        length = self.args.seq_length
        future = torch.ones(length, length).triu(1).bool()[None, None]
        output = model(batch["input_ids"], torch.arange(length)[None], future, labels=batch["token_ids"])
        if self.args.tell == "attach":
            self.tell(self.audit.attach, batch)
        return output, functools.partial(self.loss_func, batch)

    def loss_func(self, batch: dict[str, Tensor], losses: Tensor) -> tuple[Any, ...]:
        if self.args.tell == "observe":
            self.tell(self.audit.observe, batch, -losses)
        total, tokens = (losses * batch["mask"]).sum(), batch["mask"].sum().int()
        if losses.requires_grad:  # in an evaluation it does not
            self.record(batch, losses)
            self.check(total.detach())
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens])}

    def tell(self, method: Callable[..., None], batch: dict[str, Tensor], *train_log_probs: Tensor) -> None:
        fields = {name: batch[name] for name in ("sample_index", "token_position", "token_ids")}
        method(*train_log_probs, batch["rollout_log_probs"], batch["mask"], weight_version=0, **fields)

    def check(self, loss: Tensor) -> None:
        """Where a loss is rejected Megatron-LM runs forward and backward of the step again, and compares."""
        rejected = self.args.curr_iteration + 1 == self.args.reject_step
        get_rerun_state_machine().validate_result(
            result=loss, rejection_func=lambda _: rejected, message="rejected by the job", fatal=False
        )

    def record(self, batch: dict[str, Tensor], losses: Tensor) -> None:
        micro = {"train_log_probs": -losses.detach()} | {name: batch[name] for name in FIELDS}
        self.steps[self.args.curr_iteration + 1].append({name: values.clone() for name, values in micro.items()})

    def save(self) -> None:
        ranks = {
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "cp_rank": parallel_state.get_context_parallel_rank(),
        }
        weights = [{name: value.detach() for name, value in chunk.named_parameters()} for chunk in self.chunks]
        torch.save({**ranks, "steps": self.steps, "weights": weights}, self.args.out / f"rank{dist.get_rank()}.pt")


def main(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    install_cpu_shims()
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    # Megatron-LM forms its groups itself only where there are GPUs.
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    )
    training = Training(args)
    audited_pretrain = training.audit.wrap_pretrain(pretrain)
    audited_pretrain(
        pretrain_cfg_container_from_args(args),
        training.datasets,
        ModelType.encoder_or_decoder,
        training.forward_step,
        model_provider=training.model,
        skip_model_parallel_init=True,
    )
    training.save()
    dist.barrier()
    dist.destroy_process_group()


def stopped(arguments: list[str]) -> None:
    """Each rank writes down what stopped it, and is left to end by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        main(arguments)
    except ConsistencyError as stop:
        (get_args().out / f"stopped{dist.get_rank()}").write_text(str(stop))
        raise


JOBS: dict[str, Callable[[list[str]], None]] = {"pretrain": main, "stopped_pretrain": stopped}

if __name__ == "__main__":
    megatron_jobs.JOBS.update(JOBS)
    for line in sys.stdin:
        print(json.dumps(megatron_jobs.run(**json.loads(line))), flush=True)
