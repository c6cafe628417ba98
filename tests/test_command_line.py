"""The command line as people and scripts use it: what is printed where, and with which exit status."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline_views import heed_interrupts
from sink_reports import report as step_report
from sink_reports import strictly
from typer.testing import CliRunner

from rlk_audit.cli.app import app
from rlk_audit.sinks import JsonlSink

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "COLUMNS": "120",
}  # fmt: skip
PYTHON = [sys.executable, "-m", "rlk_audit"]
RED = "\x1b[31m"


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def rlk(*arguments: object) -> Done:
    """Run a command in this process, which spares the imports; scripts and terminals below take a process."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def sample(rng: np.random.Generator, step: int, index: int, noise: float, **more: Any) -> dict[str, Any]:
    rollout = -rng.exponential(1.0, int(rng.integers(10, 30)))
    train = np.minimum(rollout + rng.normal(0, noise, len(rollout)), 0.0)
    ids = rng.integers(0, 50, len(rollout)).tolist()
    record = {"step": step, "sample_index": index, "token_ids": ids, "labels": {"engine": f"e{index % 2}"}}
    return record | {"train_log_probs": train.tolist(), "rollout_log_probs": rollout.tolist()} | more


def write_dump(path: Path, seed: int = 0, noise: tuple[float, float] = (0.005, 0.005), steps: int = 3) -> Path:
    """A dump of two engines with a noise each."""
    rng = np.random.default_rng(seed)
    lines = [sample(rng, step, index, noise[index % 2]) for step in range(steps) for index in range(24)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dumps") / "healthy.jsonl")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dump(tmp_path_factory.mktemp("dumps") / "faulty.jsonl", noise=(0.005, 0.5))


# --- report ---------------------------------------------------------------------------------------------------------


def test_report_shows_the_run_and_writes_page_and_figures(faulty: Path, tmp_path: Path) -> None:
    done = rlk("report", faulty, "--html", tmp_path / "page.html", "--json", tmp_path / "run.json", "--exact")
    assert (done.returncode, done.stderr[:10]) == (0, f"{tmp_path}"[:10])
    values = strictly((tmp_path / "run.json").read_text())
    assert len(values["steps"]) == 3
    for told in ("by engine", "worst tokens", "stale_weights", "quantiles of abs(dlogp) are exact", "step 2"):
        assert told in done.stdout, told
    assert f"{values['total']['metrics']['abs_dlogp_max']:.4g}" in done.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert "page.html: " in done.stderr


# --- unusable -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["report", "nowhere"], "nowhere"),
        (["report", "."], "no dump"),
        (["check", "{dump}"], "check needs --limit, --contract or --baseline"),
        (["check", "{dump}", "--limit", "abs_dlogp_p9=1"], "did you mean abs_dlogp_p99"),
        (["check", "{dump}", "--limit", "nonsense"], "expected METRIC=BOUND"),
        (["check", "{dump}", "--contract", "none.json"], "--contract needs --dtype"),
        (["check", "{dump}", "--baseline", "{dump}"], "is no baseline"),
        (["report", "{dump}", "--format", "wandb"], "the format must be one of auto, slime"),
        (["report", "{dump}", "--tokenizer", "none.json"], "the tokenizer none.json cannot be read"),
        (["report", "{dump}", "--json", "no/such/folder/x"], "there is no folder no/such/folder"),
        (["compare", "{dump}", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    arguments: list[str], told: str, healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = rlk(*(argument.format(dump=healthy) for argument in arguments))
    assert done.returncode == 2
    assert told in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


# --- check ----------------------------------------------------------------------------------------------------------


def test_what_was_left_out_could_hide_a_crossed_limit(healthy: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text(healthy.read_text() + '{"train_log_probs": [')
    done = rlk("check", path, "--limit", "abs_dlogp_p99=0.05")
    assert done.returncode == 2
    assert "left out" in done.stdout
    assert "this is no pass" in done.stdout


def test_a_gate_is_strict(tmp_path: Path) -> None:
    """NaN among the log-probabilities fails, whatever the limits say."""
    path = tmp_path / "dump.jsonl"
    path.write_text('{"train_log_probs": [-1.0, NaN], "rollout_log_probs": [-1.0, -1.0]}\n')
    done = rlk("check", path, "--limit", "abs_dlogp_p99=0.05")
    assert done.returncode == 1
    assert "train_nan" in done.stdout


# --- compare --------------------------------------------------------------------------------------------------------


def test_compare_says_that_one_seed_is_identical(healthy: Path, tmp_path: Path) -> None:
    done = rlk("compare", healthy, write_dump(tmp_path / "again.jsonl"))
    assert done.returncode == 0
    assert "identical: both hold the same samples" in done.stdout


def test_compare_names_a_fault_of_one_side_and_the_tokens_that_moved(healthy: Path, faulty: Path) -> None:
    done = rlk("compare", healthy, faulty)
    assert done.returncode == 0
    for told in (
        "A alone shows healthy",
        "B alone shows stale_weights",
        "p = 0.001",
        "engine e1",
        "tokens that moved most",
    ):
        assert told in done.stdout, told


def test_compare_says_where_chance_would_do(tmp_path: Path) -> None:
    a, b = (write_dump(tmp_path / f"{seed}.jsonl", seed) for seed in (1, 2))
    done = rlk("compare", a, b)
    assert "no difference is shown, and one below about" in done.stdout
    few = write_dump(tmp_path / "few.jsonl", 3, steps=0)
    few.write_text(json.dumps(sample(np.random.default_rng(0), 0, 0, 0.005)) + "\n")
    assert "no test: 72 and 1 samples, at least 8 are needed" in rlk("compare", a, few).stdout


def test_compare_tells_bfloat16_from_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of the recordings, sampled at temperature 1."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "diagnosis"))
    import recordings

    recording = next(r for r in recordings.recordings("tune") if {"bf16", "fp16"} <= set(r.conditions))
    for name in ("bf16", "fp16"):
        samples = recording.conditions[name]
        lines = [{"train_log_probs": s["train"].tolist(), "rollout_log_probs": s["rollout"].tolist()} for s in samples]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = rlk("compare", tmp_path / "bf16.jsonl", tmp_path / "fp16.jsonl")
    assert "both show healthy" in done.stdout
    assert "as of bfloat16 (A) against float16" in done.stdout


# --- watch ----------------------------------------------------------------------------------------------------------


class Watch:
    """A watch that runs, and the lines that it has printed."""

    def __init__(self, path: Path) -> None:
        command = [*PYTHON, "watch", str(path)]
        self.process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, preexec_fn=heed_interrupts)
        self.text = ""

    def wait_for(self, told: str, times: int = 1) -> None:
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + 60
        while self.text.count(told) < times and time.monotonic() < deadline:
            if select.select([descriptor], [], [], 0.2)[0]:
                self.text += os.read(descriptor, 1 << 16).decode(errors="replace")
        assert self.text.count(told) >= times

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


@pytest.fixture
def watching() -> Iterator[list[Watch]]:
    started: list[Watch] = []
    yield started
    for watch in started:
        if watch.process.poll() is None:
            watch.process.kill()
        watch.process.wait()
        watch.process.stdout.close()


def test_watch_follows_a_run_through_rotation_and_restart(tmp_path: Path, watching: list[Watch]) -> None:
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path, max_bytes=9_000)
    for step in range(5):
        sink.write(step_report(step))
    assert (tmp_path / "audit.1.jsonl").exists()  # what was moved aside before is shown too
    watch = Watch(path)
    watching.append(watch)
    watch.wait_for("step 4 ")
    moved = len(list(tmp_path.iterdir()))
    for step in range(5, 12):
        sink.write(step_report(step))
    sink.close()
    assert len(list(tmp_path.iterdir())) > moved + 1
    watch.wait_for("step 11 ")
    whole = step_report(12, drift=0.25).to_json()
    with path.open("a") as file:  # a crash in the middle of a line, of which a restarted run makes another
        file.write(whole[: len(whole) // 2])
    time.sleep(0.5)
    sink = JsonlSink(path)
    sink.write(step_report(12, drift=0.75))
    watch.wait_for("step 12 ")
    path.unlink()  # a new run in place of the old one
    sink.write(step_report(1))
    sink.close()
    time.sleep(0.5)
    os.truncate(path, 0)  # emptied where it stands, as some rotations do
    time.sleep(0.5)
    with path.open("a") as file:
        file.write(step_report(2).to_json() + "\n")
    watch.wait_for("step 2 ", times=2)
    assert watch.stop() == 0
    lines = watch.text.splitlines()
    assert [line.split("step ")[1].split(" ")[0] for line in lines] == [str(step) for step in (*range(13), 1, 2)]
    assert f"max {step_report(12, drift=0.75).metrics['abs_dlogp_max']:.3g}" in lines[12]


def test_watch_waits_for_a_log(tmp_path: Path, watching: list[Watch]) -> None:
    watch = Watch(tmp_path / "runs" / "audit.jsonl")
    watching.append(watch)
    time.sleep(1)
    sink = JsonlSink(tmp_path / "runs" / "audit.jsonl")
    sink.write(step_report(3))
    sink.close()
    watch.wait_for("step 3 ")
    assert watch.stop() == 0
