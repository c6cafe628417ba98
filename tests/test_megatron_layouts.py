"""Runs on real megatron-core at several layouts: what the audit reports is what brute force finds in the recorded
tokens of all ranks, and the training is bitwise the one without the audit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import (
    FROM_EXACT_SUMS,
    Expected,
    Sample,
    audit,
    confidence_bucket,
    differences,
    parts,
    position_bucket,
    sample_metrics,
)
from strategies import assert_reports
from test_distributed import end

from rlk_audit import StepReport

TESTS = Path(__file__).parent
ROOT = TESTS.parent
EXAMPLE = ROOT / "examples" / "megatron_grpo"
SAMPLES, SEQUENCE, SEPARATOR, END, PAD = 16, 16, 10, 11, 12
SMALL = ("--hidden", 32, "--prompts", 4, "--group-size", 4, "--micro-batch-size", 2, "--warmup-steps", 4, "--steps", 2)
STEPS = (1, 2)
ENGINES = ("e0", "e1")
FORMS = ("sum", "sum_by_microbatch", "mean", "observed")
STRICT_LIMIT = 0.1
"""On the 99th percentile of abs(dlogp): far above what bfloat16 does, far below what a stale engine does."""
TIMEOUT = 240


@dataclass(frozen=True)
class Layout:
    """`data` ranks each hold their own tokens: data x context parallel."""

    ranks: int
    stages: int
    data: int
    arguments: str
    torchrun: bool = False


LAYOUTS = {
    "tp2_dp2": Layout(4, 1, 2, "--tp 2", torchrun=True),
    "pp2_vpp2": Layout(2, 2, 1, "--pp 2 --vpp 2"),
    "cp2_dp2": Layout(4, 1, 4, "--cp 2"),
    "pp2": Layout(2, 2, 1, "--pp 2"),
    "tp2_pp2_cp2": Layout(8, 2, 2, "--tp 2 --pp 2 --cp 2"),
    "moe_ep2": Layout(2, 1, 2, "--experts 4 --ep 2 --engine recorded"),
}
FURTHER = ("pp2", "tp2_pp2_cp2", "moe_ep2")
LABELS_LAYOUTS = {
    "tp2_dp2": Layout(4, 1, 2, "--tp 2 --layers 2"),
    "pp2_vpp2": Layout(2, 2, 1, "--pp 2 --vpp 2"),
    "cp2": Layout(2, 1, 2, "--cp 2 --layers 2"),
}


# --- runs -----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    own = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(map(str, (EXAMPLE, TESTS, ROOT))),
    }
    return os.environ | own


class Jobs:
    """The process that imports once and forks each job."""

    def __init__(self) -> None:
        command = [sys.executable, TESTS / "megatron_jobs.py"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )

    def run(self, job: str, ranks: int, out: Path, *arguments: Any) -> SimpleNamespace:
        """The job's `status`, whether a process was `left_running`, and its `log`."""
        log = out.with_suffix(".log")
        request = {"job": job, "ranks": ranks, "arguments": [*map(str, arguments), "--out", str(out)], "log": str(log)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks the jobs ended"
        return SimpleNamespace(**json.loads(answer), log=log.read_text())

    def succeed(self, job: str, ranks: int, out: Path, *arguments: Any) -> None:
        done = self.run(job, ranks, out, *arguments)
        assert done.status == 0, done.log
        assert not done.left_running

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(TIMEOUT)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()


def under_torchrun(ranks: int, out: Path, *arguments: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command += [EXAMPLE / "train.py", "--out", out, *arguments]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        process.wait(TIMEOUT)
    finally:
        end(process)
    assert process.returncode == 0, log.read_text()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.layouts] * (name in FURTHER)) for name in LAYOUTS],
)
def run(request: pytest.FixtureRequest, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The example, audited and recorded, at a layout."""
    layout = LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(request.param) / "audit"
    arguments = [*layout.arguments.split(), *SMALL, "--rlk-consistency-mode", "audit", "--record", out / "record"]
    if layout.torchrun:
        under_torchrun(layout.ranks, out, *arguments)
    else:
        jobs.succeed("example", layout.ranks, out, *arguments)
    return SimpleNamespace(layout=layout, out=out, record=out / "record", reports=read_reports(out))


@pytest.fixture(scope="module", params=LABELS_LAYOUTS)
def labels_run(request: pytest.FixtureRequest, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Training by `labels=` in every form, without and with the audit, at a layout."""
    layout = LABELS_LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(f"labels_{request.param}") / "out"
    jobs.succeed("labels", layout.ranks, out, *layout.arguments.split(), *SMALL)
    return SimpleNamespace(layout=layout, out=out)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.layouts] * (name != "pp2_vpp2")) for name in LABELS_LAYOUTS],
)
def pretrain_run(
    request: pytest.FixtureRequest, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """The same training run by `pretrain`, which starts and steps the audit itself."""
    layout = LABELS_LAYOUTS[request.param]
    out = tmp_path_factory.mktemp(f"pretrain_{request.param}") / "out"
    jobs.succeed("pretrain", layout.ranks, out, *layout.arguments.split(), *SMALL)
    return SimpleNamespace(layout=layout, out=out)


def read_reports(out: Path) -> dict[int | None, StepReport]:
    """Step -> report; None -> the total of the run."""
    reports = [StepReport.from_dict(json.loads(line)) for line in (out / "audit.jsonl").read_text().splitlines()]
    return {report.step: report for report in reports}


# --- what was recorded ------------------------------------------------------------------------------------------------


def shards_of_step(folder: Path, layout: Layout, step: int) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Rank -> its micro-batches, of every rank of the last stage."""
    records = {rank: torch.load(folder / f"rank{rank}.pt") for rank in range(layout.ranks)}
    first = layout.ranks - layout.ranks // layout.stages
    assert not any(records[rank]["steps"][step] for rank in range(first)), "an early stage computes no loss"
    copies = defaultdict(list)
    for rank in range(first, layout.ranks):
        copies[records[rank]["dp_rank"], records[rank]["cp_rank"]].append(rank)
    assert len(copies) == layout.data
    for ranks in copies.values():
        expected = records[ranks[0]]["steps"][step]
        for rank in ranks[1:]:
            torch.testing.assert_close(records[rank]["steps"][step], expected, rtol=0, atol=0, equal_nan=True)
    return {rank: records[rank]["steps"][step] for rank in range(first, layout.ranks)}


def one_copy(shards: dict[int, Any], layout: Layout) -> list[Any]:
    """The shards without their tensor-parallel copies: neighbouring ranks."""
    return list(shards.values())[:: len(shards) // layout.data]


def whole_samples(shards: list[list[dict[str, torch.Tensor]]], **fields: Any) -> list[Sample]:
    """The recorded tokens put together again; each must be there once, and no token of a sample may lack."""
    tokens: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for micro in (micro for shard in shards for micro in shard):
        columns = {name: values.flatten().tolist() for name, values in micro.items()}
        for values in zip(*columns.values(), strict=True):
            token = dict(zip(columns, values, strict=True))
            sample = tokens[token["sample_index"]]
            assert token["token_position"] not in sample, f"{token} is there twice"
            sample[token["token_position"]] = token
    assert sorted(tokens) == list(range(SAMPLES))
    return [whole_sample(tokens[index], **fields) for index in sorted(tokens)]


def whole_sample(tokens: dict[int, dict[str, Any]], **fields: Any) -> Sample:
    positions = sorted(tokens)
    assert positions == list(range(positions[0], positions[0] + SEQUENCE))
    ids = [tokens[position]["token_ids"] for position in positions if position >= 0]
    active = [position for position in positions if tokens[position]["mask"]]
    length = 1 + (ids.index(END) if END in ids else active[-1])
    assert tokens[-1]["token_ids"] == SEPARATOR, "position 0 follows the prompt"
    assert set(ids[length:]) <= {PAD} and all(0 <= position < length for position in active)
    response = [tokens[position] for position in range(length)]
    return Sample(
        train=[token["train_log_probs"] for token in response],
        rollout=[token["rollout_log_probs"] for token in response],
        mask=[token["mask"] for token in response],
        sample_index=response[0]["sample_index"],
        rollout_id=response[0]["rollout_id"],
        token_ids=ids[:length],
        labels={name: response[0][name] for name in ("engine",) if name in response[0]},
        **fields,
    )


def assert_figures(report: StepReport, expected: Expected) -> None:
    """Figures, warnings and worst tokens are the oracle's; sums of log-probabilities in every bit."""
    assert_reports(report, expected)
    exact = [(name, report.metrics[name]) for name in FROM_EXACT_SUMS]
    assert exact == [(name, expected.metrics[name]) for name in FROM_EXACT_SUMS]


def assert_parts(report: StepReport, expected: Expected, samples: list[Sample]) -> None:
    """Breakdowns and figures of samples, which context-parallel ranks and micro-batches cut apart."""
    bucket_of = {
        "engine": lambda token: ENGINES[token.labels["engine"]],
        "position": lambda token: position_bucket(token.token_position),
        "confidence": lambda token: confidence_bucket(token.rollout_logp),
    }
    for label, name in bucket_of.items():
        found = {bucket.name: bucket for bucket in report.breakdowns[label] if bucket.compared_token_count}
        right = parts(expected, name)
        assert set(found) == set(right)
        for bucket, part in right.items():
            assert found[bucket].compared_token_count == part.compared_token_count
            assert found[bucket].abs_dlogp_mean == part.abs_dlogp_mean
    by_slot = [replace(sample, slot=sample.sample_index) for sample in samples]
    figures = Expected(sample_metrics(by_slot, expected), {}, [], {}, [])
    assert len(figures.metrics) == 11
    assert not differences(report.metrics, figures)
    means = {s.sample_slot: s.abs_dlogp_mean for s in report.samples}
    assert len(means) == 4 and list(means.values()) == sorted(means.values(), reverse=True)


def assert_places(report: StepReport, shards: dict[int, list[dict[str, torch.Tensor]]], layout: Layout) -> None:
    """The ranks and micro-batches that the report names hold what it says, and each rank's share is its own."""
    group = list(shards)[len(shards) // layout.data - 1 :: len(shards) // layout.data]
    active = {rank: int(sum((micro["mask"] != 0).sum() for micro in shards[rank])) for rank in group}
    assert {rank.rank: rank.compared_token_count for rank in report.rank_table} == active
    for token in report.worst_tokens:
        micro = shards[token.rank][token.microbatch]
        here = (micro["sample_index"] == token.sample_index) & (micro["token_position"] == token.token_position)
        assert micro["train_log_probs"][here].tolist() == [token.train_logp]


# --- the example ------------------------------------------------------------------------------------------------------


def example_samples(run: SimpleNamespace, step: int) -> list[Sample]:
    shards = shards_of_step(run.record, run.layout, step)
    return whole_samples(one_copy(shards, run.layout), updates_since_rollout=0)


@pytest.mark.parametrize("step", STEPS)
def test_reported_figures_are_those_of_the_recorded_tokens(run: SimpleNamespace, step: int) -> None:
    samples = example_samples(run, step)
    assert all(all(sample.mask) and len(sample) >= 1 for sample in samples)
    report, expected = run.reports[step], audit(samples)
    assert_figures(report, expected)
    assert_parts(report, expected, samples)
    assert [token.labels for token in report.worst_tokens] == [
        {"engine": ENGINES[worst.labels["engine"]]} for worst in expected.worst
    ]
    assert (report.complete, report.group_size, report.scope) == (True, run.layout.data, "group")


@pytest.mark.parametrize("step", STEPS)
def test_reported_places_hold_the_tokens(run: SimpleNamespace, step: int) -> None:
    assert_places(run.reports[step], shards_of_step(run.record, run.layout, step), run.layout)


def test_the_total_of_the_run_is_that_of_all_recorded_tokens(run: SimpleNamespace) -> None:
    assert list(run.reports) == [*STEPS, None]
    assert_figures(run.reports[None], audit([sample for step in STEPS for sample in example_samples(run, step)]))


def test_losses_and_weights_are_those_of_a_run_without_the_audit(run: SimpleNamespace, jobs: Jobs) -> None:
    """The one by torchrun also equals one with forked ranks."""
    off = run.out.with_name("off")
    jobs.succeed("example", run.layout.ranks, off, *run.layout.arguments.split(), *SMALL)
    outcome = json.loads((off / "run.json").read_text())
    assert len(outcome["losses"]) == len(STEPS)
    assert outcome == json.loads((run.out / "run.json").read_text())
    assert not (off / "audit.jsonl").exists()


# --- training by labels= ----------------------------------------------------------------------------------------------


def assert_labels_figures(run: SimpleNamespace, form: str, step: int) -> None:
    """In the second step the schedule runs twice, with other losses the second time: the first ones count. Around each
    step there is an evaluation, which does not."""
    folder, layout = run.out / form / "audit", run.layout
    shards = shards_of_step(folder / "record", layout, step)
    samples = whole_samples(one_copy(shards, layout), updates_since_rollout=step - 1)
    masked = sum(not active for sample in samples for active in sample.mask)
    assert masked > 0
    report, expected = read_reports(folder)[step], audit(samples)
    if step == 2:
        expected.warnings["duplicate_microbatch"] = sum(map(len, one_copy(shards, layout)))
    assert_figures(report, expected)
    assert_places(report, shards, layout)


def assert_same_training(run: SimpleNamespace, form: str) -> None:
    off, audited = (json.loads((run.out / form / mode / "run.json").read_text()) for mode in ("off", "audit"))
    assert len(off["losses"]) >= len(STEPS)
    assert all(map(math.isfinite, off["losses"]))  # two runs of NaN would be equal whatever they had computed
    assert off == audited


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", STEPS)
def test_attached_figures_are_those_of_the_recorded_losses(labels_run: SimpleNamespace, form: str, step: int) -> None:
    assert_labels_figures(labels_run, form, step)


@pytest.mark.parametrize("form", FORMS)
def test_labels_training_is_the_one_without_the_audit(labels_run: SimpleNamespace, form: str) -> None:
    assert_same_training(labels_run, form)


@pytest.mark.parametrize("form", ["sum", "observed"])
@pytest.mark.parametrize("step", STEPS)
def test_figures_under_pretrain_are_those_of_the_recorded_losses(
    pretrain_run: SimpleNamespace, form: str, step: int
) -> None:
    assert_labels_figures(pretrain_run, form, step)


@pytest.mark.parametrize("form", ["sum", "observed"])
def test_pretrain_is_the_one_without_the_audit(pretrain_run: SimpleNamespace, form: str) -> None:
    assert_same_training(pretrain_run, form)
    assert list(read_reports(pretrain_run.out / form / "audit")) == [*STEPS, None]


# --- strict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tp2_dp2", "pp2"])
def test_a_stale_engine_stops_every_rank_of_a_strict_run(name: str, jobs: Jobs, tmp_path: Path) -> None:
    """From step 2 on e1 serves old weights: step 1 passes, step 2 ends all ranks of all stages with one message."""
    layout, out = LAYOUTS[name], tmp_path / "strict"
    fault = ["--fault", "stale_engine", "--fault-step", 2, "--lr", 0.02]
    strict = ["--rlk-consistency-mode", "strict", "--rlk-limit", f"abs_dlogp_p99={STRICT_LIMIT}"]
    arguments = [*layout.arguments.split(), *SMALL, "--steps", 4, *fault, *strict]
    done = jobs.run("strict_example", layout.ranks, out, *arguments)
    assert done.status == 1, done.log
    assert not done.left_running
    messages = {path.name: path.read_text() for path in out.glob("stopped*")}
    assert sorted(messages) == [f"stopped{rank}" for rank in range(layout.ranks)], done.log
    assert all(f"rank {rank} failed:" in done.log for rank in range(layout.ranks))
    reports = read_reports(out)
    assert list(reports) == [1, 2]
    assert [report.verdict.passed for report in reports.values()] == [True, False]
    value = reports[2].metrics["abs_dlogp_p99"]
    assert set(messages.values()) == {messages["stopped0"]}
    told = f"step 2 failed its verdict: abs_dlogp_p99 is {value:.6g}, must be <= {STRICT_LIMIT}. "
    assert messages["stopped0"].startswith(told)
    assert not (out / "run.json").exists()
