"""Rollouts: which engine answers which prompt, and how the answers reach every rank."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import task
from engines import Completion, LlamaShape, build_engine

ENGINES = ("e0", "e1")
FAULTY_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Rollout:
    """One sampled response. `sample_index` counts within the step, `group` names the prompt over the whole run."""

    sample_index: int
    group: int
    engine: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]

    @property
    def reward(self) -> float:
        return task.reward(self.prompt, self.response)


def step_prompts(args: argparse.Namespace, step: int) -> list[tuple[int, list[int]]]:
    """(group, prompt) of each sample of one engine in this step; both engines answer the same prompts."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    prompts = task.sample_prompts(args.prompts, generator)
    groups = range(step * args.prompts, (step + 1) * args.prompts)
    return [pair for pair in zip(groups, prompts, strict=True) for _ in range(args.group_size // len(ENGINES))]


def _rollouts(engine: int, prompts: list[tuple[int, list[int]]], completions: list[Completion]) -> list[Rollout]:
    """Samples of e0 come first, then those of e1: a data-parallel rank mostly reads from one engine."""
    first = engine * len(prompts)
    return [
        Rollout(first + i, group, engine, prompt, completion.token_ids, completion.log_probs)
        for i, ((group, prompt), completion) in enumerate(zip(prompts, completions, strict=True))
    ]


class EnginePool:
    """e0 and e1, each in one rank of the job (rank 0 and, where there is one, rank 1)."""

    def __init__(self, args: argparse.Namespace, shape: LlamaShape) -> None:
        self.args = args
        mine = [e for e in range(len(ENGINES)) if e % dist.get_world_size() == dist.get_rank()]
        self.engines = {engine: build_engine(args, shape) for engine in mine}

    def sync(self, weights: dict[str, Tensor], step: int) -> None:
        """Hand the trainer's weights to the engines. The faults are silent, as they are in practice: e1 goes on serving
        from the weights that it has; both sample at a temperature that the trainer knows nothing of."""
        stale = self.args.fault == "stale_engine" and step >= self.args.fault_step
        hot = self.args.fault == "temperature" and step >= self.args.fault_step
        for engine, served in self.engines.items():
            if hot:
                served.temperature = FAULTY_TEMPERATURE
            if not (stale and ENGINES[engine] == "e1"):
                served.load_weights(weights)

    def generate(self, step: int) -> list[Rollout]:
        """Collective: all rollouts of the step, in order of sample index, on every rank."""
        prompts = step_prompts(self.args, step)
        mine = []
        for engine, served in self.engines.items():
            seed = (self.args.seed * 1_000_003 + step) * len(ENGINES) + engine
            mine += _rollouts(engine, prompts, served.generate([prompt for _, prompt in prompts], seed))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return sorted((rollout for rank in everyone for rollout in rank), key=lambda r: r.sample_index)

    def close(self) -> None:
        for served in self.engines.values():
            served.close()


class RecordedPool:
    """Stands in for an engine where no export exists (mixture of experts): responses are answers with random slips,
    log-probabilities are the trainer's own from a forward pass before the step, rounded to bfloat16."""

    def __init__(self, args: argparse.Namespace, score: Callable[[list[Rollout]], Tensor]) -> None:
        self.args, self.score = args, score

    def generate(self, step: int) -> list[Rollout]:
        """Collective: all rollouts of the step on every rank."""
        prompts = step_prompts(self.args, step)
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        drafts = []
        for engine in range(len(ENGINES)):
            responses = [_with_slips(task.answer(prompt), generator) for _, prompt in prompts]
            drafts += _rollouts(engine, prompts, [Completion(r, [0.0] * len(r)) for r in responses])
        scores = self.score(drafts).bfloat16().float()
        return [
            Rollout(**{**vars(d), "log_probs": row[len(d.prompt) - 1 :][: len(d.response)].tolist()})
            for d, row in zip(drafts, scores, strict=True)
        ]

    def close(self) -> None:
        """Nothing is held."""


def _with_slips(response: list[int], generator: torch.Generator) -> list[int]:
    slips = torch.rand(len(response), generator=generator) < 0.2
    digits = torch.randint(0, task.DIGITS, (len(response),), generator=generator)
    return torch.where(slips, digits, torch.tensor(response)).tolist()


def demonstrations(count: int, generator: torch.Generator) -> list[Rollout]:
    """Prompts with responses for the supervised warm-up: every other one is sorted the wrong way round, so that the
    policy knows the format and both orders, and reinforcement learning has something to choose."""
    prompts = task.sample_prompts(count, generator)
    responses = [task.answer(prompt, descending=i % 2 == 1) for i, prompt in enumerate(prompts)]
    return [Rollout(i, -1, -1, p, r, [0.0] * len(r)) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]
