"""DlogpAudit under the real torchmetrics: the core's bits, and what torchmetrics demands of its own metrics."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from core_bits import assert_same_bits
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch
from rlk_audit.integrations.torchmetrics import DlogpAudit, merge_vectors

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1"), "position": "auto"}, samples_per_step=64, worst_k=8)


def batches(count: int = 4, seed: int = 0) -> list[TokenBatch]:
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        lengths = random.integers(0, 30, 5)
        rollout = [-random.exponential(1.0, n) for n in lengths]
        train = [np.minimum(r + random.normal(0, 0.05 * (1 + number), len(r)), 0.0) for r in rollout]
        index = list(range(5 * number, 5 * number + 5))
        labels = {"engine": [i % 2 for i in index]}
        made.append(TokenBatch.from_lists(train, rollout, sample_index=index, sample_slot=index, labels=labels))
    return made


def core_report(given: list[TokenBatch]) -> StepReport:
    collector = Collector(CONFIG)
    for batch in given:
        collector.update(batch)
    return collector.compute()


def bits(values: dict[str, float]) -> list[tuple[str, str]]:
    return [(name, float(value).hex()) for name, value in values.items()]


def assert_of(metric: DlogpAudit, given: list[TokenBatch]) -> None:
    """The metric's values and report are the core's of these batches, bit for bit."""
    expected = core_report(given)
    values = metric.compute()
    named = {CONFIG.prefix + name: value for name, value in expected.metrics.items()}
    assert bits({name: value.item() for name, value in values.items()}) == bits(named)
    assert_same_bits(metric.report, expected)


def filled(given: list[TokenBatch]) -> DlogpAudit:
    metric = DlogpAudit(CONFIG)
    for batch in given:
        metric.update(batch)
    return metric


def test_it_is_the_core() -> None:
    given = batches()
    metric = filled(given)
    assert_of(metric, given)
    assert sorted(metric.state_dict()) == ["_extra_state", "vector"]
    assert all(isinstance(value, torch.Tensor) for value in metric.state_dict().values())
    assert metric.vector.dtype == torch.int64


def test_forward_gives_the_batch_and_adds_it() -> None:
    given = batches()
    metric = DlogpAudit(CONFIG)
    for batch in given:
        alone = core_report([batch]).metrics["abs_dlogp_max"]
        value = metric(batch)[CONFIG.prefix + "abs_dlogp_max"].item()
        assert value == alone or (np.isnan(alone) and np.isnan(value))
    assert_of(metric, given)


def test_reset_forgets() -> None:
    given = batches()
    metric = filled(given)
    metric.compute()
    metric.reset()
    assert metric.report is None
    metric.update(given[1])
    assert_of(metric, given[1:2])


def test_merge_state_adds_another_metric_or_its_state() -> None:
    given = batches()
    metric, other = filled(given[:1]), filled(given[1:3])
    metric.merge_state(other)
    metric.merge_state({"vector": filled(given[3:]).vector})
    assert_of(metric, given)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_copies_go_on(again) -> None:
    given = batches()
    metric = filled(given[:2])
    metric.compute()
    other = again(metric)
    assert hash(other) != hash(metric)
    for batch in given[2:]:
        other.update(batch)
    assert_of(other, given)
    assert_of(metric, given[:2])


def test_more_ranks_than_a_row_has_worst_tokens_for_are_merged() -> None:
    """Above 1,024 ranks a layout has shorter rows: so many states are merged in parts, to the same bits."""
    given = batches(6)
    vectors = []
    for batch in given:
        metric = DlogpAudit(CONFIG)
        metric.update(batch)
        vectors.append(metric.vector)
    many = torch.stack(vectors + [DlogpAudit(CONFIG).vector] * 1025)
    assert_same_bits(StepReport.from_vector(merge_vectors(many, CONFIG), CONFIG), core_report(given))


def test_a_checkpoint_is_taken_up() -> None:
    given = batches()
    metric = DlogpAudit(CONFIG)
    metric.load_state_dict(filled(given[:3]).state_dict())
    metric.update(given[3])
    assert_of(metric, given)


@pytest.mark.parametrize("cast", ["half", "float", "double", "bfloat16"])
def test_casts_do_not_touch_the_state(cast: str) -> None:
    given = batches()
    metric = filled(given[:3])
    getattr(metric, cast)()
    metric.set_dtype(torch.float16)
    metric.type(torch.float32)
    metric.to(torch.float16)
    metric.reset()
    for batch in given:
        metric.update(batch)
    assert metric.vector.dtype == torch.int64
    assert_of(metric, given)


def test_constants_cannot_be_changed() -> None:
    metric = DlogpAudit(CONFIG)
    for name in ("is_differentiable", "higher_is_better", "full_state_update"):
        with pytest.raises(RuntimeError, match="Can't change const"):
            setattr(metric, name, True)


def test_a_collection_takes_its_values() -> None:
    given = batches()
    collection = MetricCollection({"drift": DlogpAudit(CONFIG), "again": DlogpAudit(CONFIG)}, prefix="train/")
    for batch in given:
        collection.update(batch)
    values = collection.compute()
    expected = core_report(given).metrics["abs_dlogp_p99"]
    found = {name: value.item() for name, value in values.items() if name.endswith("abs_dlogp_p99")}
    assert len(found) == 2
    assert set(found.values()) == {expected}


def test_mean_and_maximum_are_those_of_torchmetrics() -> None:
    """Its mean is added up in float32, ours exactly."""
    given = batches()
    metric, mean, maximum = filled(given), MeanMetric(), MaxMetric()
    for batch in given:
        drift = (torch.as_tensor(batch.train_log_probs) - torch.as_tensor(batch.rollout_log_probs)).abs()
        mean.update(drift)
        maximum.update(drift)
    values = metric.compute()
    assert values[CONFIG.prefix + "abs_dlogp_mean"].item() == pytest.approx(mean.compute().item(), rel=1e-6)
    assert values[CONFIG.prefix + "abs_dlogp_max"].item() == pytest.approx(maximum.compute().item(), rel=1e-6)


def test_nothing_added_is_no_agreement() -> None:
    metric = DlogpAudit(CONFIG)
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        values = metric.compute()
    assert values[CONFIG.prefix + "abs_dlogp_max"].isnan()
    assert values[CONFIG.prefix + "compared_token_count"].item() == 0


def test_a_failing_batch_is_counted_not_raised() -> None:
    metric = DlogpAudit(CONFIG)
    metric.update(torch.zeros(3), torch.zeros(4), torch.ones(3))
    assert metric.compute()[CONFIG.prefix + "warning/update_failed"].item() == 1


def test_a_collection_gives_each_metric_the_arguments_that_it_names() -> None:
    given = {
        "train_log_probs": torch.tensor([-0.5, -1.2]),
        "rollout_log_probs": torch.tensor([-0.5, -1.0]),
        "mask": torch.tensor([1, 1]),
        "sample_index": torch.tensor([3, 4]),
    }
    collection = MetricCollection({"drift": DlogpAudit(), "mean": MeanMetric()})
    collection.update(**given, value=2.0)
    collection(**given, value=4.0)
    values = collection.compute()
    assert values["mean"].item() == 3.0
    assert values["rlk_audit/compared_token_count"].item() == 4
    assert values["rlk_audit/worst_sample_index"].item() == 4


def test_update_names_every_argument_of_the_collector() -> None:
    """Kills: a field of a batch that a MetricCollection drops in silence."""
    ours = inspect.signature(DlogpAudit.update).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in ours.values())
    named = set(inspect.signature(Collector.update).parameters) - {"fields"}
    held = {"whole_slots", "refused_samples", "refused_active", "refused_total", "refusal", "fault"}
    assert set(ours) == named | {field.name for field in dataclasses.fields(TokenBatch)} - held


@pytest.mark.parametrize(
    "settings",
    [
        {"limits": {"abs_dlogp_max": 0.1}},
        {"prefix": "drift/"},
        {"quantiles": ("0.25",)},
        {"metadata": {"host": "a"}},
        {"kernel": "reference"},
    ],
)
def test_a_state_outlives_settings_that_give_it_no_meaning(settings: dict[str, Any]) -> None:
    """Kills: a checkpoint that is lost with a change of limits or prefix."""
    (given, later) = batches(2)
    saved = DlogpAudit(CONFIG)
    saved.update(given)
    config = dataclasses.replace(CONFIG, **settings)
    taken, merged = DlogpAudit(config), DlogpAudit(config)
    taken.load_state_dict(saved.state_dict())
    taken.update(later)
    merged.update(later)
    merged.merge_state(saved)
    whole = DlogpAudit(config)
    whole.update(given)
    whole.update(later)
    expected = bits({name: value.item() for name, value in whole.compute().items()})
    for metric in (taken, merged):
        assert bits({name: value.item() for name, value in metric.compute().items()}) == expected


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (AuditConfig(worst_k=9), "worst_k was 9, is 4"),
        (AuditConfig(eps_low=0.1, limits={"abs_dlogp_max": 1.0}), "eps_low was 0.1, is 0.2$"),
        (AuditConfig(grouping_power=5, samples_per_step=3), "grouping_power was 5, is 6, samples_per_step was 3, is"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_another_configuration_is_refused(other: AuditConfig, told: str, strict: bool) -> None:
    """Also one of the same length, whose numbers mean something else; where the settings are known they are named."""
    metric, saved = DlogpAudit(), DlogpAudit(other)
    saved.update(torch.zeros(3), torch.zeros(3), torch.ones(3))
    collection = MetricCollection({"drift": metric})
    refusals = []
    for load in (
        lambda: metric.load_state_dict(saved.state_dict(), strict=strict),
        lambda: collection.load_state_dict(MetricCollection({"drift": saved}).state_dict(), strict=strict),
        lambda: metric.merge_state({"vector": saved.vector}),
        lambda: metric.merge_state(saved),
    ):
        with pytest.raises((RuntimeError, ValueError), match="made with other settings of the AuditConfig") as caught:
            load()
        named = re.search(told, str(caught.value), re.MULTILINE) is not None
        assert named == ("by another version of rlk_audit:" in str(caught.value))
        refusals.append(named)
    assert refusals == [True, True, False, True]
    metric.update(torch.zeros(3), torch.zeros(3), torch.ones(3))
    assert metric.compute()["rlk_audit/compared_token_count"].item() == 3


def test_limits_are_judged() -> None:
    limits = {"abs_dlogp_max": 0.1, "abs_dlogp_mean": [0.2, ">=0.001"], "seq_ess0": 0.5}
    metric = DlogpAudit(AuditConfig(limits=limits, samples_per_step=4))
    metric.update(torch.tensor([-0.5, -1.2]), torch.tensor([-0.5, -1.0]), torch.tensor([1, 1]))
    values = {name: value.item() for name, value in metric.compute().items() if "verdict/" in name}
    assert values.pop("rlk_audit/verdict/seq_ess0") != values.pop("rlk_audit/verdict/all")  # NaN: no sample has a slot
    assert values == {"rlk_audit/verdict/abs_dlogp_max": 0.0, "rlk_audit/verdict/abs_dlogp_mean": 1.0}
    assert metric.report.verdict.failed_limits[0].metric == "abs_dlogp_max"
    metric.reset()
    metric.update(torch.tensor([-0.5, -1.2]), torch.tensor([-0.5, -1.2001]), torch.tensor([1, 1]))
    assert metric.compute()["rlk_audit/verdict/abs_dlogp_max"].item() == 1.0


@pytest.mark.parametrize("rollout", [None, torch.full((2,), torch.nan)])
def test_nothing_compared_passes_nothing(rollout: torch.Tensor | None) -> None:
    metric = DlogpAudit(AuditConfig(limits={"abs_dlogp_max": 0.1}))
    metric.update(torch.zeros(2), rollout, torch.ones(2))
    values = metric.compute()
    assert values["rlk_audit/verdict/all"].item() == 0.0
    assert values["rlk_audit/verdict/abs_dlogp_max"].isnan()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mode": "off"}, "got mode off: leave the metric out"),
        ({"mode": "strict"}, "got mode strict: raise where verdict/all is 0"),
        ({"limits": {"abs_dlogp_p99": "3x_median_50"}}, "cannot be relative to a median"),
        ({"limits": {"abs_dlogp": 1.0}}, "a limit names the metric 'abs_dlogp'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DlogpAudit(AuditConfig(**settings))
