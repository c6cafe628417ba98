"""What a run's log is told: each code with its meaning, at once and then at an interval."""

from __future__ import annotations

import pytest
import torch

from rlk_audit import AuditConfig, Auditor, Collector, StepReport
from rlk_audit.layout import StateLayout
from rlk_audit.limits import Judge
from rlk_audit.metrics import Totals, step_warnings
from rlk_audit.run_total import RunTotal
from rlk_audit.warning_log import INTERVAL, MEANINGS, WarningLog

CONFIG = AuditConfig(limits={"abs_dlogp_max": 0.5})


def auditor_of(*writers: bool, config: AuditConfig = CONFIG) -> list[Auditor]:
    return [Auditor(config, writer=writer) for writer in writers]


def step(auditor: Auditor, number: int, drift: float = 0.25, rollout: float = -1.0) -> None:
    auditor.update(torch.tensor([-1.0 - drift]), torch.tensor([rollout]), torch.ones(1))
    auditor.step(number)


def test_every_code_has_a_meaning() -> None:
    layout = StateLayout(AuditConfig(samples_per_step=1))
    nothing = Totals.of(torch.zeros(layout.length, dtype=torch.int64).numpy(), layout)
    assert set(MEANINGS) == set(step_warnings(nothing))


def test_a_code_is_told_at_once_and_then_at_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True)
    for number in range(1, 2 * INTERVAL + 2):
        step(auditor, number, rollout=float("nan"))
    told = [message for message in caplog.messages if "rollout_nan" in message]
    assert [message.split(":")[0] for message in told] == ["step 1", f"step {INTERVAL + 1}", f"step {2 * INTERVAL + 1}"]
    assert told[0] == f"step 1: rollout_nan=1: {MEANINGS['rollout_nan']}"
    others = {message.split(": ", 1)[1].split("=")[0] for message in caplog.messages}
    no_data = "a limit has no data: abs_dlogp_max is null"
    assert others == {"rollout_nan", "nothing_compared", no_data}, "and each code for itself"


def test_a_nan_is_not_told_as_broken_logits_alone(caplog: pytest.LogCaptureFixture) -> None:
    """TRL makes NaN of a None, so what the log says must hold for both."""
    (auditor,) = auditor_of(True)
    step(auditor, 1, rollout=float("nan"))
    (told,) = [message for message in caplog.messages if "rollout_nan" in message]
    assert "NaN of a missing value" in told


def test_a_code_that_comes_later_is_told_then(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True)
    for number, rollout in enumerate((float("nan"), -1.0, -9999.0, float("nan")), start=1):
        step(auditor, number, rollout=rollout)
    told = [message.split("=")[0] for message in caplog.messages if "rollout" in message]
    assert told == ["step 1: rollout_nan", "step 3: rollout_sentinel"]


def test_a_crossed_limit_is_told_like_a_code(caplog: pytest.LogCaptureFixture) -> None:
    """In mode audit the training goes on, so the log is where a crossed limit is seen."""
    (auditor,) = auditor_of(True)
    for number, drift in enumerate((0.25, 0.75, 1.0), start=1):
        step(auditor, number, drift)
    assert caplog.messages == ["step 2: a limit was crossed: abs_dlogp_max is 0.75, must be <= 0.5"]


def test_two_bounds_of_one_metric_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True, config=AuditConfig(limits={"abs_dlogp_max": (">=0.5", "<=2")}))
    for number, drift in enumerate((0.25, 3.0), start=1):
        step(auditor, number, drift)
    assert [message.rsplit("must be", 1)[1] for message in caplog.messages] == [" >= 0.5", " <= 2"]


def test_each_of_two_bounds_of_one_side_is_told(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True, config=AuditConfig(limits={"abs_dlogp_max": ("<=0.5", "<=2")}))
    for number, drift in enumerate((0.75, 3.0, 3.0), start=1):
        step(auditor, number, drift)
    assert [message.rsplit("must be", 1)[1] for message in caplog.messages] == [" <= 0.5", " <= 2"]


def test_a_run_that_was_resumed_earlier_tells_anew(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True)
    for number in (50, 51, 40):
        step(auditor, number, 0.75)
    assert [message.split(":")[0] for message in caplog.messages] == ["step 50", "step 40"]


def test_one_rank_tells(caplog: pytest.LogCaptureFixture) -> None:
    for auditor in auditor_of(False, True):
        step(auditor, 1, 0.75)
    assert len(caplog.messages) == 1


def test_nothing_to_warn_of_is_silence(caplog: pytest.LogCaptureFixture) -> None:
    (auditor,) = auditor_of(True)
    step(auditor, 1)
    WarningLog().tell(1, StepReport.from_vector(Collector().pack(), AuditConfig()))
    assert [message.split("=")[0] for message in caplog.messages] == ["step 1: nothing_compared"]


# --- ranks that are a step apart --------------------------------------------------------------------------------------


def report_of_steps(*steps: int | None) -> StepReport:
    """Of as many ranks, each of which gave the step its number."""
    vectors = []
    for place, number in enumerate(steps):
        collector = Collector()
        observed(collector)
        vectors.append(collector.pack(place, len(steps), rank=10 + place, step=number))
    return StepReport.from_vector(sum(vectors), AuditConfig(), len(steps))


@pytest.mark.parametrize("steps", [(7, 7), (None, None), (0, 0, 0), (2**70,) * 2, (-1, -1)])
def test_ranks_at_one_step_are_not_warned_of(steps: tuple[int | None, ...]) -> None:
    assert report_of_steps(*steps).warnings == {}


@pytest.mark.parametrize("steps", [(7, 8), (None, 0), (0, 0, 1), (5, 5, 5, 4), (-1, 0)])
def test_ranks_a_step_apart_are_warned_of(steps: tuple[int | None, ...]) -> None:
    report = report_of_steps(*steps)
    assert report.warnings == {"step_mismatch": 1}
    assert report.metrics["compared_token_count"] == 3 * len(steps)


def test_the_ranks_that_are_apart_are_named(caplog: pytest.LogCaptureFixture) -> None:
    WarningLog().tell(4, report_of_steps(4, 4, 5, 4))
    assert caplog.messages[0].endswith("(most gave 4; rank 12 gave 5)")
    caplog.clear()
    WarningLog().tell(4, report_of_steps(*[4] * 12, *range(5, 16)))
    assert caplog.messages[0].endswith("rank 28 gave 11, rank 29 gave 12 and 3 more)")


def test_no_strict_verdict_passes_where_ranks_are_apart() -> None:
    limits = {"abs_dlogp_max": "<=9"}
    strict = Judge(AuditConfig(mode="strict", limits=limits))
    assert strict.judge(report_of_steps(4, 4)).passed
    assert strict.judge(report_of_steps(4, 5)).violations == ("the ranks ended different steps",)
    assert Judge(AuditConfig(limits=limits)).judge(report_of_steps(4, 5)).passed, "a warning, as of failed updates"


def test_a_total_says_that_some_step_was_mixed() -> None:
    total = RunTotal(AuditConfig())
    for steps in ((1, 1), (2, 3), (4, 4)):
        vectors = []
        for place, number in enumerate(steps):
            collector = Collector()
            observed(collector)
            vectors.append(collector.pack(place, 2, step=number))
        total.add(sum(vectors), 2)
    assert total.report().warnings == {"step_mismatch": 1}


# --- the training's own count -----------------------------------------------------------------------------------------


def observed(collector: Collector | Auditor, active: int = 3) -> None:
    mask = torch.tensor([1] * active + [0] * (5 - active))
    collector.update(torch.full((5,), -1.5), torch.full((5,), -1.0), mask)


def test_another_count_of_tokens_is_warned_of() -> None:
    """Over two ranks: what counts is the whole group's number, whichever rank was told."""
    for told, warned in ((6, False), (None, False), (3, True), (12, True)):
        for rank in (0, 1):
            collectors = [Collector(), Collector()]
            for collector in collectors:
                observed(collector)
            if told is not None:
                collectors[rank].expect_active(told)
            vector = sum(collector.pack(place, 2) for place, collector in enumerate(collectors))
            report = StepReport.from_vector(vector, AuditConfig(), 2)
            assert report.warnings == ({"unexpected_token_count": 1} if warned else {}), (told, rank)
            assert report.metrics["warning_count"] == int(warned)


def test_the_count_is_that_of_one_step() -> None:
    auditor = Auditor()
    warned = []
    for number, told in enumerate((3, 4, None, 3), start=1):
        observed(auditor)
        warned.append(auditor.step(number, expected_active_tokens=told).warnings)
    assert warned == [{}, {"unexpected_token_count": 1}, {}, {}]
    assert auditor.run_total().warnings == {"unexpected_token_count": 1}, "some step of it was warned of"


def test_no_token_at_all_can_be_expected() -> None:
    """As of a step whose every token is masked."""
    for active, warned in ((0, {}), (2, {"unexpected_token_count": 1})):
        auditor = Auditor()
        observed(auditor, active)
        report = auditor.step(1, expected_active_tokens=torch.tensor(0))
        assert {code: n for code, n in report.warnings.items() if code != "nothing_compared"} == warned


@pytest.mark.parametrize("tokens", [-1, 1.0, "3", None])
def test_a_count_must_be_an_integer(tokens: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Collector().expect_active(tokens)
