"""verl's own two metric functions beside the audit, in an environment that has verl; prints JSON.

python -m benchmarks.verl_functions 4096 65536 1048576
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils.debug.metrics import calculate_debug_metrics

from benchmarks import timing
from benchmarks.data import Batch, draw
from benchmarks.variants import audit_variants
from rlk_audit import Collector

ROUNDS = {4096: 31, 65536: 21, 1 << 20: 7}


def both(batch: Batch, data: DataProto) -> dict[str, float]:
    return calculate_debug_metrics(data) | compute_offpolicy_metrics(batch.train, batch.rollout, batch.mask)


def variants(batch: Batch) -> dict[str, Callable[[], object]]:
    tensors = {"rollout_log_probs": batch.rollout, "old_log_probs": batch.train, "response_mask": batch.mask}
    data = DataProto.from_dict(tensors=tensors | {"responses": batch.position})
    made: dict[str, Callable[[], object]] = {}
    for name, config in audit_variants().items():
        collector = Collector(config)
        made[f"{name}: update"] = lambda collector=collector: collector.update(**batch.update_arguments())
    made["verl: two functions"] = lambda: both(batch, data)
    return made


def main() -> None:
    torch.set_num_threads(1)
    sizes = {}
    for tokens in map(int, sys.argv[1:]):
        taken = timing.by_turns(variants(draw(tokens)), ROUNDS.get(tokens, 3), warmup=2)
        sizes[tokens] = timing.summaries(taken)
    print(json.dumps({"version": version("verl"), "torch": torch.__version__, "sizes": sizes}))


if __name__ == "__main__":
    main()
