"""The worked examples of CONTRIBUTING.md run as they stand, and what they add shows up."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlk_audit import AuditConfig, Collector, diagnose, metrics
from rlk_audit.cli.app import app
from rlk_audit.dumps import files
from rlk_audit.metric_table import Entry
from rlk_audit.offline.audit import audit_dump
from rlk_audit.report import metric_names
from rlk_audit.sinks import logged_values
from rlk_audit.token_table import TokenTable

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(head: str) -> str:
    return TEXT.split(f"\n## {head}\n")[1].split("\n## ")[0]


def run(head: str) -> dict[str, Any]:
    """The names that a section's code leaves behind."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", section(head), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, head, "exec", dont_inherit=True), names)
    return names


def test_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Add a metric")
    monkeypatch.setattr(metrics, "FIGURES", (*metrics.FIGURES, names["rms"]))
    config = AuditConfig(limits={"dlogp_rms": 0.1})
    collector = Collector(config)
    assert math.isnan(collector.compute().metrics["dlogp_rms"])
    collector.update(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), torch.ones(2))
    report = collector.compute()
    assert report.metrics["dlogp_rms"] == pytest.approx(math.sqrt(0.125), abs=1e-7)
    assert logged_values(report)["rlk_audit/dlogp_rms"] == report.metrics["dlogp_rms"]
    assert isinstance(names["ENTRY"], Entry) and set(names["ENTRY"].names) <= set(metric_names(config))


def test_a_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    run("Add a breakdown")
    assert f"```\n{capsys.readouterr().out}```" in section("Add a breakdown")


def test_a_dump_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = run("Add a dump format")["FORMAT"]
    monkeypatch.setattr(files, "_READERS", (*files._READERS, new))
    lines = ["sample,train,rollout,mask", "7,-0.5,-0.5,1", "7,-1.25,-1.0,1", "8,-3.0,x,1", "9,-2.0,-2.0,0"]
    (tmp_path / "step_3.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "notes.txt").write_text("no dump\n")
    view = audit_dump([tmp_path])
    (step,) = view.steps
    assert (step.step, step.metrics["active_token_count"], step.metrics["abs_dlogp_max"]) == (3, 2, 0.25)
    assert step.worst_tokens[0].sample_index == 7
    assert ["sample 8 is left out: a line has something else than numbers" in str(p) for p in view.problems] == [True]
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0


def test_a_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("Add a sink")
    assert (tmp_path / "p99.csv").read_text() == "1,0.25\n"


def test_a_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("Add a signature")
    monkeypatch.setattr(diagnose, "ORDER", ((names["offset"], 1), *diagnose.ORDER))
    monkeypatch.setitem(diagnose.CHECK_FIRST, "offset", names["CHECK_FIRST"])
    rollout = [[-0.1 * token - 0.37 * sample - 0.5 for token in range(12)] for sample in range(4)]
    shifted = TokenTable.from_lists([[value - 0.4 for value in values] for values in rollout], rollout)
    (finding, *others) = diagnose.diagnose(None, shifted)
    assert (finding.code, finding.check_first) == ("offset", names["CHECK_FIRST"])
    assert finding.strength > 0.99 and finding.evidence["nats"] == pytest.approx(-0.4)
    assert others == []
    noisy = TokenTable.from_lists([[value * 1.01 for value in values] for values in rollout], rollout)
    assert names["offset"](noisy) is None
