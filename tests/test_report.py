"""StepReport: what it refuses, when it computes, its plain values and the way back from them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import rlk_audit.report
from rlk_audit import AuditConfig, Collector, LayoutMismatchError, StepReport
from rlk_audit.layout import ROW_HEADER, StateLayout
from rlk_audit.report import RANKS_SHOWN, metric_names

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1")}, metadata={"model": "tiny"})


def collector(drifts: list[float], config: AuditConfig = CONFIG, **fields: Any) -> Collector:
    made = Collector(config)
    dlogp = torch.tensor(drifts, dtype=torch.float64)
    made.update(dlogp - 4.0, torch.full_like(dlogp, -4.0), torch.ones_like(dlogp), **fields)
    return made


def summed(collectors: list[Collector]) -> torch.Tensor:
    vectors = [made.pack(rank, len(collectors), rank=100 + rank) for rank, made in enumerate(collectors)]
    return torch.stack(vectors).sum(0)


def group_report(collectors: list[Collector], config: AuditConfig = CONFIG) -> StepReport:
    return StepReport.from_vector(summed(collectors), config, len(collectors), step=3)


def strict(text: str) -> Any:
    """Parse JSON as another tool may: without NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- ranks and worst tokens -------------------------------------------------------------------------------------------


def test_the_worst_ranks_come_first_and_eight_are_shown() -> None:
    """Rank 3 drifts most, rank 1 holds nothing, ten more are ordinary."""
    drifts: list[list[float]] = [[0.1], [], [0.2, 0.0], [0.9]] + [[0.01 * rank] for rank in range(10)]
    report = group_report([collector(share) for share in drifts])
    assert [row.rank for row in report.ranks][:3] == [103, 100, 102]
    assert len(report.ranks) == RANKS_SHOWN == 8
    assert 101 not in [row.rank for row in report.ranks]
    assert [row.group_rank for row in report.rank_table] == list(range(14))
    empty = report.rank_table[1]
    assert (empty.compared_token_count, empty.update_failed) == (0, 0)
    assert all(math.isnan(v) for v in (empty.abs_dlogp_mean, empty.abs_dlogp_max, empty.dlogp_min, empty.dlogp_max))
    full = report.rank_table[2]
    assert (full.compared_token_count, full.dlogp_min) == (2, 0.0)
    assert (full.abs_dlogp_mean, full.abs_dlogp_max) == pytest.approx((0.1, 0.2))


def test_a_rank_without_tokens_is_last_even_among_ranks_without_drift() -> None:
    report = group_report([collector([]), collector([0.0])])
    assert [row.group_rank for row in report.ranks] == [1, 0]


def test_a_worst_token_carries_all_its_ids() -> None:
    fields = {
        "sample_index": [7, 8], "rollout_id": [70, 80], "token_position": [2, 3], "token_ids": [11, 12],
        "microbatch": 5,
    }  # fmt: skip
    report = group_report([collector([0.0]), collector([0.5, -1.5], labels={"engine": [1, -1]}, **fields)])
    worst, second = report.worst_tokens[:2]
    assert (worst.abs_dlogp, worst.dlogp, worst.train_logp, worst.rollout_logp) == (1.5, -1.5, -5.5, -4.0)
    assert (worst.sample_index, worst.rollout_id, worst.token_position, worst.token_id) == (8, 80, 3, 12)
    assert (worst.rank, worst.microbatch, worst.labels) == (101, 5, {"engine": "unknown"})
    assert (second.labels, second.token_id) == ({"engine": "e1"}, 11)
    assert report.worst_tokens[2].sample_index == -1, "unknown"
    named = {name.removeprefix("worst_"): value for name, value in report.metrics.items() if name.startswith("worst_")}
    assert named == {name: getattr(worst, name) for name in named}
    assert len(named) == 10


# --- when it computes -------------------------------------------------------------------------------------------------


def test_nothing_is_computed_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a sink pays only the reduction; who reads twice computes once."""
    calls: list[int] = []
    metrics = rlk_audit.report.step_metrics
    monkeypatch.setattr(rlk_audit.report, "step_metrics", lambda totals: calls.append(1) or metrics(totals))
    report = group_report([collector([0.5])])
    assert calls == []
    assert (report.scope, report.step) == ("group", 3)
    assert report.metrics["abs_dlogp_max"] == 0.5
    assert report.warnings == {"missing_metadata": 1}
    assert report.to_dict()["metrics"]["abs_dlogp_max"] == 0.5
    assert calls == [1]


def test_a_report_keeps_its_numbers() -> None:
    """Kills: a view of a vector that the next step writes to."""
    vector = summed([collector([0.5])])
    report = StepReport.from_vector(vector, CONFIG)
    vector.zero_()
    assert report.metrics["compared_token_count"] == 1


# --- plain values and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drifts", [[], [0.5, -0.25], [4.0, 4.0]])
def test_json_is_strict_and_plain(drifts: list[float]) -> None:
    report = group_report([collector(drifts), collector([])])
    values = strict(report.to_json())
    assert values == report.to_dict()
    assert "\n" not in report.to_json()
    assert values["metadata"] == {"model": "tiny"}
    assert values["group_size"] == 2
    assert values["prefix"] == "rlk_audit/"
    kinds = {type(value) for value in report.metrics.values()}
    assert kinds <= {int, float}, "no numpy or torch scalars"
    for key, value in values["metrics"].items():
        assert key.replace("/", "").replace("_", "").isalnum()
        assert not key.startswith("/")
        assert value is None or math.isfinite(value)


def test_no_key_is_the_beginning_of_another_s_path() -> None:
    """Writers that make folders of keys cannot hold `a` beside `a/b`."""
    names = metric_names(CONFIG)
    assert len(set(names)) == len(names) > 60
    assert not [name for name in names if any(other.startswith(f"{name}/") for other in names)]


def test_the_way_back_gives_nan_for_null() -> None:
    report = group_report([collector([0.5], labels={"engine": 0}), collector([])])
    back = StepReport.from_dict(strict(report.to_json()))
    assert back.to_dict() == report.to_dict()
    assert math.isnan(back.metrics["total_token_count"])
    assert back.metrics["compared_token_count"] == 1
    assert back.worst_tokens[0] == report.worst_tokens[0]
    assert math.isnan(back.rank_table[1].abs_dlogp_mean)
    assert (back.scope, back.step, back.complete, back.notes) == ("group", 3, True, ())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda values: values.pop("metrics"), "not a step report: KeyError 'metrics'"),
        (lambda values: values.update(metrics=[]), "not a step report: AttributeError"),
        (lambda values: values["metrics"].update(x="1"), "expected a number or null, got '1'"),
        (lambda values: values["metrics"].update(x=True), "expected a number or null, got True"),
        (lambda values: values["ranks"][0].update(colour=1), "unexpected keyword argument 'colour'"),
        (lambda values: values.update(scope="world"), "scope must be 'rank' or 'group'"),
    ],
)
def test_what_is_no_report_is_told(change: Any, sentence: str) -> None:
    values = group_report([collector([0.5])]).to_dict()
    change(values)
    with pytest.raises(ValueError, match=sentence):
        StepReport.from_dict(values)


# --- vectors that are no state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vector", "came"),
    [
        (torch.zeros(5, dtype=torch.int64), "torch.int64 of shape (5,)"),
        (torch.zeros(StateLayout(CONFIG, 2).length), f"torch.float32 of shape ({StateLayout(CONFIG, 2).length},)"),
        (
            torch.zeros(1, StateLayout(CONFIG, 2).length, dtype=torch.int64),
            f"torch.int64 of shape (1, {StateLayout(CONFIG, 2).length})",
        ),
    ],
)
def test_a_vector_of_another_shape_is_refused(vector: torch.Tensor, came: str) -> None:
    with pytest.raises(ValueError, match=r"^expected an int64 vector") as caught:
        StepReport.from_vector(vector, CONFIG, 2)
    length = StateLayout(CONFIG, 2).length
    assert str(caught.value) == f"expected an int64 vector of {length} entries for 2 ranks, got {came}"


def test_ranks_of_other_settings_are_named() -> None:
    other = AuditConfig(breakdowns={"engine": ("e0", "e1")}, eps_low=0.3)
    vector = summed([collector([0.5]), collector([0.5], other), collector([0.5]), collector([0.5], other)])
    with pytest.raises(LayoutMismatchError, match=r"^group ranks 1, 3 did not pack with this configuration") as caught:
        StepReport.from_vector(vector, CONFIG, 4)
    expected, found = StateLayout(CONFIG, 4).fingerprint, StateLayout(other, 4).fingerprint
    assert f"(fingerprint {expected:#x}, got {found:#x})" in str(caught.value)
    assert str(caught.value).endswith("every rank needs the same AuditConfig and version")


def test_a_rank_that_packed_twice_or_not_at_all_is_named() -> None:
    """Reported: an already reduced state, reduced again."""
    once = [collector([0.5]).pack(rank, 2) for rank in range(2)]
    with pytest.raises(LayoutMismatchError, match=r"^group ranks 1 did not pack"):
        StepReport.from_vector(once[0], CONFIG, 2)
    with pytest.raises(LayoutMismatchError, match=r"^group ranks 0, 1 did not pack"):
        StepReport.from_vector(2 * (once[0] + once[1]), CONFIG, 2)


def test_the_fingerprint_of_every_row_is_looked_at() -> None:
    vector = summed([collector([0.5])] * 3)
    vector[StateLayout(CONFIG, 3).row_slice(2).start + ROW_HEADER.index("fingerprint")] += 1
    with pytest.raises(LayoutMismatchError, match=r"^group ranks 2 did not pack"):
        StepReport.from_vector(vector, CONFIG, 3)


# --- notes and completeness -------------------------------------------------------------------------------------------


def test_identical_sides_are_a_note_and_no_warning() -> None:
    report = group_report([collector([0.0, 0.0], labels={"engine": 0})])
    assert report.notes == ("self_comparison",)
    assert report.warnings == {}
    assert report.complete
    assert group_report([collector([0.0, 0.1])]).notes == ()
    assert group_report([collector([])]).notes == (), "nothing compared is not a self-comparison"
    silent = AuditConfig(expect_identical=True)
    assert group_report([collector([0.0], silent)], silent).notes == ()


def test_one_failed_update_makes_the_group_s_report_incomplete() -> None:
    failed = collector([0.5])
    failed.mark_failed("no memory")
    report = group_report([collector([0.5]), failed])
    assert report.complete is False
    assert report.to_dict()["complete"] is False
    assert [row.update_failed for row in report.rank_table] == [0, 1]


def test_a_vector_that_is_read_otherwise_is_read_once_and_late() -> None:
    """As from pinned memory, where it lies when the copy has ended."""
    given, calls = summed([collector([0.5])]), []

    def read() -> torch.Tensor:
        calls.append(None)
        return given

    made = StepReport.from_vector(torch.zeros_like(given, device="meta"), CONFIG, read=read)
    assert not calls
    assert made.metrics["compared_token_count"] == 1 and made.metrics["abs_dlogp_max"] == 0.5
    assert made.to_dict() and len(calls) == 1


def test_the_hash_of_a_state_is_an_integer_of_it() -> None:
    one, same, other = (collector(drifts).digest() for drifts in ([0.5, 1.0], [1.0, 0.5], [0.5, 1.5]))
    assert one.dtype == torch.int64
    assert one == same != other
