"""Tokens to measure with: log-probabilities as of a policy, and a drift with a heavy tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLE_LENGTH = 1024
SIZES = (4096, 65536, 1 << 20)
"""Tokens of a micro-batch."""


@dataclass(frozen=True)
class Batch:
    """Tensors [samples, length]; `sample` and `position` say where a token is."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    sample: Tensor
    position: Tensor

    @property
    def tokens(self) -> int:
        return self.train.numel()

    def abs_dlogp(self) -> Tensor:
        """Return abs(d) of the active tokens, float64."""
        return (self.train.double() - self.rollout.double()).abs()[self.mask]

    def update_arguments(self) -> dict[str, Tensor]:
        return {
            "train_log_probs": self.train,
            "rollout_log_probs": self.rollout,
            "mask": self.mask,
            "sample_index": self.sample,
            "token_position": self.position,
        }

    def micro_batches(self, count: int) -> list[Batch]:
        """Return the samples in equal parts."""
        parts = (tensor.chunk(count) for tensor in (self.train, self.rollout, self.mask, self.sample, self.position))
        return [Batch(*part) for part in zip(*parts, strict=True)]


def draw(tokens: int, *, seed: int = 0, length: int = SAMPLE_LENGTH, first_sample: int = 0) -> Batch:
    """Return float32 log-probs of samples of one length, nine tokens of ten active, without a faulty value."""
    generator = torch.Generator().manual_seed(seed)
    shape = (max(1, tokens // length), min(length, tokens))
    rollout = torch.empty(shape).exponential_(1.0, generator=generator).neg_()
    # A normal drift whose width is itself log-normal: most tokens agree to 1e-3, a few are far off.
    width = 0.005 * torch.randn(shape, generator=generator).mul_(1.2).exp_()
    train = (rollout + width * torch.randn(shape, generator=generator)).clamp_(max=0.0)
    mask = torch.rand(shape, generator=generator) < 0.9
    sample = torch.arange(first_sample, first_sample + shape[0])[:, None].expand(shape)
    position = torch.arange(shape[1]).expand(shape)
    return Batch(train, rollout, mask, sample, position)


def with_faults(batch: Batch) -> Batch:
    """Return the batch with one token in about fifty of each class that is not compared."""
    train, rollout = batch.train.clone(), batch.rollout.clone()
    generator = torch.Generator().manual_seed(1)
    faults = [
        (rollout, float("nan")), (train, float("nan")), (rollout, -float("inf")), (train, -float("inf")),
        (rollout, -9999.0), (train, -1e30), (rollout, 0.5), (train, float("inf")),
    ]  # fmt: skip
    for side, value in faults:
        side[torch.rand(side.shape, generator=generator) < 0.02] = value
    return Batch(train, rollout, batch.mask, batch.sample, batch.position)
