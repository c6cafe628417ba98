"""The worst tokens: larger abs(dlogp) first, then lower sample index, then lower position.

``torch.topk`` picks among equal values arbitrarily, and equal values are common (a constant offset makes every token
tie), so the choice is made by exact selections, one worst token after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlk_audit.layout import WORST_LOG_PROBS, WORST_TOKEN

NO_TOKEN = -1.0
"""Stands for abs(dlogp) where there is no compared token; below any abs(dlogp)."""

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


def abs_dlogp_of_rows(rows: Tensor) -> Tensor:
    """Return abs(dlogp) (float64 [n]) of worst-token rows, NO_TOKEN for empty ones."""
    log_probs = rows[:, WORST_LOG_PROBS].contiguous().view(torch.float64)
    return torch.where(rows[:, _VALID] == 1, (log_probs[:, 0] - log_probs[:, 1]).abs(), NO_TOKEN)


def worst_rows(rows: Tensor, k: int, per_sample: bool) -> Tensor:
    """Return the k worst of worst-token rows (int64 [n, fields], n >= 1), worst first, empty rows last."""
    values = abs_dlogp_of_rows(rows)
    chosen, exists = select_worst(values, rows[:, _SAMPLE_INDEX], rows[:, _TOKEN_POSITION], k, per_sample)
    return torch.where(exists[:, None], rows[chosen], 0)
