"""Hypothesis strategies for samples, and the cutting of samples over virtual (dp, cp, micro-batch) layouts.

A *virtual rank* is a collector of its own. Packing every rank's state and adding the vectors is what a SUM all-reduce
does, so every law about layouts can be tested in one process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from oracle import Expected, Sample, differences

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch

RUBBISH = (math.nan, math.inf, -math.inf, -9999.0, 1.0, 0.0, torch.finfo(torch.float32).min)
LAYOUT_METRICS = ("worst_rank", "worst_microbatch")

# --- reports --------------------------------------------------------------------------------------------------------


def reduce(collectors: Sequence[Collector], config: AuditConfig) -> StepReport:
    """The report of a group whose ranks hold these collectors."""
    size = len(collectors)
    vectors = [collector.pack(group_rank=rank, group_size=size) for rank, collector in enumerate(collectors)]
    return StepReport.from_vector(torch.stack(vectors).sum(0), config, group_size=size)


def observe(*updates: dict[str, Any] | TokenBatch, config: AuditConfig | None = None) -> StepReport:
    """The report of one rank after these updates."""
    return collect(*updates, config=config).compute()


def collect(*updates: dict[str, Any] | TokenBatch, config: AuditConfig | None = None) -> Collector:
    collector = Collector(config or AuditConfig())
    for update in updates:
        apply(collector, update)
    return collector


def apply(collector: Collector, update: dict[str, Any] | TokenBatch) -> None:
    if isinstance(update, TokenBatch):
        collector.update(update)
    else:
        collector.update(**update)


def without_layout(report: StepReport) -> dict[str, Any]:
    """Everything in a report that the cutting of its tokens over ranks and micro-batches must not change."""
    figures = report.to_dict()
    for name in LAYOUT_METRICS:
        figures["metrics"].pop(name)
    for token in figures["worst_tokens"]:
        token.pop("rank"), token.pop("microbatch")
    for name in ("ranks", "scope", "group_size", "update_count", "updates"):
        figures.pop(name, None)
    return figures


def bits(value: Any) -> Any:
    """The value with every float as its bits, so that -0.0 and 0.0 differ and NaN equals itself."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def assert_reports(report: StepReport, expected: Expected, **tolerance: Any) -> None:
    """The report says what the oracle says: figures, warnings and worst tokens with their ids."""
    found = differences(report.metrics, expected, **tolerance)
    assert not found, "\n".join(found)
    assert report.warnings == expected.warnings
    assert report.metrics["warning_count"] == sum(expected.warnings.values())
    assert worst_of(report) == [asdict(worst) | {"labels": None} for worst in expected.worst]


def worst_of(report: StepReport) -> list[dict[str, Any]]:
    """The worst tokens as the oracle writes them, their labels aside."""
    names = (
        "abs_dlogp",
        "dlogp",
        "train_logp",
        "rollout_logp",
        "sample_index",
        "rollout_id",
        "token_position",
        "token_id",
    )
    return [{name: getattr(token, name) for name in names} | {"labels": None} for token in report.worst_tokens]


# --- data -----------------------------------------------------------------------------------------------------------

log_probs = st.floats(-60.0, 0.0, width=32) | st.sampled_from([0.0, -0.0, -(2.0**-100), -999.5, -0.5])
drifts = st.sampled_from([0.0, 0.0, 0.001, -0.001, 0.25, -0.25, 2.0, -3.0, 1e-20])
faults = st.sampled_from([math.nan, -math.inf, math.inf, -9999.0, -1000.0, 0.5, torch.finfo(torch.float32).min])


@st.composite
def tokens(draw: st.DrawFn, faulty: bool = True) -> tuple[float, float | None, int]:
    """(train, rollout, mask) of one token; now and then a side holds something that is no log-probability."""
    train = draw(log_probs)
    rollout = float(np.float32(min(0.0, train + draw(drifts)))) if draw(st.booleans()) else draw(log_probs)
    kind = draw(st.integers(0, 11)) if faulty else 11
    if kind == 0:
        train = draw(faults)
    elif kind == 1:
        rollout = draw(faults | st.none())
    return train, rollout, draw(st.sampled_from([1, 1, 1, 0]))


@st.composite
def samples(draw: st.DrawFn, faulty: bool = True, max_samples: int = 6, max_tokens: int = 9) -> list[Sample]:
    """Samples of unequal lengths, some empty, each with ids of its own."""
    made = []
    for index in range(draw(st.integers(0, max_samples))):
        column = draw(st.lists(tokens(faulty), max_size=max_tokens))
        made.append(sample_of(column, index, random.Random(index)))
    return made


def sample_of(column: Sequence[tuple[float, float | None, int]], index: int, rng: random.Random) -> Sample:
    ids = [rng.randrange(32000) for _ in column]
    return Sample(
        [train for train, _, _ in column],
        [rollout for _, rollout, _ in column],
        [mask for _, _, mask in column],
        sample_index=index,
        rollout_id=7000 + index,
        token_ids=ids,
        rollout_token_ids=[other + (rng.random() < 0.05) for other in ids],
        updates_since_rollout=rng.randrange(3),
        prompt_length=rng.randrange(5),
    )


def random_samples(rng: random.Random, count: int, longest: int = 12, faulty: bool = True) -> list[Sample]:
    """As `samples`, from a generator: for laws that need many tokens quickly."""

    def token() -> tuple[float, float | None, int]:
        train = float(np.float32(-rng.expovariate(0.7)))
        drift = rng.choice([0.0, 0.0, 0.01, -0.01, 0.3]) * rng.choice([1.0, rng.random()])
        rollout: float | None = float(np.float32(min(0.0, train + drift)))
        if faulty and rng.random() < 0.06:
            wrong = rng.choice([math.nan, -math.inf, math.inf, -9999.0, None])
            train, rollout = (train, wrong) if wrong is None or rng.random() < 0.5 else (wrong, rollout)
        return train, rollout, int(rng.random() < 0.85)

    return [
        sample_of([token() for _ in range(rng.choice([0, 1, *[rng.randint(2, longest)] * 4]))], i, rng)
        for i in range(count)
    ]


# --- one micro-batch in each of the forms that `update` takes --------------------------------------------------------


class Columns:
    """Samples laid into arrays: each is `prompt, response, padding`, and what lies outside the response is rubbish."""

    def __init__(self, group: Sequence[Sample], rng: random.Random, shift: int = 0) -> None:
        self.group, self.rng, self.shift = group, rng, shift

    def row(self, sample: Sample, width: int) -> dict[str, list[Any]]:
        """One sequence of `width` entries; with a shift of 1, entry i holds the log-probability of token i + 1."""
        start, length = sample.prompt_length - self.shift, len(sample)
        ours = sample.token_ids or [-1] * length
        row = {name: [self.rng.choice(RUBBISH) for _ in range(width)] for name in ("train", "rollout")}
        row |= {name: [0] * width for name in ("mask", "valid", "missing", "token_ids", "rollout_token_ids")}
        for i in range(length):
            place, rollout = start + i, sample.rollout[i]
            row["train"][place] = sample.train[i]
            row["rollout"][place] = self.rng.choice(RUBBISH) if rollout is None else rollout
            row["missing"][place] = int(rollout is None)
            row["mask"][place] = 1 if sample.mask is None else sample.mask[i]
            row["valid"][place] = 1
            row["token_ids"][place] = ours[i]
            row["rollout_token_ids"][place] = (sample.rollout_token_ids or ours)[i]
        return row

    def length(self, sample: Sample) -> int:
        return sample.prompt_length + len(sample)

    def per_sample(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "sample_index": torch.tensor([s.sample_index for s in self.group], dtype=torch.int64),
            "rollout_id": torch.tensor([s.rollout_id for s in self.group], dtype=torch.int64),
            "sample_slot": torch.tensor([s.slot for s in self.group], dtype=torch.int64),
        }
        if all(s.updates_since_rollout is not None for s in self.group):
            ages = [s.updates_since_rollout for s in self.group]
            fields["updates_since_rollout"] = torch.tensor(ages, dtype=torch.int64)
        return fields | labels_of(self.group, lambda codes: torch.tensor(codes, dtype=torch.int64))

    def starts(self) -> torch.Tensor:
        return torch.tensor([s.prompt_length for s in self.group], dtype=torch.int64)

    def batch(self, build: Callable[..., TokenBatch], arrays: dict[str, torch.Tensor], **place: Any) -> TokenBatch:
        fields = {name: arrays[name] for name in ("token_ids", "rollout_token_ids")} | self.per_sample()
        if "cu_seqlens" not in place or self.rng.random() < 0.5:
            fields["valid"] = arrays["valid"]  # where sequences end tells what is valid in a pack
        return build(
            arrays["train"], arrays["rollout"], arrays["mask"], rollout_missing=arrays["missing"],
            response_start=self.starts(), index_scores="next_token" if self.shift else "token", **fields, **place,
        )  # fmt: skip


def labels_of(group: Sequence[Sample], as_codes: Callable[[list[int]], Any]) -> dict[str, Any]:
    names = sorted({name for sample in group for name in sample.labels})
    return {"labels": {name: as_codes([s.labels.get(name, -1) for s in group]) for name in names}} if names else {}


def _tensors(
    rows: Sequence[dict[str, list[Any]]], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    empty = {
        "train": [],
        "rollout": [],
        "mask": [],
        "valid": [],
        "missing": [],
        "token_ids": [],
        "rollout_token_ids": [],
    }
    kinds = {"train": torch.float32, "rollout": torch.float32, "missing": torch.bool}
    return {
        name: join([torch.tensor(row[name], dtype=kinds.get(name, torch.int64)) for row in rows or [empty]])
        for name in empty
    }


def as_lists(group: Sequence[Sample], rng: random.Random) -> list[TokenBatch]:
    """Ragged lists of the responses."""
    fields: dict[str, Any] = labels_of(group, list)
    if all(s.updates_since_rollout is not None for s in group):
        fields["updates_since_rollout"] = [s.updates_since_rollout for s in group]
    if all(s.token_ids is not None for s in group):
        fields["token_ids"] = [s.token_ids for s in group]
        fields["rollout_token_ids"] = [s.rollout_token_ids or s.token_ids for s in group]
    masks = [[1] * len(s.train) if s.mask is None else s.mask for s in group]
    return [
        TokenBatch.from_lists(
            [s.train for s in group], [s.rollout for s in group], masks,
            sample_index=[s.sample_index for s in group], rollout_id=[s.rollout_id for s in group],
            sample_slot=[s.slot for s in group], **fields,
        )
    ]  # fmt: skip


def as_flat(group: Sequence[Sample], rng: random.Random) -> list[dict[str, Any]]:
    """One array of single tokens in random order, each with its ids."""
    entries = [(s, i) for s in group for i in range(len(s))]
    rng.shuffle(entries)
    columns = Columns(group, rng)
    rows = {id(s): columns.row(s, columns.length(s)) for s in group}
    at = [(s, i, rows[id(s)], s.prompt_length + i) for s, i in entries]
    update = {
        "train_log_probs": torch.tensor([row["train"][p] for _, _, row, p in at], dtype=torch.float32),
        "rollout_log_probs": torch.tensor([row["rollout"][p] for _, _, row, p in at], dtype=torch.float32),
        "mask": torch.tensor([row["mask"][p] for _, _, row, p in at], dtype=torch.float32),
        "valid": torch.ones(len(at), dtype=torch.bool),
        "rollout_missing": torch.tensor([row["missing"][p] for _, _, row, p in at], dtype=torch.bool),
        "sample_index": torch.tensor([s.sample_index for s, _, _, _ in at], dtype=torch.int64),
        "rollout_id": torch.tensor([s.rollout_id for s, _, _, _ in at], dtype=torch.int64),
        "sample_slot": torch.tensor([s.slot for s, _, _, _ in at], dtype=torch.int64),
        "whole_slots": torch.tensor([s.slot for s in group], dtype=torch.int64),
        "token_position": torch.tensor([i for _, i, _, _ in at], dtype=torch.int64),
        "token_ids": torch.tensor([row["token_ids"][p] for _, _, row, p in at], dtype=torch.int64),
        "rollout_token_ids": torch.tensor([row["rollout_token_ids"][p] for _, _, row, p in at], dtype=torch.int64),
    }
    if all(s.updates_since_rollout is not None for s in group):
        ages = [s.updates_since_rollout for s, _, _, _ in at]
        update["updates_since_rollout"] = torch.tensor(ages, dtype=torch.int64)
    names = {name for s in group for name in s.labels}
    if names:
        update["labels"] = {
            n: torch.tensor([s.labels.get(n, -1) for s, _, _, _ in at], dtype=torch.int64) for n in names
        }
    return [update]


def as_padded(group: Sequence[Sample], rng: random.Random, padding: int | None = None) -> list[TokenBatch]:
    """[B, S] with prompts before and padding behind; entry i scores token i or token i + 1."""
    columns = Columns(group, rng, shift=rng.randrange(2) if all(s.prompt_length for s in group) else 0)
    width = max(map(columns.length, group), default=0) + (rng.randrange(3) if padding is None else padding)
    arrays = _tensors([columns.row(s, width) for s in group], _stack)
    return [columns.batch(TokenBatch.from_padded, arrays)]


def as_packed(group: Sequence[Sample], rng: random.Random) -> list[TokenBatch]:
    """One sequence behind another, with padding behind the last."""
    columns = Columns(group, rng, shift=rng.randrange(2) if all(s.prompt_length for s in group) else 0)
    rows = [columns.row(s, columns.length(s)) for s in group]
    bounds = np.cumsum([0, *map(columns.length, group)]).tolist()
    padding = Columns([], rng).row(Sample([], []), rng.randrange(4) if group else 0)
    return [
        columns.batch(TokenBatch.from_packed, _tensors([*rows, padding], torch.cat), cu_seqlens=torch.tensor(bounds))
    ]


def as_cp_padded(group: Sequence[Sample], rng: random.Random, cp_size: int, layout: str) -> list[TokenBatch]:
    """[B, S / cp] on each context-parallel rank."""
    columns = Columns(group, rng, shift=rng.randrange(2) if all(s.prompt_length for s in group) else 0)
    width = round_up(max(map(columns.length, group), default=0) + rng.randrange(3), 2 * cp_size)
    arrays = _tensors([columns.row(s, width) for s in group], _stack)
    if not group:
        arrays = {name: array.new_zeros((0, width)) for name, array in arrays.items()}
    owned = [positions_of_cp_rank(width, rank, cp_size, layout) for rank in range(cp_size)]
    return [
        columns.batch(
            TokenBatch.from_cp_shard, {name: array[:, owned[rank]] for name, array in arrays.items()},
            cp_rank=rank, cp_size=cp_size, seq_length=width, layout=layout,
        )
        for rank in range(cp_size)
    ]  # fmt: skip


def as_cp_packed(group: Sequence[Sample], rng: random.Random, cp_size: int, layout: str) -> list[TokenBatch]:
    """[total / cp] on each context-parallel rank: every sequence is padded and cut over the ranks by itself (THD)."""
    columns = Columns(group, rng, shift=rng.randrange(2) if all(s.prompt_length for s in group) else 0)
    lengths = list(map(columns.length, group))
    widths = [round_up(length, 2 * cp_size) for length in lengths]
    arrays = _tensors([columns.row(s, width) for s, width in zip(group, widths, strict=True)], torch.cat)
    bounds, padded = np.cumsum([0, *lengths]).tolist(), np.cumsum([0, *widths]).tolist()
    batches = []
    for rank in range(cp_size):
        pieces = [padded[i] + positions_of_cp_rank(w, rank, cp_size, layout) for i, w in enumerate(widths)]
        owned = torch.cat([torch.zeros(0, dtype=torch.int64), *pieces])
        batches.append(
            columns.batch(
                TokenBatch.from_cp_shard, {name: array[owned] for name, array in arrays.items()},
                cp_rank=rank, cp_size=cp_size, layout=layout,
                cu_seqlens_padded=torch.tensor(padded), cu_seqlens=torch.tensor(bounds),
            )
        )  # fmt: skip
    return batches


def _stack(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, 0)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def positions_of_cp_rank(length: int, rank: int, cp_size: int, layout: str) -> torch.Tensor:
    """The places of a sequence that a context-parallel rank owns, in its own order."""
    if layout == "contiguous" or cp_size == 1:
        return torch.arange(rank * length // cp_size, (rank + 1) * length // cp_size)
    chunks = torch.arange(length).chunk(2 * cp_size) if length else [torch.zeros(0, dtype=torch.int64)] * 2 * cp_size
    return torch.cat([chunks[rank], chunks[2 * cp_size - 1 - rank]])


WHOLE_FORMS: tuple[Callable[..., list[Any]], ...] = (as_lists, as_flat, as_padded, as_packed)
CUT_FORMS: tuple[Callable[..., list[TokenBatch]], ...] = (as_cp_padded, as_cp_packed)

# --- layouts --------------------------------------------------------------------------------------------------------


def split(items: Sequence[Any], parts: int, rng: random.Random) -> list[list[Any]]:
    """The items dealt to `parts` parts at random; some may stay empty."""
    dealt: list[list[Any]] = [[] for _ in range(parts)]
    for item in items:
        rng.choice(dealt).append(item)
    return dealt


def cut(group: Sequence[Sample], rng: random.Random, dp: int, cp: int, config: AuditConfig) -> list[Collector]:
    """Collectors of dp * cp ranks, in random order, that hold every token of the samples exactly once."""
    ranks = []
    for share in split(group, dp, rng):
        cp_ranks = [Collector(config) for _ in range(cp)]
        for microbatch, batches in enumerate(_microbatches(share, rng, cp)):
            for collector, batch in zip(cp_ranks, batches, strict=True):
                _update(collector, batch, microbatch)
        ranks += cp_ranks
    rng.shuffle(ranks)
    return ranks


def _microbatches(share: Sequence[Sample], rng: random.Random, cp: int) -> Iterator[list[Any]]:
    """The share of one data-parallel rank as micro-batches, each with one piece for every context-parallel rank."""
    if not share and rng.random() < 0.5:
        return
    for part in split(share, rng.randint(1, 3), rng):
        if cp == 1:
            yield rng.choice(WHOLE_FORMS)(part, rng)
        else:
            yield rng.choice(CUT_FORMS)(part, rng, cp, rng.choice(["zigzag", "contiguous"]))


def _update(collector: Collector, batch: Any, microbatch: int) -> None:
    if isinstance(batch, TokenBatch):
        collector.update(batch, microbatch=microbatch)
    else:
        collector.update(**batch, microbatch=microbatch)
