"""What the documents name exists, and what the code knows stands in them; test_docs_code.py runs their code."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlk_audit import AuditConfig, metric_table
from rlk_audit.breakdowns import Bucket
from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.metric_table import Entry
from rlk_audit.report import metric_names
from rlk_audit.warning_log import MEANINGS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools import check_megatron_versions, doc_tables, figures  # noqa: E402

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *DOCS]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def names_in(entries: Iterable[Entry]) -> list[str]:
    return [name for entry in entries for name in entry.names]


def test_every_number_of_a_report_is_in_the_table_once() -> None:
    assert names_in(metric_table.CLASSES) == list(TOKEN_CLASSES)
    of_steps, of_samples = names_in(metric_table.METRICS), names_in(metric_table.SAMPLE_METRICS)
    plain, with_samples = (
        [name for name in metric_names(AuditConfig(samples_per_step=slots)) if not name.startswith("warning/")]
        for slots in (None, 1)
    )
    assert sorted(of_steps) == sorted(plain)
    assert sorted(of_steps + of_samples) == sorted(with_samples)
    assert sorted(names_in(metric_table.WARNINGS)) == sorted(MEANINGS)
    figures_of_a_bucket = [field.name for field in dataclasses.fields(Bucket) if field.name != "name"]
    assert names_in(metric_table.BUCKET_FIGURES) == figures_of_a_bucket


def test_the_metrics_page_has_every_table() -> None:
    """Kills: a page that lost a table, or its marks, and so agrees with the code in what is left."""
    found = doc_tables.MARKED.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    assert [name for _, name, _ in found] == ["classes", "metrics", "bucket_figures", "sample_metrics", "warnings"]


def test_the_readme_says_what_a_command_needs_before_it_shows_one() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("pip install '.[report]'") < text.index("```bash\nrlk-audit")


def test_the_readme_says_of_numba_what_was_measured() -> None:
    """Ratios of the reference path to numba's, over the sizes of docs/benchmarks.md."""
    (row,) = re.findall(
        r"^\| rlk_audit reference: update \|(.*1\.00.*)$",
        (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    measured = [float(cell) for cell in row.split("|")[2::3]]
    (told,) = re.findall(r"(\d+) to (\d+) times faster", " ".join((ROOT / "README.md").read_text("utf-8").split()))
    assert len(measured) == 3
    assert [round(min(measured)), round(max(measured))] == [int(number) for number in told]


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_of_torchmetrics_print_what_they_say(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "integrations.md"
    found = [block for block in blocks(path) if "print(" in block]
    assert len(found) == 2
    exec(found[number], {})
    assert f"{found[number]}```\n\n```\n{capsys.readouterr().out}```" in path.read_text(encoding="utf-8")


def test_the_arguments_of_the_torchmetrics_update_are_documented() -> None:
    from rlk_audit.integrations.torchmetrics import DlogpAudit

    (told,) = re.findall(r"What `update` takes\.\*\* (.*?)\n- ", sections_of_integrations()["torchmetrics"], re.DOTALL)
    named = re.findall(r"[a-z_]+", " ".join(re.findall(r"`([a-z_,\s]+)`", told)))
    assert named == [name for name in inspect.signature(DlogpAudit.update).parameters if name != "self"]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_tables_are_those_of_the_code(path: Path) -> None:
    """`make tables` writes them."""
    text = path.read_text(encoding="utf-8")
    assert text == doc_tables.with_tables(text)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_are_those_of_the_code(name: str) -> None:
    """`make tables` draws them."""
    assert (figures.FOLDER / name).read_text(encoding="utf-8") == figures.FIGURES[name]()


def test_every_page_has_a_place_in_the_site() -> None:
    """Kills: a page that nobody can reach. What else is wrong with the site `make docs` finds."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert [path.name for path in DOCS if f": {path.name}\n" not in navigation] == []


def test_the_releases_that_make_installs_are_in_the_table_of_versions() -> None:
    """Kills: a release that moved in the Makefile alone."""
    table = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    pinned = re.findall(r"[\w-]+==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    expected = {*pinned, *check_megatron_versions.VERSIONS.split(",")}
    assert len(expected) > 8 and [release for release in sorted(expected) if release not in table] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
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


def sections_of_integrations() -> dict[str, str]:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        name: part
        for name, part in found.items()
        if name not in ("prime-rl and ms-swift", "Beside the peers' own figures")
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", sections_of_integrations())
def test_the_imports_of_an_integration_run(section: str) -> None:
    """Each section says where its names are from; what a missing package keeps from being imported is left out."""
    lines = re.findall(r"^from rlk_audit.* import .+$", sections_of_integrations()[section], re.MULTILINE)
    assert lines
    for line in lines:
        try:
            exec(line, {})
        except ImportError as error:
            if "cannot be used" not in str(error):
                raise
            pytest.skip(str(error))


def test_a_module_for_slime_is_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_harness import Place, Training, arguments, make_samples, rank_data

    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(ROOT / "docs" / "integrations.md") if "SlimeAudit(" in block]
    module: dict[str, Any] = {}
    exec(block, module)
    options = {"rollout_data_postprocess_path": module["begin_rollout"], "custom_tis_function_path": module["tis"]}
    training = Training(arguments(use_tis=True, **options))
    for number in range(2):
        training.train_actor(number, rank_data(make_samples(5), Place()))
    module["audit"].audit.close()
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 2  # a step, and the run
    assert module["audit"].report.verdict.passed


def test_what_is_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of integrations, where their packages are not needed."""
    from types import SimpleNamespace

    from rlk_audit import Auditor
    from rlk_audit.integrations.nemo_rl import AuditedLogger, AuditedLoss
    from rlk_audit.integrations.set_up import driver_auditor, make_auditor
    from rlk_audit.integrations.slime import Dialect
    from rlk_audit.integrations.vime import vime_mode
    from rlk_audit.megatron_plugin import register

    monkeypatch.setattr("atexit.register", lambda call: None)
    logger = SimpleNamespace(log_batched_dict_as_jsonl=print, log_metrics=print)
    assert Auditor().config.mode == "audit"
    assert Dialect().mode(SimpleNamespace()) == "audit"
    assert vime_mode(SimpleNamespace(), {}) == "off"
    assert make_auditor().config.mode == "off"  # as VerlAudit() does
    assert not register().owns_report
    for mode, variable in (("audit", None), ("off", "off")):
        if variable is not None:
            monkeypatch.setenv("RLK_AUDIT_MODE", variable)
        assert driver_auditor(None, ()).config.mode == mode  # as SkyRLAudit() does
        assert make_auditor(AuditConfig()).config.mode == mode  # as GrpoAudit(trainer) does
        assert AuditedLoss(print).config.mode == AuditedLogger(logger).auditor.config.mode == mode
    assert Auditor().config.mode == "audit"
    monkeypatch.setenv("RLK_AUDIT_MODE", "audit")
    assert register().owns_report
