"""The worst tokens: larger abs(dlogp) first, then lower sample index, then lower position.

``torch.topk`` picks among equal values arbitrarily, and equal values are common (a constant offset makes every token
tie), so the choice is made by exact selections, one worst token after another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit.layout import WORST_LOG_PROBS, WORST_TOKEN

NO_TOKEN = -1.0
"""Stands for abs(dlogp) where there is no compared token; below any abs(dlogp)."""

FEW = 4096
"""So many tokens on a CPU are sorted at once instead of being searched through for each choice."""
_BLOCK = 1024

_INT64_MAX = torch.iinfo(torch.int64).max
_VALID = WORST_TOKEN.index("valid")
_SAMPLE_INDEX = WORST_TOKEN.index("sample_index")
_TOKEN_POSITION = WORST_TOKEN.index("token_position")


def select_worst(
    abs_dlogp: Tensor, sample: Tensor, position: Tensor, k: int, per_sample: bool
) -> tuple[Tensor, Tensor]:
    """Return the places (int64 [k]) of the worst tokens, worst first, and which exist (bool [k]), without a host sync.

    Args:
        abs_dlogp: float64 [n], NO_TOKEN where there is none; n >= 1.
        sample: int64 [n], indices of the tokens' samples.
        position: int64 [n], positions in them.
        k: how many; where there are fewer tokens the last places do not exist.
        per_sample: take at most one token of each sample; tokens of unknown samples (-1) are each by itself.
    """
    if abs_dlogp.device.type == "cpu" and len(abs_dlogp) <= FEW:
        return _sorted_choice(abs_dlogp, sample, position, k, per_sample)
    place = torch.arange(len(abs_dlogp), device=abs_dlogp.device)
    remaining = abs_dlogp.clone()
    chosen, exists = [], []
    for _ in range(k):
        largest = remaining.amax()
        tied = remaining == largest
        for key in (sample, position, place):
            lowest = torch.where(tied, key, _INT64_MAX).amin()
            tied = tied & (key == lowest)
        chosen.append(lowest)
        exists.append(largest >= 0)
        # A scalar tensor as an index would be read on the host.
        taken = tied | ((sample == sample.index_select(0, lowest[None])) & (sample != -1)) if per_sample else tied
        remaining = torch.where(taken, NO_TOKEN, remaining)
    return torch.stack(chosen), torch.stack(exists)


def _sorted_choice(
    abs_dlogp: Tensor, sample: Tensor, position: Tensor, k: int, per_sample: bool
) -> tuple[Tensor, Tensor]:
    """The same choice by a stable sort."""
    values, of_sample = abs_dlogp.numpy(), sample.numpy()
    order = np.lexsort((position.numpy(), of_sample, -values))
    if per_sample:
        _, first = np.unique(of_sample[order], return_index=True)
        leads = of_sample[order] == -1
        leads[first] = True
        order = order[leads]
    chosen = np.zeros(k, dtype=np.int64)
    chosen[: len(order)] = order[:k]
    exists = np.zeros(k, dtype=np.bool_)
    exists[: len(order)] = values[order[:k]] >= 0
    return torch.from_numpy(chosen), torch.from_numpy(exists)


def kth_largest_bound(values: npt.NDArray[np.float64], k: int) -> float:
    """Return a lower bound of the k-th largest of values [n], n >= 1; the least where there are fewer.

    It is the k-th largest of the maxima of blocks, each of which is a value: the values themselves are looked at once.
    """
    whole = len(values) // _BLOCK
    if whole >= k:
        values = values[: whole * _BLOCK].reshape(whole, _BLOCK).max(1)
    place = max(len(values) - k, 0)
    return float(np.partition(values, place)[place])


def abs_dlogp_of_rows(rows: Tensor) -> Tensor:
    """Return abs(dlogp) (float64 [n]) of worst-token rows, NO_TOKEN for empty ones."""
    log_probs = rows[:, WORST_LOG_PROBS].contiguous().view(torch.float64)
    return (log_probs[:, 0] - log_probs[:, 1]).abs_().masked_fill_(rows[:, _VALID] != 1, NO_TOKEN)


def worst_rows(rows: Tensor, k: int, per_sample: bool) -> Tensor:
    """Return the k worst of worst-token rows (int64 [n, fields], n >= 1), worst first, empty rows last."""
    values = abs_dlogp_of_rows(rows)
    chosen, exists = select_worst(values, rows[:, _SAMPLE_INDEX], rows[:, _TOKEN_POSITION], k, per_sample)
    return torch.where(exists[:, None], rows[chosen], 0)
