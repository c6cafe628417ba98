"""Faults that people reported in public, each as a small input with the right outcome.

Every test is named after its number in the list of reported cases; the numbers were computed by hand or by others, not
by the package and not by the oracle. Where a number shows a kind of fault, its neighbours are tested too.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Sample, audit
from strategies import WHOLE_FORMS, assert_reports, bits, collect, observe, reduce, without_layout

from rlk_audit import AuditConfig, Collector, LogHistogram, StepReport, TokenBatch, all_reduce

CONFIG = AuditConfig()
# Half of the last digit that a case prints.
PRINTED = 6e-7
BOUND = 0.0078
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def lists(*samples: Sample) -> TokenBatch:
    masks = [[1] * len(s.train) if s.mask is None else s.mask for s in samples]
    index = [s.sample_index if s.sample_index >= 0 else i for i, s in enumerate(samples)]
    return TokenBatch.from_lists([s.train for s in samples], [s.rollout for s in samples], masks, sample_index=index)


def flat(train: Sequence[float], rollout: Sequence[float], mask: Sequence[int] | None = None) -> dict[str, Any]:
    return {
        "train_log_probs": torch.tensor(train, dtype=torch.float64),
        "rollout_log_probs": torch.tensor(rollout, dtype=torch.float64),
        "mask": torch.ones(len(train)) if mask is None else torch.tensor(mask),
    }


def drifts(values: Sequence[float]) -> dict[str, Any]:
    """One update whose d are these values."""
    return flat([min(v, 0.0) for v in values], [min(-v, 0.0) for v in values])


def assert_metrics(report: StepReport, **expected: float) -> None:
    for name, value in expected.items():
        sketched = "_p" in name and name.rsplit("_p", 1)[1][:2].isdigit()
        tolerance = {"rel": BOUND} if sketched else {"rel": 1e-9, "abs": PRINTED}
        assert report.metrics[name] == pytest.approx(value, **tolerance, nan_ok=True), name


# --- what is compared with what -------------------------------------------------------------------------------------

B01_TRAIN = [-0.11, -2.40, -0.03, -1.70, -0.52, -3.10, -0.24, -0.95]
B01_GOOD = [t + e for t, e in zip(B01_TRAIN, [0.002, -0.001, 0.003, 0, -0.002, 0.001, 0, 0.002], strict=True)]


def test_b01_one_position_shift() -> None:
    """Figures as given, never silently re-aligned."""
    good, bad = observe(flat(B01_TRAIN, B01_GOOD)), observe(flat(B01_TRAIN, [0.0, *B01_GOOD[:-1]]))
    assert_metrics(good, compared_token_count=8, abs_dlogp_mean=0.001375, abs_dlogp_max=0.003)
    assert_metrics(bad, compared_token_count=8, abs_dlogp_mean=1.721625, abs_dlogp_max=2.859)
    # The case's -0.541 is the correlation of the log-probabilities; of the probabilities it is this.
    assert bad.metrics["prob_pearson"] == pytest.approx(-0.51264, abs=1e-5)
    assert good.metrics["prob_pearson"] > 0.99999 and good.warnings == {}


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_b01_shifts_of_any_size_and_side(shift: int) -> None:
    rollout = B01_GOOD[-shift:] + B01_GOOD[:-shift]
    assert_reports(observe(lists(Sample(B01_TRAIN, rollout))), audit([Sample(B01_TRAIN, rollout, sample_index=0)]))
    assert observe(flat(B01_TRAIN, rollout)).metrics["abs_dlogp_mean"] > 0.5


def test_b02_packed_samples() -> None:
    """A pack whose sides dropped different slots is refused whole, and the sentence names lengths and samples."""
    bounds = torch.tensor([0, 4, 7, 12])
    collector = collect(
        TokenBatch.from_packed(
            torch.zeros(11), torch.zeros(9), torch.ones(12), cu_seqlens=bounds, sample_index=[50, 51, 52]
        )
    )
    for part in (r"\b11\b", r"\b9\b", r"\b50\b"):
        assert re.search(part, str(collector.last_error))
    report = collector.compute()
    assert report.warnings["length_mismatch"] == 3
    assert report.metrics["compared_token_count"] == 0 and report.metrics["active_token_count"] == 12
    values, mask = torch.linspace(-3.0, -0.1, 12), torch.ones(12)
    mask[bounds[:-1]] = 0
    masked = observe(TokenBatch.from_packed(values, values - 0.5, mask, cu_seqlens=bounds))
    assert_metrics(masked, compared_token_count=9, abs_dlogp_mean=0.5, total_token_count=12, mask_coverage=0.75)


@pytest.mark.parametrize(
    ("train", "rollout", "mask"), [(12, 11, 12), (11, 12, 12), (12, 12, 11), (13, 12, 12), (0, 12, 12)]
)
def test_b02_no_truncation_to_the_shorter(train: int, rollout: int, mask: int) -> None:
    arrays = [-torch.ones(train), -torch.ones(rollout), torch.ones(mask)]
    good = TokenBatch.from_packed(*[-torch.ones(3)] * 3, cu_seqlens=[0, 3])
    report = observe(TokenBatch.from_packed(*arrays, cu_seqlens=torch.tensor([0, 4, 7, 12])), good)
    assert report.warnings == {"length_mismatch": 3}
    assert report.metrics["compared_token_count"] == 3 and report.metrics["active_token_count"] == mask + 3


B03 = [
    Sample([-0.5, -1.0, -2.0], [-0.4, -1.1, -1.8], sample_index=0, prompt_length=2),
    Sample([-0.3, -0.6, -0.9], [-0.3, -0.7, -0.9], sample_index=1, prompt_length=4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["left", "right", "columns", "lists"])
def test_b03_column_origin_differs_per_row(side: str, dtype: torch.dtype) -> None:
    """Left padding, right padding, prompts of unequal length and ragged lists: the same figures and positions."""
    width, starts = 7, {"left": [4, 4], "right": [0, 0], "columns": [2, 4]}.get(side)
    if starts is None:
        report = observe(lists(*B03))
    else:
        arrays = torch.full((3, 2, width), math.nan, dtype=dtype)
        arrays[2] = 0
        for row, (sample, start) in enumerate(zip(B03, starts, strict=True)):
            place = slice(start, start + 3)
            arrays[0, row, place] = torch.tensor(sample.train, dtype=dtype)
            arrays[1, row, place] = torch.tensor(sample.rollout, dtype=dtype)
            arrays[2, row, place] = 1
        batch = TokenBatch.from_padded(
            *arrays, valid=arrays[2], response_start=torch.tensor(starts), sample_index=torch.tensor([0, 1])
        )
        report = observe(batch)
    assert report.metrics["dlogp_mean"] == pytest.approx(-1 / 60, abs=1e-7)
    assert report.metrics["abs_dlogp_mean"] == pytest.approx(1 / 12, abs=1e-7)
    assert report.metrics["abs_dlogp_max"] == pytest.approx(0.2, abs=1e-6)
    assert report.metrics["compared_token_count"] == report.metrics["total_token_count"] == 6
    assert (report.metrics["worst_sample_index"], report.metrics["worst_token_position"]) == (0, 2)


def test_b04_length_mismatch() -> None:
    """A sample of 6 and 5 values is refused, the others count; d is never taken across different tokens."""
    bad, good = Sample([-1.0] * 6, [-1.1] * 5, [1] * 6), Sample([-1.0] * 4, [-1.5] * 4)
    for batch in (lists(bad, good), lists(good, bad)):
        report = observe(batch)
        assert report.warnings == {"length_mismatch": 1}
        assert_metrics(report, compared_token_count=4, active_token_count=10, abs_dlogp_mean=0.5, abs_dlogp_max=0.5)
    ids = {"token_ids": torch.tensor([11, 12, 13, 14]), "rollout_token_ids": torch.tensor([11, 12, 99, 14])}
    report = observe(flat([-1.0] * 4, [-1.5, -1.5, -9.0, -1.5]) | ids)
    assert report.warnings == {"token_mismatch": 1}
    assert_metrics(report, compared_token_count=3, abs_dlogp_max=0.5)


def test_b04_other_ids_hide_any_value() -> None:
    """A mismatch comes first: what the values are does not matter."""
    for value in (math.nan, -math.inf, -9999.0, 0.5, 0.0):
        ids = {"token_ids": torch.tensor([1, 2]), "rollout_token_ids": torch.tensor([1, 3])}
        assert observe(flat([-1.0, -2.0], [-1.0, value]) | ids).warnings == {"token_mismatch": 1}


B07_IDS = [0, 0, 1, 0, 2, 0]


def test_b07_raw_versus_temperature_scaled() -> None:
    """Two faults of temperature with signatures of their own: one of mixed sign, one a constant offset."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    raw, scaled = logits.log_softmax(0), (logits / 0.6).log_softmax(0)
    mixed = observe(flat(scaled[B07_IDS].tolist(), raw[B07_IDS].tolist()))
    assert_metrics(mixed, compared_token_count=6, dlogp_mean=-0.101204, abs_dlogp_mean=0.410710, abs_dlogp_max=1.101204)
    assert mixed.metrics["dlogp_min"] < 0 < mixed.metrics["dlogp_max"]
    constant = observe(flat(scaled[B07_IDS].tolist(), (raw / 0.6)[B07_IDS].tolist()))
    assert_metrics(constant, dlogp_mean=0.525589, abs_dlogp_mean=0.525589, dlogp_min=0.525589, dlogp_max=0.525589)
    assert constant.metrics["dlogp_std"] < 1e-7


@pytest.mark.parametrize("ids", [[0] * 10, [1] * 10, [0, 1] * 5])
def test_b08_renormalised_on_one_side(ids: list[int]) -> None:
    """A constant one-sided d: the signed figures say bias, not noise."""
    train, rollout = np.log([0.5, 0.3])[ids], np.log([0.625, 0.375])[ids]
    metrics = observe(flat(train.tolist(), rollout.tolist())).metrics
    constant = math.log(0.8)
    for name in ("dlogp_min", "dlogp_max", "dlogp_mean", "dlogp_p01", "dlogp_p50", "dlogp_p99"):
        assert metrics[name] == pytest.approx(constant, rel=1e-7)
    for name in ("abs_dlogp_p50", "abs_dlogp_p90", "abs_dlogp_p99", "abs_dlogp_max"):
        assert metrics[name] == pytest.approx(-constant, rel=1e-7)
    assert metrics["ratio0_mean"] == pytest.approx(0.8, rel=1e-6)
    assert metrics["approx_kl0"] == pytest.approx(0.0231436, abs=6e-8)
    assert metrics["clipfrac0_low"] == 0.0 or metrics["dlogp_min"] < math.log1p(-0.2)
    assert metrics["dlogp_std"] < 1e-7


# --- values that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_b09_train_neginf(dtype: torch.dtype) -> None:
    """The trainer's own filter dropped the sampled token; never NaN in any output."""
    train = torch.tensor([-0.4, -math.inf, -1.1, -0.2], dtype=dtype)
    rollout = torch.tensor([-0.41, -2.2, -1.09, -0.2], dtype=dtype)
    for mask, warnings in (([1, 1, 1, 1], {"train_neginf": 1}), ([1, 0, 1, 1], {})):
        update = {"train_log_probs": train, "rollout_log_probs": rollout, "mask": torch.tensor(mask)}
        report = observe(update | {"valid": torch.ones(4)})
        assert report.warnings == warnings
        assert report.metrics["compared_token_count"] == 3
        absent = {n for n, v in report.metrics.items() if isinstance(v, float) and math.isnan(v)}
        assert {n for n in absent if not n.startswith("updates_since_rollout")} == set()
        if dtype == torch.float64:
            assert_metrics(report, dlogp_mean=0.0, abs_dlogp_mean=0.02 / 3, abs_dlogp_max=0.01)


B11_TRAIN, B11_ROLLOUT = [-0.31, -0.02, -1.20, -0.01, -0.71], [-0.30, None, -1.25, math.nan, -0.70]


@pytest.mark.parametrize("form", ["lists", "values", "object array", "json"])
def test_b11_none_and_nan_from_the_engine(form: str) -> None:
    """Gaps and NaN are counted apart and lower the coverage; they are not a drift of 0."""
    rollout: Any = B11_ROLLOUT
    warnings = {"rollout_missing": 1, "rollout_nan": 1}
    if form == "object array":
        rollout = np.array(B11_ROLLOUT, dtype=object)
    elif form == "json":
        rollout = json.loads(json.dumps([None if r is None or math.isnan(r) else r for r in B11_ROLLOUT]))
        warnings = {"rollout_missing": 2}
    if form == "lists":
        report = observe(lists(Sample(B11_TRAIN, rollout)))
    else:
        report = observe({"train_log_probs": B11_TRAIN, "rollout_log_probs": rollout, "mask": [1] * 5})
    assert report.warnings == warnings
    assert_metrics(
        report, compared_token_count=3, active_token_count=5, compared_coverage=0.6,
        dlogp_mean=0.01, abs_dlogp_mean=0.07 / 3, abs_dlogp_max=0.05,
    )  # fmt: skip


B13_TRAIN, B13_ROLLOUT = [-0.50, -0.20, -4.0, -6.0, -5.0, -0.90], [-0.52, -0.19, 0.0, 0.0, 0.0, -0.88]
B13_MASK = [1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("form", WHOLE_FORMS, ids=lambda form: form.__name__)
def test_b13_masked_slots_hold_rubbish(form) -> None:
    """Tool tokens are not compared, and nothing that stands there shows."""
    outcomes = []
    for rubbish in (0.0, 1.0, math.nan, math.inf, -math.inf, -9999.0, None):
        rollout = [r if m else rubbish for r, m in zip(B13_ROLLOUT, B13_MASK, strict=True)]
        sample = Sample(B13_TRAIN, rollout, B13_MASK, sample_index=0)
        report = observe(*form([sample], random.Random(0)))
        assert report.warnings == {}
        assert report.metrics["dlogp_mean"] == pytest.approx(-0.01 / 3, abs=1e-7)
        assert report.metrics["abs_dlogp_mean"] == pytest.approx(0.05 / 3, abs=1e-7)
        assert report.metrics["abs_dlogp_max"] == pytest.approx(0.02, abs=1e-7)
        assert report.metrics["compared_token_count"] == 3
        outcomes.append(bits(without_layout(report)))
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_b13_unmasked_they_show() -> None:
    """The figures that leaving the mask out would give: the test can fail."""
    report = observe(flat(B13_TRAIN, B13_ROLLOUT))
    assert_metrics(report, abs_dlogp_mean=2.508333, abs_dlogp_max=6.0)
    assert report.warnings == {"zero_fill_suspect": 3}


# --- nothing, little, and padding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_b15_padding_rows(rows: int) -> None:
    """Rows of padding dilute nothing."""
    train, rollout, mask = torch.zeros(1 + rows, 5), torch.zeros(1 + rows, 5), torch.zeros(1 + rows, 5)
    train[0], rollout[0], mask[0] = -2.0, -1.0, 1.0
    report = observe(TokenBatch.from_padded(train, rollout, mask, valid=mask))
    assert_metrics(report, dlogp_mean=-1.0, abs_dlogp_mean=1.0, compared_token_count=5, total_token_count=5)
    assert math.exp(report.metrics["train_nll"]) == pytest.approx(7.389056, abs=1e-6)


def test_b16_nothing_valid() -> None:
    """Ranks without tokens weigh nothing; a step without tokens has no figures."""
    one = flat([-2.0] * 4, [-1.0] * 4)
    none = one | {"mask": torch.zeros(4)}
    report = reduce([collect(one), collect(), collect(one), collect(none)], CONFIG)
    assert_metrics(report, abs_dlogp_mean=1.0, abs_dlogp_p50=1.0, compared_token_count=8)
    assert report.warnings == {}
    empty = reduce([collect(none) for _ in range(4)], CONFIG)
    assert empty.warnings == {"nothing_compared": 1}
    for name in ("abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_max", "dlogp_min", "ess0", "train_nll"):
        assert math.isnan(empty.metrics[name])
    assert empty.metrics["compared_token_count"] == 0


def test_b19_aborted_or_empty_responses() -> None:
    """A response of no tokens is accepted in every form."""
    samples = [Sample([-1.0] * 4, [-1.02] * 4), Sample([], [], []), Sample([-1.0] * 2, [-1.04] * 2)]
    train = torch.tensor([-1.0] * 6, dtype=torch.float64)
    rollout = torch.tensor([-1.02] * 4 + [-1.04] * 2, dtype=torch.float64)
    bounds, padded = torch.tensor([0, 4, 4, 6]), torch.zeros(3, 3, 4, dtype=torch.float64)
    for row, sample in enumerate(samples):
        for column, values in enumerate((sample.train, sample.rollout, [1] * len(sample))):
            padded[column, row, : len(sample)] = torch.tensor(values)
    reports = [
        observe(lists(*samples)),
        observe(TokenBatch.from_packed(train, rollout, torch.ones(6), cu_seqlens=bounds)),
        observe(TokenBatch.from_padded(padded[0], padded[1], padded[2], valid=padded[2])),
    ]
    for report in reports:
        assert_metrics(report, compared_token_count=6, total_token_count=6)
        assert report.metrics["abs_dlogp_mean"] == pytest.approx(0.16 / 6, rel=1e-6)
        assert report.warnings == {}


def test_b33_zero_drift_is_not_nothing() -> None:
    """100 tokens that agree are 100 tokens; a rank without tokens beside them is no fault."""
    agreeing = drifts([0.0] * 100)
    for report in (observe(agreeing), reduce([collect(agreeing), collect()], CONFIG)):
        assert report.warnings == {}
        assert report.metrics["compared_token_count"] == 100
        for name in (
            "abs_dlogp_mean",
            "abs_dlogp_max",
            "abs_dlogp_p50",
            "dlogp_std",
            "dlogp_min",
            "approx_kl0",
            "kl0_k1",
        ):
            assert report.metrics[name] == 0.0
        assert any("self_comparison" in note for note in report.notes)


# --- over ranks -----------------------------------------------------------------------------------------------------

B18 = {"e0": (100, 0.010), "e1": (100, 0.012), "e2": (10, 0.900), "e3": (190, 0.011)}


@pytest.mark.parametrize("placed", ["one rank", "an engine a rank", "shuffled"])
def test_b18_one_engine_serves_stale_weights(placed: str) -> None:
    """Mean and p90 look fine; the worst tokens name the engine, on whichever ranks it appeared."""
    config = AuditConfig(breakdowns={"engine": tuple(B18)})
    tokens = [(code, drift) for code, (count, drift) in enumerate(B18.values()) for _ in range(count)]
    if placed == "one rank":
        shares = [tokens]
    elif placed == "an engine a rank":
        shares = [list(share) for _, share in itertools.groupby(tokens, key=lambda token: token[0])]
    else:
        random.Random(0).shuffle(tokens)
        shares = [tokens[i::7] for i in range(7)]
    ranks = []
    for share in shares:
        update = drifts([drift for _, drift in share]) | {
            "labels": {"engine": torch.tensor([code for code, _ in share])}
        }
        ranks.append(collect(update, config=config))
    report = reduce(ranks, config)
    assert_metrics(
        report, compared_token_count=400, abs_dlogp_mean=0.033225, abs_dlogp_p50=0.011, abs_dlogp_p90=0.012,
        abs_dlogp_p99=0.9, abs_dlogp_max=0.9,
    )  # fmt: skip
    means = {bucket.name: bucket.abs_dlogp_mean for bucket in report.breakdowns["engine"]}
    assert math.isnan(means.pop("unknown"))
    assert means == pytest.approx({name: drift for name, (_, drift) in B18.items()})
    assert len(report.worst_tokens) == 4
    assert {token.labels["engine"] for token in report.worst_tokens} == {"e2"}


def test_b18_an_unknown_engine_is_said_to_be_unknown() -> None:
    """Labels on some ranks only still merge; where they are not given the report says so."""
    config = AuditConfig(breakdowns={"engine": ("e0", "e1")})
    known = collect(drifts([0.1]) | {"labels": {"engine": torch.tensor([1])}}, config=config)
    report = reduce([known, collect(drifts([0.5]), config=config)], config)
    assert [token.labels["engine"] for token in report.worst_tokens] == ["unknown", "e1"]
    assert report.warnings == {"missing_metadata": 1}
    for code in (-1, 2, 100):
        outside = observe(drifts([0.1]) | {"labels": {"engine": torch.tensor([code])}}, config=config)
        assert outside.worst_tokens[0].labels["engine"] == "unknown"


def test_b20_a_rank_with_only_masked_tokens() -> None:
    """No update, only masked tokens, or a warning of its own: the vector has one length and the numbers hold."""
    other = {
        "none": collect(),
        "masked": collect(flat([-1.0] * 3, [-5.0] * 3, [0, 0, 0])),
        "other warning": collect(flat([-1.0], [-9999.0])),
        "failed": collect(
            {"train_log_probs": torch.zeros(3), "rollout_log_probs": torch.zeros(2), "mask": torch.ones(3)}
        ),
    }
    lengths = set()
    for kind, rank in other.items():
        for ranks in ([collect(drifts([0.1, 0.3])), rank], [rank, collect(drifts([0.1, 0.3]))]):
            lengths.update(len(r.pack(i, 2)) for i, r in enumerate(ranks))
            report = reduce(ranks, CONFIG)
            assert_metrics(report, compared_token_count=2, abs_dlogp_mean=0.2, abs_dlogp_max=0.3)
            expected = {"other warning": {"rollout_sentinel": 1}, "failed": {"update_failed": 1}}.get(kind, {})
            assert report.warnings == expected
    assert len(lengths) == 1


def test_b21_the_state_has_one_shape_whatever_the_data() -> None:
    """5 distinct values, 50,000 over 12 decades, none: one shape, and the sum is the sketch of the union."""
    rng = np.random.default_rng(0)
    few, many = [0.1, 0.2, 0.3, 0.4, 0.5], (10.0 ** rng.uniform(-9.5, 2.5, 50_000)).tolist()
    ranks = [collect(drifts(few)), collect(drifts(many)), collect()]
    assert len({rank.pack(i, 3).shape for i, rank in enumerate(ranks)}) == 1
    together = observe(drifts(few + many))
    assert bits(without_layout(reduce(ranks, CONFIG))["metrics"]) == bits(without_layout(together)["metrics"])
    union = sorted(few + many)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert together.metrics[f"abs_dlogp_{name}"] == pytest.approx(union[math.ceil(q * len(union)) - 1], rel=BOUND)


def test_b23_uneven_accumulation_windows() -> None:
    """Micro-batches weigh by their tokens, and the spread is that of all tokens, not of micro-batch means."""
    report = observe(drifts([0.1] * 10), drifts([0.9] * 2), drifts([0.5] * 4))
    assert_metrics(report, abs_dlogp_mean=0.3, dlogp_mean=0.3, dlogp_std=0.2828427)
    other = observe(drifts([0.8, 0.6]), drifts([0.01, 0.02, 0.03, 0.02]), drifts([0.05]))
    assert other.metrics["abs_dlogp_mean"] == pytest.approx(0.2185714, abs=PRINTED)


@pytest.mark.parametrize("offset", [0.5, 500.0])
def test_b23_spread_without_cancellation(offset: float) -> None:
    """Values that alternate by 1e-6 (in float32 steps where those are larger) keep their spread."""
    pair = [float(np.float32(offset)), float(np.nextafter(np.float32(offset + 1e-6), np.float32(1e9)))]
    report = observe(drifts(pair * 100_000))
    assert report.metrics["dlogp_std"] == pytest.approx((pair[1] - pair[0]) / 2, rel=1e-12)


def test_b23_spread_of_the_case() -> None:
    exact = observe(drifts([0.5, 0.500001] * 500_000))
    assert exact.metrics["dlogp_std"] == pytest.approx(5e-7, rel=0.05)


def test_b24_extremes_are_not_averaged() -> None:
    """The maximum of the ranks' maxima; a maximum below zero stays below zero."""
    report = reduce([collect(drifts([m, 0.001])) for m in (0.02, 0.05, 7.5, 0.03)], CONFIG)
    assert report.metrics["abs_dlogp_max"] == report.metrics["dlogp_max"] == 7.5
    assert report.metrics["worst_rank"] == 2
    below = reduce([collect(drifts([-0.2, -0.3])), collect(), collect(drifts([-0.1, -0.9]))], CONFIG)
    assert (below.metrics["dlogp_min"], below.metrics["dlogp_max"]) == (-0.9, -0.1)
    above = reduce([collect(drifts([0.2, 0.3])), collect(), collect(drifts([0.1, 0.9]))], CONFIG)
    assert (above.metrics["dlogp_min"], above.metrics["dlogp_max"]) == (0.1, 0.9)


@pytest.mark.parametrize("data_parallel", [1, 2])
def test_b25_tensor_parallel_replicas_are_not_counted(data_parallel: int) -> None:
    """Each tensor-parallel rank reduces over its own data-parallel group and finds the same numbers, counted once."""
    shares = [drifts([0.1, 0.2, 0.3, 0.4, 0.5]) | {"valid": torch.ones(5)} for _ in range(data_parallel)]
    for share in shares:
        share["rollout_log_probs"][0] = math.nan
    groups = [reduce([collect(share) for share in shares], CONFIG) for _ in range(2)]
    assert bits(groups[0].to_dict()) == bits(groups[1].to_dict())
    assert groups[0].metrics["active_token_count"] == 5 * data_parallel
    assert groups[0].warnings == {"rollout_nan": data_parallel}


def test_b27_stages_without_the_loss() -> None:
    """A stage that observes nothing adds nothing and warns of nothing; a chunk seen twice counts once."""
    last = Collector(CONFIG)
    for microbatch in (0, 1, 0):
        last.update(**drifts([0.25, 0.5]), microbatch=microbatch)
    report = reduce([Collector(CONFIG), last], CONFIG)
    assert report.metrics["compared_token_count"] == 4
    assert report.warnings == {"duplicate_microbatch": 1}


def test_b28_quantiles_are_not_averaged_over_ranks() -> None:
    report = reduce([collect(drifts([0.01] * 960)), collect(drifts([0.01] * 10 + [5.0] * 30))], CONFIG)
    assert_metrics(report, abs_dlogp_p50=0.01, abs_dlogp_p90=0.01, abs_dlogp_p99=5.0, abs_dlogp_max=5.0)


# --- counting, resetting, merging -----------------------------------------------------------------------------------


def doubled(collector: Collector, times: int) -> Collector:
    for _ in range(times):
        copy = Collector(collector.config)
        copy.merge(collector)
        collector.merge(copy)
    return collector


@pytest.mark.parametrize("power", [24, 31, 36])
def test_b30_counters_do_not_stop(power: int) -> None:
    """2^24, 2^31 and 2^36 tokens and one more; warning counters and sums likewise."""
    collector = doubled(collect(flat([-1.0, -1.0], [-1.25, math.nan])), power)
    collector.update(**flat([-1.0, -1.0], [-1.25, math.nan]))
    report = collector.compute()
    assert report.metrics["compared_token_count"] == report.warnings["rollout_nan"] == 2**power + 1
    assert report.metrics["abs_dlogp_mean"] == 0.25 and report.metrics["dlogp_std"] == 0.0
    collector.update(**drifts([0.5]))
    assert collector.compute().metrics["abs_dlogp_p99_9"] == pytest.approx(0.25, rel=BOUND)


def test_b30_sums_do_not_drift() -> None:
    """20 updates of a million tokens of 1e-3: a float32 running sum is 13 % off."""
    collector = collect(drifts([1e-3] * 1_000_000))
    whole = Collector(CONFIG)
    for _ in range(20):
        whole.merge(collector)
    report = whole.compute()
    assert report.metrics["compared_token_count"] == 20_000_000
    assert report.metrics["abs_dlogp_mean"] * 20_000_000 == pytest.approx(20_000, rel=1e-6)
    assert report.metrics["abs_dlogp_p99"] == pytest.approx(1e-3, rel=1e-6)


def test_b31_reset_and_read_twice() -> None:
    collector = collect(drifts([0.2, 0.4]))
    for _ in range(2):
        report = all_reduce(collector)
        assert_metrics(report, abs_dlogp_mean=0.3, compared_token_count=2)
    collector.reset()
    collector.update(**drifts([1.0, 1.0]))
    assert_metrics(all_reduce(collector), abs_dlogp_mean=1.0, compared_token_count=2, abs_dlogp_max=1.0)
    assert_metrics(report, abs_dlogp_mean=0.3)


def test_b31_memory_is_flat() -> None:
    """The state's tensors neither grow nor move over many steps."""
    import gc

    collector = Collector(CONFIG)
    update = drifts([0.1, 0.2])

    def step() -> int:
        collector.update(**update, microbatch=0)
        collector.compute()
        collector.reset()
        return collector.pack().numel()

    length = step()
    gc.collect()
    before = len(gc.get_objects())
    assert {step() for _ in range(300)} == {length}
    gc.collect()
    assert len(gc.get_objects()) - before < 100


def test_b32_no_process_group() -> None:
    """Without a process group the reduction is that of one rank: the same numbers, of the whole group."""
    assert not torch.distributed.is_initialized()
    collector = collect(drifts([0.1, -0.4, 0.0]))
    alone, reduced = collector.compute(), all_reduce(collector)
    assert bits(without_layout(alone)) == bits(without_layout(reduced))
    assert (alone.scope, reduced.scope) == ("rank", "group")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_b36_merges(order: tuple[int, ...]) -> None:
    """1..1000 (thousandths) merged into an empty one, in any order, and doubled."""
    values = [i / 1000 for i in range(1, 1001)]
    parts = [values[:10], values[10:500], values[500:]]
    merged = Collector(CONFIG)
    for i in order:
        merged.merge(collect(drifts(parts[i])))
    tree = collect(drifts(parts[order[1]]))
    tree.merge(collect(drifts(parts[order[2]])))
    tree.merge(collect(drifts(parts[order[0]])))
    in_turn = collect(*[drifts(parts[i]) for i in range(3)])
    assert torch.equal(merged.pack(), tree.pack()) and torch.equal(merged.pack(), in_turn.pack())
    before = merged.compute().metrics
    for name, low, high in (("p50", 0.5, 0.501), ("p90", 0.9, 0.901), ("p99", 0.99, 0.991)):
        assert low * (1 - BOUND) <= before[f"abs_dlogp_{name}"] <= high * (1 + BOUND)
    after = doubled(merged, 1).compute().metrics
    assert after["compared_token_count"] == 2000
    for name in ("abs_dlogp_p50", "abs_dlogp_p90", "abs_dlogp_p99", "abs_dlogp_mean", "dlogp_std", "abs_dlogp_max"):
        assert after[name] == before[name]


def test_b36_merging_with_itself_doubles() -> None:
    """a + a: twice the tokens, the same quantiles."""
    collector = collect(drifts([0.1, 0.2, 0.4]))
    before = collector.compute().metrics
    collector.merge(collector)
    after = collector.compute().metrics
    assert after["compared_token_count"] == 6
    assert (after["abs_dlogp_p50"], after["abs_dlogp_mean"]) == (before["abs_dlogp_p50"], before["abs_dlogp_mean"])


def test_b36_seven_of_eight_ranks_are_empty() -> None:
    for holder in range(8):
        ranks = [collect(drifts([i / 100 for i in range(1, 101)])) if i == holder else collect() for i in range(8)]
        assert_metrics(reduce(ranks, CONFIG), compared_token_count=100, abs_dlogp_p50=0.5, abs_dlogp_p99=0.99)


# --- quantiles ------------------------------------------------------------------------------------------------------


def test_b37_empty_single_and_extreme_quantiles() -> None:
    """Null for none, the value itself for one, never beyond the extremes, and both ends exactly."""
    config = AuditConfig(quantiles=("0", "0.5", "0.99", "1"))
    keys = ("abs_dlogp_p00", "abs_dlogp_p50", "abs_dlogp_p99", "abs_dlogp_p100")
    assert all(math.isnan(observe(config=config).metrics[key]) for key in keys)
    assert {observe(drifts([0.37]), config=config).metrics[key] for key in keys} == {0.37}
    four = observe(drifts([137.0, 215.0, 237.0, 389.0]), config=config).metrics
    assert [four[key] for key in (keys[0], keys[2], keys[3])] == [137.0, 389.0, 389.0]
    assert 137.0 <= four[keys[1]] <= 389.0 and four[keys[1]] == pytest.approx(215.0, rel=BOUND)
    assert observe(drifts([0.001] * 1000 + [900.0])).metrics["abs_dlogp_p99"] == 0.001
    edge = observe(drifts([0.001] * 99 + [900.0])).metrics["abs_dlogp_p99"]
    assert edge == 0.001, "the smallest value with at least 99 of 100 at or below it"


@pytest.mark.parametrize("values", [[1.0] * 1000 + [1e7], [1.0] * 99 + [1e7], [137.0, 215.0, 237.0, 389.0], [0.37]])
def test_b37_of_the_histogram(values: list[float]) -> None:
    """The sketch alone takes values that no log-probability has."""
    histogram = LogHistogram()
    histogram.update(torch.tensor(values, dtype=torch.float64))
    assert (histogram.quantile("0"), histogram.quantile("1")) == (min(values), max(values))
    for q in ("0.01", "0.5", "0.9", "0.99", "0.999"):
        exact = sorted(values)[math.ceil(float(q) * len(values)) - 1]
        assert histogram.quantile(q) == pytest.approx(exact, rel=BOUND)
        assert min(values) <= histogram.quantile(q) <= max(values)
    for wrong in ("-0.1", "1.1", math.nan, "NaN", "half"):
        with pytest.raises(ValueError, match="quantile"):
            histogram.quantile(wrong)
    assert math.isnan(LogHistogram().quantile("0.5"))


# --- precision ------------------------------------------------------------------------------------------------------


def test_b39_an_overflow_is_counted_and_poisons_nothing() -> None:
    """One d of 95 among 999 of 0.01: its figures are null and counted, the others stand."""
    report = observe(drifts([0.01] * 999 + [95.0]))
    assert_metrics(report, abs_dlogp_mean=0.10499, abs_dlogp_p99=0.01, abs_dlogp_max=95.0, worst_abs_dlogp=95.0)
    for name in ("ratio0_mean", "chi2_0", "ess0", "approx_kl0", "mult_prob_error"):
        assert report.metrics[f"overflow/{name}"] == 1 and math.isnan(report.metrics[name])
    assert all(not isinstance(v, float) or not math.isinf(v) for v in report.metrics.values())
    masked = observe(flat([0.0] * 1000, [-0.01] * 999 + [-95.0], [1] * 999 + [0]))
    assert masked.metrics["overflow/approx_kl0"] == 0
    assert masked.metrics["approx_kl0"] == pytest.approx(5.0167e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("drift", "overflowing"),
    [
        (44.0, ()), (45.0, ("chi2_0", "ess0")), (88.0, ("chi2_0", "ess0")),
        (89.0, ("ratio0_mean", "chi2_0", "ess0", "approx_kl0", "mult_prob_error")),
        (-88.0, ()), (-89.0, ("mult_prob_error",)),
        (800.0, ("ratio0_mean", "chi2_0", "ess0", "approx_kl0", "mult_prob_error")), (-800.0, ("mult_prob_error",)),
    ],
)  # fmt: skip
def test_b39_each_figure_has_its_own_limit(drift: float, overflowing: tuple[str, ...]) -> None:
    """exp d, its square, k3 and exp abs d leave float32 at different d."""
    metrics = observe(drifts([0.01, drift])).metrics
    for name in ("ratio0_mean", "chi2_0", "ess0", "approx_kl0", "mult_prob_error"):
        assert metrics[f"overflow/{name}"] == (name in overflowing), name
        assert math.isnan(metrics[name]) == (name in overflowing), name
    assert metrics["abs_dlogp_max"] == abs(drift)


def test_b39_float16_is_widened_before_the_exponential() -> None:
    """exp(12) leaves float16."""
    update = {"train_log_probs": torch.tensor([0.0]).half(), "rollout_log_probs": torch.tensor([-12.0]).half()}
    metrics = observe(update | {"mask": torch.ones(1)}).metrics
    assert metrics["ratio0_mean"] == pytest.approx(math.exp(12), rel=1e-6)


B41 = [-0.0012, -0.51, -7.3, -23.7, -0.3337]


def test_b41_the_rounding_floor_of_bf16() -> None:
    """float32 against the same values in bfloat16: the difference is that of storage, as given."""
    exact = torch.tensor(B41)
    stored = exact.bfloat16()
    distances = [2.19e-6, 1.719e-3, 1.250e-2, 5.000e-2, 2.84e-4]
    for value, other, distance in zip(exact, stored, distances, strict=True):
        update = {"train_log_probs": value[None], "rollout_log_probs": other[None], "mask": torch.ones(1)}
        assert observe(update).metrics["abs_dlogp_max"] == pytest.approx(distance, rel=3e-3)
    report = observe({"train_log_probs": exact, "rollout_log_probs": stored, "mask": torch.ones(5)})
    assert report.metrics["identical_frac"] == 0.0
    assert report.metrics["abs_dlogp_max"] == abs(float(exact[3]) - float(stored[3]))


@pytest.mark.parametrize("drift", [1e-5, -1e-5])
def test_b41_k3_of_a_small_drift(drift: float) -> None:
    """In float32 it would be 270 times too large."""
    assert observe(drifts([drift] * 7)).metrics["approx_kl0"] == pytest.approx(5e-11, rel=1e-5)


# --- what is written ------------------------------------------------------------------------------------------------


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


B43_STEPS = {
    "nothing": [],
    "overflow": [drifts([900.0, -900.0, 95.0])],
    "faults": [flat([math.nan, -math.inf, -1.0], [-1.0, -1.0, math.inf])],
    "plain": [drifts([0.1, -0.2, 0.0])],
}


@pytest.mark.parametrize("updates", B43_STEPS.values(), ids=B43_STEPS.keys())
def test_b43_strict_json_and_plain_numbers(updates: list[Any]) -> None:
    """Null, never a bare NaN; Python numbers; names that every backend takes."""
    report = reduce([collect(*updates), collect()], CONFIG)
    line = report.to_json()
    assert "\n" not in line
    read = json.loads(line, parse_constant=refuse)
    assert read == report.to_dict()
    assert json.dumps(StepReport.from_dict(read).to_dict()) == json.dumps(read)
    assert all(type(value) in (int, float) for value in report.metrics.values())
    assert all(value is None or type(value) in (int, float) for value in read["metrics"].values())
    for name in report.metrics:
        assert re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_./ -]*", name)
        assert not any(other.startswith(name + "/") for other in report.metrics)


def test_b43_null_is_read_back_as_nan() -> None:
    read = StepReport.from_dict(json.loads(observe().to_json()))
    assert math.isnan(read.metrics["abs_dlogp_mean"]) and read.metrics["compared_token_count"] == 0
