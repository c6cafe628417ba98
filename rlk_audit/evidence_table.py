"""A micro-batch as it is kept, the samples in it, and a sample as one line of the ``table`` format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlk_audit.config import AuditConfig
from rlk_audit.layout import COUNTER_INDEX
from rlk_audit.measure import FlatTokens, classify
from rlk_audit.nonfinite import LOG_PROBS, nonfinite_key
from rlk_audit.ragged import as_tensor, to_float_and_missing
from rlk_audit.tokens import TokenBatch, one_per_row
from rlk_audit.worst import NO_TOKEN

_SAME_SHAPE = ("mask", "valid", "rollout_missing")
_IDS = ("sample_index", "rollout_id", "token_position", "token_ids", "rollout_token_ids", "updates_since_rollout")
_SHARED_IDS = ("rollout_id", "updates_since_rollout")
_TOKEN_IDS = ("token_position", "token_ids", "rollout_token_ids")
_LABEL = "label "


@dataclass(frozen=True, eq=False)
class KeptBatch:
    """A micro-batch as tensors: log-probabilities and bool masks of one shape, ids broadcastable to it."""

    microbatch: int | None
    columns: Mapping[str, Tensor]
    config: AuditConfig

    @classmethod
    def of(cls, batch: TokenBatch, microbatch: int | None, config: AuditConfig) -> KeptBatch:
        """Take a batch's tensors as they are; nothing is copied yet.

        Raises:
            ValueError, RuntimeError: the batch's arrays do not fit together.
        """
        train, _ = to_float_and_missing(batch.train_log_probs)
        columns = {"train_log_probs": train}
        given = {name: getattr(batch, name) for name in (*_SAME_SHAPE, *_IDS)}
        given |= {_LABEL + name: codes for name, codes in batch.labels.items()}
        columns |= {n: one_per_row(n, as_tensor(v), train.shape) for n, v in given.items() if v is not None}
        columns |= {name: columns[name] != 0 for name in _SAME_SHAPE if name in columns}
        if batch.rollout_log_probs is not None:
            columns["rollout_log_probs"], absent = to_float_and_missing(batch.rollout_log_probs)
            if absent is not None:
                columns["rollout_missing"] = columns.get("rollout_missing", absent) | absent
        _check(columns)
        return cls(microbatch, {name: _unexpanded(column, train.shape) for name, column in columns.items()}, config)

    @property
    def shape(self) -> torch.Size:
        """Shape of the log-probabilities."""
        return self.columns["train_log_probs"].shape

    @property
    def row_length(self) -> int:
        """Entries of a row, the last axis."""
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, which are those of a copy."""
        return sum(column.numel() * column.element_size() for column in self.columns.values())

    @cached_property
    def drift(self) -> float:
        """Largest abs(dlogp), infinite where a token is of a class that must be empty."""
        abs_dlogp, faulty = _measure(self.flat(), self.config)
        return math.inf if bool(faulty.any()) else float(abs_dlogp.max())

    def copy(self) -> KeptBatch:
        """Return a copy in host memory."""
        columns = {name: column.detach().to("cpu", copy=True) for name, column in self.columns.items()}
        return KeptBatch(self.microbatch, columns, self.config)

    def flat(self) -> dict[str, Tensor]:
        """Return the columns with one entry a token."""
        device = self.columns["train_log_probs"].device
        return {name: column.to(device).expand(self.shape).reshape(-1) for name, column in self.columns.items()}


def _check(columns: Mapping[str, Tensor]) -> None:
    """Refuse what could not be written later, so that it costs no other micro-batch its place."""
    shape = columns["train_log_probs"].shape
    if "mask" not in columns:
        raise ValueError("a mask is needed")
    for name, column in columns.items():
        if name in (*LOG_PROBS, *_SAME_SHAPE) and column.shape != shape:
            raise ValueError(
                f"{name} must have the shape of train_log_probs, {tuple(shape)}, got {tuple(column.shape)}"
            )
        if name not in (*LOG_PROBS, *_SAME_SHAPE) and column.numel() and column.is_floating_point():
            raise ValueError(f"{name.removeprefix(_LABEL)} must be integers, got {column.dtype}")


def _unexpanded(column: Tensor, shape: torch.Size) -> Tensor:
    """Return a column without the repetitions that broadcasting made, so that a copy holds no more than it tells."""
    column.expand(shape)
    for axis, (size, stride) in enumerate(zip(column.shape, column.stride(), strict=True)):
        if stride == 0 and size > 1:
            column = column.narrow(axis, 0, 1)
    return column


def _measure(flat: Mapping[str, Tensor], config: AuditConfig) -> tuple[Tensor, Tensor]:
    """Return each token's abs(dlogp) (float64, NO_TOKEN where not compared) and whether its class must be empty."""
    train = flat["train_log_probs"].double()
    missing = flat.get("rollout_missing")
    if "rollout_log_probs" in flat:
        rollout = flat["rollout_log_probs"].double()
    else:
        rollout, missing = torch.zeros_like(train), torch.ones_like(train, dtype=torch.bool)
    both_ids = "token_ids" in flat and "rollout_token_ids" in flat
    mismatch = flat["token_ids"] != flat["rollout_token_ids"] if both_ids else None
    classes = classify(FlatTokens(train, rollout, flat["mask"], missing, mismatch), train, rollout, config)
    forbidden = torch.tensor([COUNTER_INDEX[name] for name in config.classes_not_allowed], device=train.device)
    abs_dlogp = torch.where(classes == COUNTER_INDEX["compared"], (train - rollout).abs(), NO_TOKEN)
    return abs_dlogp, torch.isin(classes, forbidden)


# --- samples --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What a micro-batch holds of one sample.

    Attributes:
        batch: the micro-batch. number: the sample's number in it.
        sample_index: as given by the caller, -1 if unknown.
        abs_dlogp: the largest of its compared tokens, NO_TOKEN without any.
        faulty: tokens of classes that must be empty.
    """

    batch: KeptBatch
    number: int
    sample_index: int
    abs_dlogp: float
    faulty: int

    def line(self, step: int, rank: int) -> str:
        """Return the sample as a line of strict JSON."""
        columns = self._columns()
        labels = {name[len(_LABEL) :]: codes for name, codes in columns.items() if name.startswith(_LABEL)}
        record: dict[str, Any] = {
            "step": step,
            "rank": rank,
            "microbatch": self.batch.microbatch,
            "sample_index": _known(self.sample_index),
            **{name: _shared(_ids(columns[name])) for name in _SHARED_IDS if name in columns},
            "labels": {name: _shared(self._names(name, codes)) for name, codes in labels.items()},
            **_log_probs("train_log_probs", columns["train_log_probs"], None),
            "mask": columns["mask"].long().tolist(),
            **{name: _ids(columns[name]) for name in _TOKEN_IDS if name in columns},
        }
        if "rollout_log_probs" in columns:
            record |= _log_probs("rollout_log_probs", columns["rollout_log_probs"], columns.get("rollout_missing"))
        else:
            record["rollout_log_probs"] = [None] * len(columns["mask"])
        return json.dumps(record, allow_nan=False) + "\n"

    def _columns(self) -> dict[str, Tensor]:
        """Return the sample's columns, in the order of positions where those are known."""
        flat = self.batch.flat()
        places, numbers = _response_tokens(flat, self.batch.row_length)
        where = places[numbers == self.number]
        columns = {name: column[where] for name, column in flat.items()}
        if "token_position" not in columns:
            return columns
        order = torch.argsort(columns["token_position"], stable=True)
        return {name: column[order] for name, column in columns.items()}

    def _names(self, label: str, codes: Tensor) -> list[str | None]:
        names = self.batch.config.breakdowns.get(label, ())
        return [names[code] if code is not None and code < len(names) else None for code in _ids(codes)]


def samples_of(batch: KeptBatch) -> list[Sample]:
    """Return the samples of a micro-batch in host memory."""
    flat = batch.flat()
    places, numbers = _response_tokens(flat, batch.row_length)
    if not len(numbers):
        return []
    count = int(numbers.max()) + 1
    abs_dlogp, faulty = (figures[places] for figures in _measure(flat, batch.config))
    worst = abs_dlogp.new_full((count,), NO_TOKEN).scatter_reduce_(0, numbers, abs_dlogp, "amax")
    faults = numbers.new_zeros(count).scatter_add_(0, numbers, faulty.long())
    # All tokens of a sample have one index, so that it does not matter which is written last.
    index = numbers.new_zeros(count).scatter_(0, numbers, _sample_index(flat)[places])
    columns = zip(index.tolist(), worst.tolist(), faults.tolist(), strict=True)
    return [Sample(batch, number, *figures) for number, figures in enumerate(columns)]


def _response_tokens(flat: Mapping[str, Tensor], row_length: int) -> tuple[Tensor, Tensor]:
    """Return the places of the tokens of responses, and for each the number of its sample."""
    real = torch.ones_like(flat["mask"])
    if "valid" in flat:
        real &= flat["valid"]
    position = flat.get("token_position")
    if position is not None:
        real &= position >= 0
    places = (real | flat["mask"]).nonzero()[:, 0]
    known = None if position is None else position[places]
    return places, _number_samples(places // row_length, _sample_index(flat)[places], known)


def _sample_index(flat: Mapping[str, Tensor]) -> Tensor:
    mask = flat["mask"]
    return flat["sample_index"].long() if "sample_index" in flat else torch.full_like(mask, -1, dtype=torch.int64)


def _number_samples(row: Tensor, index: Tensor, position: Tensor | None) -> Tensor:
    """Return for each token the number of its sample.

    A sample is what has one index in one row. Where no index tells, a sample begins with a row and, in a pack, where
    the position does not grow.
    """
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (index[1:] != index[:-1])
    if position is not None:
        begins[1:] |= (index[1:] < 0) & (position[1:] <= position[:-1])
    first = begins.nonzero()[:, 0]
    # A run of tokens without an index is a sample of its own, under a name that no index has.
    name = torch.where(index[first] >= 0, index[first], -1 - torch.arange(len(first), device=first.device))
    number_of_run: Tensor = torch.unique(torch.stack([row[first], name]), dim=1, return_inverse=True)[1]
    return number_of_run[begins.long().cumsum(0) - 1]


# --- a line ---------------------------------------------------------------------------------------------------------


def _log_probs(name: str, values: Tensor, missing: Tensor | None) -> dict[str, Any]:
    """Return an array as numbers and null, its dtype, and where it holds NaN and infinities if it does."""
    given = torch.ones_like(values, dtype=torch.bool) if missing is None else ~missing
    wide = values.double()
    numbers = [
        value if usable else None
        for value, usable in zip(wide.tolist(), (given & wide.isfinite()).tolist(), strict=True)
    ]
    where = {"NaN": wide.isnan(), "Infinity": wide == math.inf, "-Infinity": wide == -math.inf}
    told = {text: (given & found).nonzero()[:, 0].tolist() for text, found in where.items()}
    told = {text: places for text, places in told.items() if places}
    record: dict[str, Any] = {name: numbers, f"{name}_dtype": str(values.dtype).removeprefix("torch.")}
    return record | ({nonfinite_key(name): told} if told else {})


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _ids(values: Tensor) -> list[int | None]:
    return [_known(int(value)) for value in values.tolist()]


def _shared(values: list[Any]) -> Any:
    """Return the one value of all tokens, else the list with one a token."""
    return values[0] if len(set(values)) == 1 else values
