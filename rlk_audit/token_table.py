"""TokenTable: the active tokens of a step as numpy columns, for looking at drift token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rlk_audit.config import AuditConfig
from rlk_audit.nonfinite import restore_nonfinite

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

RANK_LABEL = "rank"
_UNKNOWN_CODE = -1
_COLUMNS = ("train", "rollout", "sample", "position", "token_id", "rank")


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The active tokens of a step, sorted by sample and then position; one entry a token in every column.

    Attributes:
        train, rollout: log-probabilities as given, nats; NaN stands for a missing value too.
        sample: number or index of the sample, one for each row that was paired.
        position: in the response, global.
        token_id, rank: -1 where unknown; None where not given at all.
        labels: name -> codes, -1 where unknown.
        label_names: name -> names of its codes.
        prompt_length: sample -> tokens in front of its response, where known.
    """

    train: Floats
    rollout: Floats
    sample: Ints
    position: Ints
    token_id: Ints | None = None
    rank: Ints | None = None
    labels: Mapping[str, Ints] = field(default_factory=dict)
    label_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prompt_length: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {"rollout": self.rollout, "sample": self.sample, "position": self.position, **self.labels}
        columns |= {name: getattr(self, name) for name in ("token_id", "rank") if getattr(self, name) is not None}
        for name, column in columns.items():
            if column.shape != self.train.shape or column.ndim != 1:
                raise ValueError(f"{name} must have the shape of train, {self.train.shape}, got {column.shape}")
        order = np.lexsort((self.position, self.sample))
        if np.any(np.diff(order) < 0):
            for name, column in self._at(order).items():
                object.__setattr__(self, name, column)

    @classmethod
    def from_lists(
        cls,
        train_log_probs: Sequence[Sequence[float]],
        rollout_log_probs: Sequence[Sequence[float | None] | None],
        mask: Sequence[Sequence[float]] | None = None,
        *,
        sample_index: Sequence[int] | None = None,
        token_position: Sequence[Sequence[int]] | None = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        prompt_length: Sequence[int | None] | None = None,
        rank: Sequence[int] | None = None,
        labels: Mapping[str, Sequence[Any]] | None = None,
    ) -> TokenTable:
        """Make a table of ragged samples; `None` is a missing value, samples of unequal arrays are left out.

        Args:
            train_log_probs, rollout_log_probs, mask, token_position, token_ids: one list a sample, of one length.
            sample_index, prompt_length, rank: one number a sample.
            labels: name -> one code or name a sample, or a list of them with one a token.
        """
        rows: list[dict[str, Any]] = []
        for i, train in enumerate(train_log_probs):
            row: dict[str, Any] = {"train_log_probs": train, "rollout_log_probs": rollout_log_probs[i]}
            given: dict[str, Sequence[Any] | None] = {
                "mask": mask,
                "sample_index": sample_index,
                "token_position": token_position,
            }
            given |= {"token_ids": token_ids, "prompt_length": prompt_length, "rank": rank}
            row |= {name: column[i] for name, column in given.items() if column is not None}
            row["labels"] = {name: column[i] for name, column in (labels or {}).items()}
            rows.append(row)
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> TokenTable:
        """Make a table of rows of the `table` format, one sample or part of a sample each.

        A row whose arrays differ in length is left out, and tokens whose ids differ between the sides have no
        rollout value. Rows that share an index and a position are taken for different samples. NaN and infinities that
        a line of an evidence file tells beside its arrays are put back.
        """
        parts = [part for number, row in enumerate(rows) if (part := _Part.of(row, number)) is not None]
        _number_samples(parts)
        names = sorted({name for part in parts for name in part.labels})
        label_names = {name: _code_names(part.labels.get(name, ()) for part in parts) for name in names}
        ids = {name: [getattr(part, name) for part in parts] for name in ("token_id", "rank")}
        return cls(
            _join([part.train for part in parts], np.float64),
            _join([part.rollout for part in parts], np.float64),
            _join([np.full(len(part.train), part.sample) for part in parts], np.int64),
            _join([part.position for part in parts], np.int64),
            labels={n: _codes([part.labels.get(n, ()) for part in parts], parts, label_names[n]) for n in names},
            label_names=label_names,
            prompt_length={part.sample: part.prompt_length for part in parts if part.prompt_length is not None},
            **{
                name: _join([c if c is not None else np.full(len(p.train), -1) for c, p in zip(cs, parts, strict=True)])
                for name, cs in ids.items()
                if any(column is not None for column in cs)
            },
        )

    def __len__(self) -> int:
        return len(self.train)

    @cached_property
    def compared(self) -> Bools:
        """Tokens whose two values are plausible log-probabilities."""
        floor, ceiling = AuditConfig.sentinel_floor, AuditConfig.positive_tolerance
        sides = [np.isfinite(side) & (side > floor) & (side <= ceiling) for side in (self.train, self.rollout)]
        return sides[0] & sides[1]

    @cached_property
    def dlogp(self) -> Floats:
        """Train minus rollout, 0 where not compared."""
        both = self.compared
        return np.where(both, np.where(both, self.train, 0.0) - np.where(both, self.rollout, 0.0), 0.0)

    @cached_property
    def row(self) -> Ints:
        """Number of the sample of each token, from 0."""
        begins = np.ones(len(self), dtype=np.int64)
        begins[1:] = self.sample[1:] != self.sample[:-1]
        return np.cumsum(begins) - 1

    @property
    def row_count(self) -> int:
        """Samples."""
        return int(self.row[-1]) + 1 if len(self) else 0

    @cached_property
    def prompt(self) -> Ints:
        """Prompt length of each token's sample, -1 where unknown."""
        known = self.prompt_length
        samples, places = np.unique(self.sample, return_inverse=True)
        return np.array([known.get(int(sample), -1) for sample in samples], dtype=np.int64)[places]

    @cached_property
    def row_start(self) -> Ints:
        """Return the place of the first token of each row."""
        return np.flatnonzero(np.diff(self.row, prepend=-1)).astype(np.int64)

    @cached_property
    def _dense(self) -> bool:
        """Whether no row has a gap between its positions."""
        return bool(np.all((self.position[1:] == self.position[:-1] + 1) | (self.row[1:] != self.row[:-1])))

    def find(self, row: Ints, position: Ints) -> Ints:
        """Return the index of the token of a row at a position, -1 where there is none."""
        if not len(self):
            return np.full(len(row), -1, dtype=np.int64)
        if self._dense:
            place = self.row_start[row] + position - self.position[self.row_start][row]
        else:
            # Positions beyond the table's are cut to one that no token has.
            low, high = int(self.position.min()) - 1, int(self.position.max()) + 1
            keys = self.row * (high - low + 1) + self.position - low
            place = np.searchsorted(keys, row * (high - low + 1) + np.clip(position, low, high) - low)
        place = np.clip(place, 0, len(self) - 1)
        found = (self.row[place] == row) & (self.position[place] == position)
        return np.where(found, place, -1).astype(np.int64)

    def take(self, where: Bools | Ints) -> TokenTable:
        """Return the tokens at some places."""
        return replace(self, **self._at(where))

    def blanked(self) -> TokenTable:
        """Return the table with NaN on both sides where nothing is compared, which no arithmetic warns of."""
        both = self.compared
        return replace(self, train=np.where(both, self.train, math.nan), rollout=np.where(both, self.rollout, math.nan))

    def with_rollout(self, rollout: Floats) -> TokenTable:
        """Return the table with other rollout values."""
        return replace(self, rollout=rollout)

    def groups(self) -> dict[str, tuple[Ints, tuple[str, ...]]]:
        """Return every label and the rank: name -> (codes, their names)."""
        groups = {name: (codes, self.label_names.get(name, ())) for name, codes in self.labels.items()}
        if self.rank is not None:
            ranks = np.unique(self.rank[self.rank >= 0])
            codes = np.where(self.rank >= 0, np.searchsorted(ranks, self.rank), _UNKNOWN_CODE).astype(np.int64)
            groups[RANK_LABEL] = (codes, tuple(map(str, ranks.tolist())))
        return groups

    def _at(self, where: Bools | Ints) -> dict[str, Any]:
        columns = {name: getattr(self, name) for name in _COLUMNS if getattr(self, name) is not None}
        taken: dict[str, Any] = {name: column[where] for name, column in columns.items()}
        return taken | {"labels": {name: codes[where] for name, codes in self.labels.items()}}


# --- rows -----------------------------------------------------------------------------------------------------------


@dataclass
class _Part:
    """The active tokens of one row."""

    number: int
    sample: int
    train: Floats
    rollout: Floats
    position: Ints
    token_id: Ints | None
    rank: Ints | None
    labels: dict[str, list[Any]]
    prompt_length: int | None

    @classmethod
    def of(cls, row: Mapping[str, Any], number: int) -> _Part | None:
        row = restore_nonfinite(row)
        train = _floats(row["train_log_probs"])
        rollout_given = row.get("rollout_log_probs")
        rollout = np.full(len(train), math.nan) if rollout_given is None else _floats(rollout_given)
        mask = row.get("mask")
        active = np.ones(len(train), dtype=bool) if mask is None else np.asarray(mask) != 0
        ids, others = (_ids(row.get(name), len(train)) for name in ("token_ids", "rollout_token_ids"))
        position, rank = (_ids(row.get(name), len(train)) for name in ("token_position", "rank"))
        columns = (rollout, active, ids, others, position, rank)
        if any(column is not None and len(column) != len(train) for column in columns):
            return None
        if ids is not None and others is not None:
            rollout = np.where(ids != others, math.nan, rollout)
        index = row.get("sample_index")
        prompt = row.get("prompt_length")
        return cls(
            number,
            _UNKNOWN_CODE if index is None else int(index),
            train[active],
            rollout[active],
            (np.arange(len(train)) if position is None else position)[active],
            None if ids is None else ids[active],
            None if rank is None else rank[active],
            {str(name): _per_token(codes, active) for name, codes in dict(row.get("labels") or {}).items()},
            None if prompt is None else int(prompt),
        )


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _ids(values: Any, length: int) -> Ints | None:
    """Return one id a token from a list or one value for all; None where nothing is given."""
    if values is None:
        return None
    if isinstance(values, Sequence):
        return np.array([_UNKNOWN_CODE if value is None else value for value in values], dtype=np.int64)
    return np.full(length, int(values), dtype=np.int64)


def _per_token(codes: Any, active: Bools) -> list[Any]:
    if isinstance(codes, Sequence) and not isinstance(codes, str):
        return [code for code, kept in zip(codes, active, strict=False) if kept]
    return [codes] * int(active.sum())


def _number_samples(parts: list[_Part]) -> None:
    """Give every row a sample of its own where two rows would share a position, or where no index is known."""
    places = [np.stack([np.full(len(part.train), part.sample), part.position]) for part in parts]
    joined = np.concatenate(places, axis=1) if places else np.zeros((2, 0), dtype=np.int64)
    unique = np.unique(joined, axis=1).shape[1] == joined.shape[1]
    if not unique or any(part.sample < 0 for part in parts):
        for part in parts:
            part.sample = part.number


def _code_names(columns: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    found = {code for column in columns for code in column if code is not None}
    return tuple(map(str, sorted(found, key=lambda code: (isinstance(code, str), code))))


def _codes(columns: Sequence[Sequence[Any]], parts: Sequence[_Part], names: tuple[str, ...]) -> Ints:
    number = {name: code for code, name in enumerate(names)}
    codes: list[int] = []
    for column, part in zip(columns, parts, strict=True):
        known = [_UNKNOWN_CODE if code is None else number[str(code)] for code in column]
        codes += known + [_UNKNOWN_CODE] * (len(part.train) - len(known))
    return np.array(codes, dtype=np.int64)


def _join(parts: Sequence[npt.NDArray[Any]], kind: Any = np.int64) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, dtype=kind)
