"""Samples of slime on one rank: what a rollout tells of them, and their tokens cut to the rank's piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rlk_audit.config import AuditConfig
from rlk_audit.integrations.set_up import needed
from rlk_audit.metadata import KEY_PREFIX, batch_fields, partition_metadata
from rlk_audit.places import Shard, zigzag_spans
from rlk_audit.ragged import join, refusal_of
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
        fields = batch_fields(part, config)
        if self.slots is not None:
            fields["sample_slot"] = torch.tensor([int(self.slots[row]) for row in known], device="cpu")
        return fields


@dataclass(frozen=True)
class Slices:
    """Samples of which this context-parallel rank has its tokens' log-probabilities, and the masks whole.

    Attributes:
        train, rollout: one float tensor a sample, [tokens of its response that this rank scores]; None on the rollout's
            side is a sample, or all of them, without values.
        masks: one tensor a sample, [response].
        totals, responses: tokens of each sample, and of its response, which is its end.
        padded: lengths that the cut was made of, where they are not the samples' own.
        tokens: one tensor a sample, [total].
    """

    train: Sequence[Tensor] | None
    rollout: Sequence[Tensor | None] | None
    masks: Sequence[Tensor] | None
    totals: Sequence[int] | None
    responses: Sequence[int] | None
    padded: Sequence[int] | None = None
    tokens: Sequence[Tensor] | None = None

    @classmethod
    def of_rows(cls, data: Mapping[str, Any], rows: Sequence[int]) -> Slices:
        """Return the samples at these places of slime's columns.

        Raises:
            ValueError: the columns differ in length.
        """
        names = ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
        whole = {name: data.get(name) for name in (*names, "tokens")}
        refuse_unequal(whole)
        train, rollout, masks, totals, responses, tokens = (
            None if column is None else [column[row] for row in rows] for column in whole.values()
        )
        return cls(train, rollout, masks, totals, responses, tokens=tokens)

    def batch(self, shard: Shard, **fields: Any) -> TokenBatch:
        """Return them as one batch, masks and tokens cut to where the log-probabilities are.

        A sample that is here whole and whose arrays do not have its length is refused alone. Of one that is cut over
        context-parallel ranks the others count their pieces, so that it cannot be.

        Args:
            shard: this context-parallel rank.
            fields: other fields of TokenBatch, one entry a sample.

        Raises:
            ValueError: a column is missing, or a piece of a sample that is cut has another length.
        """
        columns: dict[str, Any] = {"train_log_probs": self.train, "loss_masks": self.masks}
        columns |= {"total_lengths": self.totals, "response_lengths": self.responses}
        arrays, masks, totals, responses = needed(columns, *columns)
        refuse_unequal({**columns, "rollout_log_probs": self.rollout, "max_seq_lens": self.padded})
        cut = zip(totals, responses, self.padded or totals, strict=True)
        spans = [zigzag_spans(int(t), int(r), int(p), shard.cp_rank, shard.cp_size) for t, r, p in cut]
        parts = {"train_log_probs": arrays, "rollout_log_probs": self.rollout, "mask": _cut_all(masks, spans)}
        if self.tokens is not None:
            starts = (total - response for total, response in zip(totals, responses, strict=True))
            ids = [tokens[start:] for tokens, start in zip(self.tokens, starts, strict=True)]
            parts["token_ids"] = _cut_all(ids, spans)
        unfit = _unfit(parts, spans)
        if unfit and shard.cp_size > 1:
            place, lengths = next(iter(unfit.items()))
            raise ValueError(
                f"the piece of sample {place} on this context-parallel rank must have one length, got {lengths}"
            )
        kept = [place for place in range(len(spans)) if place not in unfit]
        batch = _joined(_picked(parts, kept), [spans[place] for place in kept], _picked(fields, kept))
        return _with_refused(batch, unfit, masks, fields.get("sample_index")) if unfit else batch


def _unfit(
    parts: Mapping[str, Sequence[Any] | None], spans: Sequence[tuple[range, range]]
) -> dict[int, dict[str, int]]:
    """Return the place of each sample whose arrays have another length than its spans -> the lengths of all."""
    found = {}
    for place, pair in enumerate(spans):
        lengths = {"response": sum(map(len, pair))}
        given = {name: part[place] for name, part in parts.items() if part is not None}
        lengths |= {name: len(values) for name, values in given.items() if values is not None}
        if len(set(lengths.values())) > 1:
            found[place] = lengths
    return found


def _with_refused(
    batch: TokenBatch, unfit: Mapping[int, Mapping[str, int]], masks: Sequence[Tensor], sample_index: Any
) -> TokenBatch:
    """Return the batch with what it leaves out."""
    place, lengths = next(iter(unfit.items()))
    return replace(
        batch,
        refused_samples=len(unfit),
        refused_active=torch.stack([(masks[place] != 0).sum() for place in unfit]).sum(),
        refused_total=sum(len(masks[place]) for place in unfit),
        refusal=refusal_of(place, lengths, None if sample_index is None else int(sample_index[place])),
    )


def _picked(columns: Mapping[str, Any], kept: list[int]) -> dict[str, Any]:
    """Return the kept samples' entries of columns, of which those of labels are one level deeper."""

    def picked(column: Any) -> Any:
        if column is None or isinstance(column, Mapping):
            return None if column is None else _picked(column, kept)
        return column[kept] if isinstance(column, Tensor) else [column[place] for place in kept]

    return {name: picked(column) for name, column in columns.items()}


def _joined(
    parts: Mapping[str, list[Tensor] | None], spans: Sequence[tuple[range, range]], fields: dict[str, Any]
) -> TokenBatch:
    arrays, masks, ids = parts["train_log_probs"] or [], parts["mask"] or [], parts.get("token_ids")
    train = join(arrays)
    rollout, missing = _filled(parts["rollout_log_probs"], arrays)
    places = [torch.arange(run.start, run.stop, device=train.device) for pair in spans for run in pair]
    if ids is not None:
        fields["token_ids"] = join(ids)
    return TokenBatch.from_packed(
        train,
        None if rollout is None else join(rollout),
        join(masks),
        rollout_missing=missing,
        cu_seqlens=[0, *accumulate(sum(map(len, pair)) for pair in spans)],
        token_position=join(places),
        **fields,
    )


def _filled(
    rollout: Sequence[Tensor | None] | None, train: Sequence[Tensor]
) -> tuple[list[Tensor] | None, Tensor | None]:
    """Return the rollout's values with zeros for samples that have none, and where those are."""
    if rollout is None or all(values is not None for values in rollout):
        return None if rollout is None else [values for values in rollout if values is not None], None
    pairs = list(zip(rollout, train, strict=True))
    missing = join([torch.full_like(t, values is None, dtype=torch.bool) for values, t in pairs])
    return [torch.zeros_like(t) if values is None else values for values, t in pairs], missing


def refuse_unequal(columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Refuse columns of unequal lengths; None is no column.

    Raises:
        ValueError: the text names each column's length.
    """
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"the columns must have one entry a sample, got {told}")


def _cut_all(columns: Sequence[Tensor], spans: Sequence[tuple[range, range]]) -> list[Tensor]:
    return [
        torch.cat([values[run.start : run.stop] for run in pair]) for values, pair in zip(columns, spans, strict=True)
    ]
