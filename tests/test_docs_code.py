"""Code, commands and settings of README.md and docs/ run as they stand there.

What cannot run here is listed with the reason, and with the test that runs the same calls elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from offline_views import record, write
from typer.main import get_command
from typer.testing import CliRunner

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.cli import live
from rlk_audit.cli.app import app
from rlk_audit.offline.run_log import read_run_logs
from rlk_audit.settings import SETTINGS, resolve_settings

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
OF_CONTRIBUTORS = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
"""Its Python runs in test_contributing.py, its commands here."""

NOT_RUN = {
    ("README.md", "PretrainAudit()"): "Megatron-LM's own loop: tests/test_real_pretrain.py",
    ("integrations.md", "trainer = GRPOTrainer"): "TRL's trainer: tests/test_trl.py",
    ("integrations.md", 'limits={"abs_dlogp_p99": 0.05}), sinks='): "TRL's trainer: tests/test_trl.py",
    ("integrations.md", "import VerlAudit"): "verl: tests/test_verl.py",
    ("integrations.md", "init_device_mesh"): "several processes: tests/test_fsdp2.py",
    ("integrations.md", "BridgeAudit()"): "Megatron-Bridge's loop: tests/test_megatron_bridge.py",
    ("integrations.md", "RLAudit().wrap"): "a megatron.rl that is in no wheel: tests/test_megatron_rl.py",
    ("integrations.md", "AuditedLogger(logger)"): "NeMo-RL's loop: tests/test_nemo_rl.py",
    ("integrations.md", "SkyRLAudit()"): "SkyRL's trainer: tests/test_skyrl.py",
}
"""(page, what its block alone holds) -> why the block does not run here; of each, test_docs.py runs the imports."""

COMMANDS_NOT_RUN = {
    "torchrun --nproc-per-node 8 -m rlk_audit": "eight processes: tests/test_offline_torchrun.py takes fewer",
    "RLK_AUDIT_MODE=audit python -m verl.trainer.main_ppo": "verl, Ray and GPUs: tests/test_verl.py",
    ".venv/bin/python -m pytest tests/test_sketch.py": "a test in a test: tests/test_sketch.py runs anyhow",
}
"""How a command begins -> why it does not run here."""


class Block(NamedTuple):
    """A fenced block, and the text of the block behind it if that shows what it prints."""

    page: str
    language: str
    code: str
    shown: str | None


FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def blocks(page: str, text: str, language: str) -> list[Block]:
    found = [Block(page, *match.groups()) for match in FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def listed(block: Block) -> bool:
    return any(page == block.page and part in block.code for page, part in NOT_RUN)


# --- what the code needs that is not in it --------------------------------------------------------------------------


def dump(path: Path, seed: int = 0) -> Path:
    """Two steps of samples whose sides differ by noise of 0.01 nats."""
    rng = np.random.default_rng(seed)
    for step in (1, 2):
        rows = []
        for index in range(40):
            train = -rng.exponential(1.0, 30) - 0.1
            rollout = train + rng.normal(0, 0.01, 30)
            engine = f"e{index % 2}"
            rows.append(
                record(train.tolist(), rollout.tolist(), step=step, sample_index=index, labels={"engine": engine})
            )
        write(path / f"step_{step}.jsonl", rows)
    return path


def run_log(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in (1, 2):
        collector = Collector(AuditConfig())
        collector.update(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -2.0]), torch.ones(2))
        lines.append(StepReport.from_vector(collector.pack(), collector.config, step=step).to_json() + "\n")
    path.write_text("".join(lines))
    return path


def of_readme(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training of one process, whose schedule and model stand in for megatron-core's."""
    schedule = SimpleNamespace(get_forward_backward_func=lambda: lambda **arguments: None)
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", schedule)
    monkeypatch.setattr(sys, "argv", ["train.py", "--rlk-consistency-mode", "audit"])
    return {
        "parser": argparse.ArgumentParser(),
        "model": torch.nn.Linear(1, 1),
        "forward_step": lambda iterator, model: None,
        "train_log_probs": torch.tensor([-0.5, -1.25]),
        "rollout_log_probs": torch.tensor([-0.5, -1.0]),
        "mask": torch.ones(2),
        "index": torch.tensor([3, 3]),
        "position": torch.arange(2),
        "iteration": 1,
    }


def prepare(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names and files that a page's code takes for granted."""
    if page == "README.md":
        return of_readme(monkeypatch)
    if page in ("page.md", "dumps.md"):
        dump(Path("dumps"))
    if page == "diagnosis.md":
        samples = [[-0.5 - 0.1 * token for token in range(8)] for _ in range(4)]
        drifted = [[value * 1.3 for value in sample] for sample in samples]
        return {"train_log_probs": drifted, "rollout_log_probs": samples, "masks": None, "engines": ["e0", "e1"] * 2}
    return {}


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if blocks(name, text, "python")])
def test_python_runs_and_prints_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == "integrations.md":
        pytest.importorskip("torchmetrics")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atexit.register", lambda call: call)
    names = prepare(page, monkeypatch)
    for block in blocks(page, PAGES[page], "python"):
        if listed(block):
            continue
        exec(compile(block.code, page, "exec", dont_inherit=True), names)
        printed = capsys.readouterr().out
        assert block.shown is None or printed == block.shown, block.code
    if page == "README.md":
        assert names["audit"].owns_report


def test_what_is_listed_is_one_block_each_and_names_a_test() -> None:
    """Kills: an entry that outlived its block, or that hides others."""
    for (page, part), reason in NOT_RUN.items():
        assert sum(part in block.code for block in blocks(page, PAGES[page], "python")) == 1, part
        assert all((ROOT / test).exists() for test in re.findall(r"tests/\w+\.py", reason)), reason
    commands = [command for _, command in shell_commands()]
    for start in COMMANDS_NOT_RUN:
        assert sum(command.startswith(start) for command in commands) == 1, start


def test_code_is_marked_as_what_it_is() -> None:
    """Kills: code in a block without a language, or indented, which none of these tests would see."""
    code = re.compile(r"(from \S+ import|import|rlk-audit|torchrun|python|pip|make|export) ")
    for page, text in PAGES.items():
        assert {block[0] for block in FENCE.findall(text)} <= {"python", "bash", "yaml", "json", "diff", ""}, page
        assert not [block.code for block in blocks(page, text, "") if code.match(block.code)], page
        outside = FENCE.sub("", text)
        assert not re.findall(rf"^    {code.pattern}.*", outside, re.MULTILINE), page


# --- commands -------------------------------------------------------------------------------------------------------


def shell_commands() -> Iterator[tuple[str, str]]:
    """(page, command) of every line of every block of shell, comments cut off."""
    for page, text in {**PAGES, "CONTRIBUTING.md": OF_CONTRIBUTORS}.items():
        for block in blocks(page, text, "bash"):
            for line in block.code.replace("\\\n", " ").splitlines():
                if command := shlex.join(shlex.split(line, comments=True)):
                    yield page, command


def runs(command: str) -> bool:
    return not any(command.startswith(start) for start in COMMANDS_NOT_RUN)


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _ in shell_commands()))
def test_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A log that ends, in place of one that a job goes on writing.
    monkeypatch.setattr(live, "follow", lambda path: iter(read_run_logs([path]).steps))
    for words in [shlex.split(command) for owner, command in shell_commands() if owner == page and runs(command)]:
        if words[0] == "rlk-audit":
            run_audit(words[1:])
        elif words[0] == "make":
            subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        elif words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
        else:
            assert_options_of_a_framework(words)
    resolve_settings()


def run_audit(words: list[str]) -> None:
    """A command of rlk-audit over paths that are made where it expects them; it must find nothing wrong."""
    for word in words[1:]:
        path = Path(word)
        if path.suffix == ".jsonl" and not path.exists():
            run_log(path)
        elif word.split("/")[0] in ("dumps", "accepted", "new", "evidence") and not list(path.glob("*.jsonl")):
            dump(path)
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, (words, result.output)
    written = [words[i + 1] for i, word in enumerate(words) if word in ("--json", "--html")]
    assert all(Path(file).stat().st_size for file in written)


def assert_options_of_a_framework(words: list[str]) -> None:
    """Options for a framework's own command line: what they name of the package exists."""
    assert words[0].startswith("--"), f"neither run nor listed: {words}"
    named = [word for word in words if word.startswith("rlk_audit.")]
    assert named
    for name in named:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_yaml_is_a_file_of_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    (block,) = blocks("settings.md", PAGES["settings.md"], "yaml")
    (tmp_path / "settings.yaml").write_text(block.code)
    monkeypatch.setenv("RLK_AUDIT_CONFIG", str(tmp_path / "settings.yaml"))
    settings = resolve_settings()
    assert settings.config.breakdowns["engine"] == ("e0", "e1") and settings.config.limits["ess0"] == (">=0.9",)


# --- names in the running text --------------------------------------------------------------------------------------

EVERYTHING = {**PAGES, "CONTRIBUTING.md": OF_CONTRIBUTORS}


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@pytest.mark.parametrize("page", EVERYTHING)
def test_commands_in_the_text_exist(page: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for words in (code.split() for code in quoted(EVERYTHING[page]) if code.startswith("rlk-audit ")):
        if words[1].islower() and not words[1].startswith("-"):
            known = {option for parameter in commands[words[1]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("page", EVERYTHING)
def test_settings_extras_and_targets_in_the_text_exist(page: str) -> None:
    text = EVERYTHING[page]
    options = {option for setting in SETTINGS for option in setting.options}
    assert set(re.findall(r"--rlk-[a-z-]+", text)) <= options
    variables = {setting.variable for setting in SETTINGS}
    assert set(re.findall(r"\bRLK_AUDIT_[A-Z_]*[A-Z]\b", text)) <= variables
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[tool.")[0]
    extras = set(re.findall(r"^([a-z]+) = \[", project, re.MULTILINE))
    named = re.findall(r"(?:rlk_audit|'\.)\[([a-z,]+)\]", text)
    assert {extra for names in named for extra in names.split(",")} <= extras
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {code.split()[1] for code in quoted(text) if code.startswith("make ")} <= targets
