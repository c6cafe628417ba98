"""Evidence: the worst samples are written whole and exactly, within bounds, and never at the training's cost."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import math
import random
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Sample, audit, token_class
from strategies import (
    CUT_FORMS,
    WHOLE_FORMS,
    apply,
    as_cp_packed,
    as_cp_padded,
    as_lists,
    as_packed,
    as_padded,
    random_samples,
    reduce,
    split,
)

from rlk_audit import AuditConfig, Collector, TokenBatch
from rlk_audit.evidence import EvidenceBuffer, restore_nonfinite
from rlk_audit.token_table import TokenTable

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1")})
ENGINES = {-1: None, 0: "e0", 1: "e1"}

# --- reading back ---------------------------------------------------------------------------------------------------


def refuse_constant(text: str) -> float:
    raise AssertionError(f"{text} is not JSON")


def read(path: Path | None) -> list[dict[str, Any]]:
    """The records of a file that any strict JSON reader could read, NaN and infinities restored."""
    assert path is not None
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.decode("ascii").splitlines()
    return [restore_nonfinite(json.loads(line, parse_constant=refuse_constant)) for line in lines]


def bits(values: Sequence[float | None]) -> list[str | None]:
    return [None if value is None else float(value).hex() for value in values]


def assert_whole(record: dict[str, Any], sample: Sample, positions: Sequence[int] | None = None) -> None:
    """The record tells every token of the sample, or those at the positions of a part, as the sample has them."""
    where = range(len(sample)) if positions is None else positions
    assert record["token_position"] == list(where)
    assert bits(record["train_log_probs"]) == bits([sample.train[i] for i in where])
    assert bits(record["rollout_log_probs"]) == bits([sample.rollout[i] for i in where])
    assert record["mask"] == [int(sample.mask[i] != 0) for i in where]
    assert record["token_ids"] == [sample.token_ids[i] for i in where]
    assert record["rollout_token_ids"] == [sample.rollout_token_ids[i] for i in where]
    assert record["rollout_id"] == sample.rollout_id
    assert record["updates_since_rollout"] == sample.updates_since_rollout
    assert record["labels"] == {"engine": ENGINES[sample.labels["engine"]]}


# --- brute force ----------------------------------------------------------------------------------------------------


def labelled(rng: random.Random, count: int, **options: Any) -> list[Sample]:
    samples = random_samples(rng, count, **options)
    for sample in samples:
        sample.labels = {"engine": rng.choice([-1, 0, 1])}
    return samples


def classes(sample: Sample) -> list[str]:
    return [
        token_class(train, rollout, ours != theirs)
        for train, rollout, ours, theirs, mask in zip(
            sample.train, sample.rollout, sample.token_ids, sample.rollout_token_ids, sample.mask, strict=True
        )
        if mask
    ]


def worst_samples(samples: Sequence[Sample], named: Sequence[int], count: int) -> list[int]:
    """The indices that a buffer of these samples must write, in order."""
    drift, faults = {}, {}
    for sample in samples:
        drift[sample.sample_index] = max((w.abs_dlogp for w in audit([sample], worst_k=1).worst), default=-1.0)
        faults[sample.sample_index] = sum(name in CONFIG.classes_not_allowed for name in classes(sample))
    place = {index: named.index(index) for index in named}
    order = sorted((s.sample_index for s in samples if len(s)), key=lambda i: (place.get(i, 99), -drift[i], i))
    faulty = sorted((i for i in order if faults[i]), key=lambda i: -faults[i])[: math.ceil(count / 2)]
    rest = [i for i in order if i not in faulty][: count - len(faulty)]
    return [i for i in order if i in faulty or i in rest]


def batch_of(update: TokenBatch | dict[str, Any]) -> TokenBatch:
    return update if isinstance(update, TokenBatch) else TokenBatch(**update)


def filled(folder: Path, updates: Sequence[TokenBatch | dict[str, Any]], **options: Any) -> EvidenceBuffer:
    buffer = EvidenceBuffer(folder, config=CONFIG, **options)
    for microbatch, update in enumerate(updates):
        buffer.keep(batch_of(update), microbatch)
    return buffer


# --- what is written ------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), faulty=st.booleans())
def test_the_worst_samples_are_written_whole(
    seed: int, count: int, faulty: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Lists, single tokens in any order, padded rows and packs, mixed in one step, against brute force.

    Kills: a sample cut at its mask, a prompt or padding written, an order by array place, NaN told as missing, the
    faulty samples crowded out by the drifting ones or the other way round.
    """
    rng = random.Random(seed)
    samples = labelled(rng, rng.randint(1, 9), faulty=faulty)
    groups = split(samples, 3, rng)
    updates = [update for group in groups for update in rng.choice(WHOLE_FORMS)(group, rng)]
    collector = Collector(CONFIG)
    for update in updates:
        apply(collector, update)
    report = collector.compute()
    buffer = filled(tmp_path_factory.mktemp("evidence"), updates, samples=count)
    path = buffer.write(3, report, rank=5)
    named = [worst.sample_index for worst in audit(samples).worst]
    expected = worst_samples(samples, named, count)
    if not expected:
        assert path is None
        return
    assert path is not None
    assert path.name == "evidence_step00000003_rank00005.jsonl"
    records = read(path)
    assert [record["sample_index"] for record in records] == expected
    by_index = {sample.sample_index: sample for sample in samples}
    for record in records:
        assert_whole(record, by_index[record["sample_index"]])
        group = next(g for g, members in enumerate(groups) if by_index[record["sample_index"]] in members)
        assert (record["step"], record["rank"], record["microbatch"]) == (3, 5, group)


@given(seed=st.integers(0, 2**32), form=st.sampled_from(CUT_FORMS), layout=st.sampled_from(["zigzag", "contiguous"]))
def test_parts_of_context_parallel_ranks_join(
    seed: int, form: Callable[..., list[TokenBatch]], layout: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every rank writes its part of the worst sample, and sample index and position put it together.

    Kills: positions local to the shard, a rank that writes its own worst sample in place of the group's.
    """
    rng = random.Random(seed)
    samples = labelled(rng, rng.randint(1, 6), faulty=False)
    cp_size, folder = rng.choice([1, 2, 4]), tmp_path_factory.mktemp("evidence")
    shards = form(samples, rng, cp_size, layout)
    collectors = []
    for shard in shards:
        collectors.append(Collector(CONFIG))
        collectors[-1].update(shard)
    report = reduce(collectors, CONFIG)
    parts = defaultdict(list)
    for rank, shard in enumerate(shards):
        path = filled(folder, [shard], samples=len(samples)).write(0, report, rank)
        for record in read(path) if path else []:
            parts[record["sample_index"]].append(record)
    assert sorted(parts) == [sample.sample_index for sample in samples if len(sample)]
    for sample in samples:
        owned = [record["token_position"] for record in parts[sample.sample_index]]
        assert sorted(position for part in owned for position in part) == list(range(len(sample)))
        for record in parts[sample.sample_index]:
            assert record["token_position"] == sorted(record["token_position"])
            assert_whole(record, sample, record["token_position"])


@pytest.mark.parametrize("form", [as_cp_padded, as_cp_packed])
def test_each_rank_writes_its_part_of_the_named_sample(form: Callable[..., list[TokenBatch]], tmp_path: Path) -> None:
    """The drift lies on one rank only, the others' own worst sample is another one."""
    rng = random.Random(0)
    samples = labelled(rng, 4, faulty=False)
    for sample in samples:
        sample.train, sample.rollout, sample.mask = [-1.0] * 8, [-1.5] * 8, [1] * 8
        sample.token_ids = sample.rollout_token_ids = list(range(8))
        sample.prompt_length = 0
    samples[2].rollout = [-1.0] * 7 + [-9.0]
    shards = form(samples, rng, 2, "contiguous")
    collectors = [Collector(CONFIG), Collector(CONFIG)]
    for collector, shard in zip(collectors, shards, strict=True):
        collector.update(shard)
    report = reduce(collectors, CONFIG)
    for rank, shard in enumerate(shards):
        records = read(filled(tmp_path, [shard], samples=1).write(0, report, rank))
        assert [record["sample_index"] for record in records] == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_written_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """Ten thousand random values and the odd ones. Kills: rounding to a number of digits, a detour through float32."""
    generator = torch.Generator().manual_seed(1)
    train = (-20 * torch.rand(4, 2500, generator=generator, dtype=torch.float64)).to(dtype)
    rollout = (train.double() + 0.01 * torch.randn(4, 2500, generator=generator, dtype=torch.float64)).to(dtype)
    odd = [0.0, -0.0, math.nan, math.inf, -math.inf, torch.finfo(dtype).min, torch.finfo(dtype).tiny, -1e-7]
    train[1, :8] = rollout[2, -8:] = torch.tensor(odd, dtype=dtype)
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch.from_padded(train, rollout, torch.ones(4, 2500), sample_index=torch.arange(4)))
    records = {record["sample_index"]: record for record in read(buffer.write(0))}
    assert sorted(records) == [0, 1, 2, 3]
    for row, record in records.items():
        assert bits(record["train_log_probs"]) == bits(train[row].tolist())
        assert bits(record["rollout_log_probs"]) == bits(rollout[row].tolist())
        assert record["train_log_probs_dtype"] == record["rollout_log_probs_dtype"] == str(dtype)[6:]
        assert torch.tensor(record["train_log_probs"], dtype=dtype).equal(train[row]) or row == 1


def test_missing_nan_and_infinities_are_told_apart(tmp_path: Path) -> None:
    """In the file all four are null; ``*_nonfinite`` tells which is what."""
    buffer = EvidenceBuffer(tmp_path)
    rollout = [None, math.nan, -math.inf, math.inf, -1.0]
    buffer.keep(TokenBatch.from_lists([[-1.0, math.nan, -2.0, -math.inf, -3.0]], [rollout], sample_index=[4]))
    path = buffer.write(0)
    assert path is not None
    raw = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert raw["rollout_log_probs"] == [None, None, None, None, -1.0]
    assert raw["rollout_nonfinite"] == {"NaN": [1], "-Infinity": [2], "Infinity": [3]}
    assert raw["train_log_probs"] == [-1.0, None, -2.0, None, -3.0]
    assert raw["train_nonfinite"] == {"NaN": [1], "-Infinity": [3]}
    restored = restore_nonfinite(raw)
    assert bits(restored["rollout_log_probs"]) == bits(rollout)
    assert "rollout_nonfinite" not in restored
    assert "rollout_nonfinite" in raw, "its argument is not changed"
    # A table restores a raw line itself. Kills: a trainer's filter, T = -inf, read as a missing value.
    table = TokenTable.from_rows([raw])
    assert bits(table.train.tolist()) == bits([-1.0, math.nan, -2.0, -math.inf, -3.0])
    assert bits(table.rollout.tolist()) == bits([math.nan, math.nan, -math.inf, math.inf, -1.0])
    told = {"train_log_probs": [-1.0, None], "train_nonfinite": {"-Infinity": [1]}, "rollout_nonfinite": {"NaN": [0]}}
    assert bits(TokenTable.from_rows([told | {"rollout_log_probs": None}]).train.tolist()) == bits([-1.0, -math.inf])
    assert TokenTable.from_rows([told]).train.tolist() == [-1.0, -math.inf], "without a rollout side at all"


def test_a_batch_without_rollout_values_is_all_missing(tmp_path: Path) -> None:
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch.from_lists([[-1.0, -2.0]], None))
    (record,) = read(buffer.write(0))
    assert record["rollout_log_probs"] == [None, None]
    assert record["sample_index"] is None


def test_a_missing_value_is_null_whatever_stands_there(tmp_path: Path) -> None:
    """Stated by a mask or by a None, in one batch. Kills: rubbish of a missing slot told as NaN, one statement lost."""
    missing = torch.tensor([[True, True, False, False]])
    rollout = np.array([[math.nan, -2.0, None, -4.0]], dtype=object)
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch(torch.zeros(1, 4), rollout, torch.ones(1, 4), rollout_missing=missing))
    (record,) = read(buffer.write(0))
    assert record["rollout_log_probs"] == [None, None, None, -4.0]


def test_a_prompt_is_no_part_of_the_sample(tmp_path: Path) -> None:
    """Where its length alone tells; padding behind stays, nothing tells it from tokens that are not active."""
    train = torch.tensor([[-9.0, -9.0, -1.0, -2.0, -9.0], [-9.0, -3.0, -4.0, -5.0, -6.0]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 1]])
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch.from_padded(train, train, mask, response_start=torch.tensor([2, 1])))
    told = [(r["train_log_probs"], r["token_position"], r["mask"]) for r in read(buffer.write(0))]
    assert sorted(told) == [
        ([-3.0, -4.0, -5.0, -6.0], [0, 1, 2, 3], [1, 0, 1, 1]),
        ([-1.0, -2.0, -9.0], [0, 1, 2], [1, 1, 0]),
    ]


def test_labels_that_differ_over_tokens_are_lists(tmp_path: Path) -> None:
    config = AuditConfig(breakdowns={"turn": 2, "engine": ("a",)})
    labels = {"turn": torch.tensor([[0, 1, -1]]), "engine": torch.tensor([[0]])}
    buffer = EvidenceBuffer(tmp_path, config=config)
    batch = TokenBatch(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3), rollout_id=9, labels=labels)
    buffer.keep(batch)
    (record,) = read(buffer.write(0))
    assert record["labels"] == {"turn": ["0", "1", None], "engine": "a"}
    assert record["rollout_id"] == 9


@pytest.mark.parametrize("form", [as_lists, as_padded, as_packed])
def test_samples_without_an_index_stay_apart(form: Callable[..., list[TokenBatch]], tmp_path: Path) -> None:
    """Rows, and in a pack a position that starts again, tell them apart."""
    rng = random.Random(3)
    samples = labelled(rng, 6, faulty=False)
    for sample in samples:
        sample.sample_index = -1
    records = read(filled(tmp_path, form(samples, rng)).write(0))
    told = sorted(bits(record["train_log_probs"]) for record in records)
    assert told == sorted(bits(sample.train) for sample in samples if len(sample))
    assert {record["sample_index"] for record in records} == {None}


def test_one_index_in_two_rows_is_two_samples(tmp_path: Path) -> None:
    """Responses of one prompt group may share an index. Kills: rows joined into a sample of twofold positions."""
    buffer = EvidenceBuffer(tmp_path)
    train = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    buffer.keep(
        TokenBatch.from_padded(train, train, torch.ones(2, 2), response_start=0, sample_index=torch.tensor([7, 7]))
    )
    assert sorted(r["train_log_probs"] for r in read(buffer.write(0))) == [[-3.0, -4.0], [-1.0, -2.0]]


@pytest.mark.parametrize("columns", [2, 3])
def test_a_value_a_row_is_the_row_s(columns: int, tmp_path: Path) -> None:
    """As the collector takes it, also where there are as many rows as columns."""
    shape, config = (2, columns), AuditConfig(breakdowns={"engine": ("a", "b")})
    batch = TokenBatch(
        torch.full(shape, -2.0), torch.full(shape, -1.0), torch.ones(shape), labels={"engine": torch.tensor([1, 0])},
        sample_index=torch.tensor([7, 9]), rollout_id=torch.tensor([3, 4]),
    )  # fmt: skip
    buffer = EvidenceBuffer(tmp_path, config=config)
    buffer.keep(batch, 0)
    records = read(buffer.write(1, force=True))
    assert [(r["sample_index"], r["rollout_id"], r["labels"]) for r in records] == [
        (7, 3, {"engine": "b"}), (9, 4, {"engine": "a"}),
    ]  # fmt: skip
    assert [len(r["train_log_probs"]) for r in records] == [columns] * 2


@pytest.mark.parametrize(
    "column", ["rollout_log_probs", "mask", "token_ids", "rollout_token_ids", "token_position", "rank"]
)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_row_of_unequal_arrays_is_left_out_of_a_table(column: str, length: int) -> None:
    row = {
        "train_log_probs": [-1.0] * 3,
        "rollout_log_probs": [-1.5] * 3,
        "token_ids": [1] * 3,
        "token_position": [0, 1, 2],
    }
    table = TokenTable.from_rows([row | {column: [1] * length}, row])
    assert table.train.tolist() == [-1.0] * 3 and table.rollout.tolist() == [-1.5] * 3


def test_compressed_and_plain_say_the_same(tmp_path: Path) -> None:
    samples = labelled(random.Random(5), 6)
    batches = as_lists(samples, random.Random(0))
    plain = filled(tmp_path / "plain", batches).write(0)
    packed = filled(tmp_path / "packed", batches, compress=True).write(0)
    assert packed is not None
    assert packed.name == "evidence_step00000000_rank00000.jsonl.gz"
    assert [bits(r["train_log_probs"]) for r in read(plain)] == [bits(r["train_log_probs"]) for r in read(packed)]
    assert packed.stat().st_size < plain.stat().st_size


# --- what is kept ---------------------------------------------------------------------------------------------------


def rows(*drifts: float, length: int = 8) -> TokenBatch:
    """One padded row a drift, the sample's index that drift's place."""
    rollout = torch.full((len(drifts), length), -1.0)
    train = rollout - torch.tensor(drifts)[:, None]
    return TokenBatch(train, rollout, torch.ones_like(train), sample_index=torch.arange(len(drifts))[:, None])


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_later_changes_in_place_do_not_show(kind: str, tmp_path: Path) -> None:
    """Megatron divides the loss in place after the loss function. Kills: references kept in place of copies."""
    values = torch.tensor([[-1.0, -2.0]])
    given: Any = {"tensor": values, "array": values.numpy(), "list": values.tolist()}[kind]
    mask, ids = torch.ones(1, 2), torch.tensor([[3]])
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch(given, given, mask, sample_index=ids))
    mask.zero_(), ids.zero_()
    if kind == "list":
        given[0][0] = 5.0
    else:
        given[...] = 5.0
    (record,) = read(buffer.write(0))
    assert record["train_log_probs"] == record["rollout_log_probs"] == [-1.0, -2.0]
    assert (record["mask"], record["sample_index"]) == ([1, 1], 3)


def test_inputs_are_unchanged_and_no_graph_is_kept(tmp_path: Path) -> None:
    leaf = torch.full((2, 3), -1.0, requires_grad=True)
    train = leaf * 2
    batch = TokenBatch(train, torch.full((2, 3), -1.0), torch.ones(2, 3))
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(batch)
    watched = weakref.ref(train)
    train.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.eq(2).all()
    del train, batch
    gc.collect()
    assert watched() is None
    assert buffer.write(0) is not None


def test_nothing_is_kept_after_clear(tmp_path: Path) -> None:
    """Kills: a clear that forgets the sealed steps or the numbers of micro-batches."""

    def tensors() -> dict[int, torch.Tensor]:
        return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}

    buffer = EvidenceBuffer(tmp_path)
    gc.collect()
    before = set(tensors())
    buffer.keep(rows(1.0, 2.0), 0)
    buffer.seal(0)
    buffer.keep(rows(3.0), 0)
    gc.collect()
    kept = [weakref.ref(thing) for name, thing in tensors().items() if name not in before]
    assert len(kept) >= 8, "four columns of two micro-batches"
    assert buffer.kept_bytes > 0
    buffer.clear()
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []
    assert buffer.kept_bytes == 0
    assert buffer.write(0) is None
    buffer.keep(rows(4.0), 0)
    assert buffer.write(1, force=True) is not None


def test_ids_are_kept_as_small_as_they_came(tmp_path: Path) -> None:
    """Kills: a copy that makes broadcast ids full, eight bytes a token."""
    buffer = EvidenceBuffer(tmp_path)
    tokens = torch.zeros(4, 1000)
    position = torch.arange(1000).expand(4, 1000)
    buffer.keep(
        TokenBatch(tokens, tokens, tokens, token_position=position, sample_index=torch.arange(4)[:, None], rollout_id=3)
    )
    assert buffer.kept_bytes == 4000 * (4 + 4 + 1) + 1000 * 8 + 4 * 8 + 8


@given(
    drifts=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), min_size=1, max_size=12), room=st.integers(1, 6)
)
def test_memory_is_bounded_and_the_worst_stays(
    drifts: list[float], room: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Kills: first come, first served; the last one kept; a NaN that compares as the smallest drift."""
    size = EvidenceBuffer(tmp_path_factory.mktemp("probe"))
    size.keep(rows(0.0))
    buffer = EvidenceBuffer(tmp_path_factory.mktemp("evidence"), max_bytes=room * size.kept_bytes + 7, samples=99)
    for microbatch, drift in enumerate(drifts):
        buffer.keep(rows(drift), microbatch)
        assert buffer.kept_bytes <= room * size.kept_bytes + 7

    def severity(drift: float) -> float:
        return math.inf if math.isnan(drift) else drift

    records = read(buffer.write(0))
    told = sorted(severity(-1.0 - record["train_log_probs"][0]) for record in records)
    assert told == sorted(map(severity, drifts))[-room:]


def test_among_equals_the_first_stays(tmp_path: Path) -> None:
    size = EvidenceBuffer(tmp_path)
    size.keep(rows(1.0))
    buffer = EvidenceBuffer(tmp_path, max_bytes=size.kept_bytes)
    for microbatch in range(3):
        buffer.keep(rows(1.0), microbatch)
    assert [record["microbatch"] for record in read(buffer.write(0))] == [0]


def test_a_micro_batch_larger_than_the_bound_is_let_go_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = EvidenceBuffer(tmp_path, max_bytes=1000)
    buffer.keep(rows(0.5), 0)
    with caplog.at_level(logging.WARNING, "rlk_audit.evidence"):
        buffer.keep(rows(9.0, length=500), 1)
        buffer.keep(rows(9.0, length=500), 2)
    assert [record["microbatch"] for record in read(buffer.write(0))] == [0]
    assert [record.message for record in caplog.records] == [
        "evidence is bounded to 1000 bytes: micro-batches of least drift are let go"
    ]


def test_a_micro_batch_is_kept_once(tmp_path: Path) -> None:
    """The first evaluation counts, as in the collector."""
    buffer = EvidenceBuffer(tmp_path)
    for drift in (1.0, 5.0):
        buffer.keep(rows(drift), 0)
        buffer.keep(rows(drift))  # without a number each is its own
    told = [(r["microbatch"], r["train_log_probs"][0]) for r in read(buffer.write(0))]
    assert told == [(None, -6.0), (0, -2.0), (None, -2.0)]


@pytest.mark.parametrize(
    "batch",
    [
        TokenBatch(torch.zeros(3), torch.zeros(2), torch.ones(3)),
        TokenBatch(torch.zeros(3), torch.zeros(3)),
        TokenBatch(torch.zeros(3), torch.zeros(3), torch.ones(3), sample_index=torch.zeros(2, dtype=torch.int64)),
        TokenBatch(torch.zeros(3), torch.zeros(3), torch.ones(3), token_ids=torch.zeros(3)),
        TokenBatch([[-1.0], [-1.0, -2.0]], [[-1.0]], [[1]]),
        TokenBatch(np.array(["x"]), torch.zeros(1), torch.ones(1)),
    ],
)
def test_a_batch_that_does_not_fit_costs_only_itself(
    batch: TokenBatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = EvidenceBuffer(tmp_path)
    with caplog.at_level(logging.WARNING, "rlk_audit.evidence"):
        buffer.keep(batch, 0)
        buffer.keep(batch, 1)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("a micro-batch could not be kept as evidence: ")
    buffer.keep(rows(1.0), 2)
    assert [record["microbatch"] for record in read(buffer.write(0))] == [2]


def test_faults_and_empty_batches_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(TokenBatch.from_padded(torch.zeros(3), torch.zeros(3), torch.ones(3)))
    buffer.keep(TokenBatch.from_lists([], []))
    buffer.keep(TokenBatch.from_padded(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0)))
    assert (buffer.kept_bytes, buffer.write(0), caplog.records) == (0, None, [])


# --- steps ----------------------------------------------------------------------------------------------------------


def test_steps_between_files(tmp_path: Path) -> None:
    """Written are the first step, those 10 later, those asked for by force, and a run that went back."""
    buffer = EvidenceBuffer(tmp_path, min_steps=10)
    written = []
    for step, force in [
        (5, False),
        (6, False),
        (14, False),
        (15, False),
        (16, True),
        (25, False),
        (26, False),
        (3, False),
    ]:
        buffer.keep(rows(1.0), 0)
        if buffer.write(step, force=force):
            written.append(step)
        buffer.clear()
    assert written == [5, 15, 16, 26, 3]
    assert sorted(int(path.name[13:21]) for path in tmp_path.iterdir()) == [3, 5, 15, 16, 26]


def test_a_late_verdict_writes_the_step_it_judges(tmp_path: Path) -> None:
    """With ``lag=1`` the verdict of step t comes when step t + 1 was collected. Kills: the open step written for it."""
    buffer = EvidenceBuffer(tmp_path, min_steps=1)
    for step in range(5):
        buffer.keep(rows(float(step)), 0)
        buffer.seal(step)
        if step:
            (record,) = read(buffer.write(step - 1))
            assert record["train_log_probs"][0] == -step
            buffer.clear(step - 1)
    (record,) = read(buffer.write(4))
    assert record["train_log_probs"][0] == -5.0


def test_sealed_steps_that_nobody_clears_do_not_pile_up(tmp_path: Path) -> None:
    buffer = EvidenceBuffer(tmp_path)
    held = []
    for step in range(6):
        buffer.keep(rows(1.0), 0)
        buffer.seal(step)
        held.append(buffer.kept_bytes)
    assert held == [held[0]] + [2 * held[0]] * 5


# --- disks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [700, 1100, 4000])
def test_the_files_of_a_rank_stay_below_the_bound(bound: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Across buffers, as in a resumed run; another rank's files do not count, deleted ones no longer do."""
    for step in range(30):
        buffer = EvidenceBuffer(tmp_path, max_disk_bytes=bound)
        buffer.keep(rows(1.0, 2.0, 3.0), 0)
        buffer.write(step, rank=2)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert bound - sum(sizes) < max(sizes), "the room is used"
    assert buffer.write(30, rank=2) is None
    assert buffer.write(0, rank=2, force=True) is not None, "a file that is replaced makes room for its successor"
    assert buffer.write(31, rank=1, force=True) is not None
    for path in tmp_path.glob("*rank00002*"):
        path.unlink()
    assert buffer.write(32, rank=2, force=True) is not None
    assert f"is bounded to {bound} bytes a rank" in caplog.text


def test_a_step_written_again_replaces_its_file(tmp_path: Path) -> None:
    buffer = EvidenceBuffer(tmp_path)
    buffer.keep(rows(1.0), 0)
    first = buffer.write(0)
    buffer.keep(rows(2.0), 1)
    assert buffer.write(0, force=True) == first
    assert len(read(first)) == 2
    assert list(tmp_path.iterdir()) == [first]


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Root may write to any folder, so a file stands where the folder should."""
    (tmp_path / "file").write_text("")
    buffer = EvidenceBuffer(tmp_path / "file" / "evidence", min_steps=1)
    buffer.keep(rows(1.0), 0)
    with caplog.at_level(logging.WARNING, "rlk_audit.evidence"):
        assert [buffer.write(step) for step in range(3)] == [None, None, None]
    assert len(caplog.records) == 1
    assert "the evidence of step 0 could not be written to" in caplog.records[0].message


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    buffer = EvidenceBuffer(tmp_path / "evidence", min_steps=1)
    buffer.keep(rows(1.0), 0)
    first = buffer.write(0)
    assert first is not None
    first.unlink()
    first.parent.rmdir()
    assert buffer.write(1) is not None


FULL_DISK = """
import resource, sys, torch
from rlk_audit import TokenBatch
from rlk_audit.evidence import EvidenceBuffer

buffer = EvidenceBuffer(sys.argv[1], min_steps=1)
buffer.keep(TokenBatch(torch.zeros(1, 9), torch.zeros(1, 9), torch.ones(1, 9)), 0)
small = buffer.write(0)
buffer.keep(TokenBatch(torch.zeros(4, 5000), torch.zeros(4, 5000), torch.ones(4, 5000)), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
failed = [buffer.write(1), buffer.write(2)]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(small is not None, failed, buffer.write(3) is not None)
"""


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    """The write breaks off in mid-file, is told once, and works again when there is room."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True [None, None] True\n"
    assert done.stderr.count("could not be written") == 1
    assert "File too large" in done.stderr
    steps = sorted(path.name for path in tmp_path.iterdir())
    assert steps == ["evidence_step00000000_rank00000.jsonl", "evidence_step00000003_rank00000.jsonl"]


@pytest.mark.parametrize("name", ["max_bytes", "samples", "min_steps", "max_disk_bytes"])
@pytest.mark.parametrize("bound", [0, -1, 2.5, True, None])
def test_bounds_are_checked_at_set_up(name: str, bound: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        EvidenceBuffer(tmp_path, **{name: bound})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_evidence_of_a_gpu_is_kept_in_host_memory(tmp_path: Path) -> None:
    train = torch.full((2, 4), -1.0, device="cuda")
    buffer = EvidenceBuffer(tmp_path, max_bytes=150)
    buffer.keep(TokenBatch(train, train - 1, train != 0, sample_index=torch.arange(2)[:, None]), 0)
    buffer.keep(TokenBatch(train, train - 2, train != 0, sample_index=torch.arange(2)[:, None]), 1)
    assert {record["microbatch"] for record in read(buffer.write(0))} == {1}
