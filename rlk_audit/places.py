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


def zigzag_spans(total: int, response: int, padded: int, cp_rank: int, cp_size: int) -> tuple[range, range]:
    """Return the two runs of response tokens that one context-parallel rank holds.

    The sequence, padded to a multiple of 2 * cp_size, is cut into that many chunks; a rank has its own and the one as
    far from the end. It scores the token behind each of its positions, so that token t belongs to where t - 1 lies.

    Args:
        total, response: tokens of the sequence and of its response, which is its end.
        padded: length that the cut is made of: ``total``, or that of the batch's padded rows.
    """
    if cp_size == 1:
        return range(response), range(0)
    chunk = -(-padded // (2 * cp_size))
    prompt = total - response

    def span(number: int) -> range:
        start, stop = max(number * chunk + 1, prompt), min((number + 1) * chunk + 1, total)
        return range(start - prompt, max(start, stop) - prompt)

    return span(cp_rank), span(2 * cp_size - 1 - cp_rank)
