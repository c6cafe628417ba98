"""HARNESS: what slime does around the audit's functions, rebuilt from reading slime 624b824 and miles 31f1ca9.

Neither can be installed here. Rebuilt are the order of calls, their arguments, and the layout of the data: how samples
are dealt to data-parallel ranks, which log-probabilities a context-parallel rank holds (each token's owner is looked up
by itself), that masks stay whole, that a micro-batch lists the very tensors of the rollout, and how the loss uses what
a TIS function returns. The log-probabilities are recorded ones, moved by one trained weight that begins at zero.
"""

from __future__ import annotations

import importlib
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlk_audit.integrations import slime, vime

BATCH_KEYS = (
    "tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "advantages", "rollout_log_probs",
    "rollout_mask_sums", "max_seq_lens",
)  # fmt: skip
"""What slime's train_one_step asks its iterator for: nothing that names a sample."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No megatron, nothing that runs behind the tests, and a process's own audit made anew for each.

    It is for every test of a module that imports it.
    """
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr("atexit.unregister", lambda call: None)
    yield
    slime._process_audit.cache_clear()
    vime._process_audit.cache_clear()


def arguments(**given: Any) -> Namespace:
    """The arguments that matter; every hook is off unless it is given."""
    values = {
        "rollout_data_postprocess_path": None, "custom_tis_function_path": None, "use_tis": False,
        "get_mismatch_metrics": False, "use_rollout_logprobs": False, "recompute_loss_function": False,
        "rollout_top_p": 1.0, "rollout_top_k": -1, "eps_clip": 0.2, "eps_clip_high": None, "use_wandb": False,
    }  # fmt: skip
    return Namespace(**{**values, **given})


def make_samples(count: int, seed: int = 0) -> list[Sample]:
    """Recorded samples of unequal lengths: tool tokens with rubbish, one aborted, one whose prompt is nearly all."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        prompt, response = int(random.integers(1, 12)), int(random.integers(1, 40))
        if number == 1:
            prompt, response = 37, 1
        rollout = -random.exponential(1.0, response).astype(np.float32)
        train = np.minimum(rollout + random.normal(0, 0.03 * (1 + number % 3), response), 0).astype(np.float32)
        mask = random.random(response) < 0.8 if number != 2 else np.zeros(response, bool)
        rollout[~mask], train[~mask] = 0.0, -4.0
        samples.append(
            Sample(
                train.tolist(),
                rollout.tolist(),
                mask.astype(int).tolist(),
                sample_index=100 + 7 * number,
                rollout_id=number // 2,
                token_ids=random.integers(0, 500, response).tolist(),
                labels={"engine": number % 2},
                prompt_length=prompt,
                slot=number,
            )
        )
    return samples


@dataclass(frozen=True)
class Place:
    """Where this rank stands."""

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    last_stage: bool = True


def cp_piece(total: int, response: int, place: Place, padded: int | None = None) -> list[int]:
    """The response tokens that this rank scores, each found by the chunk in which the token before it lies."""
    if place.cp_size == 1:
        return list(range(response))
    chunk = -(-(padded or total) // (2 * place.cp_size))
    prompt = total - response
    mine = (place.cp_rank, 2 * place.cp_size - 1 - place.cp_rank)
    return [token for token in range(response) if (prompt + token - 1) // chunk in mine]


def rank_data(
    samples: Sequence[Sample],
    place: Place,
    *,
    micro_batch: int = 2,
    recomputed: bool = True,
    padded: int | None = None,
    metadata: bool = True,
) -> dict[str, Any]:
    """What slime's actor hands to the hook: samples dealt in turn, log-probabilities cut, masks and tokens whole."""
    partition = list(range(place.dp_rank, len(samples), place.dp_size))
    own = [samples[number] for number in partition]
    most = math.ceil(len(samples) / place.dp_size)
    count = math.ceil(most / micro_batch)
    rows = [list(range(i * micro_batch, min((i + 1) * micro_batch, len(own)))) for i in range(count)]
    responses = [len(sample) for sample in own]
    totals = [sample.prompt_length + len(sample) for sample in own]
    pieces = [cp_piece(t, r, place, padded) for t, r in zip(totals, responses, strict=True)]

    def cut(columns: Sequence[Sequence[float]]) -> list[Tensor]:
        return [
            torch.tensor([c[i] for i in piece], dtype=torch.float32) for c, piece in zip(columns, pieces, strict=True)
        ]

    data: dict[str, Any] = {
        "partition": partition,
        "tokens": [torch.tensor([7] * s.prompt_length + list(s.token_ids or ())) for s in own],
        "response_lengths": responses,
        "total_lengths": totals,
        "rewards": [float(s.sample_index % 2) for s in own],
        "loss_masks": [torch.tensor(s.mask, dtype=torch.int) for s in own],
        "sample_indices": [s.sample_index for s in own],
        "rollout_ids": [s.rollout_id for s in own],
        "rollout_mask_sums": torch.tensor([float(sum(s.mask or ())) for s in own]),
        "rollout_log_probs": cut([s.rollout for s in own]),  # type: ignore[misc]
        "raw_reward": [float(s.sample_index % 2) for s in samples],
        "global_batch_sizes": [len(samples)],
        "num_microbatches": [count],
        "micro_batch_indices": rows,
    }
    if metadata:  # vime ships it; slime drops it on the way
        data["metadata"] = [{"engine": f"e{s.labels['engine']}", "model_name": "m"} for s in own]
    if padded is not None:
        data["max_seq_lens"] = [padded] * len(own)
    if place.last_stage:
        scored = cut([s.train for s in own])  # type: ignore[misc]
        data["recorded"] = scored
        data["advantages"] = [torch.linspace(-1, 1, len(values)) for values in scored]
        if recomputed:
            data["log_probs"] = scored
    return data


@dataclass
class Training:
    """One rank of slime's actor. ``miles`` differs in what the hooks are given, and detaches what it hands over."""

    args: Namespace
    place: Place = field(default_factory=Place)
    miles: bool = False
    weight: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)

    def train_actor(self, rollout_id: int, data: dict[str, Any]) -> None:
        hook = load_function(self.args.rollout_data_postprocess_path)
        recorded = data.pop("recorded", None)
        if hook is not None:
            hook(self.args) if self.miles else hook(self.args, rollout_id, data)
        if recorded is None:
            return
        for indices in data["micro_batch_indices"]:
            batch = {key: [data[key][i] for i in indices] if key in data else None for key in BATCH_KEYS}
            now = [recorded[i] for i in indices]
            if self.args.recompute_loss_function:
                loss, metrics = checkpoint(self.policy_loss, batch, now, use_reentrant=False)
            else:
                loss, metrics = self.policy_loss(batch, now)
            loss.backward()
            self.losses.append(loss.item())
            self.metrics.append(metrics)

    def policy_loss(self, batch: dict[str, Any], recorded: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        rollout = batch["rollout_log_probs"]
        if self.miles:
            rollout = [values.detach() for values in rollout]
        log_probs = [values + self.weight * torch.cos(values) for values in recorded]
        scored = batch["log_probs"] or [values.detach() for values in log_probs]
        old = rollout if self.args.use_rollout_logprobs else scored
        ppo_kl = joined(old) - joined(log_probs)
        pg_loss = -joined(batch["advantages"]) * (-ppo_kl).exp()
        masks, metrics = batch["loss_masks"], {}
        if self.args.use_tis or self.args.get_mismatch_metrics:
            given = {
                "args": self.args,
                "pg_loss": pg_loss,
                "train_log_probs": scored,
                "rollout_log_probs": rollout,
                "loss_masks": masks,
                "total_lengths": batch["total_lengths"],
                "response_lengths": batch["response_lengths"],
            }
            if self.miles:
                given |= {"parallel_state": object(), "max_seq_lens": batch["max_seq_lens"]}
            tis = load_function(self.args.custom_tis_function_path) or vanilla_tis
            pg_loss, masks, per_token = tis(**given)
            metrics = {name: self.reduce(values, batch, batch["loss_masks"]) for name, values in per_token.items()}
        return self.reduce(pg_loss, batch, masks) + 0 * self.weight, metrics  # a graph also without tokens

    def reduce(self, values: Tensor, batch: dict[str, Any], masks: list[Tensor]) -> Tensor:
        """The sum of means of samples: whole masks cut to this rank's piece, over whole sums of the masks."""
        padded = batch["max_seq_lens"] or [None] * len(masks)
        cut = zip(batch["total_lengths"], batch["response_lengths"], padded, strict=True)
        pieces = [cp_piece(total, response, self.place, pad) for total, response, pad in cut]
        parts = values.split([len(piece) for piece in pieces])
        kept = [part * mask[piece] for part, mask, piece in zip(parts, masks, pieces, strict=True)]
        sums = zip(kept, batch["rollout_mask_sums"], strict=True)
        return sum((part.sum() / total.clamp_min(1) for part, total in sums), torch.zeros(()) * values.sum())


def vanilla_tis(args: Namespace, *, pg_loss: Tensor, **given: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """A correction of slime's kind: weights of each token, masks as they came, one metric a token."""
    weights = (joined(given["train_log_probs"]) - joined(given["rollout_log_probs"])).exp()
    clipped = weights.clamp(0.0, 2.0)
    return pg_loss * clipped, given["loss_masks"], {"tis": weights, "tis_clipfrac": (clipped != weights).float()}


def joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0)


def load_function(path: str | Callable[..., Any] | None) -> Any:
    """A dotted path, as slime's options hold; a function of a test stands for the path of its module."""
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
