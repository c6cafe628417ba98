"""Arithmetic of positions in packed and context-parallel layouts, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One context-parallel rank's share of a sequence."""

    cp_rank: int
    cp_size: int
    layout: str

    def global_position(self, local: Tensor, local_length: Tensor | int) -> Tensor:
        """Return the position in the whole sequence of each local index of a piece ``local_length`` long."""
        if self.layout == "contiguous":
            return local + self.cp_rank * local_length
        chunk = torch.div(torch.as_tensor(local_length, device=local.device), 2, rounding_mode="floor")
        second = (2 * self.cp_size - 2 - self.cp_rank) * chunk + local
        return torch.where(local < chunk, self.cp_rank * chunk + local, second)


def locate(index: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sample, position in it) of each packed index; behind the last bound the sample is len(bounds) - 1."""
    sample = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    return sample, index - bounds[sample]


def per_sample(values: Tensor, sample: Tensor, beyond: int) -> Tensor:
    """Spread one value a sample over its tokens; packed padding, behind the last sample, gets ``beyond``."""
    return torch.cat([values, values.new_full((1,), beyond)])[sample]
