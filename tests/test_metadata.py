"""Metadata through partitions: every field reaches its sample, and nothing else ever sees it."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_audit import AuditConfig, Collector, TokenBatch
from rlk_audit.metadata import (
    FIELDS,
    audit_key,
    audit_keys,
    batch_fields,
    missing_fields,
    partition_metadata,
    strip_audit_keys,
    undeclared_names,
)

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1"), "weight_lag": 3, "turn": 4})

# --- data -----------------------------------------------------------------------------------------------------------

values = {
    "sample_index": st.integers(0, 2**62),
    "rollout_id": st.integers(0, 2**40),
    "engine": st.sampled_from(["e0", "e1", "e7"]),
    "weight_version": st.integers(0, 9),
    "turn": st.integers(0, 5),
}


@st.composite
def columns(draw: st.DrawFn, samples: int) -> dict[str, Any]:
    """Some of the fields, each as a list with holes, a tensor or an array; beside them, data of the framework's own."""
    data: dict[str, Any] = {"tokens": [[1] * (i % 3) for i in range(samples)], "rewards": torch.arange(samples) / 2}
    for field in FIELDS:
        entry = values.get(field, st.sampled_from(["a", "b"]))
        kind = draw(st.sampled_from(["absent", "list", "holes", "tensor", "array"]))
        if kind == "holes":
            entry = entry | st.none()
        elif kind != "list" and field not in values:
            continue
        if kind == "absent":
            continue
        column: Any = draw(st.lists(entry, min_size=samples, max_size=samples))
        if kind in ("tensor", "array") and field != "engine":
            column = torch.tensor(column, dtype=torch.int64) if kind == "tensor" else np.array(column, dtype=np.int64)
        data[field] = column
    return data


@st.composite
def dealt(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[int]]]:
    """Rollout data, and its samples dealt to 1 to 8 ranks in any order; some ranks get none."""
    samples = draw(st.integers(0, 12))
    data = draw(columns(samples))
    rank_of = draw(st.lists(st.integers(0, draw(st.integers(0, 7))), min_size=samples, max_size=samples))
    order = draw(st.permutations(range(samples)))
    return data, [[i for i in order if rank_of[i] == rank] for rank in range(max(rank_of, default=0) + 1)]


def plain(column: Any) -> list[Any]:
    return list(column) if isinstance(column, (list, tuple)) else column.tolist()


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal keys in order, equal types, equal entries."""
    return list(left) == list(right) and all(
        type(left[key]) is type(right[key]) and plain(left[key]) == plain(right[key]) for key in left
    )


# --- partitions -----------------------------------------------------------------------------------------------------


@given(dealt())
def test_every_field_reaches_its_sample_and_merges_again(case: tuple[dict[str, Any], list[list[int]]]) -> None:
    """Kills: one rank's order for all, a slice instead of a gather, a column left out where its first entry is None."""
    data, partitions = case
    before = copy.deepcopy(data)
    parts = partition_metadata(data, partitions)
    assert same(data, before)
    assert len(parts) == len(partitions)
    fields = [field for field in FIELDS if field in data]
    for part in parts:
        assert set(part) == {audit_key(field) for field in fields} | {audit_key("sample_index")}
    for field in fields:
        merged = [None] * sum(map(len, partitions))
        for partition, part in zip(partitions, parts, strict=True):
            column = part[audit_key(field)]
            assert type(column) is type(data[field])
            for place, entry in zip(partition, plain(column), strict=True):
                merged[place] = entry
        assert merged == plain(data[field])
    if "sample_index" not in data:
        assert [part[audit_key("sample_index")] for part in parts] == partitions


@given(dealt(), st.integers(0, 2**32))
def test_a_part_can_be_partitioned_again(case: tuple[dict[str, Any], list[list[int]]], seed: int) -> None:
    """Ranks cut their part into micro-batches. Kills: the local place taken for the sample's index."""
    data, partitions = case
    for partition, part in zip(partitions, partition_metadata(data, partitions), strict=True):
        local = list(range(len(partition)))
        random.Random(seed).shuffle(local)
        cuts = [local[: len(local) // 2], local[len(local) // 2 :]]
        direct = partition_metadata(data, [[partition[i] for i in cut] for cut in cuts])
        for twice, once in zip(partition_metadata(part, cuts), direct, strict=True):
            assert {key: plain(column) for key, column in twice.items()} == {
                key: plain(column) for key, column in once.items()
            }


@pytest.mark.parametrize("as_places", [list, tuple, torch.tensor, np.array, iter])
def test_places_may_come_in_any_container(as_places: Any) -> None:
    parts = partition_metadata({"engine": ["a", "b", "c"]}, [as_places([2, 0]), as_places([1])])
    assert [part[audit_key("engine")] for part in parts] == [["c", "a"], ["b"]]


def test_a_range_and_repeated_or_dropped_samples() -> None:
    parts = partition_metadata({"engine": ["a", "b", "c"]}, [range(2), [1, 1], []])
    assert [part[audit_key("engine")] for part in parts] == [["a", "b"], ["b", "b"], []]
    assert [part[audit_key("sample_index")] for part in parts] == [[0, 1], [1, 1], []]


def test_frameworks_names_and_per_sample_mappings() -> None:
    """slime keeps plural columns and, in ``metadata``, a mapping a sample; a column goes before the mappings."""
    data = {
        "sample_indices": [40, 41],
        "rollout_ids": torch.tensor([7, 8]),
        "weight_versions": [["3", "4"], ["4"]],
        "turn": [5, 6],
        "metadata": [{"contract_id": "c1", "turn": 0}, None],
    }
    (part,) = partition_metadata(data, [[1, 0]])
    assert {key: plain(column) for key, column in part.items()} == {
        "rlk_audit_sample_index": [41, 40],
        "rlk_audit_rollout_id": [8, 7],
        "rlk_audit_weight_version": [["4"], ["3", "4"]],
        "rlk_audit_turn": [6, 5],
        "rlk_audit_contract_id": [None, "c1"],
    }


def test_the_audits_own_column_goes_first() -> None:
    """Rank data may still hold the column of the whole batch beside the rank's part."""
    (part,) = partition_metadata({"turn": [0, 1], "rlk_audit_turn": [3, 4]}, [[1]])
    assert part[audit_key("turn")] == [4]


@pytest.mark.parametrize("one", ["c1", torch.tensor(3), np.int64(3)])
def test_one_value_stands_for_all_samples(one: Any) -> None:
    """Kills: a text cut into its letters."""
    parts = partition_metadata({"contract_id": one, "engine": ["a", "b", "c"]}, [[0, 2], [1], []])
    expected = "c1" if one == "c1" else 3
    assert [part[audit_key("contract_id")] for part in parts] == [[expected] * 2, [expected], []]


def test_further_fields_are_carried_on_request() -> None:
    (part,) = partition_metadata({"env": ["math", "code"], "engine": ["a", "b"]}, [[1]], fields=("env",))
    assert part == {"rlk_audit_env": ["code"]}


@pytest.mark.parametrize(
    ("data", "partitions", "text"),
    [
        ({"engine": ["a", "b"], "turn": [1]}, [[0]], r"one entry a sample, got the lengths engine 2, turn 1"),
        ({"engine": ["a", "b"]}, [[0], [2]], r"places from 0 to 1, got 2"),
        ({"engine": ["a", "b"]}, [[-1]], r"places from 0 to 1, got -1"),
        ({}, [[0, -3]], r"got -3"),
    ],
)
def test_what_does_not_fit_is_refused(data: dict[str, Any], partitions: list[list[int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        partition_metadata(data, partitions)


# --- kept out of rollout metrics ------------------------------------------------------------------------------------


def rollout_metrics(rollout_data: dict[str, Any]) -> dict[str, float]:
    """The mean of every column, as a framework logs them; it cannot deal with anything else."""
    return {key: sum(column) / max(len(column), 1) for key, column in rollout_data.items()}


def test_rollout_metrics_never_see_the_audits_keys() -> None:
    data: dict[str, Any] = {"rewards": [1.0, 0.0], "response_lengths": [4, 8]}
    (part,) = partition_metadata({**data, "engine": ["e0", None], "turn": [3, 1]}, [[0, 1]])
    merged = {**data, **part}
    with pytest.raises(TypeError):
        rollout_metrics(merged)
    assert rollout_metrics(strip_audit_keys(merged)) == {"rewards": 0.5, "response_lengths": 6.0}
    assert set(audit_keys(merged)) == {"rlk_audit_engine", "rlk_audit_turn", "rlk_audit_sample_index"}


@given(dealt())
def test_strip_leaves_rollout_data_as_it_was(case: tuple[dict[str, Any], list[list[int]]]) -> None:
    """The very columns, in their order. Kills: a prefix that also takes ``rollout_*``, a copy of columns."""
    data, partitions = case
    for part in partition_metadata(data, partitions):
        merged = {**part, **data}
        stripped = strip_audit_keys(merged)
        assert list(stripped) == list(data)
        assert all(stripped[key] is column for key, column in data.items())
        assert set(merged) == set(data) | set(part), "its argument is not changed"
    assert audit_keys(data) == ()


# --- what the collector is told -------------------------------------------------------------------------------------


def metadata(**columns: Any) -> dict[str, Any]:
    return {audit_key(field): column for field, column in columns.items()}


def test_fields_of_a_batch() -> None:
    fields = batch_fields(
        metadata(
            sample_index=[5, None, 6, 7],
            rollout_id=["12", "a-uid", 3.0, True],
            engine=["e1", "e0", "e9", None],
            turn=torch.tensor([0, 3, 4, -1]),
            weight_version=[9, "7", "default", [8, "6"]],
        ),
        CONFIG,
        trainer_version=9,
    )
    labels = fields.pop("labels")
    assert {name: ids.tolist() for name, ids in fields.items()} == {
        "sample_index": [5, -1, 6, 7],
        "rollout_id": [12, -1, 3, -1],
        "updates_since_rollout": [0, 2, -1, 3],
    }
    assert {name: codes.tolist() for name, codes in labels.items()} == {
        "engine": [1, 0, -1, -1],
        "weight_lag": [0, 2, -1, -1],  # three updates are beyond the declared codes
        "turn": [0, 3, -1, -1],
    }
    assert all(ids.dtype == torch.int64 for ids in (*fields.values(), *labels.values()))


@pytest.mark.parametrize(
    ("names", "values", "codes", "undeclared"),
    [
        (("e0", "e1"), [0, 1, 2, -1, -2, True, 1.0, 0.5], [0, 1, -1, -1, -1, -1, 1, -1], ("2", "-2", "True", "0.5")),
        (("e0", "e1"), ["e1", "1", None, "e9"], [1, -1, -1, -1], ("1", "e9")),
        (("7", "3"), [3, 7, 0, "3", 3.0], [1, 0, -1, 1, 1], ("0",)),
        (("x", "1"), [1, 0, "x"], [1, -1, 0], ("0",)),
    ],
)
def test_integers_of_a_label_are_codes_unless_its_names_are_numbers(
    names: tuple[str, ...], values: list[Any], codes: list[int], undeclared: tuple[str, ...]
) -> None:
    config = AuditConfig(breakdowns={"engine": names})
    assert batch_fields(metadata(engine=values), config)["labels"]["engine"].tolist() == codes
    assert undeclared_names(metadata(engine=values), config) == {"engine": undeclared}


def test_what_is_declared_or_unknown_is_not_undeclared() -> None:
    assert undeclared_names(metadata(engine=["e0", None], turn=[-1, 2]), CONFIG) == {}
    assert undeclared_names(metadata(weight_version=[1, 9, None]), CONFIG, trainer_version=9) == {"weight_lag": ("8",)}


@pytest.mark.parametrize("version", [10, 12, -1, 2**63, "v3", "", "٣", 2.5, [], [4, "default"], [4, None]])
def test_a_version_that_cannot_be_is_unknown(version: Any) -> None:
    """Newer than the trainer's, no number, or mixed with one that is not known: never a claim of 0 updates."""
    fields = batch_fields(metadata(weight_version=[version, 4]), CONFIG, trainer_version=9)
    assert fields["updates_since_rollout"].tolist() == [-1, 5]
    assert fields["labels"]["weight_lag"].tolist() == [-1, -1]


def test_absent_fields_are_left_out() -> None:
    assert batch_fields({"rewards": [1]}, CONFIG, 3) == {"labels": {}}
    assert batch_fields(metadata(weight_version=[1]), CONFIG) == {"labels": {}}, "nothing to count updates from"


def test_an_own_weight_lag_goes_before_the_derived_one() -> None:
    fields = batch_fields(metadata(weight_version=[1], weight_lag=[2]), CONFIG, trainer_version=1)
    assert fields["labels"]["weight_lag"].tolist() == [2]
    assert fields["updates_since_rollout"].tolist() == [0]


def test_a_single_value_is_no_column() -> None:
    with pytest.raises(TypeError, match="rlk_audit_engine must be a list, a tensor or an array, got str"):
        batch_fields(metadata(engine="e0"), CONFIG)


@pytest.mark.parametrize("form", ["lists", "padded", "packed", "update"])
def test_the_collector_reads_the_fields(form: str) -> None:
    """The worst token is the second sample's, by whichever way the fields reach the collector."""
    train, rollout = torch.tensor([[-1.0, -1.0], [-1.0, -3.0]]), torch.full((2, 2), -1.0)
    mask = torch.ones(2, 2)
    part = partition_metadata({"engine": ["e1", "e0"], "weight_version": [4, 3], "turn": [0, 2]}, [[1, 0]])[0]
    fields = batch_fields(part, CONFIG, trainer_version=4, per_row=form == "update")
    train = train.flip(0)  # the part's order
    collector = Collector(CONFIG)
    if form == "lists":
        collector.update(TokenBatch.from_lists(train.tolist(), rollout.tolist(), mask.tolist(), **fields))
    elif form == "padded":
        collector.update(TokenBatch.from_padded(train, rollout, mask, **fields))
    elif form == "packed":
        flat = [array.reshape(-1) for array in (train, rollout, mask)]
        collector.update(TokenBatch.from_packed(*flat, cu_seqlens=torch.tensor([0, 2, 4]), **fields))
    else:
        collector.update(train, rollout, mask, **fields)
    report = collector.compute()
    assert report.complete, collector.last_error
    worst = report.worst_tokens[0]
    assert (worst.abs_dlogp, worst.sample_index) == (2.0, 1)
    assert worst.labels == {"engine": "e0", "weight_lag": "1", "turn": "2"}
    assert (report.metrics["updates_since_rollout_min"], report.metrics["updates_since_rollout_max"]) == (0, 1)
    assert "missing_metadata" not in report.warnings


# --- missing metadata -----------------------------------------------------------------------------------------------


def test_missing_is_what_was_asked_for_and_is_not_there() -> None:
    given_fields = metadata(engine=["e0", "e9"], turn=[1, None], contract_id=["c", None])
    assert missing_fields(given_fields, CONFIG, 3) == ("weight_lag", "turn")
    assert missing_fields(given_fields, CONFIG, 3, required=("contract_id", "backend_id", "engine")) == (
        "weight_lag",
        "turn",
        "contract_id",
        "backend_id",
    )
    assert missing_fields(given_fields, AuditConfig()) == (), "nobody asked"


def test_weight_lag_needs_both_versions() -> None:
    config = AuditConfig(breakdowns={"weight_lag": 2})
    assert missing_fields(metadata(weight_version=[1, 2]), config, 2) == ()
    assert missing_fields(metadata(weight_version=[1, "default"]), config, 2) == (), "given, though of no use"
    assert missing_fields(metadata(weight_version=[1, None]), config, 2) == ("weight_lag",)
    assert missing_fields(metadata(weight_version=[1, []]), config, 2) == ("weight_lag",)
    assert missing_fields(metadata(weight_version=[1, 2]), config) == ("weight_lag",)


def test_a_rank_without_samples_misses_nothing() -> None:
    data = {"engine": ["e0"], "turn": [0], "weight_version": [1]}
    empty = partition_metadata(data, [[0], []])[1]
    assert missing_fields(empty, CONFIG, 1) == ()


@pytest.mark.parametrize(("engines", "flagged"), [(["e0", "e1"], 0), (["e0", "e9"], 0), (["e0", None], 1), (None, 1)])
def test_missing_metadata_counts_once_a_step(engines: list[str | None] | None, flagged: int) -> None:
    """Two micro-batches lack it, the step counts 1; a name that nobody declared is unknown, not missing."""
    config = AuditConfig(breakdowns={"engine": ("e0", "e1")})
    collector = Collector(config)
    for microbatch in range(2):
        part = partition_metadata({} if engines is None else {"engine": engines}, [[0, 1]])[0]
        fields = batch_fields(part, config)
        collector.update(TokenBatch.from_lists([[-1.0], [-1.0]], [[-1.0], [-2.0]], **fields), microbatch=microbatch)
        if missing_fields(part, config):
            collector.flag("missing_metadata")
    assert collector.compute().warnings.get("missing_metadata", 0) == flagged


def test_no_framework_is_imported() -> None:
    code = "import sys, rlk_audit.metadata; print({'ray', 'megatron', 'slime'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
