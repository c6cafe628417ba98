"""Breakdowns: every bucket's figures against the oracle's, parts that add up, and what is written of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Expected, Part, Sample, Worst, audit, confidence_bucket, parts, position_bucket
from strategies import WHOLE_FORMS, cut, observe, random_samples, reduce

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.breakdowns import GROUPING_POWER, bucket_of_confidence, bucket_of_position
from rlk_audit.config import CONFIDENCE_EDGES, POSITION_BUCKETS
from rlk_audit.sinks.base import LOGGED_CODES, logged_values
from rlk_audit.sketch import relative_accuracy

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1", "e2"), "position": "auto", "confidence": "auto"}, worst_k=8)
BUCKET_OF: dict[str, Callable[[Worst], str]] = {
    "engine": lambda token: f"e{token.labels['engine']}" if 0 <= token.labels["engine"] < 3 else "unknown",
    "position": lambda token: position_bucket(token.token_position),
    "confidence": lambda token: confidence_bucket(token.rollout_logp),
}


def step(seed: int, count: int = 20) -> list[Sample]:
    """Engines of code -1 to 4, of which 3 and 4 are not declared."""
    rng = random.Random(seed)
    group = random_samples(rng, count, longest=70)
    return [replace(sample, labels={"engine": rng.randint(-1, 4)}) for sample in group]


def assert_breakdowns(report: StepReport, expected: Expected) -> None:
    assert set(report.breakdowns) == set(BUCKET_OF)
    for label, bucket_of in BUCKET_OF.items():
        buckets = {bucket.name: bucket for bucket in report.breakdowns[label]}
        right = parts(expected, bucket_of)
        assert {name for name, bucket in buckets.items() if bucket.compared_token_count} == set(right)
        assert sum(bucket.compared_token_count for bucket in buckets.values()) == len(expected.tokens)
        for name, part in right.items():
            assert_bucket(buckets[name], part, expected)
        for bucket in buckets.values():
            if not bucket.compared_token_count:
                assert all(math.isnan(value) for value in list(vars(bucket).values())[2:])


def assert_bucket(bucket: Any, part: Part, expected: Expected) -> None:
    assert bucket.compared_token_count == part.compared_token_count
    assert bucket.tail_frac_ln2 == part.tail_frac_ln2
    assert bucket.abs_dlogp_mean == part.abs_dlogp_mean
    for name in ("abs_dlogp_p50", "abs_dlogp_p99"):
        exact = getattr(part, name)
        assert getattr(bucket, name) == pytest.approx(exact, rel=relative_accuracy(GROUPING_POWER) + 2**-23, abs=2**-33)
    known = any(worst.abs_dlogp == part.abs_dlogp_max for worst in expected.worst)
    if not math.isnan(bucket.abs_dlogp_max):
        assert bucket.abs_dlogp_max == part.abs_dlogp_max
    assert known or math.isnan(bucket.abs_dlogp_max), "a maximum is told only where a worst token proves it"


@pytest.mark.parametrize("form", WHOLE_FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_figures_are_the_oracle_s(form: Callable[..., list[Any]], seed: int) -> None:
    group = step(seed)
    report = observe(*form(group, random.Random(seed)), config=CONFIG)
    assert_breakdowns(report, audit(group, worst_k=8))
    assert any(not math.isnan(b.abs_dlogp_max) for buckets in report.breakdowns.values() for b in buckets)


@pytest.mark.parametrize("seed", range(6))
def test_figures_over_ranks_and_cuts_are_the_oracle_s(seed: int) -> None:
    group = step(seed)
    report = reduce(cut(group, random.Random(seed), 1 + seed % 3, 1 + seed % 2, CONFIG), CONFIG)
    assert_breakdowns(report, audit(group, worst_k=8))


def test_a_label_known_on_some_ranks_only_still_merges() -> None:
    """Reported: keys that differ over the ranks. The rank without the label has unknown tokens, and says so."""
    config = AuditConfig(breakdowns={"engine": 2})
    ranks = [Collector(config), Collector(config)]
    ranks[0].update(torch.tensor([-1.5]), torch.tensor([-1.0]), torch.ones(1), labels={"engine": 1})
    ranks[1].update(torch.tensor([-1.25]), torch.tensor([-1.0]), torch.ones(1))
    report = reduce(ranks, config)
    means = {bucket.name: bucket.abs_dlogp_mean for bucket in report.breakdowns["engine"]}
    assert means["1"] == 0.5 and means["unknown"] == 0.25 and math.isnan(means["0"])
    assert report.warnings == {"missing_metadata": 1}


def test_built_in_labels_are_no_metadata_that_could_lack() -> None:
    config = AuditConfig(breakdowns={"position": "auto", "confidence": "auto"})
    report = observe({"train_log_probs": [-1.5], "rollout_log_probs": [-1.0], "mask": [1]}, config=config)
    assert report.warnings == {}
    assert report.breakdowns["position"][0].compared_token_count == 1, "without positions they are unknown"
    assert report.worst_tokens[0].labels == {}
    with pytest.raises(TypeError, match="label position is not declared"):
        Collector(config).update([-1.0], [-1.0], [1], labels={"position": 1})


@pytest.mark.parametrize("position", [-7, -1, 0, 1, 2, 3, 4, 7, 8, 1023, 1024, 65535, 65536, 10**9])
def test_position_buckets(position: int) -> None:
    config = AuditConfig(breakdowns={"position": "auto"})
    update = {"train_log_probs": [-1.5], "rollout_log_probs": [-1.0], "mask": [1], "token_position": position}
    (filled,) = [b.name for b in observe(update, config=config).breakdowns["position"] if b.compared_token_count]
    assert filled == position_bucket(position) == bucket_of_position(position)


@pytest.mark.parametrize("edge", CONFIDENCE_EDGES)
def test_confidence_buckets_begin_at_their_edge(edge: float) -> None:
    config = AuditConfig(breakdowns={"confidence": "auto"})
    at = math.log(edge)
    found = []
    for rollout in (math.nextafter(at, -9), at, math.nextafter(at, 9)):
        rollouts = torch.tensor([rollout], dtype=torch.float64)
        report = observe({"train_log_probs": rollouts, "rollout_log_probs": rollouts, "mask": [1]}, config=config)
        (filled,) = [b.name for b in report.breakdowns["confidence"] if b.compared_token_count]
        assert filled == confidence_bucket(rollout) == bucket_of_confidence(rollout)
        found.append(filled)
    assert found[0] != found[1] == found[2]
    assert found[1].startswith(f"{edge:g}-")


@given(st.lists(st.floats(-999.0, 0.0), min_size=1, max_size=30))
def test_sums_neither_overflow_nor_round(values: list[float]) -> None:
    """Up to the largest abs(dlogp) there is, times many tokens."""
    config = AuditConfig(breakdowns={"engine": 1})
    repeat = 100_000 // len(values)
    rollout = torch.tensor(values, dtype=torch.float64).repeat(repeat)
    labels = {"engine": 0}
    collector = Collector(config)
    collector.update(torch.zeros_like(rollout), rollout, torch.ones_like(rollout), labels=labels)
    for _ in range(20):  # 2^20 times as many tokens
        collector.merge(collector)
    bucket = collector.compute().breakdowns["engine"][1]
    fixed = sum(round(-value * 2**32) for value in values)
    assert bucket.compared_token_count == repeat * len(values) << 20
    assert bucket.abs_dlogp_mean == fixed / (len(values) << 32)


def test_one_per_sample_tells_no_maximum() -> None:
    """The bucket's worst token may have lost its place to another of its sample."""
    config = replace(CONFIG, worst_per_sample=1)
    report = observe(*WHOLE_FORMS[0](step(1), random.Random(1)), config=config)
    assert all(math.isnan(b.abs_dlogp_max) for buckets in report.breakdowns.values() for b in buckets)


def test_the_round_trip_keeps_breakdowns() -> None:
    report = observe(*WHOLE_FORMS[0](step(2), random.Random(2)), config=CONFIG)
    again = StepReport.from_dict(report.to_dict())
    assert again.to_dict() == report.to_dict()
    assert set(report.to_dict()["breakdowns"]) == set(BUCKET_OF)


def test_figures_are_logged_for_buckets_that_have_tokens() -> None:
    update = {"train_log_probs": [-1.5, -1.75], "rollout_log_probs": [-1.0, -1.0], "mask": [1, 1]}
    values = logged_values(observe(update | {"labels": {"engine": 1}}, config=AuditConfig(breakdowns={"engine": 2})))
    found = {key: value for key, value in values.items() if "breakdown" in key}
    names = ("compared_token_count", "tail_frac_ln2", "abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_p99")
    assert set(found) == {f"rlk_audit/breakdown/engine/1/{name}" for name in names}
    assert found["rlk_audit/breakdown/engine/1/abs_dlogp_mean"] == 0.625
    assert found["rlk_audit/breakdown/engine/1/tail_frac_ln2"] == 0.5


@pytest.mark.parametrize(("codes", "logged"), [(LOGGED_CODES, True), (LOGGED_CODES + 1, False)])
def test_a_label_of_many_codes_is_not_logged(codes: int, logged: bool) -> None:
    update = {"train_log_probs": [-1.5], "rollout_log_probs": [-1.0], "mask": [1], "labels": {"host": 3}}
    report = observe(update, config=AuditConfig(breakdowns={"host": codes}))
    assert any("breakdown" in key for key in logged_values(report)) == logged
    assert len(report.to_dict()["breakdowns"]["host"]) == codes + 1


@pytest.mark.parametrize(
    ("breakdowns", "told"),
    [
        ({"position": 4}, "breakdowns['position'] must be 'auto', since its buckets are built in, got 4"),
        ({"confidence": ("a", "b")}, "breakdowns['confidence'] must be 'auto'"),
        ({"position": "log2"}, "breakdowns['position'] must be 'auto'"),
    ],
)
def test_built_in_labels_take_no_codes(breakdowns: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        AuditConfig(breakdowns=breakdowns)
    assert str(refused.value).startswith(told)


def test_auto_is_the_same_as_its_buckets() -> None:
    config = AuditConfig(breakdowns={"position": "auto"})
    assert config.breakdowns["position"] == POSITION_BUCKETS
    assert AuditConfig.from_dict(config.to_dict()) == config


def test_parts_stay_in_the_run_s_total_and_slots_do_not() -> None:
    """The state of a total is smaller by its table of samples; what remains adds up."""
    from rlk_audit import Auditor

    config = AuditConfig(breakdowns={"engine": 2}, samples_per_step=3)
    auditor = Auditor(config)
    for number in (1, 2):
        auditor.update([-1.5], [-1.0], [1], labels={"engine": number - 1}, sample_slot=number)
        report = auditor.step(number)
        assert [sample.sample_slot for sample in report.samples] == [number]
    total = auditor.run_total()
    assert [bucket.compared_token_count for bucket in total.breakdowns["engine"]] == [0, 1, 1]
    assert total.samples == () and "sample_count" not in total.metrics
    assert total.metrics["abs_dlogp_mean"] == 0.5
