"""An audited policy gradient on plain PyTorch: FSDP2 over a DeviceMesh, log-probabilities as DTensors.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2/train.py            # data parallel
    torchrun --standalone --nproc-per-node 4 examples/fsdp2/train.py --tp 2     # data x tensor parallel

The sampler is a bfloat16 copy of the policy. It misses the weight updates from step 3 on, and the reports show it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlk_audit import AuditConfig, Auditor
from rlk_audit.sinks import ConsoleSink, JsonlSink

WORDS, WIDTH, SAMPLES, LENGTH = 50, 32, 8, 12


class Policy(nn.Module):
    """The next word from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.embed(words))))


def parallel_policy(mesh: DeviceMesh) -> Policy:
    torch.manual_seed(0)
    policy = Policy()
    parallelize_module(policy, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(policy, mesh=mesh["dp"])
    return policy


def sampler_of(policy: Policy) -> Policy:
    """Collective: every rank must call this. A bfloat16 copy with the whole weights."""
    copy = Policy()
    copy.load_state_dict({name: value.full_tensor() for name, value in policy.state_dict().items()})
    return copy.to(torch.bfloat16)


@torch.no_grad()
def sample(sampler: Policy, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Words [samples, length + 1], log-probabilities and mask [samples, length]; each sample ends where it likes."""
    words, log_probs = [torch.zeros(SAMPLES, dtype=torch.long)], []
    for _ in range(LENGTH):
        scores = sampler(words[-1]).float().log_softmax(-1)
        words.append(torch.multinomial(scores.exp(), 1, generator=random)[:, 0])
        log_probs.append(scores.gather(1, words[-1][:, None])[:, 0])
    ends = torch.randint(0, LENGTH + 1, (SAMPLES, 1), generator=random)
    return torch.stack(words, 1), torch.stack(log_probs, 1), torch.arange(LENGTH) < ends


def log_probs_of(policy: Policy, words: Tensor, mesh: DeviceMesh) -> DTensor:
    """Of the words that follow: samples over `dp`, the same on every rank of `tp`."""
    scores = policy(words[:, :-1]).log_softmax(-1)
    own = scores.gather(2, words[:, 1:, None])[..., 0]
    return DTensor.from_local(own, mesh, (Shard(0), Replicate()))


def train(args: argparse.Namespace) -> None:
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    policy = parallel_policy(mesh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    place = mesh["dp"].get_local_rank()
    random = torch.Generator().manual_seed(place)  # one stream a dp rank: ranks of tp hold the same samples

    sinks = [] if args.out is None or mesh["tp"].get_local_rank() else [ConsoleSink(), JsonlSink(args.out)]
    auditor = Auditor(AuditConfig(mode=args.mode), group=mesh["dp"].get_group(), sinks=sinks)
    for step in range(1, args.steps + 1):
        if step < 3:
            sampler = sampler_of(policy)
        words, rollout, mask = sample(sampler, random)
        log_probs = log_probs_of(policy, words, mesh)
        auditor.update(
            log_probs,
            rollout,
            mask,
            sample_index=torch.arange(place * SAMPLES, (place + 1) * SAMPLES),
            token_position=torch.arange(LENGTH),
            token_ids=words[:, 1:],
        )
        reward = (words[:, 1:] % 2 == 0).float()
        loss = -(log_probs.to_local() * (reward - 0.5) * mask).sum() / mask.sum().clamp(min=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        auditor.step(step)
        print(f"rank {dist.get_rank()} step {step} loss {loss.item().hex()}", flush=True)
    auditor.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--mode", choices=("off", "audit", "strict"), default="audit")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2/audit.jsonl"))
    args = parser.parse_args()
    train(args)
    dist.barrier()  # gloo's threads let go of the last step's reductions, which none may do once Python has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
