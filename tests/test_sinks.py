"""Sinks: strict lines that survive a crash, one readable line a step, and faults at set-up."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.sinks import ConsoleSink, JsonlSink, summary_line


def report(
    step: int | None = 7, drifts: tuple[float, ...] = (0.5, 0.0), config: AuditConfig | None = None
) -> StepReport:
    collector = Collector(config)
    collector.update(
        [-2.0 + drift for drift in drifts], [-2.0] * len(drifts), [1] * len(drifts),
        sample_index=3, token_position=list(range(len(drifts))),
    )  # fmt: skip
    return StepReport.from_vector(collector.pack(), collector.config, step=step)


# --- JSONL ------------------------------------------------------------------------------------------------------------


def test_each_report_is_one_line_at_once(tmp_path: Path) -> None:
    """Kills: a buffer that holds a line back until the file is closed."""
    path = tmp_path / "new" / "folder" / "audit.jsonl"
    sink = JsonlSink(path)
    for step in range(3):
        sink.write(report(step))
        lines = path.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(step + 1))
    assert json.loads(lines[0]) == report(0).to_dict()
    sink.close()


def test_nothing_compared_is_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "audit.jsonl")
    sink.write(report(drifts=()))
    sink.close()
    text = (tmp_path / "audit.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["metrics"]["abs_dlogp_mean"] is None


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        ("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"step": 2, "met', 1), ('{"step": 1}\n{"step": 2}\n{', 2),
        ('{"st', 0),
    ],
)  # fmt: skip
def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path: Path, before: str, kept: int) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(before)
    sink = JsonlSink(path)
    sink.write(report(9))
    sink.close()
    lines = path.read_text().splitlines()
    assert lines[:kept] == before.splitlines()[:kept]
    assert [json.loads(line)["step"] for line in lines] == [*range(1, kept + 1), 9]


def test_a_path_that_cannot_be_written_fails_at_set_up(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        JsonlSink(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file"):
        JsonlSink(tmp_path / "file" / "audit.jsonl")


# --- console ----------------------------------------------------------------------------------------------------------


def parts(line: str) -> tuple[str, list[str]]:
    """What the line calls the step, and what it says of it."""
    name, *rest = line.rstrip("\n").split(" | ")
    return name.split(" ", 1)[-1] if name.startswith("rlk_audit ") else name, rest


def test_the_console_line() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(report(drifts=(0.5, 0.5, 0.0)))
    sink.close()
    assert not stream.closed
    assert stream.getvalue().count("\n") == 1
    assert parts(stream.getvalue()) == (
        "step 7",
        [
            "tokens 3", "mean 0.333", "p50 0.5", "p99 0.5", "max 0.5", "kl0 0.0991", "clip0 0.667",
            "worst sample 3 pos 0 rank 0",
        ],
    )  # fmt: skip


def test_standard_output_is_looked_up_when_it_is_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink()
    sink.write(report())
    assert parts(capsys.readouterr().out)[0] == "step 7"


def test_what_there_is_nothing_to_say_about_is_a_dash() -> None:
    line = summary_line(report(step=None, drifts=()))
    nothing = ["mean -", "p50 -", "p99 -", "max -", "kl0 -", "clip0 -"]
    assert parts(line) == ("step -", ["tokens 0", *nothing, "nothing_compared=1"])


def test_warnings_and_notes_stand_in_the_line_and_what_is_not_computed_does_not() -> None:
    collector = Collector(AuditConfig(quantiles=("0.75",)))
    collector.update([-1.0, -2.0], [-1.0, math.nan], [1, 1], sample_index=4)
    line = summary_line(StepReport.from_vector(collector.pack(), collector.config, step=7))
    assert parts(line)[1] == [
        "tokens 1", "mean 0", "max 0", "kl0 0", "clip0 0", "worst sample 4 pos -1 rank 0", "rollout_nan=1",
        "self_comparison",
    ]  # fmt: skip
