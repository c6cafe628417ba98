"""Findings in a run: when a step is diagnosed, and where what was found is written."""

from __future__ import annotations

import importlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_audit import AuditConfig, Auditor, ConsistencyError, StepReport
from rlk_audit.auditor import DIAGNOSIS_INTERVAL
from rlk_audit.finding import Finding
from rlk_audit.sinks import ConsoleSink, JsonlSink, TensorBoardSink

CONFIG = AuditConfig(limits={"abs_dlogp_p99": 0.2}, breakdowns={"engine": ("e0", "e1")})
STALE = "stale_weights"


def observe(auditor: Auditor, stale: bool) -> None:
    """Two engines, of which e1 drifts by 0.5 nats and more where it is stale."""
    generator = torch.Generator().manual_seed(0)
    for engine in (0, 1):
        rollout = -0.2 - 3 * torch.rand(20, 20, generator=generator)
        noise = torch.randn(20, 20, generator=generator)
        drift = noise * (0.5 if stale and engine else 0.005)
        auditor.update((rollout + drift).clamp(max=-0.01), rollout, torch.ones(20, 20), labels={"engine": engine})


def run(config: AuditConfig, sinks: Any, steps: dict[int, bool]) -> list[StepReport]:
    with Auditor(config, sinks=sinks) as auditor:
        reports = []
        for number, stale in steps.items():
            observe(auditor, stale)
            reports.append(auditor.step(number))
    return reports


def test_a_failed_step_is_diagnosed_and_one_that_passed_is_not(tmp_path: Path) -> None:
    healthy, stale = run(CONFIG, [JsonlSink(tmp_path / "audit.jsonl")], {1: False, 2: True})
    assert healthy.findings == ()
    first = stale.findings[0]
    assert (first.code, "e1" in first.summary) == (STALE, True)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [len(line["findings"]) for line in lines] == [0, len(stale.findings), 0]
    again = StepReport.from_dict(lines[1])
    assert again.findings[0].to_dict() == first.to_dict()
    assert 0 < first.strength <= 1 and first.check_first and dict(first.evidence)


def test_now_and_then_a_step_that_passed_is_diagnosed_too() -> None:
    n = DIAGNOSIS_INTERVAL
    reports = run(CONFIG, [ConsoleSink(io.StringIO())], {n - 1: False, n: False, n + 1: False})
    assert [[finding.code for finding in report.findings] for report in reports] == [[], ["healthy"], []]
    silent = run(CONFIG, [], {n: False})
    assert silent[0].findings == (), "where nothing is written nobody would read it"


def test_the_console_tells_the_causes_of_a_failed_step() -> None:
    stream = io.StringIO()
    run(CONFIG, [ConsoleSink(stream)], {1: False, 2: True, 100: False})
    lines = stream.getvalue().splitlines()
    causes = [place for place, line in enumerate(lines) if "cause: " in line]
    assert causes[0] == 2 and lines[1].startswith("rlk_audit step 2")
    assert lines[2].startswith(f"    cause: {STALE} (") and "; check " in lines[2]
    assert all(place < 5 for place in causes), "a healthy step has no cause"


@pytest.mark.parametrize(
    ("tokens", "told"),
    [(400, "nothing in the report points at a fault: mean abs"), (3, "3 compared tokens are too few to say")],
)
def test_a_failed_step_without_a_cause_says_so(tokens: int, told: str) -> None:
    """Kills: ``cause: healthy (100%)``, and an error that sends people to check nothing."""
    stream = io.StringIO()
    limits = {"abs_dlogp_max": 1e-6}
    for mode in ("audit", "strict"):
        auditor = Auditor(AuditConfig(mode=mode, limits=limits), sinks=[ConsoleSink(stream)])
        generator = torch.Generator().manual_seed(0)
        rollout = -0.2 - 3 * torch.rand(tokens, generator=generator)
        noise = 0.005 * torch.randn(tokens, generator=generator)
        auditor.update((rollout + noise).clamp(max=-0.01), rollout, torch.ones(tokens))
        if mode == "strict":
            with pytest.raises(ConsistencyError, match=r"\. look first at the labels and ranks of the worst tokens"):
                auditor.step(1)
        else:
            auditor.step(1)
        line = stream.getvalue().splitlines()[1]
        assert line.startswith(f"    no known cause matches: {told}")
        assert "check" not in line and "100" not in line
        auditor.close()


def test_the_message_of_a_strict_run_names_the_cause() -> None:
    with pytest.raises(ConsistencyError, match=r"likely cause: stale_weights \(\d+%\): .*e1.*; check weight versions"):
        run(AuditConfig(mode="strict", limits=CONFIG.limits, breakdowns=CONFIG.breakdowns), [], {1: True})


def test_tensorboard_has_the_findings_as_text(tmp_path: Path) -> None:
    run(CONFIG, [TensorBoardSink(tmp_path)], {1: False, 2: True})
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("rlk_audit/findings/text_summary")
    assert event.step == 2 and f"**{STALE}**" in event.tensor_proto.string_val[0].decode()


def test_a_diagnosis_that_fails_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlk_audit.auditor.diagnose", lambda report: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="rlk_audit.auditor"):
        (report,) = run(CONFIG, [], {1: True})
    assert report.findings == () and not report.verdict.passed
    assert "step 1 could not be diagnosed: division by zero" in caplog.messages


@pytest.mark.parametrize("broken", [{}, {"code": "x"}, {"code": "x", "strength": 1, "evidence": []}, None, 3])
def test_what_is_no_finding_is_refused(broken: Any) -> None:
    with pytest.raises(ValueError, match="not a finding"):
        Finding.from_dict(broken)
