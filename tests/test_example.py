"""The example's own pieces: task, engine, export, launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlk_audit.offline.audit import Asked, audit_dump
from rlk_audit.offline.texts import TokenTexts

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "megatron_grpo"
SMALL = ["--hidden", "32", "--prompts", "4", "--group-size", "4", "--micro-batch-size", "4", "--steps", "2"]


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


def run_python(*arguments):
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    paths = os.pathsep.join(map(str, (EXAMPLE, ROOT)))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | settings | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )


def launch(ranks, *arguments):
    return run_python(EXAMPLE / "fork_launch.py", ranks, "--", *arguments)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ([1, 4, 5, 11], 1.0),
        ([5, 4, 1, 11], 0.5),  # the wrong order: the middle and the end are right
        ([1, 4, 11], 0.5),  # ends too early
        ([1, 4, 5, 5, 5, 5], 0.5),  # never ends
        ([], 0.0),
    ],
)
def test_reward_is_the_share_of_right_positions(response, expected):
    import task

    assert task.reward([task.START, 5, 1, 4, task.SEPARATOR], response) == expected


def test_prompts_and_responses_fit_the_sequence():
    import task

    prompts = task.sample_prompts(200, torch.Generator().manual_seed(0))
    assert len({len(prompt) for prompt in prompts}) == task.MAX_DIGITS - task.MIN_DIGITS + 1
    assert max(map(len, prompts)) == task.MAX_PROMPT
    assert max(len(task.answer(prompt)) for prompt in prompts) <= task.MAX_RESPONSE
    assert task.reward(prompts[0], task.answer(prompts[0])) == 1.0


@pytest.fixture
def engine_and_weights():
    from engines import LlamaShape
    from engines.hf import HfEngine, build_llama

    shape = LlamaShape(16, 32, 64, 2, 4, 2, 8, 16)
    torch.manual_seed(0)
    # Larger than at initialisation, so that attention and log-probabilities are far from uniform.
    weights = {n: w * 5 if w.dim() > 1 else w for n, w in build_llama(shape, torch.float32).state_dict().items()}
    engine = HfEngine(shape, torch.float32)
    engine.load_weights(weights)
    return engine, weights, shape


def test_engine_reports_the_log_probs_of_its_own_tokens(engine_and_weights):
    import task
    from engines.hf import score

    engine, weights, shape = engine_and_weights
    prompts = task.sample_prompts(20, torch.Generator().manual_seed(1))
    completions = engine.generate(prompts, seed=3)
    assert len({len(c.token_ids) for c in completions}) > 1
    for prompt, completion in zip(prompts, completions, strict=True):
        alone = score(shape, weights, torch.tensor([prompt + completion.token_ids]))[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(completion.log_probs), alone, atol=2e-5, rtol=0)
        assert task.END not in completion.token_ids[:-1]
        assert completion.token_ids[-1] == task.END or len(completion.token_ids) == task.MAX_RESPONSE


def test_engine_depends_on_the_seed_alone(engine_and_weights):
    import task

    engine, _, _ = engine_and_weights
    prompts = task.sample_prompts(10, torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    first = engine.generate(prompts, seed=3)
    torch.manual_seed(2)
    assert engine.generate(prompts, seed=3) == first
    assert engine.generate(prompts, seed=4) != first


def test_run_is_bitwise_the_same_with_and_without_the_audit(tmp_path):
    runs = {}
    for mode in ("off", "audit"):
        arguments = ["--tp", 2, "--warmup-steps", 2, "--rlk-consistency-mode", mode, "--out", tmp_path / mode, *SMALL]
        arguments += ["--dump", tmp_path / mode / "dump"] * (mode == "audit")
        done = launch(2, *arguments)
        assert done.returncode == 0, done.stderr
        runs[mode] = json.loads((tmp_path / mode / "run.json").read_text())
    assert runs["off"] == runs["audit"]
    reports = [json.loads(line) for line in (tmp_path / "audit" / "audit.jsonl").read_text().splitlines()]
    reports = [report for report in reports if report["kind"] == "step"]  # the last line is the run's total
    assert [report["step"] for report in reports] == [1, 2]
    assert all(report["metrics"]["compared_token_count"] > 0 and not report["warnings"] for report in reports)
    assert not (tmp_path / "off" / "audit.jsonl").exists()
    assert_the_dump_tells_the_same(tmp_path / "audit", reports)


def assert_the_dump_tells_the_same(out, reports):
    """The figures of the dump are those of the live audit, bit for bit, and its token ids have texts."""
    view = audit_dump([out / "dump"], asked=Asked(texts=TokenTexts(out / "tokenizer.json")))
    alone = ("worst_rank", "worst_microbatch", "updates_since_rollout")  # what files do not tell
    for live, offline in zip(reports, view.steps, strict=True):
        read = offline.to_dict()
        for key, value in live["metrics"].items():
            assert read["metrics"][key] == value or key.startswith(alone), key
        for buckets in (*read["breakdowns"].values(), *live["breakdowns"].values()):
            for bucket in buckets:
                # More worst tokens are kept, so of more buckets the maximum is known, which bounds the quantiles.
                del bucket["abs_dlogp_max"], bucket["abs_dlogp_p50"], bucket["abs_dlogp_p99"]
        assert (read["breakdowns"], read["samples"][:4]) == (live["breakdowns"], live["samples"])
        assert read["histogram"] == live["histogram"]
    assert not view.problems
    import task

    names = {task.text([token]) for token in range(task.VOCAB_SIZE)}
    assert {text for excerpt in view.excerpts for text in excerpt.texts} <= names


SWAPPED_EXPORT = """
import sys, fork_launch, model, train
right = model.export_weights
def swapped(chunks, shape):
    weights = right(chunks, shape)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return weights | {gate: weights[up], up: weights[gate]}
model.export_weights = swapped
sys.exit(fork_launch.launch(2, lambda: train.main(sys.argv[1:])))
"""


def test_wrong_export_stops_the_run(tmp_path):
    done = run_python("-c", SWAPPED_EXPORT, "--tp", 2, "--warmup-steps", 8, "--out", tmp_path, *SMALL)
    assert done.returncode == 1
    assert "ExportMismatchError: exported weights differ by" in done.stderr
    assert not (tmp_path / "run.json").exists()


FAILING_RANK = """
import os, sys, time, fork_launch
def target():
    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(200)
sys.exit(fork_launch.launch(3, target))
"""


def test_launcher_ends_the_others_when_a_rank_fails():
    assert run_python("-c", FAILING_RANK).returncode == 7


PLANTED = {
    "none": "healthy",
    "stale_engine": "stale_weights",
    "temperature": "temperature",
    "shift": "shift",
    "zero_fill": "zero_fill",
    "row_order": "row_order",
}
LARGER = ["--hidden", "64", "--warmup-steps", "40", "--lr", "0.001", "--steps", "4", "--fault-step", "3"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [pytest.param(*pair, marks=[pytest.mark.layouts] * (pair[0] != "stale_engine")) for pair in PLANTED.items()],
)
def test_a_run_ends_by_naming_its_fault(fault, code, tmp_path):
    done = launch(1, *LARGER, "--fault", fault, "--rlk-consistency-mode", "audit", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split("Diagnosis of the last step, strongest cause first\n")[1].splitlines()
    assert told[0].strip().startswith(f"{code} (")
    assert ("engine e1" in told[0]) == (fault == "stale_engine")


def test_every_fault_has_its_cause(monkeypatch):
    import planted_faults

    assert set(PLANTED) == {"none", *planted_faults.FAULTS}
