"""What a micro-batch costs on one core: the audit beside an exact one, helpers, metrics libraries and sketches.

    python -m benchmarks.update [--sizes 4096,65536,1048576] [--verl-python PATH]

All variants of a size take turns in one run. Before anything is timed, the exact audit's figures must agree with the
report's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import peers, timing
from benchmarks.data import SIZES, Batch, draw, with_faults
from benchmarks.exact_audit import disagreements, exact_audit
from benchmarks.variants import audit_variants, default_audit
from rlk_audit import AuditConfig, Collector

ROUNDS = {4096: 41, 65536: 21, 1 << 20: 9}
FEWEST_ROUNDS = 3
PARTS_TOKENS = 65536
ENGINES = {"engine": 4}
BUILT_IN = {"position": "auto", "confidence": "auto"}
SAMPLES = PARTS_TOKENS // 256
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "engine": {"breakdowns": ENGINES},
    "engine, position, confidence": {"breakdowns": ENGINES | BUILT_IN},
    "samples": {"samples_per_step": SAMPLES},
    "all": {"breakdowns": ENGINES | BUILT_IN, "samples_per_step": SAMPLES},
}
"""Parts of a step that are asked for beside the plain audit."""


class DifferentWorkError(RuntimeError):
    """The exact audit and the report, or two paths of the audit, do not say the same."""


def check_agreement(batch: Batch) -> None:
    """Refuse to compare an exact audit whose figures are not those of the report, and paths of other bits."""
    vectors = []
    for name, config in audit_variants().items():
        collector = Collector(config)
        collector.update(**batch.update_arguments())
        found = disagreements(exact_audit(batch, config), collector.compute(), config)
        if found:
            raise DifferentWorkError(f"{name}, {batch.tokens} tokens: {'; '.join(found)}")
        vectors.append(collector.pack())
    if not all(vector.equal(vectors[0]) for vector in vectors):
        raise DifferentWorkError(f"{batch.tokens} tokens: the paths of the audit differ in their bits")


def variants(batch: Batch) -> dict[str, Callable[[], object]]:
    """Return name -> one micro-batch's work."""
    made: dict[str, Callable[[], object]] = {}
    for name, config in audit_variants().items():
        made |= _audit(name, config, batch)
    settings = default_audit()
    made["exact audit, torch.sort"] = lambda: exact_audit(batch, settings)
    made["torch.sort of abs(d) alone"] = lambda: (batch.train - batch.rollout).abs().view(-1).sort()
    made["helper, sample by sample"] = lambda: peers.helper(batch)
    made["torchmetrics"] = lambda: peers.torchmetrics_step(batch)
    for name in peers.SKETCHES:
        made[name] = lambda name=name: peers.fill(name, batch)
    return made


def _audit(name: str, config: AuditConfig, batch: Batch) -> dict[str, Callable[[], object]]:
    collector = Collector(config)

    def whole() -> object:
        collector.reset()
        collector.update(**batch.update_arguments())
        return collector.compute().metrics

    return {
        f"{name}: update": lambda: collector.update(**batch.update_arguments()),
        f"{name}: update and report": whole,
    }


def accuracy(batch: Batch) -> dict[str, dict[str, float]]:
    """Return each sketch's relative error at p99.9 and its bytes, and those of the audit."""
    config = default_audit()
    truth = exact_audit(batch, config)["abs_dlogp_p99_9"]
    found = {}
    for name in peers.SKETCHES:
        quantile, size = peers.fill(name, batch)
        found[name] = {"error": quantile(peers.QUANTILE) / truth - 1, "bytes": size()}
    collector = Collector(config)
    collector.update(**batch.update_arguments())
    answer = collector.compute().metrics["abs_dlogp_p99_9"]
    found["rlk_audit"] = {
        "error": answer / truth - 1,
        "bytes": 8 * collector.layout.length,
        "sketch_bytes": 8 * collector.layout.fields["sketch"].length,
    }
    return found


def parts() -> dict[str, Any]:
    """Return what breakdowns and the table of samples add to an update."""
    tokens, length = PARTS_TOKENS, PARTS_TOKENS // SAMPLES
    batch = draw(tokens, length=length)
    runs: dict[str, Callable[[], object]] = {}
    sizes = {}
    for part, asked in PARTS.items():
        for name, config in audit_variants(worst_k=4, **asked).items():
            given: dict[str, Any] = batch.update_arguments() | {"sample_slot": batch.sample}
            if config.caller_labels:
                given["labels"] = {"engine": batch.sample % 4}
            collector = Collector(config)
            runs[f"{name}: {part}"] = lambda collector=collector, given=given: collector.update(**given)
            sizes[f"{name}: {part}"] = 8 * collector.layout.length
    return {"tokens": tokens, "bytes": sizes, "times": timing.summaries(timing.by_turns(runs, 21, warmup=2))}


def of_verl(python: str | None, sizes: list[int]) -> dict[str, Any] | None:
    """Return what an environment with verl measured; None without one."""
    if not python:
        return None
    command = [python, "-m", "benchmarks.verl_functions", *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def measure(sizes: list[int], verl_python: str | None) -> dict[str, Any]:
    """Return the group's results."""
    torch.set_num_threads(1)
    check_agreement(with_faults(draw(SIZES[0])))
    results: dict[str, Any] = {}
    for tokens in sizes:
        batch = draw(tokens)
        check_agreement(batch)
        taken = timing.by_turns(variants(batch), ROUNDS.get(tokens, FEWEST_ROUNDS), warmup=2 if tokens < 1 << 20 else 1)
        results[str(tokens)] = {"times": timing.summaries(taken), "accuracy": accuracy(batch)}
    return timing.made() | {"sizes": results, "parts": parts(), "verl": of_verl(verl_python, sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="tokens of a micro-batch")
    parser.add_argument("--verl-python", default="", help="interpreter of an environment that has verl")
    args = parser.parse_args()
    print(json.dumps(measure([int(size) for size in args.sizes.split(",")], args.verl_python or None)))


if __name__ == "__main__":
    main()
