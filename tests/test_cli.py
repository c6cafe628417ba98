"""The command line: exit codes, streams, hostile texts, terminals, and what it says where something is missing."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_views import heed_interrupts, record, steady, write
from test_offline_logs import dump, log, report
from typer.testing import CliRunner

from rlk_audit import Auditor
from rlk_audit.cli import tables
from rlk_audit.cli.app import app
from rlk_audit.cli.live import spark
from rlk_audit.offline.run_log import read_run_logs
from rlk_audit.report import WorstToken
from rlk_audit.run_view import Excerpt
from rlk_audit.sinks.jsonl import JsonlSink

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
MODULE = [sys.executable, "-m", "rlk_audit"]
EVIL = "\x1b]0;owned\x07\x1b[2J[bold red]x[/nothing]\r\n‮\x9b31m"
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f‮]")


def rlk(*arguments: str | Path) -> Any:
    """Run a command in this process, its streams apart."""
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def process(*arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [*MODULE, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, **how)


def refused(result: Any, *parts: str) -> None:
    """One sentence on standard error, exit 2, no trace, nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in result.stderr, result.stderr
    assert all(part in lines[0] for part in parts), lines[0]


# --- report ---------------------------------------------------------------------------------------------------------


def test_report_shows_the_figures_and_writes_them(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl")
    result = rlk("report", path, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html", "--exact")
    assert result.exit_code == 0, result.output
    values = json.loads((tmp_path / "a.json").read_text())
    assert f"{values['total']['metrics']['abs_dlogp_p99']:.4g}" in result.stdout
    for text in ("tokens compared", "step 2", "by position", "worst tokens", "what made the drift", "exact"):
        assert text in result.stdout
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert re.fullmatch(r".*a\.html: [0-9.]+ MB\n", result.stderr)


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_json_stands_alone_on_standard_output(command: str, tmp_path: Path) -> None:
    """Strict: no NaN, also where nothing was compared."""

    def forbidden(name: str) -> None:
        raise AssertionError(name)

    for path in (dump(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", [record([math.nan], [-1.0])])):
        result = rlk(command, path, "--json", "-")
        assert (result.exit_code, result.stderr) == (0, "")
        values = json.loads(result.stdout, parse_constant=forbidden)
        causes = values if command == "diagnose" else values["causes"]
        assert causes[0]["findings"][0]["code"] in ("healthy", "nothing_compared")


def test_report_by_labels(tmp_path: Path) -> None:
    labels = [{"engine": f"e{i}", "env": f"v{i}"} for i in range(3)]
    path = write(tmp_path / "a.jsonl", [steady(i, 5, labels=labels[i]) for i in range(3)])
    result = rlk("report", path, "--by", "engine", "--by", "engine")
    assert "by engine" in result.stdout and "by env" not in result.stdout
    refused(rlk("report", path, "--by", "nothing"), "no label nothing", "it has engine, env")


def test_report_of_a_log(tmp_path: Path) -> None:
    result = rlk("report", log(tmp_path / "a.jsonl", *(report(step, 0.01 * step) for step in range(30))))
    assert result.exit_code == 0
    assert "steps: the one of largest max in every 2" in result.stdout


def test_a_log_of_other_quantiles_breaks_nothing(tmp_path: Path) -> None:
    values = [json.loads(report(step).to_json()) for step in range(3)]
    for one in values:
        one["metrics"] = {"compared_token_count": 2}
    path = write(tmp_path / "a.jsonl", values)
    assert rlk("report", path).exit_code == rlk("compare", path, path).exit_code == 0
    result = rlk("check", path, "--limit", "abs_dlogp_p99=1")
    assert result.exit_code == 2 and "step 0 has no abs_dlogp_p99" in result.stderr


# --- check ----------------------------------------------------------------------------------------------------------

CI = """set -u
cd {folder}
{rlk} check good.jsonl --limit abs_dlogp_p99=0.5; echo good $?
{rlk} check good.jsonl --limit abs_dlogp_p99=0.0001; echo bad $?
{rlk} check missing.jsonl --limit abs_dlogp_p99=0.5; echo missing $?
{rlk} check damaged.jsonl --limit abs_dlogp_p99=0.5; echo damaged $?
{rlk} check good.jsonl --limit abs_dlogp_p99=0.0001 | head -c 0; echo closed ${{PIPESTATUS[0]}}
"""


def test_check_in_a_script(tmp_path: Path) -> None:
    good = dump(tmp_path / "good.jsonl")
    (tmp_path / "damaged.jsonl").write_text(good.read_text() + '{"train_log_probs": [')
    script = CI.format(folder=tmp_path, rlk=" ".join(MODULE))
    result = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    ends = [line for line in result.stdout.splitlines() if re.fullmatch(r"[a-z]+( \d)?", line)]
    assert ends == ["good 0", "bad 1", "missing 2", "damaged 2", "closed 1"], result.stdout + result.stderr
    assert "passed: 3 steps" in result.stdout and "FAILED: 3 in 3 steps" in result.stdout
    assert "but this is no pass: what was left out" in result.stdout
    assert result.stderr.strip() == "error: missing.jsonl does not exist"


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["report", "DUMP"], ["report", "DUMP", "--json", "-"], ["check", "DUMP", "--limit", "abs_dlogp_p99=0.5"],
        ["watch", "LOG"], ["--version"], ["--help"], ["report", "--help"],
    ],
)  # fmt: skip
def test_a_full_disk_is_told_in_a_sentence(command: list[str], buffered: bool, tmp_path: Path) -> None:
    files = {"DUMP": dump(tmp_path / "a.jsonl", count=2), "LOG": log(tmp_path / "audit.jsonl", report(1))}
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [*MODULE, *(str(files.get(word, word)) for word in command)],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100,
        )  # fmt: skip
    assert (told.returncode, told.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("command", [["check", "missing.jsonl", "--limit", "abs_dlogp_p99=0.5"], ["no-such-command"]])
def test_an_error_that_cannot_be_told_is_no_crossed_limit(command: list[str], buffered: bool) -> None:
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [*MODULE, *command], env=environment, stdout=subprocess.PIPE, stderr=full, text=True, timeout=100
        )
    assert (told.returncode, told.stdout) == (2, "")


@pytest.mark.parametrize(
    ("command", "status"), [("report DUMP", 0), ("--version", 0), ("--help", 0), ("report missing.jsonl", 2)]
)
def test_closed_streams_change_no_status(command: str, status: int, tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl", count=2)
    words = shlex.join([*MODULE, *command.replace("DUMP", str(path)).split()])
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        told = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], env=ENVIRONMENT, capture_output=True, text=True, timeout=100
        )
        assert told.returncode == status, told
        assert "Traceback" not in told.stderr


def test_check_of_several_and_relative_limits(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", *(report(step, 0.1 if step < 30 else 0.9) for step in range(31)))
    assert rlk("check", path, "--limit", "abs_dlogp_max<=1", "--limit", "abs_dlogp_max>=0.05").exit_code == 0
    result = rlk("check", path, "--limit", "abs_dlogp_max=3x_median_20", "--limit", "abs_dlogp_mean>=0.2")
    assert result.exit_code == 1
    failed = result.stdout.splitlines()
    assert sum("must be >= 0.2" in line for line in failed) == 30
    assert sum("must be <= 0.3" in line for line in failed) == 1


def test_check_by_a_median_of_too_few_steps_is_no_pass(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", *map(report, range(15)))
    result = rlk("check", path, "--limit", "abs_dlogp_max=3x_median_20", "--limit", "abs_dlogp_p99=1")
    assert result.exit_code == 2 and "abs_dlogp_max cannot be judged, for a median needs 20 steps" in result.stdout


def test_a_failure_that_a_later_report_replaced_is_no_pass(tmp_path: Path) -> None:
    """A run that failed and began anew: which of the two weights are those of the step, a log cannot say."""
    path = log(tmp_path / "a.jsonl", report(1, 0.1), report(2, 0.9), report(3, 0.1), report(2, 0.1), report(3, 0.1))
    result = rlk("check", path, "--limit", "abs_dlogp_max=0.5")
    assert result.exit_code == 2
    assert "replaced 1 failed, first that of step 2: abs_dlogp_max is 0.9, must be <= 0.5" in result.stdout
    assert rlk("check", path, "--limit", "abs_dlogp_max=1").exit_code == 0
    assert "reports that a later one of their step replaces, as after a restart: 2" in rlk("report", path).stdout


def test_check_by_a_baseline(tmp_path: Path) -> None:
    good, worse = dump(tmp_path / "a.jsonl"), dump(tmp_path / "b.jsonl", 0.1)
    accepted = tmp_path / "accepted.json"
    assert rlk("report", good, "--json", accepted).exit_code == 0
    assert rlk("check", good, "--baseline", accepted, "--ratio", "1").exit_code == 0
    result = rlk("check", worse, "--baseline", accepted)
    assert result.exit_code == 1 and "times the baseline's" in result.stdout
    refused(rlk("check", good, "--baseline", good), "is no baseline")
    refused(rlk("check", good, "--baseline", tmp_path / "none"), "cannot be read")
    for ratio in ("0", "nan", "-1", "inf"):
        refused(rlk("check", good, "--baseline", accepted, "--ratio", ratio), "positive number")


def test_check_of_figures_of_samples(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl")
    assert rlk("check", path, "--limit", "abs_dlogp_sample_mean=1").exit_code == 0
    assert rlk("check", path, "--limit", "abs_dlogp_sample_mean=1e-9").exit_code == 1


def test_check_passes_nothing_that_compared_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record([-1.0], [-1.0], mask=[0])])
    result = rlk("check", path, "--limit", "abs_dlogp_p99=1")
    assert result.exit_code == 1 and "nothing was compared" in result.stdout


def test_check_of_a_rank_alone_is_no_pass(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", report(1, scope="rank"))
    assert rlk("check", path, "--limit", "abs_dlogp_p99=1").exit_code == 2
    assert rlk("check", path, "--limit", "abs_dlogp_p99=0.001").exit_code == 1


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["check", "DUMP"], "needs --limit, --contract or --baseline"),
        (["check", "DUMP", "--limit", "abs_dlogp"], "expected METRIC=BOUND"),
        (["check", "DUMP", "--limit", "abs_dlogp_p98=1"], "did you mean"),
        (["check", "DUMP", "--limit", "abs_dlogp_p99=nan"], "must be a number"),
        (["check", "DUMP", "--contract", "none.json"], "--dtype"),
        (["check", "DUMP", "--contract", "none.json", "--dtype", "bfloat16"], "none.json"),
        (["report", "none"], "none does not exist"),
        (["report", "DUMP", "--format", "verl"], "the format must be one of auto"),
        (["report", "DUMP", "--json", "none/a.json"], "--json none/a.json: there is no folder none; make it"),
        (["report", "DUMP", "--html", "none/a.html"], "--html none/a.html: there is no folder none; make it"),
        (["report", "DUMP", "--html", "."], "--html . is a folder; name a file in it"),
        (["report", "DUMP", "--tokenizer", "none.json"], "expected a tokenizer.json"),
        (["diagnose", "DUMP", "--json", "."], "--json . is a folder"),
        (["diagnose", "NOTHING", "--json", "none/a.json"], "there is no folder none"),  # before anything is read
        (["compare", "DUMP", "none"], "none does not exist"),
        (["watch", "."], "directory"),
    ],
)
def test_unusable_input(arguments: list[str], part: str, tmp_path: Path) -> None:
    path = str(dump(tmp_path / "a.jsonl", count=2))
    refused(rlk(*(path if one == "DUMP" else one for one in arguments)), part)


@pytest.mark.parametrize("arguments", [["report"], ["check", "--nothing"], ["compare", "a"], ["nothing"], []])
def test_unusable_usage(arguments: list[str]) -> None:
    result = rlk(*arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_help_has_examples_a_line_each() -> None:
    for command, line in {
        "report": "rlk-audit report dumps/ --html page.html",
        "check": "rlk-audit check dumps/ --baseline accepted.json --ratio 1.5",
        "compare": "rlk-audit compare a.jsonl b.jsonl",
        "diagnose": "rlk-audit diagnose dumps/ --json - | jq '.[0].findings'",
        "watch": "rlk-audit watch runs/audit.jsonl",
    }.items():
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).stdout
        assert line in [shown.strip() for shown in shown.splitlines()], shown
    shown = rlk("--help").stdout
    assert all(command in shown for command in ("report", "check", "compare", "diagnose", "watch"))


def test_both_ways_to_start_are_the_same() -> None:
    script = "import sys; sys.argv[0] = 'rlk-audit'; from rlk_audit.__main__ import main; main()"
    ways = [[*MODULE, "--help"], [sys.executable, "-c", script, "--help"]]
    told = [subprocess.run(way, env=ENVIRONMENT, capture_output=True, text=True, timeout=60) for way in ways]
    assert [one.returncode for one in told] == [0, 0] and not told[0].stderr
    usage = [one.stdout.replace("python -m rlk_audit", "rlk-audit") for one in told]
    assert usage[0].split() == usage[1].split()


def test_completion() -> None:
    environment = ENVIRONMENT | {
        "_RLK_AUDIT_COMPLETE": "complete_bash",
        "COMP_WORDS": "rlk-audit di",
        "COMP_CWORD": "1",
    }
    script = "import sys; sys.argv = ['rlk-audit']; from rlk_audit.__main__ import main; main()"
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() == ["diagnose"], told


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_names_the_extra(package: str, tmp_path: Path) -> None:
    write(tmp_path / f"{package}.py", [])
    (tmp_path / f"{package}.py").write_text(f"raise ImportError('no module named {package}')")
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    told = subprocess.run([*MODULE, "report", "x"], env=environment, capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.count("\n") == 1 and "pip install 'rlk_audit[report]'" in told.stderr


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [("jinja2", ["--html", "page.html"], "report"), ("tokenizers", ["--tokenizer", "x.json"], "tokenizer")],
)
def test_an_optional_package_of_an_option(
    package: str, arguments: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    path = dump(tmp_path / "a.jsonl", count=2)
    refused(rlk("report", path, *arguments), f"rlk_audit[{extra}]")


# --- compare and diagnose -------------------------------------------------------------------------------------------


def test_compare(tmp_path: Path) -> None:
    a, b = dump(tmp_path / "a.jsonl"), dump(tmp_path / "b.jsonl", 0.1)
    same = rlk("compare", a, a)
    assert same.exit_code == 0 and "identical: both hold the same samples" in same.stdout
    other = rlk("compare", a, b)
    for text in ("permutation test p = 0.001", "tokens that moved most", "12 samples are in both", "p99 B / A"):
        assert text in other.stdout, text
    logs = [log(tmp_path / f"{drift}.jsonl", report(1, drift), report(2, drift)) for drift in (0.1, 0.2)]
    told = rlk("compare", *logs).stdout
    assert "no test: a log holds no samples" in told and re.search(r"max +0\.1 +0\.2 +2\b", told)
    assert rlk("compare", a, logs[0]).exit_code == 0


def test_diagnose(tmp_path: Path) -> None:
    records = [steady(index, 200) for index in range(12)]
    for one in records:
        one["train_log_probs"] = one["rollout_log_probs"]
    told = rlk("diagnose", write(tmp_path / "a.jsonl", records)).stdout
    assert "all tokens: self_comparison (100%)" in told and "check whether" in told
    assert "step 1: too_few_tokens" in rlk("diagnose", log(tmp_path / "b.jsonl", report(1))).stdout


def test_steps_of_a_log_that_the_run_did_not_diagnose_are_diagnosed(tmp_path: Path) -> None:
    """A run without limits diagnoses one step in a hundred; its log must not read as healthy for that."""
    path = tmp_path / "audit.jsonl"
    auditor = Auditor(sinks=[JsonlSink(path)], writer=True)
    rng = np.random.default_rng(0)
    for step in range(4):
        train = -rng.exponential(1.0, 4000)
        rollout = np.full(4000, math.nan) if step == 2 else train + rng.normal(0, 0.005, 4000)
        auditor.update(train, np.minimum(rollout, 0.0), np.ones(4000))
        auditor.step(step)
    auditor.close()
    told = rlk("diagnose", path).stdout
    assert "steps 0 to 1: healthy" in told and "step 2: nothing_compared" in told and "step 3: healthy" in told
    page = tmp_path / "page.html"
    assert rlk("report", path, "--html", page).exit_code == 0
    assert "iagnosed from tokens" not in page.read_text() and "nothing_compared" in page.read_text()


# --- hostile texts --------------------------------------------------------------------------------------------------


def hostile_dump(folder: Path) -> Path:
    folder.mkdir()
    records = [steady(i, 30, step=i % 2, labels={EVIL: f"{EVIL}{i}", "engine": f"[link=x]{i}"}) for i in range(6)]
    (folder / f"{EVIL.replace('/', '')}.npz").write_bytes(b"PK\x03\x04 train_log_probs.npy")
    return write(folder / "a.jsonl", records)


def hostile_log(path: Path) -> Path:
    lines = []
    for step in range(3):
        one = json.loads(report(step).to_json())
        one["warnings"] = {EVIL: 3}
        one["notes"], one["prefix"] = [EVIL], EVIL
        one["breakdowns"] = {EVIL: [{"name": EVIL} | dict.fromkeys(BUCKET, 1)]}
        one["verdict"] = {"passed": False, "limits": [], "violations": [EVIL]}
        one["findings"] = [{"code": EVIL, "strength": 1, "evidence": {}, "check_first": EVIL, "summary": EVIL}]
        one["ranks"] = [dict.fromkeys(one["ranks"][0], 0) | {"host": EVIL}]
        one["worst_tokens"][0]["labels"] = {EVIL: EVIL}
        lines.append(one)
    return write(path, lines)


BUCKET = (
    "compared_token_count", "abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_p99", "abs_dlogp_max", "tail_frac_ln2",
)  # fmt: skip


def test_texts_of_dumps_and_logs_cannot_steer_a_terminal(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({EVIL: 0} | {f"{EVIL}{n}": n for n in range(1, 500)}, unk_token=EVIL)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    folder = hostile_dump(tmp_path / "dump").parent
    read = hostile_log(tmp_path / "log.jsonl")
    for arguments in (
        ["report", folder, "--tokenizer", tmp_path / "tokenizer.json"], ["check", folder, "--limit", "ess0=0.1"],
        ["compare", folder, read], ["diagnose", folder], ["report", read], ["diagnose", read],
        ["check", read, "--limit", "abs_dlogp_max=0.01"], ["report", EVIL], ["check", folder, "--limit", EVIL],
    ):  # fmt: skip
        result = rlk(*arguments)
        assert not STEERING.search(result.stdout + result.stderr), arguments
        assert result.exit_code in (0, 1, 2)
    assert "[bold red]x[/nothing]" in rlk("report", read).stdout


def test_plain_text() -> None:
    assert tables.plain_text("a b\x1b\n\ud800é日") == "a b\\x1b\\n\\ud800é日"
    assert str(tables.line("[bold]\x9b")) == "[bold]\\x9b"
    assert [tables.number(value) for value in (1234567, 0.123456, math.nan)] == ["1,234,567", "0.1235", "-"]


def test_check_of_a_run_that_compared_little_is_no_pass(tmp_path: Path) -> None:
    """Whatever kept the tokens out: samples refused, ids that differ, values missing, placeholders."""
    missing = [steady(i, 30) | ({"rollout_log_probs": [None] * 30} if i else {}) for i in range(8)]
    ids = [steady(i, 30) | {"token_ids": [1] * 30, "rollout_token_ids": [1 + (i > 0)] * 30} for i in range(8)]
    sentinel = [steady(i, 30) | ({"rollout_log_probs": [-9999.0] * 30} if i else {}) for i in range(8)]
    for name, rows in {"missing": missing, "ids": ids, "sentinel": sentinel}.items():
        path = write(tmp_path / f"{name}.jsonl", rows)
        result = rlk("check", path, "--limit", "abs_dlogp_p99=5")
        assert result.exit_code == 2, (name, result.output)
        assert "at the least 30 of 240 (--limit" in result.stdout, (name, result.output)
        assert rlk("check", path, "--limit", "abs_dlogp_p99=5", "--limit", "compared_coverage>=0.1").exit_code == 0, (
            name
        )
        assert rlk("check", path, "--limit", "compared_coverage>=0.2").exit_code == 1, name
    one_lost = write(tmp_path / "one.jsonl", [steady(0, 199), steady(1, 1) | {"rollout_log_probs": [None]}])
    assert rlk("check", one_lost, "--limit", "abs_dlogp_p99=5").exit_code == 0


def test_check_of_a_copy_is_no_pass_unless_it_must_be_one(tmp_path: Path) -> None:
    path = write(tmp_path / "copy.jsonl", [record([-1.0, -2.0], [-1.0, -2.0], sample_index=i) for i in range(8)])
    result = rlk("check", path, "--limit", "abs_dlogp_p99=5")
    assert result.exit_code == 2 and "the same values throughout" in result.stdout
    assert rlk("check", path, "--limit", "abs_dlogp_max=0").exit_code == 0


def test_a_relative_limit_says_from_which_step_on_it_judged(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [steady(i, 5, step=i) for i in range(24)])
    result = rlk("check", path, "--limit", "abs_dlogp_p99=3x_median_20")
    assert (
        result.exit_code == 0 and "passed: 24 steps (by their median: abs_dlogp_p99 from step 20 on)" in result.stdout
    )


def test_a_log_has_no_tokens_to_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [json.loads(report(1).to_json())])
    for option in (["--by", "engine"], ["--exact"]):
        refused(rlk("report", path, *option), "is the log of a run")


def test_a_folder_of_logs_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = log(tmp_path / "run" / "audit.jsonl", report(1))
    for command in (["report"], ["diagnose"], ["check", "--limit", "ess0>=0.9"]):
        refused(rlk(*command, tmp_path), "no dump of a known format", f"{path} is the log of a run: give it by itself")


def run_log_of(path: Path, *parts: Sequence[float], closed: bool = False) -> Path:
    """A log of some runs, each of steps with these drifts and a total behind them; the last may have been killed."""
    number = 0
    for part in parts:
        auditor = Auditor(sinks=[JsonlSink(path)])
        for drift in part:
            auditor.update(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0 - drift, -2.0]), torch.ones(2))
            auditor.step(number)
            number += 1
        auditor.close()
    if not closed:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return path


def accepted(tmp_path: Path) -> Path:
    rlk("report", dump(tmp_path / "good.jsonl"), "--json", tmp_path / "good.json")
    return tmp_path / "good.json"


@pytest.mark.parametrize("parts", [([0.01] * 3, [2.0] * 3), ([2.0, 2.0, 0.01],)])
def test_no_part_of_a_run_stands_for_it(parts: Sequence[Sequence[float]], tmp_path: Path) -> None:
    """A total written before later steps, and the last step where there is no total."""
    path = run_log_of(tmp_path / "audit.jsonl", *parts)
    assert read_run_logs([path]).total is None
    assert "all steps" not in rlk("report", path).stdout
    refused(rlk("check", path, "--baseline", accepted(tmp_path)), "a baseline needs the run's total")
    compared = rlk("compare", path, path).stdout
    assert f"A has no total: the figures are those of its last step, step {sum(map(len, parts)) - 1}" in compared


def test_a_total_of_a_part_of_the_steps_is_none_of_the_run(tmp_path: Path) -> None:
    """As of a job that began anew without its state: the last total counts from there."""
    path = run_log_of(tmp_path / "audit.jsonl", [0.01] * 3, [2.0] * 3, closed=True)
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "run"
    assert read_run_logs([path]).total is None
    assert read_run_logs([run_log_of(tmp_path / "b.jsonl", [0.01] * 3, closed=True)]).total is not None


def test_a_baseline_is_of_a_whole_run(tmp_path: Path) -> None:
    rlk("report", run_log_of(tmp_path / "audit.jsonl", [2.0, 0.01]), "--json", tmp_path / "a.json")
    refused(rlk("check", dump(tmp_path / "d.jsonl"), "--baseline", tmp_path / "a.json"), "is no baseline")


@pytest.mark.parametrize("broken", [{"mask": [0] * 5}, {"train_log_probs": [math.nan] * 5}])
def test_a_gate_on_a_baseline_alone_is_strict_too(broken: dict[str, Any], tmp_path: Path) -> None:
    rows = [steady(i, 5, step=1 + i // 2) for i in range(6)]
    path = write(tmp_path / "a.jsonl", rows)
    rlk("report", path, "--json", tmp_path / "a.json")
    assert rlk("check", path, "--baseline", tmp_path / "a.json").exit_code == 0
    odd = write(tmp_path / "b.jsonl", [row | broken if row["step"] == 2 else row for row in rows])
    result = rlk("check", odd, "--baseline", tmp_path / "a.json", "--ratio", "1000")
    assert result.exit_code == 1 and "step 2:" in result.stdout


def test_an_absolute_limit_hides_no_relative_one_that_was_never_judged(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl")
    limits = ("--limit", "abs_dlogp_p99=3x_median_20", "--limit", "abs_dlogp_p99=5")
    for given in (limits, limits[2:] + limits[:2]):
        result = rlk("check", path, *given)
        assert result.exit_code == 2 and "abs_dlogp_p99 cannot be judged, for a median needs" in result.stdout


def test_a_step_without_a_number_is_not_called_all_tokens(tmp_path: Path) -> None:
    rows = [steady(0, 5, step=1), record([-1.0], [-3.5]), record([-1.0], [-3.5])]
    result = rlk("check", write(tmp_path / "a.jsonl", rows), "--limit", "abs_dlogp_max=1")
    assert result.exit_code == 1
    assert "step unknown: abs_dlogp_max is 2.5" in result.stdout and "all tokens" not in result.stdout


def test_ids_are_no_quantities(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record([-1.0], [-3.5], sample_index=1234567, token_ids=[50256])])
    other = write(tmp_path / "b.jsonl", [record([-1.0], [-3.0], sample_index=1234567, token_ids=[50256])])
    assert all(text in rlk("report", path).stdout for text in ("1234567", "50256"))
    assert all(text in rlk("compare", path, other).stdout for text in ("1234567", "50256"))
    unknown = rlk("report", write(tmp_path / "c.jsonl", [record([-1.0], [-3.5])])).stdout
    assert unknown.split("worst tokens")[1].splitlines()[4].split()[:4] == ["-", "0", "0", "-"]


def test_coverage_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record([-1.0, -1.0], [None, -1.5])])
    shown = dict(re.findall(r"^ *(share of .*?) {2,}([0-9.]+) *$", rlk("report", path).stdout, re.MULTILINE))
    assert shown == {"share of active tokens compared": "0.5", "share of tokens active": "1"}


def test_masked_tokens_are_not_coloured_as_drift(tmp_path: Path) -> None:
    worst = WorstToken(2.0, -2.0, -3.0, -1.0, 0, -1, 2, -1, {}, -1, -1)
    shown = Excerpt(1, worst, (0, 1, 2), ("a", "b", "c"), (-9.0, -9.0, -3.0), (-1.0, -1.0, -1.0), (False, True, True))
    told = tables._excerpt(shown).renderables[1]
    assert [str(span.style) for span in told.spans] == ["dim", "red", "bold reverse red"]


def test_a_page_needs_a_file_of_its_own(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl")
    refused(rlk("report", path, "--html", "-"), "a file of its own")
    refused(rlk("report", path, "--html", tmp_path / "out", "--json", tmp_path / "out"), "a file of its own")
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_watch_refuses_what_is_no_log(tmp_path: Path) -> None:
    for path in (dump(tmp_path / "a.jsonl"), tmp_path):
        refused(rlk("watch", path), "not the log of a run")


def test_worst_tokens_are_shown_with_their_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record([-1.0], [-1.0 - step], sample_index=7, step=step) for step in (3, 4)])
    lines = rlk("report", path).stdout.split("worst tokens")[1].splitlines()[4:6]
    assert [line.split()[:3] for line in lines] == [["4", "7", "0"], ["3", "7", "0"]]


# --- streams and terminals ------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    path = dump(tmp_path / "a.jsonl")
    for arguments in (f"report {path}", f"report {path} --json -"):
        script = f"{' '.join(MODULE)} {arguments} | head -c 5 >/dev/null; echo ${{PIPESTATUS[0]}}"
        result = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert (result.stdout, result.stderr) == ("0\n", ""), arguments


def test_nothing_moves_where_there_is_no_terminal(tmp_path: Path) -> None:
    result = process("report", dump(tmp_path / "a.jsonl"))
    assert result.stderr == "" and "\x1b" not in result.stdout


class Terminal:
    """A process whose streams are a pseudo-terminal."""

    def __init__(self, *arguments: str | Path) -> None:
        master, slave = pty.openpty()
        environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
        command = [*MODULE, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=slave, stdout=slave, stderr=slave, preexec_fn=heed_interrupts
        )
        os.close(slave)
        self.master, self.text = master, ""

    def until(self, text: str, seconds: float = 60) -> str:
        """Read until a text is shown, or the process ends."""
        deadline = time.monotonic() + seconds
        while text not in self.text and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 1 << 16).decode(errors="replace")
                except OSError:
                    break
        assert text in self.text, self.text[-3000:]
        return self.text

    def end(self, signal: int) -> int:
        self.process.send_signal(signal)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            os.close(self.master)


def test_bars_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal("report", dump(tmp_path / "a.jsonl"))
    assert "scanning" in terminal.until("worst tokens")
    assert terminal.end(0) == 0


def test_watch_on_a_terminal_through_rotation_and_restart(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    terminal = Terminal("watch", path)
    terminal.until("waiting for")
    sink = JsonlSink(path, max_bytes=1)
    for step in (101, 102, 103):
        sink.write(report(step, 0.01 * step))
        terminal.until(str(step))
    sink.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    sink = JsonlSink(path)
    sink.write(report(55))
    sink.close()
    assert "\x1b[" in terminal.until(" 55 ") and "Traceback" not in terminal.text
    assert terminal.end(2) == 0


def test_watch_writes_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    path = hostile_log(tmp_path / "audit.jsonl")
    command = [*MODULE, "watch", str(path)]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as watcher:
        assert watcher.stdout is not None and watcher.stderr is not None
        lines = [watcher.stdout.readline() for _ in range(6)]
        watcher.send_signal(2)
        assert (watcher.wait(20), watcher.stderr.read()) == (0, "")
    assert [bool(re.search(rf"step {n} \|", lines[2 * n])) for n in range(3)] == [True] * 3
    assert all("cause: " in line for line in lines[1::2])
    assert not STEERING.search("".join(lines))


def test_spark() -> None:
    assert spark([0.0, 1.0, math.nan, 4.0]) == " ▂ █"
    assert spark([]) == "" and spark([math.nan, 0.0]) == "  "
    assert spark([math.inf, -9.0, 2.0]) == "  █"
