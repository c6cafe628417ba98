"""Samples of slime on one rank: what a rollout tells of them, and their tokens cut to the rank's piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlk_audit.config import AuditConfig
from rlk_audit.metadata import KEY_PREFIX, batch_fields, partition_metadata
from rlk_audit.places import Shard, zigzag_spans
from rlk_audit.ragged import join
from rlk_audit.tokens import TokenBatch


@dataclass
class Rollout:
    """What is known of a rollout.

    Attributes:
        number: its id.
        steps: optimizer steps that it is trained in.
        metadata: the audit's columns, one entry a sample.
        slots: each sample's place in the whole rollout.
        rows: identity of a sample's rollout log-probabilities -> the sample's place here.
        seen: micro-batches that came, by where their rollout log-probabilities lie, and their numbers.
    """

    number: int
    steps: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    slots: Sequence[int] | None = None
    rows: dict[int, int] = field(default_factory=dict)
    seen: dict[tuple[tuple[int, int], ...], int] = field(default_factory=dict)

    def fields(self, rows: Sequence[int | None], config: AuditConfig | None) -> dict[str, Any]:
        """Return what the collector is told of the samples at these places; nothing if one of them is not known."""
        known = [row for row in rows if row is not None]
        if config is None or len(known) != len(rows) or not self.metadata:
            return {}
        names = [name.removeprefix(KEY_PREFIX) for name in self.metadata]
        (part,) = partition_metadata(self.metadata, [known], names)
        slots = {} if self.slots is None else {"sample_slot": torch.tensor([int(self.slots[row]) for row in known])}
        return batch_fields(part, config) | slots


@dataclass(frozen=True)
class Slices:
    """Samples of which this context-parallel rank has its tokens' log-probabilities, and the masks whole.

    Attributes:
        train, rollout: one float tensor a sample, [tokens of its response that this rank scores].
        masks: one tensor a sample, [response].
        totals, responses: tokens of each sample, and of its response, which is its end.
        padded: lengths that the cut was made of, where they are not the samples' own.
        tokens: one tensor a sample, [total].
    """

    train: Sequence[Tensor]
    rollout: Sequence[Tensor] | None
    masks: Sequence[Tensor]
    totals: Sequence[int]
    responses: Sequence[int]
    padded: Sequence[int] | None = None
    tokens: Sequence[Tensor] | None = None

    @classmethod
    def of_rows(cls, data: Mapping[str, Any], rows: Sequence[int]) -> Slices:
        """Return the samples at these places of slime's columns."""

        def column(name: str) -> list[Any] | None:
            return None if data.get(name) is None else [data[name][row] for row in rows]

        needed = ("loss_masks", "total_lengths", "response_lengths")
        masks, totals, responses = (column(name) or [] for name in needed)
        train, rollout, tokens = (column(name) for name in ("log_probs", "rollout_log_probs", "tokens"))
        return cls(train or [], rollout, masks, totals, responses, tokens=tokens)

    def batch(self, shard: Shard, **fields: Any) -> TokenBatch:
        """Return them as one batch, masks and tokens cut to where the log-probabilities are.

        Raises:
            ValueError: a sample's arrays have other lengths than its piece.
        """
        cut = zip(self.totals, self.responses, self.padded or self.totals, strict=True)
        spans = [zigzag_spans(int(t), int(r), int(p), shard.cp_rank, shard.cp_size) for t, r, p in cut]
        masks = [_cut(mask, pair) for mask, pair in zip(self.masks, spans, strict=True)]
        lengths = [sum(map(len, pair)) for pair in spans]
        for name, arrays in (("train_log_probs", self.train), ("rollout_log_probs", self.rollout), ("mask", masks)):
            found = lengths if arrays is None else [len(values) for values in arrays]
            if found != lengths:
                raise ValueError(f"{name} must have the lengths {lengths} on this context-parallel rank, got {found}")
        train = join(list(self.train))
        if self.tokens is not None:
            starts = (total - response for total, response in zip(self.totals, self.responses, strict=True))
            ids = [_cut(ids[start:], pair) for ids, start, pair in zip(self.tokens, starts, spans, strict=True)]
            fields["token_ids"] = join(ids)
        places = [torch.arange(run.start, run.stop, device=train.device) for pair in spans for run in pair]
        return TokenBatch.from_packed(
            train,
            None if self.rollout is None else join(list(self.rollout)),
            join(masks),
            cu_seqlens=[0, *accumulate(lengths)],
            token_position=join(places),
            **fields,
        )


def _cut(values: Tensor, spans: tuple[range, range]) -> Tensor:
    return torch.cat([values[run.start : run.stop] for run in spans])
