"""The documents' code runs as it stands, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlk_audit import AuditConfig
from rlk_audit.report import metric_names
from rlk_audit.warning_log import MEANINGS

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_inputs_run_in_order() -> None:
    names: dict[str, object] = {}
    found = blocks(ROOT / "docs" / "inputs.md")
    assert len(found) == 6
    for block in found:
        exec(block, names)


def test_the_plain_example_of_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md") if "print(" in block]
    exec(block, {})
    assert f"```\n{capsys.readouterr().out}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_of_torchmetrics_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "integrations.md"
    (block,) = [block for block in blocks(path) if "print(" in block]
    exec(block, {})
    assert f"```\n{capsys.readouterr().out}```" in path.read_text(encoding="utf-8")


def test_every_metric_and_warning_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {name for name in metric_names(AuditConfig(samples_per_step=1)) if not name.startswith("warning/")}
    assert [name for name in sorted(names | set(MEANINGS)) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_examples_of_dumps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (ROOT / "docs" / "dumps.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "step_3.jsonl").write_text(line)
    reading, writing = blocks(ROOT / "docs" / "dumps.md")
    monkeypatch.chdir(tmp_path / "dumps")
    exec(writing, {})
    monkeypatch.chdir(tmp_path)
    exec(reading, {})
    assert capsys.readouterr().out == "3 0 2\n3 -1 2\n3 -1 1\n"
