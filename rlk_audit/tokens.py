"""Where a token is: padded, ragged, packed and context-parallel layouts, all turned into one TokenBatch.

A token's position counts from the first token of its response and is global: a context-parallel shard reports the
position in the whole sequence. No constructor reads a device value on the host, except ``from_lists``, whose data is
there already. Faults of the data never raise here (one rank would leave the others waiting): they are kept in the
batch, and ``Collector.update`` counts and logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlk_audit.places import Shard, locate, per_sample
from rlk_audit.ragged import Values as Values
from rlk_audit.ragged import active_count, as_tensor, join, join_rollout, known_id, refusal_of, to_float_and_missing

PerToken = Values | int | None

_INDEX_SCORES = ("token", "next_token")
_PER_SAMPLE = ("sample_index", "sample_slot", "rollout_id", "updates_since_rollout")
"""Fields that may come as one value a sample; labels may too."""
_PER_TOKEN = ("token_position", "token_ids", "rollout_token_ids")
"""Ids that are a token's own; the others, and labels, are often one value a sample."""


def one_per_row(name: str, ids: Tensor, shape: torch.Size) -> Tensor:
    """Return ids so that they broadcast to ``shape``: [rows] beside [rows, columns] is one value a row."""
    per_row = len(shape) == 2 and ids.dim() == 1 and len(ids) == shape[0] and name not in _PER_TOKEN
    return ids[:, None] if per_row else ids


def own_shard(values: Any) -> Any:
    """Return a DTensor's shard on this rank, and anything else as it is. No communication.

    Raises:
        TypeError: the DTensor is a partial sum, of which no rank holds a log-probability.
    """
    placements = getattr(values, "placements", None)
    if placements is None:
        return values
    if any(placement.is_partial() for placement in placements):
        raise TypeError(f"a DTensor of {placements} holds parts of sums; redistribute it to Shard or Replicate first")
    return values.detach().to_local()


@dataclass(frozen=True)
class TokenBatch:
    """Log-probabilities of sampled tokens with what is known of each; build it with a ``from_*`` constructor.

    Attributes:
        train_log_probs: float tensor of any shape, natural logarithms.
        rollout_log_probs: same shape, or None where the engine gave none at all.
        mask: same shape, nonzero = active.
        valid: same shape, nonzero = a position of a response; None = not known, then no total is reported.
        rollout_missing: same shape, nonzero = the engine gave no value here.
        sample_index, sample_slot, rollout_id, token_position, token_ids, rollout_token_ids, updates_since_rollout:
            integers of the same shape or broadcastable to it.
        labels: label name -> integer codes of the same shape or broadcastable to it; -1 is unknown.
        whole_slots: [samples], slots of the samples that the batch holds whole, also of those without a token.
        refused_samples, refused_active, refused_total: samples refused for arrays of unequal length, and their tokens.
        refusal: one sentence on the first refused sample.
        fault: one sentence, when the batch as a whole cannot be used.
    """

    train_log_probs: Values
    rollout_log_probs: Values | None = None
    mask: Values | None = None
    valid: Values | None = None
    rollout_missing: Values | None = None
    sample_index: PerToken = None
    sample_slot: PerToken = None
    rollout_id: PerToken = None
    token_position: PerToken = None
    token_ids: PerToken = None
    rollout_token_ids: PerToken = None
    updates_since_rollout: PerToken = None
    labels: Mapping[str, PerToken] = field(default_factory=dict)
    whole_slots: Values | None = None
    refused_samples: int = 0
    refused_active: int | Tensor = 0
    refused_total: int = 0
    refusal: str | None = None
    fault: str | None = None

    def own_shards(self) -> TokenBatch:
        """Return the batch with each DTensor's shard on this rank in its place.

        Raises:
            TypeError: a DTensor is a partial sum.
        """
        if not any(hasattr(value, "placements") for value in (*vars(self).values(), *self.labels.values())):
            return self
        fields = {name: own_shard(value) for name, value in vars(self).items() if name != "labels"}
        return TokenBatch(**fields, labels={name: own_shard(codes) for name, codes in self.labels.items()})

    @classmethod
    def from_lists(
        cls,
        train_log_probs: Sequence[Values],
        rollout_log_probs: Sequence[Values | None] | None,
        mask: Sequence[Values] | None = None,
        *,
        sample_index: Sequence[int | None] | None = None,
        sample_slot: Sequence[int | None] | None = None,
        rollout_id: Sequence[int | None] | None = None,
        token_ids: Sequence[Values] | None = None,
        rollout_token_ids: Sequence[Values] | None = None,
        updates_since_rollout: Sequence[int] | int | None = None,
        labels: Mapping[str, Sequence[int | None]] | None = None,
    ) -> TokenBatch:
        """Build from one list (or 1-D tensor) of response tokens a sample; entry i scores response token i.

        ``None`` in a rollout list is a missing value, ``None`` for a whole list a sample without values. Without
        ``mask`` every token is active. Per-sample sequences have one entry a sample, None where it is unknown. A sample
        whose lists differ in length is refused whole, the others count.
        """
        return or_fault(
            lambda: cls._from_lists(
                train_log_probs,
                {
                    "rollout_log_probs": rollout_log_probs,
                    "mask": mask,
                    "token_ids": token_ids,
                    "rollout_token_ids": rollout_token_ids,
                },
                {"sample_index": sample_index, "sample_slot": sample_slot, "rollout_id": rollout_id},
                updates_since_rollout,
                dict(labels or {}),
            )
        )

    @classmethod
    def _from_lists(
        cls,
        train: Sequence[Values],
        columns: dict[str, Sequence[Any] | None],
        per_sample: dict[str, Sequence[int | None] | None],
        updates: Sequence[int] | int | None,
        labels: dict[str, Sequence[int | None]],
    ) -> TokenBatch:
        if len(train) and not hasattr(train[0], "__len__"):
            return cls((), fault=f"train_log_probs must be one list a sample, got {train[0]!r} for the first sample")
        count = len(train)
        per_sample["updates_since_rollout"] = [updates] * count if isinstance(updates, int) else updates
        for name, values in {**columns, **per_sample, **labels}.items():
            if values is not None and len(values) != count:
                return cls((), fault=f"{name} must have one entry a sample, expected {count}, got {len(values)}")
        return _join_samples(train, columns, per_sample, labels)

    @classmethod
    def from_padded(
        cls,
        train_log_probs: Values,
        rollout_log_probs: Values | None,
        mask: Values,
        *,
        response_start: PerToken = None,
        index_scores: str = "token",
        **fields: Any,
    ) -> TokenBatch:
        """Build from padded arrays [batch, length]; padding may stand on either side.

        Args:
            response_start: [batch], the column of each row's first response token; without it positions are unknown.
            index_scores: ``"token"`` if column i holds the log-probability of token i, ``"next_token"`` if of token
                i + 1 (Megatron's labels).
            fields: other fields of TokenBatch; per-sample ones may have the shape [batch].
        """
        _check_index_scores(index_scores)

        def build() -> TokenBatch:
            train = _log_probs(train_log_probs)
            if train.dim() != 2:
                return cls((), fault=f"padded arrays must be [batch, length], got the shape {tuple(train.shape)}")
            position = torch.arange(train.shape[1], device=train.device).expand(train.shape)
            places = _Places(position, len(train))
            return places.batch(train, rollout_log_probs, mask, response_start, index_scores, fields)

        return or_fault(build)

    @classmethod
    def from_packed(
        cls,
        train_log_probs: Values,
        rollout_log_probs: Values | None,
        mask: Values,
        *,
        cu_seqlens: Values,
        response_start: PerToken = None,
        index_scores: str = "token",
        **fields: Any,
    ) -> TokenBatch:
        """Build from sequences packed one behind another in arrays [total].

        Args:
            cu_seqlens: [samples + 1], where each sequence starts, and the end; entries behind the end are padding.
            response_start: [samples], place of the first response token in its sequence; 0 if not given.
            index_scores: as in ``from_padded``.
            fields: other fields of TokenBatch; per-sample ones may have the shape [samples].

        A pack whose arrays differ in length is refused whole.
        """
        _check_index_scores(index_scores)

        def build() -> TokenBatch:
            train, rollout, masks, own = _flat_pack(train_log_probs, rollout_log_probs, mask, fields)
            bounds = _bounds("cu_seqlens", cu_seqlens, train.device)
            samples = len(bounds) - 1
            refused = _refuse_unequal_pack(train, rollout, masks, samples, own.get("sample_index"))
            if refused is not None:
                return refused
            sample, position = locate(torch.arange(train.numel(), device=train.device), bounds)
            last = per_sample(bounds.diff(), sample, 0) - int(index_scores == "next_token")
            places = _Places(position, samples, sample, position < last)
            return places.batch(train, rollout, masks, _or_zero(response_start), index_scores, own)

        return or_fault(build)

    @classmethod
    def from_cp_shard(
        cls,
        train_log_probs: Values,
        rollout_log_probs: Values | None,
        mask: Values,
        *,
        cp_rank: int,
        cp_size: int,
        seq_length: int | None = None,
        layout: str = "zigzag",
        cu_seqlens_padded: Values | None = None,
        cu_seqlens: Values | None = None,
        response_start: PerToken = None,
        index_scores: str = "token",
        **fields: Any,
    ) -> TokenBatch:
        """Build from one context-parallel rank's shard.

        Padded: arrays [batch, seq_length / cp_size]. Packed (``cu_seqlens_padded`` given): arrays
        [total_padded / cp_size], every padded sequence cut over the ranks by itself.

        Args:
            cp_rank, cp_size: this rank's place in the context-parallel group.
            layout: ``"zigzag"``: the sequence is 2 * cp_size chunks and rank r owns chunks r and 2 * cp_size - 1 - r,
                as in Megatron and TransformerEngine; ``"contiguous"``: rank r owns the r-th of cp_size pieces.
            seq_length: length of the whole padded sequence; needed for padded arrays.
            cu_seqlens_padded: [samples + 1], global starts of the padded sequences, the same on every rank.
            cu_seqlens: [samples + 1], global starts without the padding; tells padding from tokens.
            response_start: per sample, place of the first response token in the whole sequence.
            index_scores: as in ``from_padded``; Megatron's labels make it ``"next_token"``.
            fields: other fields of TokenBatch; per-sample ones may have the shape [batch] or [samples].
        """
        _check_index_scores(index_scores)
        if not 0 <= cp_rank < cp_size or layout not in ("zigzag", "contiguous"):
            raise ValueError(
                "expected 0 <= cp_rank < cp_size and layout 'zigzag' or 'contiguous', "
                f"got cp_rank={cp_rank}, cp_size={cp_size}, layout={layout!r}"
            )
        place = Shard(cp_rank, cp_size, layout)
        if seq_length is None and cu_seqlens_padded is None:
            raise ValueError("from_cp_shard needs seq_length (padded arrays) or cu_seqlens_padded (packed ones)")

        def build_padded(length: int) -> TokenBatch:
            train = _log_probs(train_log_probs)
            pieces = 2 * cp_size if layout == "zigzag" else cp_size
            if train.dim() != 2 or length % pieces or train.shape[1] != length // cp_size:
                return cls((), fault=_shard_fault(train, length, cp_size, pieces))
            position = place.global_position(torch.arange(train.shape[1], device=train.device), train.shape[1])
            places = _Places(position.expand(train.shape), len(train))
            return places.batch(train, rollout_log_probs, mask, response_start, index_scores, fields)

        def build_packed(padded: Values) -> TokenBatch:
            train, rollout, masks, own = _flat_pack(train_log_probs, rollout_log_probs, mask, fields)
            bounds = _bounds("cu_seqlens_padded", padded, train.device)
            local_bounds = torch.div(bounds, cp_size, rounding_mode="floor")
            sample, within = locate(torch.arange(train.numel(), device=train.device), local_bounds)
            samples = len(bounds) - 1
            position = place.global_position(within, per_sample(local_bounds.diff(), sample, 0))
            true_bounds = bounds if cu_seqlens is None else _bounds("cu_seqlens", cu_seqlens, train.device)
            last = per_sample(true_bounds.diff(), sample, 0) - int(index_scores == "next_token")
            places = _Places(position, samples, sample, (sample < samples) & (position < last))
            return places.batch(train, rollout, masks, _or_zero(response_start), index_scores, own)

        if cu_seqlens_padded is not None:
            return or_fault(lambda: build_packed(cu_seqlens_padded))
        assert seq_length is not None
        return or_fault(lambda: build_padded(seq_length))


@dataclass(frozen=True)
class _Places:
    """Where the entries of an array stand.

    Attributes:
        position: place of each entry in its own sequence.
        samples: how many sequences there are.
        sample: which sequence each packed entry belongs to (``samples`` behind the last); None for rows.
        real: where a packed entry scores a token, not padding; None for rows.
    """

    position: Tensor
    samples: int
    sample: Tensor | None = None
    real: Tensor | None = None

    def spread(self, value: Any) -> Any:
        """Give every token its sequence's value; what is not one value a sequence stays as it is."""
        if not self._is_one_each(value):
            return value
        value = torch.as_tensor(value, device=self.position.device)
        return value[:, None] if self.sample is None else per_sample(value, self.sample, -1)

    def _is_one_each(self, value: Any) -> bool:
        """Return whether a value is one a sequence: [samples]."""
        if value is None or isinstance(value, int):
            return False
        return tuple(as_tensor(value).shape) == (self.samples,)

    def batch(
        self,
        train: Tensor,
        rollout: Values | None,
        mask: Values,
        response_start: PerToken,
        index_scores: str,
        fields: dict[str, Any],
    ) -> TokenBatch:
        """Return the batch of these tokens, with their positions in the response where its start is known."""
        labels = {name: self.spread(codes) for name, codes in (fields.pop("labels", None) or {}).items()}
        spread = {n: self.spread(value) if n in _PER_SAMPLE else value for n, value in fields.items()}
        if self._is_one_each(fields.get("sample_slot")):
            spread["whole_slots"] = fields["sample_slot"]
        real = self.real
        if response_start is not None:
            position = self.position + int(index_scores == "next_token") - self.spread(response_start)
            spread.setdefault("token_position", position)
            real = None if real is None else real & (position >= 0)
        if real is not None:
            spread.setdefault("valid", real)
        return TokenBatch(train, rollout, mask, labels=labels, **spread)


def or_fault(build: Callable[[], TokenBatch]) -> TokenBatch:
    """Return the batch, or one that holds why the data make none: an exception would leave the other ranks waiting."""
    try:
        return build()
    except KeyError as error:
        return TokenBatch((), fault=f"the batch cannot be read: {error} is missing")
    except Exception as error:
        return TokenBatch((), fault=f"the batch cannot be read: {' '.join(str(error).split())}")


def _log_probs(values: Values) -> Tensor:
    tensor, absent = to_float_and_missing(values)
    if absent is not None:
        raise ValueError("train_log_probs must hold numbers, got None among them")
    return tensor


def _bounds(name: str, values: Values, device: torch.device) -> Tensor:
    bounds = torch.as_tensor(values, device=device).long()
    if bounds.dim() != 1 or not len(bounds):
        raise ValueError(f"{name} must be [samples + 1], got the shape {tuple(bounds.shape)}")
    # Elsewhere reading them would wait for the device.
    if device.type == "cpu" and (bounds[0] != 0 or (bounds.diff() < 0).any()):
        raise ValueError(f"{name} must begin with 0 and never fall, as sums of lengths do, got {bounds.tolist()[:8]}")
    return bounds


def _flat_pack(
    train: Values, rollout: Values | None, mask: Values, fields: dict[str, Any]
) -> tuple[Tensor, Values | None, Values, dict[str, Any]]:
    """Return a pack's arrays as [total], also where they came as [1, total]."""
    first = _log_probs(train)
    if first.dim() == 1:
        return first, rollout, mask, fields
    if first.dim() != 2 or len(first) != 1:
        raise ValueError(f"packed arrays must be [total] or [1, total], got the shape {tuple(first.shape)}")

    def flat(values: Any) -> Any:
        whole = not isinstance(values, (Tensor, np.ndarray, list, tuple)) or np.ndim(values) != 2
        return values if whole or len(values) != 1 else values[0]

    own = {name: flat(values) for name, values in fields.items() if name != "labels"}
    own["labels"] = {name: flat(codes) for name, codes in (fields.get("labels") or {}).items()}
    return first[0], flat(rollout), flat(mask), own


def _or_zero(response_start: PerToken) -> PerToken:
    return 0 if response_start is None else response_start


def _check_index_scores(index_scores: str) -> None:
    if index_scores not in _INDEX_SCORES:
        raise ValueError(f"index_scores must be 'token' or 'next_token', got {index_scores!r}")


def _shard_fault(train: Tensor, seq_length: int, cp_size: int, pieces: int) -> str:
    return (
        f"a shard of seq_length {seq_length} over {cp_size} context-parallel ranks must have the shape "
        f"[batch, {seq_length // cp_size}] with seq_length a multiple of {pieces}, got {tuple(train.shape)}"
    )


def _refuse_unequal_pack(
    train: Tensor, rollout: Values | None, mask: Values, samples: int, sample_index: PerToken
) -> TokenBatch | None:
    """Return a batch that refuses the whole pack when its arrays differ in length, else None.

    With one length too many or too few it is not known which sample is at fault, so none can be trusted.
    """
    lengths = {"train_log_probs": train.numel(), "mask": _count(mask)}
    if rollout is not None:
        lengths["rollout_log_probs"] = _count(rollout)
    if len(set(lengths.values())) == 1:
        return None
    told = ", ".join(f"{name} {length}" for name, length in lengths.items())
    named = "" if sample_index is None else f" (sample_index {_shown(sample_index)})"
    active = as_tensor(mask)
    return TokenBatch(
        train.new_zeros(0),
        None,
        active.new_zeros(0),
        refused_samples=samples,
        refused_active=(active != 0).sum(),
        refused_total=_count(mask),
        refusal=f"a pack of {samples} samples{named} is refused: its arrays must have one length, got {told}; "
        "score every array with the same shift and pad it alike",
    )


def _count(values: Values) -> int:
    return values.numel() if isinstance(values, Tensor) else int(np.size(np.asarray(values, dtype=object)))


def _shown(sample_index: PerToken) -> str:
    """Show ids without reading a device tensor on the host."""
    if isinstance(sample_index, Tensor) and sample_index.device.type != "cpu":
        return "on the device"
    values = as_tensor(sample_index).reshape(-1).tolist()
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


# --- ragged lists ---------------------------------------------------------------------------------------------------


def _join_samples(
    train: Sequence[Values],
    columns: Mapping[str, Sequence[Any] | None],
    per_sample: Mapping[str, Sequence[int | None] | None],
    labels: Mapping[str, Sequence[int | None]],
) -> TokenBatch:
    """Join ragged samples end to end, leaving out those whose arrays differ in length."""
    given = {name: column for name, column in columns.items() if column is not None}
    kept: list[int] = []
    refused_active = refused_total = 0
    refusal = None
    for i, values in enumerate(train):
        lengths = {"train_log_probs": len(values)}
        lengths |= {name: len(column[i]) for name, column in given.items() if column[i] is not None}
        if len(set(lengths.values())) == 1:
            kept.append(i)
            continue
        refused_active += active_count(given["mask"][i]) if "mask" in given else len(values)
        refused_total += lengths.get("mask", len(values))
        indices = per_sample.get("sample_index")
        refusal = refusal or refusal_of(i, lengths, None if indices is None else indices[i])
    rollout, missing = join_rollout(train, given.get("rollout_log_probs"), kept)
    lengths_kept = _integers(len(train[i]) for i in kept)
    everywhere = torch.ones(int(lengths_kept.sum()), dtype=torch.bool, device="cpu")

    def spread(values: Sequence[int | None]) -> Tensor:
        return _integers(known_id(values[i]) for i in kept).repeat_interleave(lengths_kept)

    scores = [to_float_and_missing(train[i]) for i in kept]
    if any(absent is not None for _, absent in scores):
        return TokenBatch((), fault="train_log_probs must hold numbers, got None among them")
    slots = per_sample.get("sample_slot")
    ids: dict[str, Any] = {name: spread(values) for name, values in per_sample.items() if values is not None}
    for name in _TOKEN_COLUMNS:
        if name in given:
            ids[name] = join([as_tensor(given[name][i]) for i in kept])
    return TokenBatch(
        join([values for values, _ in scores]),
        rollout,
        join([as_tensor(given["mask"][i]) != 0 for i in kept]) if "mask" in given else everywhere,
        valid=everywhere,
        rollout_missing=missing,
        token_position=join([torch.arange(len(train[i]), device="cpu") for i in kept]),
        labels={name: spread(codes) for name, codes in labels.items()},
        **ids,
        whole_slots=None if slots is None else _integers(known_id(slots[i]) for i in kept),
        refused_samples=len(train) - len(kept),
        refused_active=refused_active,
        refused_total=refused_total,
        refusal=refusal,
    )


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


_TOKEN_COLUMNS = ("token_ids", "rollout_token_ids")
