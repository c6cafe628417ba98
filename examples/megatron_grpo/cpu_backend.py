"""Lets megatron-core run where CUDA is absent, with gloo.

megatron-core names the CUDA device literally in a few places of its schedules, buffers and optimizers. `install` gives
just those modules a `torch` whose factories ignore the device; `torch` itself stays as it is, so that a stray
`device="cuda"` elsewhere still fails. With CUDA present nothing is changed.
"""

import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

_MODULES = (
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "optimizer.clip_grads",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.mappings",
    "transformer.moe.router",
    "utils",
)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


class _CpuTensor(torch.Tensor):
    """A tensor that older releases make on the CPU and then move: `torch.tensor(0).cuda()`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from it is an ordinary tensor

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.tensor(*args, **kwargs).as_subclass(_CpuTensor)


class _Overlay:
    """A module with some of its names replaced."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that the function has: releases of megatron-core differ."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _rotary_of_cp_rank(
    embedding: torch.Tensor, seq_dim: int, cp_group: torch.distributed.ProcessGroup | None = None
) -> torch.Tensor:
    """megatron-core's own pins host memory: of 2 * cp chunks, rank r owns chunks r and 2 * cp - 1 - r."""
    group = cp_group or parallel_state.get_context_parallel_group()
    chunks = embedding.chunk(2 * group.size(), seq_dim)
    return torch.cat([chunks[group.rank()], chunks[-1 - group.rank()]], seq_dim)


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def install() -> None:
    """Prepare megatron-core for the CPU; does nothing where CUDA is present. Call once a process."""
    if torch.cuda.is_available():
        return
    # The inference tracker forks no CUDA generator; with dropout 0 the trainer draws nothing from it.
    initialize_rng_tracker(**known(initialize_rng_tracker, inference_rng_tracker=True, force_reset=True))
    cuda = _Overlay(torch.cuda, current_device=lambda: "cpu", current_stream=lambda: None)
    factories = {name: _on_cpu(getattr(torch, name)) for name in ("empty", "ones", "zeros")}
    factories["tensor"] = _on_cpu(_tensor)
    for name in _MODULES:
        vars(importlib.import_module(f"megatron.core.{name}"))["torch"] = _Overlay(torch, cuda=cuda, **factories)
    rotary = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    vars(rotary)["get_pos_emb_on_this_cp_rank"] = _rotary_of_cp_rank
    # 0.16 forgets this fallback of the router where Transformer Engine is absent.
    vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
