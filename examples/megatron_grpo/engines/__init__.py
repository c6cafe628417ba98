"""Rollout engines: programs of their own that sample from exported weights."""

import argparse
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LlamaShape:
    """What an engine must know of the model before any weight arrives; names as in Hugging Face's LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True)
class Completion:
    """One sampled response, with the engine's own log-probability of each of its tokens."""

    token_ids: list[int]
    log_probs: list[float]


class Engine(Protocol):
    """A rollout engine. Its output depends on weights, prompts and seed alone."""

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Replace all weights; names as in Hugging Face's LlamaForCausalLM."""

    def generate(self, prompts: list[list[int]], seed: int) -> list[Completion]:
        """One response for each prompt, sampled at temperature 1."""

    def close(self) -> None:
        """Free what the engine holds."""


def build_engine(args: argparse.Namespace, shape: LlamaShape) -> Engine:
    """The engine that `--engine` names; only its own library is imported."""
    if args.engine == "vllm":
        from engines.vllm import VllmEngine

        return VllmEngine(shape)
    from engines.hf import HfEngine

    return HfEngine(shape)
