"""Limits by themselves: what a bound says, what a judge demands, its history, and where a failure sends the reader."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.limits import MIN_HISTORY, Judge, Limit, failure_message


def report(config: AuditConfig, drifts: list[float], **changed: list[float]) -> StepReport:
    collector = Collector(config)
    drift = torch.tensor(drifts, dtype=torch.float64)
    given = {"train_log_probs": drift - 4.0, "rollout_log_probs": torch.full_like(drift, -4.0)}
    given |= {name: torch.tensor(values, dtype=torch.float64) for name, values in changed.items()}
    collector.update(**given, mask=torch.ones_like(drift))
    made = collector.compute()
    made.step = 3
    return made


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (0.05, "abs_dlogp_p99<=0.05"),
        ("<= 0.05", "abs_dlogp_p99<=0.05"),
        (">=2", "abs_dlogp_p99>=2"),
        ("3x_median_50", "abs_dlogp_p99<=3x_median_50"),
        (f"1.5x_median_{MIN_HISTORY}", f"abs_dlogp_p99<=1.5x_median_{MIN_HISTORY}"),
    ],
)
def test_a_bound_is_read_and_shown(bound: Any, text: str) -> None:
    assert str(Limit.parse("abs_dlogp_p99", bound)) == text
    assert Limit.parse_assignment(text) == Limit.parse("abs_dlogp_p99", bound)


@pytest.mark.parametrize(
    "bound", [True, "", "x", "nan", math.inf, "0x_median_50", "-1x_median_50", f"3x_median_{MIN_HISTORY - 1}", "=<1"]
)
def test_what_is_no_bound_is_told(bound: Any) -> None:
    with pytest.raises(ValueError, match=r"^the limit of abs_dlogp_p99 must be a number"):
        Limit.parse("abs_dlogp_p99", bound)


def test_a_metric_of_samples_needs_their_table() -> None:
    with pytest.raises(ValueError, match="set samples_per_step"):
        Judge(AuditConfig(limits={"seq_ratio0_geo_max": 1.0}))
    with pytest.raises(ValueError, match="did you mean abs_dlogp_p99"):
        Judge(AuditConfig(limits={"abs_dlogp_p999999": 1.0}))


@pytest.mark.parametrize(("mode", "failures"), [("audit", []), ("strict", ["prob_pearson has no data"])])
def test_a_limited_metric_without_data_fails_a_strict_audit_alone(mode: str, failures: list[str]) -> None:
    config = AuditConfig(mode=mode, limits={"prob_pearson": 0.5})
    made = report(config, [0.0, 0.0])
    assert math.isnan(made.metrics["prob_pearson"]), "of equal probabilities there is no correlation"
    assert list(Judge(config).judge(made).failures()) == failures


@pytest.mark.parametrize("demands", [True, False])
def test_classes_that_must_be_empty(demands: bool) -> None:
    config = AuditConfig(mode="strict" if demands else "audit", limits={"abs_dlogp_p99": 1.0})
    verdict = Judge(config).judge(report(config, [0.0, 0.0], rollout_log_probs=[-4.0, math.nan]))
    told = ["1 tokens of the class rollout_nan, which must be empty"] if demands else []
    assert list(verdict.failures()) == told


def test_a_history_is_taken_up_where_it_was_left() -> None:
    config = AuditConfig(limits={"abs_dlogp_p50": "2x_median_20"})
    first = Judge(config)
    for _ in range(MIN_HISTORY):
        assert first.judge(report(config, [0.5])).passed is not False
    again = Judge(config)
    again.load_state_dict(first.state_dict())
    assert list(again.judge(report(config, [1.5])).failures())
    assert not list(Judge(config).judge(report(config, [1.5])).failures()), "without a history there is no verdict yet"
    again.load_state_dict({})
    assert again.state_dict() == {"abs_dlogp_p50": []}


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({}, "the labels and ranks of the worst tokens"),
        ({"rollout_log_probs": [-4.0, math.nan]}, "the rollout engine"),
        ({"rollout_log_probs": [-4.0, -math.inf]}, "the rollout engine"),
        ({"rollout_log_probs": [-4.0, -9999.0]}, "the rollout engine"),
        ({"train_log_probs": [-9.0, math.nan]}, "the training forward"),
        ({"train_log_probs": [-9.0, -math.inf]}, "the training forward"),
        ({"train_log_probs": [-9.0, -9999.0]}, "the training forward"),
        ({"train_log_probs": [math.nan, math.nan], "rollout_log_probs": [math.nan, math.nan]}, "the mask, and whether"),
        ({"train_log_probs": [-9.0]}, "the log of the ranks whose update failed"),
    ],
)
def test_a_failure_says_where_to_look_first(changed: dict[str, list[float]], where: str) -> None:
    config = AuditConfig(mode="strict", limits={"abs_dlogp_max": 0.1})
    made = report(config, [0.5, 0.5], **changed)
    made.verdict = Judge(config).judge(made)
    assert f"look first at {where}" in failure_message(made)
    assert failure_message(made).startswith("step 3 failed its verdict: ")
