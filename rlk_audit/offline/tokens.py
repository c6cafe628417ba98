"""Samples of a dump joined end to end: a TokenBatch for the collector, and columns for whatever looks at each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from sys import getsizeof
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlk_audit.config import AuditConfig
from rlk_audit.dumps.sample import DumpSample, Label
from rlk_audit.layout import COUNTER_INDEX
from rlk_audit.measure import FlatTokens, classify
from rlk_audit.offline.labels import LabelNames
from rlk_audit.ragged import refusal_of
from rlk_audit.token_table import TokenTable
from rlk_audit.tokens import TokenBatch

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BATCH_TOKENS = 1 << 18
"""Tokens that are joined and measured at a time."""

_PER_TOKEN = ("rollout_log_probs", "mask", "rollout_missing", "token_ids", "rollout_token_ids", "token_position")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of whole samples, end to end; one entry a token in every column but those of samples.

    Attributes:
        samples, slots: the samples whose arrays are of one length, and their numbers in the step.
        starts: int64 [samples], place of each sample's first token.
        train, rollout: as in the dump.
        active, missing: bool.
        position: in the response.
        token_ids, rollout_token_ids: -1 where unknown, the other side's where only one is known; None where no sample
            has any.
        labels: name -> codes, -1 where unknown.
        refused: samples of unequal arrays.
        refused_slots: their numbers in the step.
        config: of the audit; it says which tokens are compared.
    """

    samples: tuple[DumpSample, ...]
    slots: Ints
    starts: Ints
    train: Floats
    rollout: Floats
    active: Bools
    missing: Bools
    position: Ints
    token_ids: Ints | None
    rollout_token_ids: Ints | None
    labels: dict[str, Ints]
    refused: tuple[DumpSample, ...]
    refused_slots: Ints
    config: AuditConfig

    @classmethod
    def join(
        cls,
        numbered: Iterable[tuple[int, DumpSample]],
        labels: Sequence[LabelNames] = (),
        config: AuditConfig | None = None,
    ) -> Tokens:
        """Join samples, each with its number in the step; the configuration is the default one if None."""
        whole: list[tuple[int, DumpSample]] = []
        refused: list[tuple[int, DumpSample]] = []
        for slot, sample in numbered:
            (whole if is_whole(sample) else refused).append((slot, sample))
        samples = [sample for _, sample in whole]
        lengths = [len(sample) for sample in samples]
        return cls(
            tuple(samples),
            np.array([slot for slot, _ in whole], dtype=np.int64),
            np.cumsum([0, *lengths], dtype=np.int64)[:-1],
            _join([_floats(s.train_log_probs) for s in samples], np.float32),
            _join([_rollout(s) for s in samples], np.float32),
            _join([s.mask for s in samples], np.bool_),
            _join([_missing(s) for s in samples], np.bool_),
            _join([np.arange(len(s)) if s.token_position is None else s.token_position for s in samples], np.int64),
            _ids([_first(s.token_ids, s.rollout_token_ids) for s in samples], lengths),
            _ids([_first(s.rollout_token_ids, s.token_ids) for s in samples], lengths),
            {
                label.name: _join(
                    [label.code(s.labels.get(label.key), n) for s, n in zip(samples, lengths, strict=True)], np.int64
                )
                for label in labels
            },
            tuple(sample for _, sample in refused),
            np.array([slot for slot, _ in refused], dtype=np.int64),
            config or AuditConfig(),
        )

    def __len__(self) -> int:
        return len(self.train)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return np.diff(self.starts, append=len(self))

    @cached_property
    def sample_index(self) -> Ints:
        """Index of each sample; its number in the step where the dump has none, so that worst tokens have an order."""
        known = self._of_samples("sample_index")
        return np.where(known < 0, self.slots, known)

    @cached_property
    def compared(self) -> Bools:
        """Which tokens the audit compares."""
        train, rollout, active, missing = map(torch.from_numpy, (self.train, self.rollout, self.active, self.missing))
        mismatch = None if self.mismatch is None else torch.from_numpy(self.mismatch)
        flat = FlatTokens(train, rollout, active, missing, mismatch)
        classes = classify(flat, flat.train.double(), flat.rollout.double(), self.config)
        return np.asarray((classes == COUNTER_INDEX["compared"]).numpy())

    @cached_property
    def dlogp(self) -> npt.NDArray[np.float64]:
        """Train minus rollout, nats, 0 where not compared."""
        train, rollout = (np.where(self.compared, side, 0.0).astype(np.float64) for side in (self.train, self.rollout))
        return train - rollout + 0.0

    @property
    def mismatch(self) -> Bools | None:
        """Where the token ids of both sides differ; None where a side has none."""
        if self.token_ids is None or self.rollout_token_ids is None:
            return None  # both are known or none is
        return np.asarray(self.token_ids != self.rollout_token_ids)

    def batch(self) -> TokenBatch:
        """Return the samples as the collector takes them, each whole."""
        given = {"token_ids": self.token_ids, "rollout_token_ids": self.rollout_token_ids} | self.labels
        ids = {name: torch.from_numpy(column) for name, column in given.items() if column is not None}
        return TokenBatch(
            torch.from_numpy(self.train),
            torch.from_numpy(self.rollout),
            torch.from_numpy(self.active),
            torch.ones(len(self), dtype=torch.bool, device="cpu"),
            torch.from_numpy(self.missing),
            sample_index=torch.from_numpy(np.repeat(self.sample_index, self.lengths)),
            sample_slot=torch.from_numpy(np.repeat(self.slots, self.lengths)),
            rollout_id=torch.from_numpy(np.repeat(self._of_samples("rollout_id"), self.lengths)),
            token_position=torch.from_numpy(self.position),
            token_ids=ids.pop("token_ids", None),
            rollout_token_ids=ids.pop("rollout_token_ids", None),
            labels=ids,
            whole_slots=torch.from_numpy(np.concatenate([self.slots, self.refused_slots])),
            refused_samples=len(self.refused),
            refused_active=sum(int(np.count_nonzero(sample.mask)) for sample in self.refused),
            refused_total=sum(len(sample) for sample in self.refused),
            refusal=self._refusal(),
        )

    def table(self, labels: Sequence[LabelNames]) -> TokenTable:
        """Return the active tokens as a diagnosis takes them."""
        active = self.active
        absent = self.missing if self.mismatch is None else self.missing | self.mismatch
        with np.errstate(invalid="ignore"):  # a damaged file may hold NaN that signal
            train, rollout = (side.astype(np.float64) for side in (self.train, self.rollout))
        rollout[absent] = math.nan
        prompts = zip(self.slots.tolist(), self.samples, strict=True)
        return TokenTable(
            train[active],
            rollout[active],
            np.repeat(self.slots, self.lengths)[active],
            self.position[active],
            None if self.token_ids is None else self.token_ids[active],
            labels={name: codes[active] for name, codes in self.labels.items()},
            label_names={label.name: label.names for label in labels},
            prompt_length={slot: s.prompt_length for slot, s in prompts if s.prompt_length is not None},
        )

    def _refusal(self) -> str | None:
        if not self.refused:
            return None
        first = self.refused[0]
        known = None if first.sample_index < 0 else first.sample_index
        return refusal_of(int(self.refused_slots[0]), lengths(first), known)

    def _of_samples(self, name: str) -> Ints:
        return np.array([getattr(sample, name) for sample in self.samples], dtype=np.int64)


def lengths(sample: DumpSample) -> dict[str, int]:
    """Return the length of each array of a sample."""
    given = {"train_log_probs": sample.train_log_probs} | {name: getattr(sample, name) for name in _PER_TOKEN}
    return {name: len(values) for name, values in given.items() if values is not None}


def owned(sample: DumpSample) -> DumpSample:
    """Return a sample whose arrays are its own, so that those of its file can go."""
    arrays = {name: getattr(sample, name) for name in ("train_log_probs", *_PER_TOKEN)}
    shared = {name: values.copy() for name, values in arrays.items() if values is not None and values.base is not None}
    return replace(sample, **shared)


def memory_of(sample: DumpSample) -> int:
    """Return about how many bytes a sample takes that owns its arrays."""
    arrays = [getattr(sample, name) for name in ("train_log_probs", *_PER_TOKEN)]
    numbers: int = sum(array.nbytes for array in arrays if array is not None)
    labels = sum(getsizeof(key) + _label_memory(label) for key, label in sample.labels.items())
    return 1024 + numbers + labels


def _label_memory(label: Label) -> int:
    texts = () if label is None or isinstance(label, str) else label
    return getsizeof(label) + sum(map(getsizeof, texts))


def is_whole(sample: DumpSample) -> bool:
    """Return whether a sample's arrays are of one length."""
    return len(set(lengths(sample).values())) == 1


def _floats(values: Floats | None) -> Floats:
    if values is None:
        raise ValueError("a sample without train_log_probs has nothing to compare")
    return values


def _rollout(sample: DumpSample) -> Floats:
    values = sample.rollout_log_probs
    return np.zeros(len(sample), dtype=np.float32) if values is None else values


def _missing(sample: DumpSample) -> Bools:
    absent = sample.rollout_log_probs is None
    return np.full(len(sample), absent) if absent or sample.rollout_missing is None else sample.rollout_missing


def _first(ids: Ints | None, otherwise: Ints | None) -> Ints | None:
    return otherwise if ids is None else ids


def _ids(columns: Sequence[Ints | None], lengths: Sequence[int]) -> Ints | None:
    if all(column is None for column in columns):
        return None
    filled = [np.full(n, -1) if c is None else c for c, n in zip(columns, lengths, strict=True)]
    return _join(filled, np.int64)


def _join(parts: Sequence[npt.NDArray[Any]], kind: Any) -> npt.NDArray[Any]:
    joined = np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
    return joined if np.issubdtype(joined.dtype, np.floating) else joined.astype(kind, copy=False)
