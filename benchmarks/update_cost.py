"""What a micro-batch costs: the plain audit, and with breakdowns and the table of samples, beside sorting its tokens.

    python benchmarks/update_cost.py [--tokens 65536] [--rounds 15]

All variants take turns in one run, on one core; given are medians, and ratios to the plain audit. Sorting stands for an
audit that keeps every token and gives exact quantiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlk_audit import AuditConfig, Collector

ENGINES = {"engine": 4}
BUILT_IN = {"position": "auto", "confidence": "auto"}
SAMPLES = 256
CONFIGS = {
    "plain": AuditConfig(),
    "engine": AuditConfig(breakdowns=ENGINES),
    "engine, position, confidence": AuditConfig(breakdowns=ENGINES | BUILT_IN),
    "samples": AuditConfig(samples_per_step=SAMPLES),
    "all": AuditConfig(breakdowns=ENGINES | BUILT_IN, samples_per_step=SAMPLES),
}


def fields(tokens: int, config: AuditConfig) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, tokens // SAMPLES)
    rollout = -3 * torch.rand(shape, generator=generator) - 0.01
    given = {
        "train_log_probs": rollout + 0.01 * torch.randn(shape, generator=generator),
        "rollout_log_probs": rollout,
        "mask": torch.ones(shape, dtype=torch.bool),
        "sample_index": torch.arange(SAMPLES),
        "token_position": torch.arange(shape[1]),
        "sample_slot": torch.arange(SAMPLES),
    }
    given["train_log_probs"].clamp_(max=0)
    return given | ({"labels": {"engine": torch.arange(SAMPLES) % 4}} if config.caller_labels else {})


def variants(tokens: int) -> dict[str, Callable[[], object]]:
    made: dict[str, Callable[[], object]] = {}
    for name, config in CONFIGS.items():
        collector, given = Collector(config), fields(tokens, config)
        made[name] = lambda collector=collector, given=given: collector.update(**given)
    given = fields(tokens, CONFIGS["plain"])
    made["torch.sort of abs(d)"] = lambda: (given["train_log_probs"] - given["rollout_log_probs"]).abs().view(-1).sort()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    timed: dict[str, list[float]] = {}
    runs = variants(args.tokens)
    for round_ in range(args.rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if round_ >= 2:  # the first ones warm up
                timed.setdefault(name, []).append(time.perf_counter() - start)
    plain = statistics.median(timed["plain"])
    print(f"{args.tokens} tokens, {args.rounds} rounds, torch {torch.__version__}, one core")
    for name, seconds in timed.items():
        median = statistics.median(seconds)
        size = 8 * Collector(CONFIGS[name]).layout.length if name in CONFIGS else 0
        print(f"{name:30} {1e9 * median / args.tokens:7.1f} ns a token  x{median / plain:.2f}  {size:8d} bytes reduced")


if __name__ == "__main__":
    main()
