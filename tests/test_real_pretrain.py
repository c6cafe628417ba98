"""Megatron-LM's own `pretrain`, as the wheel of megatron-core ships it, under the audit: command line, numbering of the
steps, evaluation in between, TensorBoard, strict mode. Figures are those of brute force on the recorded tokens, and the
training is bitwise the one without the audit."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Expected, Sample, audit
from strategies import bits
from test_megatron_layouts import (
    TESTS,
    Jobs,
    Layout,
    assert_figures,
    assert_places,
    environment,
    one_copy,
    read_reports,
    shards_of_step,
)
from test_sinks_stores import tensorboard_values

from rlk_audit.sinks import logged_values

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("megatron", "megatron.training"))),
    reason="this megatron-core has no megatron.training: wheels ship it from 0.19 on, for Python 3.12 and later",
)

STEPS, BATCH, MICRO_BATCH, SEQUENCE = (1, 2, 3), 8, 2, 8
EVAL_INTERVAL = 2
EVALUATIONS = len(STEPS) // EVAL_INTERVAL + 2
"""In between, and at the end on both other splits."""
ARGUMENTS = f"""
    --micro-batch-size {MICRO_BATCH} --global-batch-size {BATCH} --train-iters {len(STEPS)}
    --eval-interval {EVAL_INTERVAL} --eval-iters 2 --log-interval 1
    --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
    --tokenizer-type NullTokenizer --vocab-size 31 --make-vocab-size-divisible-by 16
    --lr 0.01 --lr-decay-style constant --calculate-per-token-loss --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights
    --transformer-impl local --attention-backend unfused --distributed-backend gloo --use-cpu-initialization
    --clip-grad 0 --num-workers 0 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-gelu-fusion --no-persist-layer-norm
""".split()
"""The last three lines: what needs CUDA is off."""
LAYOUTS = {
    "pp2": Layout(2, 2, 1, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": Layout(2, 2, 1, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "tp2_dp2": Layout(4, 1, 2, "--tensor-model-parallel-size 2"),
}
MODES = {mode: ("--rlk-consistency-mode", mode) for mode in ("off", "audit", "strict")}
IMPOSSIBLE = 1e-9
RERUN_STEP = 2


class PretrainJobs(Jobs):
    def __init__(self) -> None:
        command = [sys.executable, TESTS / "megatron_pretrain_job.py"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )

    def pretrain(self, layout: Layout, out: Path, *arguments: Any, job: str = "pretrain") -> SimpleNamespace:
        return self.run(job, layout.ranks, out, *ARGUMENTS, *layout.arguments.split(), *arguments)


def command_line_sinks(out: Path) -> tuple[Any, ...]:
    """TensorBoard is the training's own."""
    return ("--rlk-sinks", "tensorboard,jsonl", "--rlk-output-dir", out, "--tensorboard-dir", out / "events")


@pytest.fixture(scope="module")
def jobs() -> Iterator[PretrainJobs]:
    started = PretrainJobs()
    yield started
    started.close()


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def off(layout: Layout, jobs: PretrainJobs, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return succeed(layout, jobs, tmp_path_factory.mktemp("off") / "out", *MODES["off"])


@pytest.fixture(scope="module", params=["attach", "observe"])
def run(
    request: pytest.FixtureRequest, layout: Layout, jobs: PretrainJobs, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """An audited training: told by `attach`, to sinks named on the command line; or by `observe`, to one given in code,
    with a step that Megatron-LM runs twice."""
    tell, out = request.param, tmp_path_factory.mktemp(request.param) / "out"
    further = command_line_sinks(out) if tell == "attach" else ["--sink-in-code", "--reject-step", RERUN_STEP]
    done = succeed(layout, jobs, out, *MODES["audit"], "--tell", tell, *further)
    done.reports = read_reports(out)
    done.rerun_step = RERUN_STEP if tell == "observe" else None
    return done


def succeed(layout: Layout, jobs: PretrainJobs, out: Path, *arguments: Any) -> SimpleNamespace:
    done = jobs.pretrain(layout, out, *arguments)
    assert done.status == 0, done.log
    assert not done.left_running
    return SimpleNamespace(layout=layout, out=out, log=done.log, rerun_step=None)


def micro_batches_of_step(run: SimpleNamespace, step: int) -> dict[int, list[dict[str, torch.Tensor]]]:
    """Rank -> what it recorded; of a step that ran twice, the first time."""
    shards = shards_of_step(run.out, run.layout, step)
    count = BATCH // MICRO_BATCH // run.layout.data
    for micros in shards.values():
        assert len(micros) == count * (2 if step == run.rerun_step else 1)
        torch.testing.assert_close(
            micros[count:], micros[:count] * (step == run.rerun_step), rtol=0, atol=0, equal_nan=True
        )
    return {rank: micros[:count] for rank, micros in shards.items()}


def samples_of_step(run: SimpleNamespace, step: int) -> list[Sample]:
    """The recorded samples of all ranks: each of the step's, with every token, exactly once."""
    micros = [micro for shard in one_copy(micro_batches_of_step(run, step), run.layout) for micro in shard]
    rows = {name: torch.cat([micro[name] for micro in micros]).tolist() for name in micros[0]}
    assert sorted(index for index, *_ in rows["sample_index"]) == list(range((step - 1) * BATCH, step * BATCH))
    assert all(positions == list(range(SEQUENCE)) for positions in rows["token_position"])
    return [
        Sample(
            train=sample["train_log_probs"],
            rollout=sample["rollout_log_probs"],
            mask=sample["mask"],
            sample_index=sample["sample_index"][0],
            token_ids=sample["token_ids"],
            updates_since_rollout=step - 1,
        )
        for sample in (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))
    ]


def expected_of(run: SimpleNamespace, *steps: int) -> Expected:
    """No sample says where it ends, as where a mask is all that the training has."""
    expected = audit([sample for step in steps for sample in samples_of_step(run, step)], total_known=False)
    if run.rerun_step in steps:
        expected.warnings["duplicate_microbatch"] = BATCH // MICRO_BATCH
    return expected


def logged_losses(log: str) -> list[tuple[str, str]]:
    """Iteration -> loss as printed, of the training and of each evaluation."""
    return re.findall(r"iteration +(\d+.*?)[/|].*?lm loss(?: value)?: (\S+)", log)


def weights_of(out: Path, rank: int) -> list[dict[str, bytes]]:
    """Bits of the rank's chunks."""
    chunks = torch.load(out / f"rank{rank}.pt")["weights"]
    return [{name: value.numpy().tobytes() for name, value in chunk.items()} for chunk in chunks]


def losses_of(run: SimpleNamespace, step: int) -> dict[int, list[bytes]]:
    """Rank -> bits of the loss of its tokens."""
    shards = micro_batches_of_step(run, step)
    return {rank: [micro["train_log_probs"].numpy().tobytes() for micro in shard] for rank, shard in shards.items()}


def tensorboard_scalars(run: SimpleNamespace, step: int) -> dict[str, float]:
    """The audit's scalars of a step in the event file."""
    values = tensorboard_values(run.out / "events")[step]
    return {key: value for key, value in values.items() if key.startswith(run.reports[1].prefix)}


def logged_float32(run: SimpleNamespace, step: int) -> dict[str, float]:
    return {key: float(np.float32(value)) for key, value in logged_values(run.reports[step]).items()}


# --- audit ------------------------------------------------------------------------------------------------------------


def test_there_is_a_line_for_each_iteration_that_megatron_logs_and_the_total(run: SimpleNamespace) -> None:
    logged = [int(iteration) for iteration in re.findall(r"iteration +(\d+)/", run.log)]
    assert logged == list(STEPS)
    assert list(run.reports) == [*logged, None]
    assert len((run.out / "audit.jsonl").read_text().splitlines()) == len(STEPS) + 1


@pytest.mark.parametrize("step", STEPS)
def test_reported_figures_are_those_of_the_recorded_tokens(run: SimpleNamespace, step: int) -> None:
    """And of no other: around the steps there were evaluations, and one step may have run twice."""
    report, expected = run.reports[step], expected_of(run, step)
    active = sum(int(sum(sample.mask)) for sample in samples_of_step(run, step))
    assert 0 < active < BATCH * SEQUENCE
    assert report.metrics["compared_token_count"] == report.metrics["active_token_count"] == active
    assert_figures(report, expected)
    assert (report.complete, report.group_size, report.scope) == (True, run.layout.data, "group")
    assert_places(report, micro_batches_of_step(run, step), run.layout)


def test_the_total_of_the_run_is_that_of_all_recorded_tokens(run: SimpleNamespace) -> None:
    assert_figures(run.reports[None], expected_of(run, *STEPS))


def test_losses_and_weights_are_those_of_a_run_without_the_audit(run: SimpleNamespace, off: SimpleNamespace) -> None:
    for step in STEPS:
        assert losses_of(run, step) == losses_of(off, step)
    for rank in range(run.layout.ranks):
        assert weights_of(run.out, rank) == weights_of(off.out, rank)
    assert len(logged_losses(off.log)) == len(STEPS) + EVALUATIONS
    assert logged_losses(run.log) == logged_losses(off.log)
    assert not (off.out / "audit.jsonl").exists()


@pytest.mark.parametrize("run", ["attach"], indirect=True)
def test_scalars_are_in_the_event_file_of_the_training(run: SimpleNamespace) -> None:
    """At the steps, and only there, where Megatron-LM writes its own."""
    assert len(list((run.out / "events").iterdir())) == 1
    values = tensorboard_values(run.out / "events")
    assert sorted(step for step, row in values.items() if "lm loss" in row) == list(STEPS)
    for step in values:
        assert tensorboard_scalars(run, step) == (logged_float32(run, step) if step in STEPS else {})
    assert not (run.out / "tensorboard").exists()


@pytest.mark.parametrize(("layout", "run"), [("pp2", "attach")], indirect=True)
def test_a_resumed_run_counts_on(run: SimpleNamespace, jobs: PretrainJobs, tmp_path: Path) -> None:
    """Steps and updates of the weights: as if it had never been stopped."""
    stop = STEPS[-2]
    checkpoint = ["--ckpt-format", "torch", "--save", tmp_path / "checkpoint", "--save-interval", stop]
    first = succeed(
        run.layout, jobs, tmp_path / "first", *MODES["audit"], "--sink-in-code", *checkpoint, "--exit-interval", stop
    )
    load = ["--ckpt-format", "torch", "--load", tmp_path / "checkpoint", "--no-load-rng"]
    second = succeed(run.layout, jobs, tmp_path / "second", *MODES["audit"], "--sink-in-code", *load)
    reports = read_reports(first.out), read_reports(second.out)
    assert list(map(list, reports)) == [[*STEPS[:-1], None], [STEPS[-1], None]]
    for step, report in (reports[0] | reports[1]).items():
        if step is not None:
            assert bits(report.to_dict()) == bits(run.reports[step].to_dict())
    for rank in range(run.layout.ranks):
        assert weights_of(second.out, rank) == weights_of(run.out, rank)


@pytest.mark.parametrize("layout", ["pp2"], indirect=True)
def test_an_iteration_that_is_skipped_is_no_update(layout: Layout, jobs: PretrainJobs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeed(layout, jobs, out, *MODES["audit"], "--sink-in-code", "--iterations-to-skip", STEPS[0])
    updates = [(step, report.metrics["updates_since_rollout"]) for step, report in read_reports(out).items()]
    assert updates[:-1] == [(2, 0), (3, 1)]


# --- strict -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(layout: Layout, jobs: PretrainJobs, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What ran until a limit failed that nothing can meet."""
    out = tmp_path_factory.mktemp("strict") / "out"
    limit = ["--rlk-limit", f"abs_dlogp_p99={IMPOSSIBLE}"]
    done = jobs.pretrain(layout, out, *MODES["strict"], *limit, *command_line_sinks(out), job="stopped_pretrain")
    messages = {path.name: path.read_text() for path in out.glob("stopped*")}
    return SimpleNamespace(**vars(done), layout=layout, out=out, messages=messages, reports=read_reports(out))


def test_a_limit_that_fails_stops_every_rank_in_the_first_step(stopped: SimpleNamespace) -> None:
    ranks = range(stopped.layout.ranks)
    assert stopped.status == 1, stopped.log
    assert not stopped.left_running
    assert not re.search(r"iteration +\d+/", stopped.log)
    assert sorted(stopped.messages) == [f"stopped{rank}" for rank in ranks], stopped.log
    assert all(f"rank {rank} failed:" in stopped.log for rank in ranks)
    assert list(stopped.reports) == [1, None]
    assert not stopped.reports[1].verdict.passed
    value = stopped.reports[1].metrics["abs_dlogp_p99"]
    (message,) = set(stopped.messages.values())
    told = f"step 1 failed its verdict: abs_dlogp_p99 is {value:.6g}, must be <= {IMPOSSIBLE:g}. "
    assert message.startswith(told)


def test_the_step_that_stopped_the_training_is_in_its_event_file(stopped: SimpleNamespace) -> None:
    assert tensorboard_scalars(stopped, 1) == logged_float32(stopped, 1)
