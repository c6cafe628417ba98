"""GrpoAudit in trainings of the real trl: the core's bits of the tokens that trl had; a training that notices nothing.

Each training is a program of its own (trl_job.py), in one process or in two under torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

from rlk_audit import AuditConfig, Collector, StepReport

pytest.importorskip("trl", reason="trl is not installed: make test-integrations")

JOB = Path(__file__).with_name("trl_job.py")
TIMEOUT = 240
PREFIX = "rlk_audit/"
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
VLLM_IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_AOT_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "0",
}  # fmt: skip
"""trl's colocated vLLM on a CPU: trl reaches into its worker, which so must be of this process."""

Run = dict[str, Any]
Runner = Callable[..., list[Run]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Returns what each rank of a training left; the same training is run once."""

    @cache
    def run(sampler: str, ranks: int = 1, audit: bool = True, config: str = "{}", trl: str = "{}") -> list[Run]:
        out = tmp_path_factory.mktemp("trl")
        program = [sys.executable] if ranks == 1 else [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        ]  # fmt: skip
        job = [str(JOB), "--out", str(out), "--sampler", sampler, "--config", config, "--trl", trl]
        command = [*program, *job, *(["--audit"] if audit else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=os.environ | VARIABLES)
        assert done.returncode == 0, done.stderr[-3000:]
        runs = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
        lines = (out / "audit.jsonl").read_text().splitlines() if audit else []
        for each in runs:
            each["reports"] = [report for line in lines if (report := StepReport.from_dict(json.loads(line))).step]
            each["stderr"] = done.stderr
        return runs

    return run


def pieces(runs: list[Run], step: int) -> list[Run]:
    """What trl had for a step, rank after rank."""
    return [piece for run in runs for piece in run["tokens"] if piece["step"] == step]


def core(given: list[Run]) -> StepReport:
    collector = Collector(AuditConfig())
    first = 0
    for piece in given:
        train = torch.tensor(piece["train"])
        collector.update(
            train,
            None if piece["rollout"] is None else torch.tensor(piece["rollout"]),
            torch.tensor(piece["mask"]),
            valid=torch.tensor(piece["valid"]),
            sample_index=torch.arange(first, first + len(train))[:, None],
            token_position=torch.arange(train.shape[1]),
            token_ids=torch.tensor(piece["ids"]),
        )
        first += len(train)
    return collector.compute()


def expected_by_hand(given: list[Run], worst_k: int = 4) -> oracle.Expected:
    """Brute force: only what is a position of a completion, token by token."""
    samples = []
    for piece in given:
        for row, valid in enumerate(piece["valid"]):
            length = sum(valid)
            rollout = [None] * length if piece["rollout"] is None else piece["rollout"][row][:length]
            samples.append(
                oracle.Sample(
                    piece["train"][row][:length],
                    rollout,
                    piece["mask"][row][:length],
                    sample_index=len(samples),
                    token_ids=piece["ids"][row][:length],
                )
            )
    return oracle.audit(samples, worst_k=worst_k)


def figures(report: StepReport) -> dict[str, str]:
    """All figures but places, which trl's shuffle and the number of ranks may change, bit for bit."""
    places = ("worst_sample_index", "worst_rank", "worst_microbatch")
    return {name: float(value).hex() for name, value in report.metrics.items() if name not in places}


CASES = [
    ("engine", 1, "{}"),
    ("engine", 2, "{}"),
    ("engine", 1, '{"num_iterations": 2, "max_steps": 4}'),
    ("engine", 1, '{"vllm_importance_sampling_correction": false, "gradient_accumulation_steps": 2}'),
    ("engine", 2, '{"vllm_importance_sampling_correction": false, "gradient_accumulation_steps": 2}'),
    ("rollout_func", 1, "{}"),
    ("rollout_func", 2, "{}"),
    ("rollout_func", 1, '{"num_iterations": 2, "max_steps": 4}'),
    ("rollout_func", 1, '{"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1}'),
    ("rollout_func", 1, '{"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2}'),
]


@pytest.mark.parametrize(("sampler", "ranks", "trl"), CASES)
def test_the_figures_are_those_of_the_tokens_that_trl_had(train: Runner, sampler: str, ranks: int, trl: str) -> None:
    runs = train(sampler, ranks, trl=trl)
    reports = runs[0]["reports"]
    assert [report.step for report in reports] == sorted({piece["step"] for piece in runs[0]["tokens"]})
    for report in reports:
        given = pieces(runs, report.step)
        assert figures(report) == figures(core(given))
        by_hand = expected_by_hand(given)
        found = oracle.differences(report.metrics, by_hand)
        assert [line for line in found if not line.startswith("worst_sample_index")] == []
        assert report.warnings == by_hand.warnings
        assert report.metrics["abs_dlogp_max"] > 0.01


def test_a_none_of_the_engine_is_not_told_as_broken_logits_alone(train: Runner) -> None:
    (run,) = train("engine", 1)
    assert run["reports"][0].classes["rollout_nan"] > 0
    assert "NaN of a missing value" in run["stderr"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_worst_tokens_name_the_row_that_trl_generated(train: Runner, ranks: int) -> None:
    """Where trl recomputes, the recorder sees rows before the shuffle: their order is the one of trl's completions."""
    runs = train("engine", ranks, config='{"worst_k": 40}')  # so many that some lie on each rank
    for report in runs[0]["reports"]:
        expected = expected_by_hand(pieces(runs, report.step), worst_k=40).worst
        found = [(t.sample_index, t.token_position, t.token_id, t.train_logp) for t in report.worst_tokens]
        assert found == [(t.sample_index, t.token_position, t.token_id, t.train_logp) for t in expected]


def test_ranks_hold_unequal_numbers_of_tokens(train: Runner) -> None:
    """Else a mean of means would pass for a mean."""
    counts = [rank.compared_token_count for rank in train("engine", 2)[0]["reports"][0].ranks]
    assert max(counts) > 2 * min(counts)


@pytest.mark.parametrize(("sampler", "ranks"), [("engine", 1), ("engine", 2), ("rollout_func", 1)])
def test_the_training_is_bitwise_that_without_an_audit(train: Runner, sampler: str, ranks: int) -> None:
    for audited, alone in zip(train(sampler, ranks), train(sampler, ranks, audit=False), strict=True):
        assert audited["losses"] == alone["losses"]
        assert repr(audited["tokens"]) == repr(alone["tokens"])  # NaN is not equal to itself
        assert all(torch.equal(value, alone["weights"][name]) for name, value in audited["weights"].items())
        assert without_ours(audited["log"]) == without_ours(alone["log"])


def without_ours(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{k: v for k, v in line.items() if k not in timed and not k.startswith(PREFIX)} for line in log]


def test_every_process_has_the_figures_in_the_trainers_log(train: Runner) -> None:
    for run in train("engine", 2):
        logged = [line for line in run["log"] if PREFIX + "abs_dlogp_p99" in line]
        assert [line["step"] for line in logged] == [1, 2, 3]
        for line, report in zip(logged, run["reports"], strict=True):
            finite = {PREFIX + name: value for name, value in report.metrics.items() if math.isfinite(value)}
            assert {name: value for name, value in line.items() if name.startswith(PREFIX)} == finite


def test_a_log_that_passes_over_steps_shows_the_one_that_failed(train: Runner) -> None:
    reports = train("engine")[0]["reports"]
    p99 = [report.metrics["abs_dlogp_p99"] for report in reports]
    assert max(p99[:2]) > p99[2], "the fixture's last step must not be its worst"
    limit = json.dumps({"limits": {"abs_dlogp_p99": (max(p99[:2]) + p99[2]) / 2}})
    (run,) = train("engine", config=limit, trl='{"logging_steps": 3}')
    (line,) = [line for line in run["log"] if PREFIX + "abs_dlogp_p99" in line]
    assert line["step"] == 3
    assert line[PREFIX + "abs_dlogp_p99"] in p99[:2]
    assert line[PREFIX + "verdict/all"] == 0.0


def test_strict_stops_every_process_with_one_sentence(train: Runner) -> None:
    runs = train("engine", 2, config='{"mode": "strict", "strict_classes": [], "limits": {"abs_dlogp_max": 1e-6}}')
    assert len({run["stopped"] for run in runs}) == 1
    assert "abs_dlogp_max" in runs[0]["stopped"]
    assert runs[0]["stopped"].startswith("ConsistencyError")
    assert len(runs[0]["reports"]) == 1


def test_plain_generation_compares_nothing_and_says_so(train: Runner) -> None:
    (run,) = train("plain")
    assert "nothing will be compared" in run["stderr"]
    for report in run["reports"]:
        assert report.warnings["nothing_compared"] == 1
        assert report.metrics["compared_token_count"] == 0
        assert report.metrics["active_token_count"] > 0
        assert math.isnan(report.metrics["abs_dlogp_max"])
    assert all(PREFIX + "abs_dlogp_max" not in line for line in run["log"])


def test_a_variable_switches_it_off(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_AUDIT_MODE", "off")
    (run,) = train("engine", trl='{"max_steps": 1}')
    assert run["reports"] == []
    assert not any(name.startswith(PREFIX) for line in run["log"] for name in line)


# --- beside trl's own figures -----------------------------------------------------------------------------------------


def of_trl(run: Run, figure: str) -> list[float]:
    key = f"sampling/sampling_logp_difference/{figure}"
    return [line[key] for line in run["log"] if key in line]


def of_ours(run: Run, figure: str) -> list[float]:
    return [report.metrics[f"abs_dlogp_{figure}"] for report in run["reports"]]


def test_in_one_process_trl_says_the_same(train: Runner) -> None:
    (run,) = train("engine")
    assert of_trl(run, "mean") == pytest.approx(of_ours(run, "mean"), rel=1e-6)
    assert of_trl(run, "max") == pytest.approx(of_ours(run, "max"), rel=1e-6)


def test_with_the_real_vllm(train: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: make test-integrations ENGINE=vllm")
    for name, value in VLLM_IN_PROCESS.items():
        monkeypatch.setenv(name, value)
    settings = {
        "max_steps": 2,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 64,
    }
    (run,) = train("vllm", trl=json.dumps(settings))
    assert len(run["reports"]) == 2
    for report in run["reports"]:
        given = pieces([run], report.step)
        assert figures(report) == figures(core(given))
        assert oracle.differences(report.metrics, expected_by_hand(given)) == []
        assert 0.0 < report.metrics["abs_dlogp_max"] < 1.0
    assert of_trl(run, "mean") == pytest.approx(of_ours(run, "mean"), rel=1e-6)
    assert of_trl(run, "max") == pytest.approx(of_ours(run, "max"), rel=1e-6)


def test_in_two_processes_trl_averages_the_means_of_ranks(train: Runner) -> None:
    """Its maximum is global; its mean weighs a rank of few tokens as one of many, and so is another number."""
    runs = train("engine", 2)
    assert of_trl(runs[0], "max") == pytest.approx(of_ours(runs[0], "max"), rel=1e-6)
    for step, (theirs, ours) in enumerate(zip(of_trl(runs[0], "mean"), of_ours(runs[0], "mean"), strict=True), 1):
        by_rank = [expected_by_hand(pieces([run], step)).metrics["abs_dlogp_mean"] for run in runs]
        assert theirs == pytest.approx(statistics.mean(by_rank), rel=1e-6)
        assert abs(theirs / ours - 1) > 0.01
