"""Show of every promise of the README that its tests would notice if it were broken: docs/promises.md.

    python tools/promises.py [--write docs/promises.md]

Every test runs as the code stands and must pass; then the code is changed in one place, in a copy, and it must fail.
Tests of several ranks run under torchrun. Ends with 1 if a promise has a test that notices nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RANKS = 2
TIMEOUT = 600
COPIED = ("rlk_audit", "tests", "benchmarks", "examples", "docs", "README.md", "CHANGELOG.md", "pyproject.toml")


class Promise(NamedTuple):
    """A promise, the test of it, and a change to the code that breaks it."""

    number: int
    says: str
    test: str
    broken_by: str
    file: str
    old: str
    new: str


HEADINGS = {
    1: "Global, not per shard",
    2: "One collective a step",
    3: "Bitwise the same for every layout",
    4: "The training does not notice",
    5: "It never hangs and never lies",
}

PROMISES = (
    Promise(
        1,
        "Quantiles are those of all tokens of the group",
        "tests/distributed/test_reported_cases.py::test_b28_quantiles_are_those_of_all_tokens",
        "a rank keeps its own vector instead of the sum",
        "allreduce.py",
        "work = dist.all_reduce(vector, op",
        "work = dist.all_reduce(vector.clone(), op",
    ),
    Promise(
        1,
        "Quantiles are within the bound",
        "tests/test_accuracy.py::test_quantiles_are_within_their_bound",
        "a bin answers its lower edge",
        "sketch.py",
        "return 2.0 * low * high / (low + high)",
        "return low",
    ),
    Promise(
        1,
        "Quantiles are of integer ranks",
        "tests/test_laws.py::test_every_figure_is_that_of_the_oracle",
        "the rank of a quantile is one too high",
        "sketch.py",
        'side="right"))',
        'side="left"))',
    ),
    Promise(
        1,
        "Counts are exact",
        "tests/test_accuracy.py::test_clip_and_tail_limits_are_strict",
        "a limit is not strict",
        "measure.py",
        '"tail_ln2": (magnitude > LN2).sum()',
        '"tail_ln2": (magnitude >= LN2).sum()',
    ),
    Promise(
        1,
        "Extremes are those of all tokens",
        "tests/distributed/test_reported_cases.py::test_b24_extremes_are_extremes",
        "the extreme is the mean of the ranks' extremes",
        "metrics.py",
        "(np.min if name in MINIMA else np.max)(",
        "np.mean(",
    ),
    Promise(
        1,
        "The worst tokens are those of the group",
        "tests/test_laws.py::test_the_worst_rank_is_the_one_that_held_it",
        "a rank's row does not name it",
        "state.py",
        "held_by.masked_fill_(held_by < 0, rank)",
        "held_by.masked_fill_(held_by < 0, 0)",
    ),
    Promise(
        2,
        "One all-reduce a step, of one length",
        "tests/distributed/test_all_reduce.py::test_one_all_reduce_a_step_of_one_length",
        "the vector is reduced once more",
        "allreduce.py",
        "        work = dist.all_reduce(vector, op",
        "        dist.all_reduce(vector.clone(), group=group)\n        work = dist.all_reduce(vector, op",
    ),
    Promise(
        2,
        "Its length never depends on the data",
        "tests/test_laws.py::test_the_length_of_the_vector_depends_on_no_data",
        "a rank without tokens sends less",
        "state.py",
        "        return vector\n",
        "        return vector if self.additive.any() else vector[:-1]\n",
    ),
    Promise(
        2,
        "An update starts no collective",
        "tests/test_laws.py::test_update_starts_no_collective",
        "an update waits for the others",
        "collector.py",
        "        self.updates += 1\n",
        "        self.updates += 1\n        torch.distributed.barrier()\n",
    ),
    Promise(
        3,
        "Any cut over TP, PP, CP, DP and micro-batches gives the same bits",
        "tests/test_layout_invariance.py::test_every_bit_of_the_report_is_that_of_the_uncut_step",
        "of equal tokens the first to come is the worst",
        "worst.py",
        "np.lexsort((position.numpy(), of_sample, -values))",
        'np.argsort(-values, kind="stable")',
    ),
    Promise(
        3,
        "Any cut over real processes gives the bits of one",
        "tests/distributed/test_all_reduce.py::test_every_cut_gives_the_bits_of_one_process",
        "a sum is rounded once a micro-batch",
        "measure.py",
        'exact_sum.add_terms(slots("dlogp"), dlogp_parts)',
        'exact_sum.add_terms(slots("dlogp"), exact_sum.split(rounded.dlogp.sum()[None]))',
    ),
    Promise(
        3,
        "The order of tokens leaves no trace",
        "tests/test_accuracy.py::test_order_of_tokens_leaves_no_trace",
        "the first token counts twice",
        "measure.py",
        'compared = classes == COUNTER_INDEX["compared"]\n',
        'compared = classes == COUNTER_INDEX["compared"]\n    train[0] = rollout[0]\n',
    ),
    Promise(
        4,
        "Loss, gradients and weights are bitwise those of a run without it",
        "tests/test_example.py::test_run_is_bitwise_the_same_with_and_without_the_audit",
        "the training's log-probabilities are worked on in place",
        "collector.py",
        "tensor = tensor.detach().resolve_neg()",
        "tensor = tensor.detach().mul_(1.5)",
    ),
    Promise(
        4,
        "The training's random numbers are left alone",
        "tests/test_auditor.py::test_the_training_s_random_numbers_are_left_alone",
        "the audit draws one",
        "collector.py",
        "        self.updates += 1\n",
        "        self.updates += 1\n        torch.rand(())\n",
    ),
    Promise(
        4,
        "Inputs are not written to, and no graph is kept",
        "tests/test_laws.py::test_update_keeps_no_graph_and_writes_no_input",
        "float64 inputs are worked on in place",
        "measure.py",
        "tokens.train.to(torch.float64, copy=True)",
        "tokens.train.to(torch.float64)",
    ),
    Promise(
        4,
        "An update reads nothing on the host",
        "tests/test_host_syncs.py::test_an_update_reads_nothing_on_the_host",
        "a value is read",
        "collector.py",
        "FLAGS[name] * tokens.active.any()",
        "FLAGS[name] * tokens.active.any().item()",
    ),
    Promise(
        4,
        "No input is kept alive",
        "tests/test_bad_input.py::test_no_input_is_kept_alive",
        "the last batch is kept",
        "collector.py",
        "        self.updates += 1\n",
        "        self.updates += 1\n        self.last = batch\n",
    ),
    Promise(
        5,
        "A failing update still takes part in the collective",
        "tests/distributed/test_failures.py::test_a_failed_update_on_one_rank",
        "the error is raised",
        "collector.py",
        "                self.mark_failed(str(error))\n                return\n",
        "                raise\n",
    ),
    Promise(
        5,
        "A rank without tokens stays in the reduction",
        "tests/distributed/test_reported_cases.py::test_b20_a_rank_without_tokens_stays_in_the_reduction",
        "a rank without tokens goes on",
        "allreduce.py",
        "    if group_size > 1:\n        vector = vector.to",
        "    if group_size > 1 and collector.updates:\n        vector = vector.to",
    ),
    Promise(
        5,
        "Nothing compared is never no drift",
        "tests/test_bad_input.py::test_nothing_compared_is_never_no_drift",
        "a mean of nothing is 0",
        "metrics.py",
        "return numerator / denominator if denominator else math.nan",
        "return numerator / max(denominator, 1)",
    ),
    Promise(
        5,
        "What is no log-probability is counted apart",
        "tests/test_laws.py::test_what_is_no_log_prob_is_counted_apart",
        "NaN of the rollout is compared",
        "measure.py",
        '"rollout_nan": rollout.isnan()',
        '"rollout_nan": None',
    ),
    Promise(
        5,
        "Every active token is in exactly one class",
        "tests/test_laws.py::test_token_classes_add_up_to_the_active_tokens",
        "masked tokens are compared",
        "measure.py",
        'return classes.masked_fill_(~tokens.active, COUNTER_INDEX["inactive"])',
        "return classes",
    ),
)


def run(test: str, folder: Path) -> tuple[bool, str]:
    """Return whether a test passes, and pytest's output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [sys.executable, *(launcher if "distributed/" in test else []), "-m", "pytest", test, "-x", "-q"]
    command += ["-p", "no:cacheprovider", f"--timeout={TIMEOUT}", "-k", "not numba"]
    variables = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return False, "no end"
    return ended.returncode == 0, ended.stdout + ended.stderr


def copied(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    # The reference is what is changed; numba, where it is installed, would measure in its place.
    (folder / "numba.py").write_text("raise ImportError")
    return folder


def broken(promise: Promise, text: str) -> str:
    if text.count(promise.old) != 1:
        raise LookupError(f"{promise.file} must hold {promise.old!r} once, it does {text.count(promise.old)} times")
    return text.replace(promise.old, promise.new)


def try_promise(promise: Promise) -> str | None:
    """Return what is wrong with a promise's test, None if nothing is."""
    passes, output = run(promise.test, ROOT)
    if not passes:
        return f"the test fails as the code stands:\n{output[-1500:]}"
    with tempfile.TemporaryDirectory() as place:
        folder = copied(Path(place))
        path = folder / "rlk_audit" / promise.file
        path.write_text(broken(promise, path.read_text(encoding="utf-8")), encoding="utf-8")
        passes, output = run(promise.test, folder)
    if passes:
        return f"the test passes where {promise.broken_by}"
    return None if " failed" in output or output == "no end" else f"the change does not run:\n{output[-1500:]}"


def page() -> str:
    """Return docs/promises.md."""
    parts = [
        "# Promises and their tests",
        "Each promise of the [README](../README.md#what-it-promises), the test of it, and a change to the code with "
        "which that test fails. `python tools/promises.py` makes every change in a copy and runs the tests. "
        "[faults.md](faults.md) says what was done to running processes, [mutation.md](mutation.md) how many blind "
        "changes of the core the tests notice.",
    ]
    for number, heading in HEADINGS.items():
        rows = [
            f"| {each.says} | `{each.test.removeprefix('tests/')}` | {each.broken_by} (`{each.file}`) |"
            for each in PROMISES
            if each.number == number
        ]
        head = ["| promise | test | fails where |", "| --- | --- | --- |"]
        parts += [f"## {number}. {heading}", "\n".join(head + rows)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="the page")
    parser.add_argument("--only", default="", help="promises whose test has this in its name")
    options = parser.parse_args()
    chosen = [promise for promise in PROMISES if options.only in promise.test]
    wrong = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for promise, complaint in zip(chosen, pool.map(try_promise, chosen), strict=True):
            wrong += complaint is not None
            print(f"{promise.number}. {promise.says}: {complaint or 'broken, and noticed'}", flush=True)
    if options.write and not wrong:
        options.write.write_text(page(), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
