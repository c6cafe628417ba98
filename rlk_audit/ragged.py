"""Ragged lists and single arrays, as engines give them, read into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

NDArray = np.ndarray[Any, Any]
Values = Tensor | NDArray | Sequence[Any]


def as_tensor(values: Any) -> Tensor:
    """Return a tensor as it is, all else as one in host memory, whatever torch's default device is."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values, device="cpu")


def to_float_and_missing(values: Values) -> tuple[Tensor, Tensor | None]:
    """Return (float tensor, where a value was ``None``) of an array or a list; the second is None where none was.

    Raises:
        ValueError: the list is ragged or holds something other than numbers and None.
    """
    if isinstance(values, Tensor):
        return values, None
    if isinstance(values, np.ndarray) and values.dtype != object:
        return as_tensor(values), None
    if len(values) and isinstance(values[0], Tensor):
        if len({getattr(value, "shape", None) for value in values}) > 1:
            raise ValueError("log-probabilities must be in equal rows, got tensors of different shapes")
        return torch.stack(list(values)), None
    try:
        array = np.asarray(values)
        if array.dtype != object:  # a list of whole numbers is meant as log-probabilities all the same
            return as_tensor(array.astype(np.float64) if array.dtype.kind in "iu" else array), None
        missing = array == np.array(None)
        numbers = np.where(missing, 0.0, array).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"log-probabilities must be numbers or None in equal rows ({error})") from error
    return torch.from_numpy(numbers), torch.from_numpy(missing.astype(bool)) if missing.any() else None


def join_rollout(
    train: Sequence[Values], rollout: Sequence[Any] | None, kept: list[int]
) -> tuple[Tensor | None, Tensor | None]:
    """Join the rollout values of the kept samples; the second is where there is none."""
    if rollout is None:
        return None, None
    values, missing = [], []
    for i in kept:
        length = len(train[i])
        if rollout[i] is None:
            sample, absent = torch.zeros(length, device="cpu"), _flags(length, True)
        else:
            sample, none_here = to_float_and_missing(rollout[i])
            if sample.dim() != 1:
                raise ValueError(
                    f"rollout_log_probs must be one number or None a token, got the shape {tuple(sample.shape)} for "
                    f"sample {i}"
                )
            absent = _flags(length, False) if none_here is None else none_here
        values.append(sample)
        missing.append(absent)
    return join(values), join(missing)


def _flags(length: int, value: bool) -> Tensor:
    return torch.full((length,), value, device="cpu")


def join(parts: list[Tensor]) -> Tensor:
    """Join 1-D tensors; the widest dtype wins, an empty Python list (float32) never widens the others."""
    filled = [part for part in parts if part.numel()]
    return torch.cat(filled) if filled else torch.zeros(0, device="cpu")


def known_id(value: int | None) -> int:
    """Return an id; None is an unknown one."""
    return -1 if value is None else int(value)


def active_count(mask: Values) -> int:
    """Return the active tokens of one mask."""
    return int((as_tensor(mask) != 0).sum())


def refusal_of(place: int, lengths: Mapping[str, int], sample_index: int | None) -> str:
    """Return the sentence on a sample whose arrays differ in length."""
    told = ", ".join(f"{name} {length}" for name, length in lengths.items())
    named = f"sample {place} of the batch" if sample_index is None else f"sample_index {sample_index}"
    return f"{named} is refused: its arrays must have one length, got {told}; keep the tokens that were sampled"
