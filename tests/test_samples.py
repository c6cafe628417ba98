"""The table of samples: exact figures of whole samples, however they were cut, against the oracle's."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from oracle import Sample, audit, differences, sample_metrics
from strategies import CUT_FORMS, WHOLE_FORMS, collect, cut, observe, random_samples, reduce

from rlk_audit import AuditConfig, Auditor, Collector, StepReport, TokenBatch
from rlk_audit.samples import SAMPLE_METRICS

SLOTS = 24
CONFIG = AuditConfig(samples_per_step=SLOTS)


def step(seed: int, count: int = 20) -> list[Sample]:
    """Samples in slots of a random order, some of the slots free."""
    rng = random.Random(seed)
    slots = rng.sample(range(SLOTS), count)
    return [replace(s, slot=slot) for s, slot in zip(random_samples(rng, count), slots, strict=True)]


def assert_samples(report: StepReport, group: list[Sample]) -> None:
    expected = audit(group)
    expected.metrics |= sample_metrics(group, expected)
    assert not differences(report.metrics, expected)
    assert report.metrics["sample_count"] == len(group)
    by_slot: dict[int, list[float]] = {}
    slot_of = {sample.sample_index: sample.slot for sample in group}
    for token in expected.tokens:
        by_slot.setdefault(slot_of[token.worst.sample_index], []).append(token.d)
    means = {slot: math.fsum(map(abs, values)) / len(values) for slot, values in by_slot.items()}
    worst = sorted(means, key=lambda slot: (-round(means[slot], 9), slot))[:4]
    assert [sample.sample_slot for sample in report.samples] == worst
    for sample in report.samples:
        values = by_slot[sample.sample_slot]
        assert sample.compared_token_count == len(values)
        assert sample.abs_dlogp_mean == pytest.approx(means[sample.sample_slot], abs=2**-32)
        assert sample.seq_log_ratio0 == pytest.approx(math.fsum(values), abs=len(values) * 2**-32)


@pytest.mark.parametrize("form", WHOLE_FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_figures_are_the_oracle_s(form: Callable[..., list[Any]], seed: int) -> None:
    group = step(seed)
    assert_samples(observe(*form(group, random.Random(seed)), config=CONFIG), group)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("form", CUT_FORMS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_sample_cut_over_context_parallel_ranks_is_whole_again(cp: int, form: Any, layout: str) -> None:
    group = step(7)
    ranks = [collect(batch, config=CONFIG) for batch in form(group, random.Random(cp), cp, layout)]
    assert_samples(reduce(ranks, CONFIG), group)


@pytest.mark.parametrize("seed", range(6))
def test_cut_in_any_way(seed: int) -> None:
    group = step(seed)
    report = reduce(cut(group, random.Random(seed), 1 + seed % 3, 1 + seed % 2, CONFIG), CONFIG)
    assert_samples(report, group)


def test_a_sample_cut_over_micro_batches_is_whole_again() -> None:
    collector = Collector(CONFIG)
    for drifts in ([0.5, 0.25], [0.75], [-1.0]):
        train = torch.tensor([-2.0 + drift for drift in drifts])
        collector.update(train, torch.full_like(train, -2.0), torch.ones_like(train), sample_slot=3)
    (sample,) = collector.compute().samples
    assert (sample.sample_slot, sample.compared_token_count, sample.active_token_count) == (3, 4, 4)
    assert (sample.abs_dlogp_mean, sample.seq_log_ratio0) == (0.625, 0.5)


def test_the_mean_of_samples_is_not_that_of_tokens() -> None:
    """One long sample without drift beside a short one with: the token mean hides it."""
    lists = [[-1.0] * 99, [-1.5]], [[-1.0] * 99, [-1.0]]
    report = observe(TokenBatch.from_lists(*lists, sample_slot=[0, 1]), config=CONFIG)
    assert report.metrics["abs_dlogp_sample_mean"] == 0.25
    assert report.metrics["abs_dlogp_mean"] == 0.005
    assert report.metrics["seq_log_ratio0_min"] == -0.5
    assert report.metrics["seq_ratio0_geo_min"] == math.exp(-0.5)


def aborted(form: str) -> TokenBatch:
    """Three samples: four tokens, none, two."""
    train, rollout = [[-0.52] * 4, [], [-0.54] * 2], [[-0.5] * 4, [], [-0.5] * 2]
    if form == "lists":
        return TokenBatch.from_lists(train, rollout, sample_slot=[0, 1, 2])
    slots = torch.arange(3)
    if form == "packed":
        flat = [torch.tensor(list(chain.from_iterable(side)), dtype=torch.float64) for side in (train, rollout)]
        return TokenBatch.from_packed(*flat, torch.ones(6), cu_seqlens=[0, 4, 4, 6], sample_slot=slots)
    rows = [torch.tensor([x + [0.0] * (4 - len(x)) for x in side], dtype=torch.float64) for side in (train, rollout)]
    mask = torch.tensor([[i < len(x) for i in range(4)] for x in train])
    return TokenBatch.from_padded(*rows, mask, valid=mask, sample_slot=slots)


@pytest.mark.parametrize("form", ["lists", "packed", "padded"])
def test_b19_aborted_or_empty_responses(form: str) -> None:
    report = observe(aborted(form), config=CONFIG)
    assert report.metrics["abs_dlogp_mean"] == pytest.approx(0.0266667, abs=6e-8)
    assert (report.metrics["sample_count"], report.metrics["zero_active_sample_count"]) == (3, 1)
    assert report.warnings == {"zero_active_sample": 1}
    assert report.metrics["abs_dlogp_sample_mean"] == pytest.approx(0.03)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_b15_padding_rows_dilute_nothing(rows: int) -> None:
    """Rows of padding are no samples: they have no slot."""
    train, rollout = torch.full((1 + rows, 5), -2.0), torch.full((1 + rows, 5), -1.0)
    mask = torch.zeros(1 + rows, 5)
    mask[0] = 1
    slots = torch.tensor([6] + [-1] * rows)
    report = observe(TokenBatch.from_padded(train, rollout, mask, sample_slot=slots), config=CONFIG)
    assert (report.metrics["sample_count"], report.metrics["zero_active_sample_count"]) == (1, 0)
    assert report.metrics["abs_dlogp_sample_mean"] == 1.0
    assert report.metrics["seq_log_ratio0_mean"] == -5.0
    assert report.warnings == {}


@pytest.mark.parametrize("slot", [-1, SLOTS, 10**9, None])
def test_a_token_without_a_slot_makes_the_figures_null(slot: int | None) -> None:
    collector = Collector(CONFIG)
    collector.update([-1.5, -1.0], [-1.0, -1.0], [1, 0], sample_slot=0)
    collector.update([-1.5, -1.0, -1.0], [-1.0, -1.0, -1.0], [1, 1, 0], sample_slot=slot)
    report = collector.compute()
    assert report.warnings == {"sample_table_overflow": 2}
    assert report.samples == ()
    for name in ("sample_count", "zero_active_sample_count", *SAMPLE_METRICS):
        assert math.isnan(report.metrics[name])
    assert report.metrics["compared_token_count"] == 3, "the other figures are as they were"
    json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))


def test_what_was_not_compared_is_active_all_the_same() -> None:
    report = observe(TokenBatch.from_lists([[-1.0, -1.0]], [[None, -1.5]], sample_slot=[4]), config=CONFIG)
    (sample,) = report.samples
    assert (sample.active_token_count, sample.compared_token_count) == (2, 1)
    nothing = observe(TokenBatch.from_lists([[-1.0]], [[None]], sample_slot=[4]), config=CONFIG)
    assert (nothing.metrics["sample_count"], nothing.metrics["zero_active_sample_count"]) == (1, 0)
    assert nothing.samples == () and math.isnan(nothing.metrics["abs_dlogp_sample_mean"])


def test_ratios_that_leave_float64_are_null_and_their_logarithms_stay() -> None:
    count = 60
    report = observe(TokenBatch.from_lists([[-1.0] * count], [[-21.0] * count], sample_slot=[0]), config=CONFIG)
    assert report.metrics["seq_log_ratio0_max"] == 1200.0
    assert math.isnan(report.metrics["seq_chi2_0"])
    assert report.metrics["seq_ess0"] == 1.0
    assert report.metrics["seq_ratio0_geo_max"] == math.exp(20.0)


@pytest.mark.parametrize("drifts", [[998.0], [998.0, 0.5], [998.0, -998.0], [708.0, 710.0], [-998.0]])
def test_a_mean_drift_beyond_any_ratio_is_null_and_ends_no_rank(drifts: list[float]) -> None:
    """As of a placeholder of -999 that an engine fills in: it lies within what is compared."""
    group = [
        Sample([min(drift, 0.0) - 1.0] * 2, [-max(drift, 0.0) - 1.0] * 2, sample_index=i, slot=i)
        for i, drift in enumerate(drifts)
    ]
    auditor = Auditor(CONFIG)
    auditor.update(*WHOLE_FORMS[0](group, random.Random(0)))
    report = auditor.step(1)
    assert_samples(report, group)
    assert math.isnan(report.metrics["seq_ratio0_geo_max"]) == (max(drifts) > 709)
    assert math.isnan(report.metrics["seq_ratio0_geo_min"]) == (min(drifts) > 709)
    assert report.metrics["seq_log_ratio0_max"] == 2 * max(drifts)


def test_without_a_table_nothing_is_said_of_samples() -> None:
    report = observe(TokenBatch.from_lists([[-1.0], []], [[-1.5], []], sample_slot=[0, 1]))
    assert report.samples == () and not {"sample_count", *SAMPLE_METRICS} & set(report.metrics)
    assert report.warnings == {}


def test_the_table_is_in_the_size_and_may_be_refused() -> None:
    table = Collector(CONFIG).layout.size_table()
    assert table[f"{SLOTS} samples"] == (SLOTS + 1) * 5 * 8
    with pytest.raises(ValueError, match=r"100000 samples 4000040"):
        Collector(AuditConfig(samples_per_step=100_000))


def test_the_round_trip_keeps_samples() -> None:
    report = observe(*WHOLE_FORMS[0](step(3), random.Random(3)), config=CONFIG)
    assert StepReport.from_dict(report.to_dict()).to_dict() == report.to_dict()
    assert len(report.to_dict()["samples"]) == 4


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
def test_the_number_of_slots_is_checked(value: object) -> None:
    with pytest.raises((ValueError, TypeError), match="samples_per_step must be"):
        AuditConfig(samples_per_step=value)
