"""Bad input: a fault of the data never raises, is counted, is said in one sentence, and the rank still reports."""

from __future__ import annotations

import gc
import logging
import math
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Sample, audit
from strategies import assert_reports, bits, collect, observe, reduce, without_layout

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch
from rlk_audit.collector import ERROR_INTERVAL, ERROR_SENTENCES

T = [-0.5, -1.0, -2.0, -0.25]
R = [-0.5, -1.25, -1.5, -0.25]
SAMPLE = Sample(T, R, sample_index=3)


def update_of(**changes: Any) -> dict[str, Any]:
    fields = {"train_log_probs": torch.tensor(T), "rollout_log_probs": torch.tensor(R), "mask": torch.ones(4)}
    return fields | {"valid": torch.ones(4), "sample_index": 3, "token_position": torch.arange(4)} | changes


def said(collector: Collector) -> str:
    assert collector.last_error is not None
    assert "\n" not in collector.last_error
    return collector.last_error


# --- an update that fails -------------------------------------------------------------------------------------------

FAULTS = {
    "rollout too short": (update_of(rollout_log_probs=torch.tensor(R[:3])), r"rollout_log_probs .*\(4,\).*\(3,\)"),
    "rollout too long": (update_of(rollout_log_probs=torch.zeros(5)), r"rollout_log_probs .*\(4,\).*\(5,\)"),
    "rollout of one": (update_of(rollout_log_probs=torch.tensor([-0.5])), r"rollout_log_probs .*\(4,\).*\(1,\)"),
    "rollout transposed": (update_of(rollout_log_probs=torch.zeros(4, 1)), r"rollout_log_probs .*\(4,\).*\(4, 1\)"),
    "rollout 0-dim": (update_of(rollout_log_probs=torch.tensor(-0.5)), r"rollout_log_probs .*\(4,\).*\(\)"),
    "mask too short": (update_of(mask=torch.ones(3)), r"mask .*\(4,\).*\(3,\)"),
    "mask transposed": (update_of(mask=torch.ones(1, 4)), r"mask .*\(4,\).*\(1, 4\)"),
    "mask empty": (update_of(mask=torch.ones(0)), r"mask .*\(4,\).*\(0,\)"),
    "valid too long": (update_of(valid=torch.ones(6)), r"valid .*\(4,\).*\(6,\)"),
    "missing too short": (update_of(rollout_missing=torch.zeros(2)), r"rollout_missing .*\(4,\).*\(2,\)"),
    "integer train": (update_of(train_log_probs=torch.tensor([-1, -2, 0, 0])), r"train_log_probs .*float.*int64"),
    "integer rollout": (update_of(rollout_log_probs=np.zeros(4, dtype=np.int32)), r"rollout_log_probs .*float.*int32"),
    "bool train": (update_of(train_log_probs=torch.ones(4, dtype=torch.bool)), r"train_log_probs .*float.*bool"),
    "complex rollout": (
        update_of(rollout_log_probs=torch.zeros(4, dtype=torch.cfloat)),
        r"rollout_log_probs .*complex",
    ),
    "float ids": (update_of(token_ids=torch.ones(4), rollout_token_ids=torch.ones(4)), r"token_ids .*integer.*float32"),
    "float sample index": (update_of(sample_index=torch.ones(4)), r"sample_index .*integer.*float32"),
    "too few sample indices": (update_of(sample_index=torch.ones(3).long()), r"sample_index .*\(4,\).*\(3,\)"),
    "too many positions": (update_of(token_position=torch.arange(5)), r"token_position .*\(4,\).*\(5,\)"),
    "too many ages": (update_of(updates_since_rollout=torch.arange(5)), r"updates_since_rollout .*\(4,\).*\(5,\)"),
    "None in train": (update_of(train_log_probs=[-0.5, None, -2.0, -0.25]), r"train_log_probs .*None"),
    "ragged train": (update_of(train_log_probs=[[-0.5], [-1.0, -2.0]]), r"log-probabilities .*equal rows"),
    "text in rollout": (update_of(rollout_log_probs=[-0.5, "x", -1.5, -0.25]), r"log-probabilities .*numbers"),
}


@pytest.mark.parametrize(("update", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_the_data_fails_the_update_and_says_why(
    update: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is counted but `update_failed`, half of an update never is; the log says it once a step."""
    collector = collect(update_of())
    with caplog.at_level(logging.WARNING, logger="rlk_audit.collector"):
        collector.update(**update)
        collector.update(**update)
    report = collector.compute()
    expected = audit([SAMPLE])
    expected.warnings["update_failed"] = 2
    assert_reports(report, expected)
    assert report.complete is False and collect(update_of()).compute().complete is True
    assert re.search(sentence, said(collector))
    records = [record for record in caplog.records if record.name == "rlk_audit.collector"]
    assert [record.levelno for record in records] == [logging.WARNING]
    assert re.search(sentence, records[0].getMessage())


def test_a_failed_update_after_a_good_one_leaves_the_report_as_it_was() -> None:
    """To the byte, the failure's own count aside."""
    good, failed = collect(update_of()), collect(update_of())
    failed.update(**FAULTS["rollout too short"][0])
    before, after = without_layout(good.compute()), without_layout(failed.compute())
    assert after["metrics"].pop("warning/update_failed") == 1 and before["metrics"].pop("warning/update_failed") == 0
    assert after["metrics"].pop("warning_count") == 1 and before["metrics"].pop("warning_count") == 0
    assert after.pop("warnings") == {"update_failed": 1} and before.pop("warnings") == {}
    assert (after.pop("complete"), before.pop("complete")) == (False, True)
    assert bits(after) == bits(before)


BREAKABLE = {
    "reference": ("exp", "scatter_add_", "amax", "abs", "sum", "long", "double", "reshape", "masked_fill_"),
    "numba": ("numpy", "contiguous", "double", "reshape", "sum"),
}
"""What each path calls on tensors before a micro-batch is committed."""


@pytest.mark.parametrize(("path", "least"), [("reference", 20), ("numba", 8)])
def test_an_update_that_breaks_half_way_commits_nothing(path: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever operation fails in an update, before it there was nothing of it in the state.

    Kills: counters written before the sums; a micro-batch number remembered although its data was not counted.
    """
    reference = collect(update_of()).pack()
    failed = 0
    for broken in BREAKABLE[path]:
        original = getattr(torch.Tensor, broken)
        for call in range(0, 40, 3):
            collector, calls = Collector(AuditConfig(kernel=path)), [0]

            def break_once(self: torch.Tensor, *args: Any, calls=calls, call=call, original=original, **kw: Any) -> Any:
                calls[0] += 1
                if calls[0] == call + 1:
                    raise RuntimeError("out of memory, as it were")
                return original(self, *args, **kw)

            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, broken, break_once)
                collector.update(**update_of(), microbatch=1)
            if calls[0] <= call:
                break
            failed += 1
            report = collector.compute()
            assert report.warnings == {"update_failed": 1, "nothing_compared": 1}, (broken, call)
            assert report.metrics["active_token_count"] == report.metrics["total_token_count"] == 0
            collector.reset()
            collector.update(**update_of())
            assert torch.equal(collector.pack(), reference)
    assert failed > least


def test_a_failed_microbatch_may_come_again() -> None:
    """A number counts as seen only when its data was counted."""
    collector = Collector(AuditConfig())
    collector.update(**FAULTS["rollout too short"][0], microbatch=4)
    collector.update(**update_of(), microbatch=4)
    expected = audit([SAMPLE])
    expected.warnings["update_failed"] = 1
    assert_reports(collector.compute(), expected)


def test_a_rank_whose_update_failed_still_reduces() -> None:
    """The group's report holds the other ranks' tokens, and names the rank."""
    ranks = [collect(update_of()), collect(FAULTS["integer train"][0]), collect()]
    report = reduce(ranks, AuditConfig())
    expected = audit([SAMPLE])
    expected.warnings["update_failed"] = 1
    assert_reports(report, expected)
    assert report.complete is False
    assert {row.rank: row.update_failed for row in report.ranks} == {0: 0, 1: 1, 2: 0}


def test_the_sentence_is_forgotten_with_the_step() -> None:
    collector = collect(FAULTS["integer train"][0])
    collector.reset()
    assert collector.last_error is None and collector.compute().complete is True


def test_each_reason_is_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    """Kills: the second fault of a run, which the first one's silence hides."""
    collector = Collector(AuditConfig())
    for step in range(ERROR_INTERVAL + 1):
        collector.update(torch.zeros(2), torch.zeros(3), torch.ones(2))
        if step == ERROR_INTERVAL // 2:
            collector.mark_failed("response_lengths is missing")
        collector.reset()
    shape = [line for line in caplog.messages if "got (3,)" in line]
    column = [line for line in caplog.messages if "response_lengths is missing" in line]
    assert (len(shape), len(column), len(caplog.messages)) == (2, 1, 3)


def test_a_storm_of_different_reasons_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(AuditConfig())
    for length in range(3, 200):
        collector.update(torch.zeros(2), torch.zeros(length), torch.ones(2))
    assert len(caplog.messages) == ERROR_SENTENCES
    ends = [line.endswith("other reasons are not logged in these steps any more") for line in caplog.messages]
    assert ends == [False] * (ERROR_SENTENCES - 1) + [True]
    assert "got (199,)" in str(collector.last_error)


# --- misuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        (update_of(train_log_probs="-0.5"), "train_log_probs .*str"),
        (update_of(train_log_probs={"a": 1}), "train_log_probs .*dict"),
        (update_of(rollout_log_probs=3.5), "rollout_log_probs .*float"),
        (update_of(mask="1111"), "mask .*str"),
        (update_of(train_log_probs=None), "train_log_probs"),
        (update_of(microbatch="1"), "microbatch .*str"),
        (update_of(labels={"engine": 0}), "engine"),
        (update_of(token_idz=torch.arange(4)), "token_idz"),
    ],
    ids=["text", "dict", "number", "text mask", "no train", "text micro-batch", "undeclared label", "unknown field"],
)
def test_misuse_raises_at_once(update: dict[str, Any], sentence: str) -> None:
    """Wrong types are the same on every rank, so they may raise; nothing is counted."""
    collector = Collector(AuditConfig())
    with pytest.raises(TypeError, match=sentence):
        collector.update(**update)
    assert torch.equal(collector.pack(), Collector(AuditConfig()).pack())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantiles": ("-0.1",)}, "quantile.*-0.1"), ({"quantiles": ("1.5",)}, "quantile.*1.5"),
        ({"quantiles": (math.nan,)}, "quantile.*nan"), ({"mode": "loud"}, "mode.*loud"),
        ({"grouping_power": 9}, "grouping_power.*9"), ({"worst_k": 0}, "worst_k.*0"),
        ({"eps_low": -0.1}, "eps_low.*-0.1"),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AuditConfig(**settings)


# --- values that are no log-probabilities ---------------------------------------------------------------------------

VALUES = [
    ("rollout", math.nan, "rollout_nan"), ("train", math.nan, "train_nan"),
    ("rollout", -math.inf, "rollout_neginf"), ("train", -math.inf, "train_neginf"),
    ("rollout", math.inf, "positive"), ("train", math.inf, "positive"),
    ("rollout", -9999.0, "rollout_sentinel"), ("train", -9999.0, "train_sentinel"),
    ("rollout", -1000.0, "rollout_sentinel"), ("train", "min", "train_sentinel"),
    ("rollout", 0.5, "positive"), ("train", 0.01, "positive"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("side", "value", "code"), VALUES)
def test_each_value_has_its_class(dtype: torch.dtype, side: str, value: Any, code: str) -> None:
    """Not-a-number, infinities, sentinels and impossible values are counted by name and enter no figure."""
    columns = {"train": torch.tensor(T, dtype=dtype), "rollout": torch.tensor(R, dtype=dtype)}
    columns[side][1] = torch.finfo(dtype).min if value == "min" else value
    report = observe(update_of(train_log_probs=columns["train"], rollout_log_probs=columns["rollout"]))
    wide = [columns[name].double().tolist() for name in ("train", "rollout")]
    assert report.warnings == {code: 1}
    assert_reports(report, audit([Sample(*wide, sample_index=3)]))
    masked = observe(
        update_of(
            train_log_probs=columns["train"], rollout_log_probs=columns["rollout"], mask=torch.tensor([1, 0, 1, 1])
        )
    )
    assert masked.warnings == {}


@pytest.mark.parametrize("floor", [-1000.0, -50.0])
def test_the_sentinel_floor_is_inclusive(floor: float) -> None:
    """At the floor is a placeholder, above it a log-probability."""
    above = math.nextafter(floor, 0.0)
    train = torch.tensor([-1.0, -1.0, floor, above], dtype=torch.float64)
    rollout = torch.tensor([floor, above, -1.0, -1.0], dtype=torch.float64)
    report = observe(
        {"train_log_probs": train, "rollout_log_probs": rollout, "mask": torch.ones(4)},
        config=AuditConfig(sentinel_floor=floor),
    )
    assert report.warnings == {"rollout_sentinel": 1, "train_sentinel": 1}


def test_the_positive_tolerance_is_exclusive() -> None:
    """Rounding may lift a log-probability a little above 0; more is no log-probability."""
    values = torch.tensor([1e-3, math.nextafter(1e-3, 1.0), 0.0], dtype=torch.float64)
    report = observe({"train_log_probs": values, "rollout_log_probs": torch.zeros(3), "mask": torch.ones(3)})
    assert report.warnings == {"positive": 1}
    assert report.metrics["dlogp_max"] == 1e-3


def test_a_zero_fill_is_suspected_and_still_compared() -> None:
    """R exactly 0.0 while T is below -1."""
    train, rollout = [-1.0, math.nextafter(-1.0, -2.0), -5.0, -5.0], [0.0, 0.0, -0.0, -1e-9]
    report = observe({"train_log_probs": np.array(train), "rollout_log_probs": np.array(rollout), "mask": np.ones(4)})
    assert report.warnings == {"zero_fill_suspect": 2}
    assert report.metrics["compared_token_count"] == 4


def test_token_ids_are_compared_only_where_both_are_given() -> None:
    ids, other = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 9, 3, 4])
    assert observe(update_of(token_ids=ids, rollout_token_ids=other)).warnings == {"token_mismatch": 1}
    assert observe(update_of(token_ids=ids)).warnings == {}
    assert observe(update_of(rollout_token_ids=other)).warnings == {}
    masked = update_of(token_ids=ids, rollout_token_ids=other, mask=torch.tensor([1, 0, 1, 1]))
    assert observe(masked).warnings == {}


# --- gaps -----------------------------------------------------------------------------------------------------------


def test_a_gap_in_the_rollout_is_missing_in_every_form() -> None:
    """None in a list, in an object array, a bool array beside rubbish: the same report."""
    gap = [-0.5, None, -1.5, -0.25]
    where, rubbish = torch.tensor([False, True, False, False]), torch.tensor([-0.5, math.nan, -1.5, -0.25])
    reports = [
        observe(update_of(rollout_log_probs=gap)),
        observe(update_of(rollout_log_probs=np.array(gap, dtype=object))),
        observe(update_of(rollout_log_probs=rubbish, rollout_missing=where)),
        observe(update_of(rollout_log_probs=rubbish, rollout_missing=where.int().numpy())),
        observe(TokenBatch.from_lists([T], [gap], [[1] * 4], sample_index=[3])),
    ]
    for report in reports:
        assert_reports(report, audit([Sample(T, gap, sample_index=3)]))


def test_a_gap_in_the_train_side_is_never_a_zero() -> None:
    """The trainer always has a value; where a list has none, its token must not be compared."""
    report = observe(TokenBatch.from_lists([[-0.5, None]], [[-0.5, -3.0]], [[1, 1]]))
    assert report.metrics["compared_token_count"] <= 1
    assert report.metrics["compared_token_count"] == 0 or report.metrics["abs_dlogp_max"] == 0.0
    assert report.warnings


@pytest.mark.parametrize("form", ["tensor", "lists"])
def test_no_rollout_values_at_all(form: str) -> None:
    """Every active token is missing, and one flag a step says that none came."""
    if form == "tensor":
        updates: list[Any] = [update_of(rollout_log_probs=None)] * 2
    else:
        updates = [TokenBatch.from_lists([T], None, [[1] * 4], sample_index=[3])] * 2
    report = observe(*updates)
    assert report.warnings == {"rollout_missing": 8, "missing_rollout_log_probs": 1, "nothing_compared": 1}
    assert report.metrics["active_token_count"] == 8 and report.metrics["compared_coverage"] == 0.0
    assert math.isnan(report.metrics["abs_dlogp_mean"])
    both = reduce([collect(*updates), collect(*updates)], AuditConfig())
    assert both.warnings["missing_rollout_log_probs"] == 1


def test_a_sample_of_the_list_without_values_is_missing() -> None:
    report = observe(TokenBatch.from_lists([T, T], [R, None], [[1] * 4] * 2, sample_index=[3, 4]))
    assert_reports(report, audit([SAMPLE, Sample(T, [None] * 4, sample_index=4)]))


# --- lengths of samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", ["train", "rollout", "mask"])
def test_a_sample_of_unequal_lists_is_refused_whole(short: str, caplog: pytest.LogCaptureFixture) -> None:
    """The other samples count; the sentence names both lengths and the sample."""
    columns = {"train": list(T), "rollout": list(R), "mask": [1] * 4}
    columns[short] = columns[short][:3]
    with caplog.at_level(logging.WARNING, logger="rlk_audit.collector"):
        collector = collect(
            TokenBatch.from_lists(
                [T, columns["train"]], [R, columns["rollout"]], [[1] * 4, columns["mask"]], sample_index=[3, 77]
            )
        )
    report = collector.compute()
    assert report.warnings == {"length_mismatch": 1}
    assert report.metrics["compared_token_count"] == 4
    assert report.metrics["active_token_count"] == 4 + len(columns["mask"])
    assert report.metrics["abs_dlogp_mean"] == audit([SAMPLE]).metrics["abs_dlogp_mean"]
    assert report.complete is True
    for part in (r"\b77\b", r"\b4\b", r"\b3\b", r"train_log_probs", r"rollout_log_probs"):
        assert re.search(part, said(collector))
    assert said(collector) in caplog.text


@pytest.mark.parametrize("name", ["token_ids", "rollout_token_ids"])
def test_ids_of_another_length_refuse_the_sample_too(name: str) -> None:
    ids = {"token_ids": [[1, 2, 3, 4]] * 2, "rollout_token_ids": [[1, 2, 3, 4]] * 2}
    ids[name] = [[1, 2, 3, 4], [1, 2, 3]]
    report = observe(TokenBatch.from_lists([T, T], [R, R], [[1] * 4] * 2, sample_index=[3, 4], **ids))
    assert report.warnings == {"length_mismatch": 1}
    assert report.metrics["compared_token_count"] == 4


def test_too_few_lists_fail_the_update() -> None:
    """Which sample a list belongs to is then unknown, for all of them."""
    collector = collect(TokenBatch.from_lists([T, T], [R], [[1] * 4] * 2))
    assert collector.compute().warnings == {"update_failed": 1, "nothing_compared": 1}
    assert re.search(r"rollout_log_probs .*2.*1", said(collector))


def test_too_few_sample_indices_fail_the_update() -> None:
    collector = collect(TokenBatch.from_lists([T, T], [R, R], [[1] * 4] * 2, sample_index=[1]))
    assert collector.compute().warnings == {"update_failed": 1, "nothing_compared": 1}
    assert re.search(r"sample_index .*2.*1", said(collector))


@pytest.mark.parametrize("shape", [(2, 5), (3,), (2, 3, 1)])
def test_a_shard_of_the_wrong_shape_fails_the_update(shape: tuple[int, ...]) -> None:
    values = torch.zeros(shape)
    batch = TokenBatch.from_cp_shard(values, values, values, cp_rank=0, cp_size=2, seq_length=8)
    collector = collect(batch)
    assert collector.compute().warnings == {"update_failed": 1, "nothing_compared": 1}
    assert "4" in said(collector) and str(tuple(shape)) in said(collector)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_ids_of_a_pack_belong_to_tokens_even_when_samples_are_as_many(cp_size: int) -> None:
    """Two sequences, one empty, and two tokens: what is given per token stays per token.

    Kills: a field taken as one value a sample because its length happens to be the number of samples.
    """
    arrays = torch.tensor([-1.0, -5.0]), torch.tensor([-2.0, -4.5]), torch.tensor([1, 1])
    fields = {
        "token_ids": torch.tensor([8, 9]),
        "rollout_token_ids": torch.tensor([8, 7]),
        "sample_index": torch.tensor([40, 41]),
    }
    bounds = torch.tensor([0, 0, 2 * cp_size])
    if cp_size == 1:
        batch = TokenBatch.from_packed(*arrays, cu_seqlens=bounds, **fields)
    else:
        batch = TokenBatch.from_cp_shard(*arrays, cp_rank=0, cp_size=cp_size, cu_seqlens_padded=bounds, **fields)
    report = observe(batch)
    assert report.warnings == {"token_mismatch": 1}
    assert (report.worst_tokens[0].token_id, report.worst_tokens[0].sample_index) == (8, 41)


# --- nothing --------------------------------------------------------------------------------------------------------

EMPTY = {
    "no update": [],
    "all masked": [update_of(mask=torch.zeros(4))],
    "no tokens": [{n: torch.zeros(0) for n in ("train_log_probs", "rollout_log_probs", "mask")}],
    "no rows": [{n: torch.zeros(0, 7) for n in ("train_log_probs", "rollout_log_probs", "mask")}],
    "no columns": [{n: torch.zeros(3, 0) for n in ("train_log_probs", "rollout_log_probs", "mask")}],
    "empty lists": [{"train_log_probs": [], "rollout_log_probs": [], "mask": []}],
    "no samples": [TokenBatch.from_lists([], [], [], sample_index=[])],
    "empty samples": [
        TokenBatch.from_lists([[], []], [[], []], [[], []], token_ids=[[], []], rollout_token_ids=[[], []])
    ],
    "empty pack": [TokenBatch.from_packed(*[torch.zeros(0)] * 3, cu_seqlens=torch.tensor([0]))],
    "pack of empty": [TokenBatch.from_packed(*[torch.zeros(0)] * 3, cu_seqlens=torch.tensor([0, 0, 0]))],
    "all missing": [update_of(rollout_log_probs=[None] * 4, mask=torch.zeros(4))],
}


@pytest.mark.parametrize("updates", EMPTY.values(), ids=EMPTY.keys())
@pytest.mark.filterwarnings("error")
def test_nothing_compared_is_never_no_drift(updates: list[Any]) -> None:
    """Counts of 0, one warning, and null for every mean, quantile and extreme."""
    report = reduce([collect(*updates), collect()], AuditConfig())
    assert report.warnings == {"nothing_compared": 1}
    assert report.complete is True and report.worst_tokens == () and report.notes == ()
    assert report.metrics["compared_token_count"] == report.metrics["active_token_count"] == 0
    kinds = ("dlogp", "ratio0", "clipfrac", "kl0", "chi2", "ess0", "prob_", "nll", "ppl", "frac", "worst_", "coverage")
    figures = [n for n in report.metrics if any(kind in n for kind in kinds) and "/" not in n and n != "mask_coverage"]
    assert len(figures) > 35
    assert all(math.isnan(report.metrics[name]) for name in figures)
    assert report.to_dict()["metrics"]["abs_dlogp_mean"] is None


# --- forms that are fine --------------------------------------------------------------------------------------------

MASKS = {
    "bool": torch.tensor([True, False, True, True]),
    "int64": torch.tensor([1, 0, 1, 1]),
    "uint8": torch.tensor([1, 0, 255, 1], dtype=torch.uint8),
    "negative": torch.tensor([-1, 0, 2, 1]),
    "float": torch.tensor([1.0, 0.0, 0.25, 1e-9]),
    "bfloat16": torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.bfloat16),
    "numpy": np.array([True, False, True, True]),
    "list": [1, 0, 1, 1],
    "bool list": [True, False, True, True],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_mask_is_active_where_it_is_not_zero(mask: Any) -> None:
    assert_reports(observe(update_of(mask=mask)), audit([Sample(T, R, [1, 0, 1, 1], sample_index=3)]))


def grid(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).reshape(2, 2)


FORMS = {
    "numpy": update_of(train_log_probs=np.array(T, np.float32), rollout_log_probs=np.array(R, np.float32)),
    "lists": update_of(train_log_probs=T, rollout_log_probs=R, mask=[1] * 4),
    "tuples": update_of(train_log_probs=tuple(T), rollout_log_probs=tuple(R)),
    "tensor and list": update_of(rollout_log_probs=R),
    "float64 and float16": update_of(
        train_log_probs=torch.tensor(T).double(), rollout_log_probs=torch.tensor(R).half()
    ),
    "strided": update_of(train_log_probs=torch.tensor(T).repeat_interleave(2)[::2]),
    "read-only numpy": update_of(train_log_probs=np.broadcast_to(np.array(T, np.float32), (4,))),
    "requires grad": update_of(train_log_probs=torch.tensor(T, requires_grad=True)),
    "parameter": update_of(train_log_probs=torch.nn.Parameter(torch.tensor(T))),
}


@pytest.mark.parametrize("update", FORMS.values(), ids=FORMS.keys())
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writ")
def test_forms_that_hold_the_same_values_report_the_same(update: dict[str, Any]) -> None:
    assert_reports(observe(update), audit([SAMPLE]))


def test_transposed_and_expanded_tensors_are_read_in_their_own_order() -> None:
    """Kills: `.view(-1)` on storage order."""
    expected = audit([Sample(T, [-0.5] * 4, [1, 0, 1, 1], sample_index=3)])
    update = {
        "train_log_probs": grid(T).t().contiguous().t(),
        "rollout_log_probs": torch.tensor(-0.5).expand(2, 2),
        "mask": torch.tensor([[1, 0], [1, 1]]).t().contiguous().t(),
        "valid": torch.ones(1).expand(2, 2),
        "sample_index": 3,
        "token_position": torch.tensor([[0, 2], [1, 3]]).t(),
    }
    assert_reports(observe(update), expected)


def test_a_single_token_without_dimensions_counts() -> None:
    """0-dim tensors are of one shape like any other."""
    update = {"train_log_probs": torch.tensor(-1.0), "rollout_log_probs": torch.tensor(-1.5), "mask": torch.tensor(1)}
    report = observe(
        update | {"valid": torch.tensor(1), "sample_index": 3, "token_position": 0, "token_ids": torch.tensor(6)}
    )
    assert_reports(report, audit([Sample([-1.0], [-1.5], sample_index=3, token_ids=[6])]))


def test_ids_are_broadcast() -> None:
    """[B, 1] sample indices and [S] positions for [B, S] log-probs."""
    update = {
        "train_log_probs": torch.tensor([T, R]), "rollout_log_probs": torch.tensor([R, T]), "mask": torch.ones(2, 4),
        "valid": torch.ones(2, 4), "sample_index": torch.tensor([[8], [5]]), "token_position": torch.arange(4),
        "rollout_id": np.array([[1], [2]]),
    }  # fmt: skip
    expected = audit([Sample(T, R, sample_index=8, rollout_id=1), Sample(R, T, sample_index=5, rollout_id=2)])
    assert_reports(observe(update), expected)


def test_inference_mode_leaves_a_state_that_can_be_used_outside() -> None:
    """Inputs made in inference mode, updates made there: the same bytes, and no inference tensor is kept."""
    with torch.inference_mode():
        inside = collect(update_of())
    outside = collect(update_of())
    inside.update(**update_of())
    outside.update(**update_of())
    assert torch.equal(inside.pack(), outside.pack())
    assert not inside.pack().is_inference()
    inside.reset()
    assert inside.compute().metrics["compared_token_count"] == 0


def test_no_input_is_kept_alive() -> None:
    """Tensors and their graph are free once the caller lets go of them."""
    leaf = torch.tensor(T, requires_grad=True)
    train = leaf * 2.0
    graph, rollout = weakref.ref(train), torch.tensor(R)
    other = weakref.ref(rollout)
    collector = collect(update_of(train_log_probs=train, rollout_log_probs=rollout))
    del train, rollout
    gc.collect()
    assert graph() is None and other() is None
    assert collector.compute().metrics["compared_token_count"] == 4


def test_numpy_inputs_are_not_written_to() -> None:
    arrays = {"train_log_probs": np.array(T), "rollout_log_probs": np.array(R), "mask": np.array([1.0, 0.0, 1.0, 1.0])}
    arrays["rollout_log_probs"][1] = np.nan
    copies = {name: values.copy() for name, values in arrays.items()}
    observe(arrays)
    for name, values in arrays.items():
        assert np.array_equal(values, copies[name], equal_nan=True)


# --- micro-batches --------------------------------------------------------------------------------------------------


def test_a_repeated_microbatch_is_ignored_and_counted() -> None:
    """The first evaluation counts; the number is free again in the next step; without a number nothing is repeated."""
    collector = Collector(AuditConfig())
    collector.update(**update_of(), microbatch=0)
    collector.update(**update_of(rollout_log_probs=torch.full((4,), -7.0)), microbatch=0)
    collector.update(**update_of(rollout_log_probs=torch.full((4,), -7.0)), microbatch=0)
    expected = audit([SAMPLE])
    expected.warnings["duplicate_microbatch"] = 2
    assert_reports(collector.compute(), expected)
    collector.reset()
    for _ in range(2):
        collector.update(**update_of())
    collector.update(**update_of(), microbatch=0)
    assert collector.compute().metrics["compared_token_count"] == 12
    assert collector.compute().warnings == {}


def test_a_duplicate_on_one_rank_shows_in_the_group() -> None:
    twice = Collector(AuditConfig())
    for _ in range(2):
        twice.update(**update_of(), microbatch=1)
    report = reduce([collect(update_of()), twice], AuditConfig())
    assert report.warnings == {"duplicate_microbatch": 1}
    assert report.metrics["compared_token_count"] == 8


# --- vectors --------------------------------------------------------------------------------------------------------


def test_a_vector_of_the_wrong_kind_is_refused() -> None:
    vector = collect(update_of()).pack()
    for wrong, size in ((vector[:-1], 1), (vector.double(), 1), (vector, 2)):
        with pytest.raises(ValueError, match="int64"):
            StepReport.from_vector(wrong, AuditConfig(), group_size=size)


def test_a_rank_outside_the_group_cannot_pack() -> None:
    for rank, size in ((1, 1), (-1, 2), (5, 4)):
        with pytest.raises(ValueError, match="group_rank"):
            collect().pack(rank, size)
