"""One rank of a check against slime's own source: its loss, its context-parallel cuts and its iterator call the audit.

    RLK_SLIME_SOURCE=<checkout of slime> torchrun --nproc-per-node 4 tests/real_slime_job.py CP

slime itself needs packages that are not here, of which nothing is called on this path; they are empty modules. Groups
are those of the real megatron-core on gloo. Logits are random; the oracle is given the scores of whole sequences.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class Empty(ModuleType):
    """A package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for missing in ("httpx", "ray", "ray.actor", "wandb", "sglang", "sglang_router", "aiohttp", "pybase64"):
    sys.modules.setdefault(missing, Empty(missing))
sys.path.insert(0, os.environ["RLK_SLIME_SOURCE"])

import oracle  # noqa: E402
from megatron.core import mpu  # noqa: E402
from slime.backends.megatron_utils import cp_utils, data, loss  # noqa: E402

from rlk_audit import AuditConfig  # noqa: E402
from rlk_audit.integrations.slime import SlimeAudit  # noqa: E402

VOCABULARY = 16
SAMPLES = [(3, 9), (30, 2), (5, 21), (1, 14), (8, 1), (12, 17), (2, 30), (6, 6)]
"""Tokens of prompt and response."""


def arguments(**given: Any) -> Namespace:
    off = (
        "use_rollout_logprobs", "get_mismatch_metrics", "use_opsm", "use_kl_loss", "recompute_loss_function", "use_tis",
        "calculate_per_token_loss", "use_unbiased_kl", "allgather_cp", "true_on_policy_mode", "use_critic",
    )  # fmt: skip
    values = dict.fromkeys(off, False) | {
        "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "log_probs_chunk_size": -1,
        "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0,
        "loss_type": "policy_loss", "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None,
        "qkv_format": "thd", "use_wandb": False, "use_tensorboard": False,
    }  # fmt: skip
    return Namespace(**{**values, **given})


def whole() -> list[dict[str, Any]]:
    """Every sample with its logits, and what the oracle knows of it."""
    random = torch.Generator().manual_seed(5)
    made = []
    for number, (prompt, response) in enumerate(SAMPLES):
        length = prompt + response
        tokens = torch.randint(0, VOCABULARY, (length,), generator=random)
        logits = torch.randn(length, VOCABULARY, generator=random)
        scored = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0][-response:]
        mask = (torch.rand(response, generator=random) < 0.8).int()
        rollout = scored - 0.05 * torch.rand(response, generator=random)
        made.append(
            {"number": number, "tokens": tokens, "logits": logits, "mask": mask, "rollout": rollout, "train": scored}
        )
    return made


def rollout_data(samples: list[dict[str, Any]], groups: int) -> dict[str, Any]:
    """What the actor holds of its samples, cut by slime's own functions."""
    sizes = [(len(s["tokens"]), len(s["mask"])) for s in samples]
    per = len(samples) // groups
    return {
        "tokens": [s["tokens"] for s in samples],
        "loss_masks": [s["mask"] for s in samples],
        "total_lengths": [total for total, _ in sizes],
        "response_lengths": [response for _, response in sizes],
        "sample_indices": [s["number"] for s in samples],
        "rollout_ids": [s["number"] // 2 for s in samples],
        "rollout_mask_sums": torch.tensor([float(s["mask"].sum()) for s in samples]),
        "rollout_log_probs": [
            cp_utils.slice_log_prob_with_cp(s["rollout"], *size) for s, size in zip(samples, sizes, strict=True)
        ],
        "advantages": [
            cp_utils.slice_log_prob_with_cp(torch.linspace(-1, 1, size[1]), *size) for size in sizes
        ],
        "micro_batch_indices": [list(range(i * per, (i + 1) * per)) for i in range(groups)],
        "num_microbatches": [groups],
    }  # fmt: skip


KEYS = (
    "tokens", "multimodal_train_inputs", "total_lengths", "response_lengths", "loss_masks", "log_probs", "advantages",
    "rollout_log_probs", "rollout_mask_sums",
)  # fmt: skip


def train(
    args: Namespace, samples: list[dict[str, Any]], given: dict[str, Any]
) -> tuple[list[float], list[torch.Tensor]]:
    """slime's own iterator, batch and loss function over the micro-batches; returns losses and gradients of logits."""
    (iterator,) = data.get_data_iterator(given)
    losses, gradients = [], []
    for rows in given["micro_batch_indices"]:
        batch = data.get_batch(iterator, KEYS, 1)
        pieces = [cp_utils.slice_with_cp(samples[row]["logits"], 0) for row in rows]
        logits = torch.cat(pieces)[None].clone()
        pad = batch["tokens"].shape[1] - logits.shape[1]
        logits = torch.nn.functional.pad(logits, (0, 0, 0, pad)).requires_grad_()
        result = loss.loss_function(args, batch, len(given["micro_batch_indices"]), len(SAMPLES), logits)
        result[0].backward()
        losses.append(result[0].item())
        gradients.append(logits.grad)
    return losses, gradients


def main(cp_size: int) -> None:
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(context_parallel_size=cp_size)
    data.accelerator = Namespace(device=lambda: "cpu", current_device=lambda: "cpu")
    samples = whole()
    own = samples[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    expected = oracle.audit(
        [
            oracle.Sample(
                s["train"].tolist(), s["rollout"].tolist(), s["mask"].tolist(), sample_index=s["number"],
                rollout_id=s["number"] // 2,
            )
            for s in samples
        ],
        eps_high=0.28,
    )  # fmt: skip
    for recompute in (False, True):
        audit = SlimeAudit()
        name = f"hooks_{recompute}"  # slime finds it by its path
        sys.modules[name] = ModuleType(name)
        sys.modules[name].tis = audit.tis  # type: ignore[attr-defined]
        audited = arguments(use_tis=True, custom_tis_function_path=f"{name}.tis", recompute_loss_function=recompute)
        given = rollout_data(own, 2)
        audit.begin_rollout(audited, 3, given)
        with_audit = train(audited, own, given)
        without = train(arguments(recompute_loss_function=recompute), own, rollout_data(own, 2))
        audit.begin_rollout(audited, 4, {})
        assert with_audit[0] == without[0]
        assert all(map(torch.equal, with_audit[1], without[1]))
        check(audit, expected)
    given = rollout_data(own, 2)
    cut = ((s, len(s["tokens"]), len(s["mask"])) for s in own)
    given["log_probs"] = [cp_utils.slice_log_prob_with_cp(s["train"], total, response) for s, total, response in cut]
    audit = SlimeAudit(AuditConfig(eps_high=0.28))
    audit.rollout_data_postprocess(arguments(), 3, given)
    check(audit, expected)
    print(f"rank {dist.get_rank()}: {expected.metrics['compared_token_count']} tokens agree")
    dist.barrier()
    dist.destroy_process_group()


def check(audit: SlimeAudit, expected: oracle.Expected) -> None:
    assert audit.report is not None
    assert audit.report.complete
    found = {n: v for n, v in expected.metrics.items() if n != "worst_token_id"}
    # slime scores by its own log-softmax, whose last bits are not the oracle's.
    expected = oracle.Expected(found, expected.warnings, expected.worst, dict.fromkeys(found, 2e-6), expected.tokens)
    assert oracle.differences(audit.report.metrics, expected, relative=1e-4) == []


main(int(sys.argv[1]))
