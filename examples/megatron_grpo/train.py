"""GRPO on a small verifiable task with a megatron-core policy, audited on every step. See README.md.

    torchrun --standalone --nproc-per-node 4 train.py --tp 2 --rlk-consistency-mode audit \
        --fault stale_engine --fault-step 10 --steps 12 --out out
"""

import argparse
import json
import logging
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import cpu_backend
import grpo
import model
import planted_faults
from console import Console
from dump import Dump, response_scores
from recorder import Recorder
from rlk_audit import AuditConfig
from rlk_audit.diagnose import TokenTable, diagnose
from rlk_audit.megatron_plugin import MegatronAudit, add_rlk_args, register
from rlk_audit.sinks import JsonlSink
from rollout import ENGINES, EnginePool, RecordedPool, Rollout, demonstrations
from trainer import Trainer, forward_step, token_sum

EXPORT_TOLERANCE = 1e-4


class ExportMismatchError(RuntimeError):
    """The exported weights do not give the trainer's log-probabilities."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    layout = parser.add_argument_group("layout (data parallel is what remains of the world size)")
    layout.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    layout.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    layout.add_argument("--vpp", type=int, default=None, help="virtual pipeline stages of each pipeline rank")
    layout.add_argument("--cp", type=int, default=1, help="context parallel size")
    layout.add_argument("--experts", type=int, default=None, help="experts of each layer (needs --engine recorded)")
    layout.add_argument("--ep", type=int, default=1, help="expert parallel size")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--layers", type=int, default=4)
    sizes.add_argument("--hidden", type=int, default=128)
    sizes.add_argument("--prompts", type=int, default=16, help="prompts a step")
    sizes.add_argument("--group-size", type=int, default=8, help="samples of a prompt, half from each engine")
    sizes.add_argument("--micro-batch-size", type=int, default=16)
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=int, default=12)
    run.add_argument("--warmup-steps", type=int, default=60, help="supervised steps before the first rollout")
    run.add_argument("--warmup-lr", type=float, default=1e-3)
    run.add_argument("--lr", type=float, default=3e-4)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--engine", choices=("hf", "vllm", "recorded"), default="hf")
    run.add_argument("--fault", choices=("none", *planted_faults.FAULTS), default="none", help="see planted_faults.py")
    run.add_argument("--fault-step", type=int, default=1, help="first step that has the fault")
    run.add_argument("--dump", type=Path, help="folder for every step's tokens, to be read by rlk-audit")
    run.add_argument("--out", type=Path, default=Path("out"), help="folder of audit.jsonl and run.json")
    run.add_argument("--record", type=Path, default=None, help="folder for each rank's observed tokens")
    add_rlk_args(parser)
    args = parser.parse_args(argv)
    if args.experts and args.engine != "recorded":
        parser.error("a mixture of experts is not exported: use --engine recorded")
    if args.engine == "recorded" and args.fault in planted_faults.IN_ENGINES:
        parser.error("--engine recorded has no engine with weights and a temperature")
    if args.engine != "hf" and args.fault == "temperature":
        parser.error("--fault temperature needs --engine hf")
    return args


def start_parallel(args: argparse.Namespace) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    cpu_backend.install()
    dist.init_process_group(cpu_backend.backend(), timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
    )


def check_export(trainer: Trainer, weights: dict[str, Tensor], seed: int) -> float:
    """Collective: float32 transformers on the exported weights against the trainer, token by token."""
    checks = demonstrations(trainer.args.prompts * trainer.args.group_size, torch.Generator().manual_seed(seed))
    ours = trainer.score(checks)
    error = [0.0]
    if dist.get_rank() == 0:
        from engines.hf import score

        batch = grpo.build_batch(checks)
        sequences = torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1)
        theirs = score(model.llama_shape(trainer.config), weights, sequences)
        error = [float(((ours - theirs) * batch["mask"]).abs().max())]
    dist.broadcast_object_list(error)
    if not error[0] <= EXPORT_TOLERANCE:
        raise ExportMismatchError(f"exported weights differ by {error[0]:.2e} nats, more than {EXPORT_TOLERANCE}")
    return error[0]


def warm_up(trainer: Trainer) -> None:
    args = trainer.args
    trainer.set_learning_rate(args.warmup_lr)
    for step in range(args.warmup_steps):
        generator = torch.Generator().manual_seed(args.seed * 7_000_003 + step)
        loss = trainer.warm_up(grpo.build_batch(demonstrations(args.prompts * args.group_size, generator)))
    trainer.set_learning_rate(args.lr)
    if args.warmup_steps and dist.get_rank() == dist.get_world_size() - 1:
        print(f"warm-up: {args.warmup_steps} supervised steps, loss {loss:.3f}", flush=True)


def policy_loss(observers: list[Any], micro: dict[str, Tensor], output: Tensor) -> tuple[Any, ...]:
    """`output` is the cross entropy [b, s] of each label; its negative is the trainer's log-probability."""
    log_probs = -output
    for observer in observers:
        observer.observe(
            log_probs,
            micro["rollout_log_probs"],
            micro["mask"],
            valid=micro["mask"],
            sample_index=micro["sample_index"],
            sample_slot=micro["sample_index"],
            rollout_id=micro["rollout_id"],
            token_position=micro["token_position"],
            token_ids=micro["labels"],
            updates_since_rollout=0,  # what the trainer believes of both engines
            labels={"engine": micro["engine"]},
        )
    return token_sum(grpo.grpo_loss(log_probs, micro), micro)


def start_audit(args: argparse.Namespace) -> MegatronAudit:
    sinks = []
    if dist.get_rank() == dist.get_world_size() - 1 and args.rlk_consistency_mode in ("audit", "strict"):
        log = args.out / "audit.jsonl"
        log.unlink(missing_ok=True)  # the sink appends, and this is a run of its own
        sinks.append(JsonlSink(log))
    config = AuditConfig(
        mode="off",
        breakdowns={"engine": ENGINES, "position": "auto", "confidence": "auto"},
        samples_per_step=args.prompts * args.group_size,
    )
    return register(args, config=config, sinks=sinks)


def token_table(rollouts: list[Rollout], scores: Tensor) -> TokenTable:
    """Every token of the step, for a diagnosis that looks at neighbours and other rows too."""
    return TokenTable.from_lists(
        response_scores(rollouts, scores),
        [r.log_probs for r in rollouts],
        sample_index=[r.sample_index for r in rollouts],
        token_ids=[r.response for r in rollouts],
        prompt_length=[len(r.prompt) for r in rollouts],
        labels={"engine": [ENGINES[r.engine] for r in rollouts]},
    )


def hand_over_weights(trainer: Trainer, pool: EnginePool, step: int) -> None:
    """Collective: export the trainer's weights to the engines; before the first rollout the export is checked."""
    weights = model.export_weights(trainer.chunks, model.llama_shape(trainer.config))
    if step == 1:
        error = check_export(trainer, weights, trainer.args.seed)
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"export: float32 transformers agrees to {error:.1e} nats", flush=True)
    pool.sync(weights, step)


def build_pool(trainer: Trainer) -> EnginePool | RecordedPool:
    if trainer.args.engine == "recorded":
        return RecordedPool(trainer.args, trainer.score)
    return EnginePool(trainer.args, model.llama_shape(trainer.config))


def train(args: argparse.Namespace) -> None:
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    audit = start_audit(args)
    audit_runs = args.rlk_consistency_mode in ("audit", "strict")
    pool = build_pool(trainer)
    warm_up(trainer)
    recorder = Recorder(args.record) if args.record else None
    observers = [audit, recorder] if recorder else [audit]
    step_func = audit.wrap_forward_step(partial(forward_step, partial(policy_loss, observers)))
    schedule = audit.wrap_schedule(get_forward_backward_func())
    console = Console() if last_rank else None
    dump = Dump(args.dump) if args.dump and last_rank else None
    losses, rewards = [], []
    for step in range(1, args.steps + 1):
        if isinstance(pool, EnginePool):
            hand_over_weights(trainer, pool, step)
        rollouts = planted_faults.plant(args, step, pool.generate(step))
        # Before the update: what the engines sampled is compared with the weights that they were given.
        diagnosed = audit_runs and step == args.steps
        scores = trainer.score(rollouts) if diagnosed or args.dump else None
        if dump:
            dump.write(step, rollouts, scores)
        losses.append(trainer.train(schedule, step_func, grpo.build_batch(rollouts, grpo.advantages(rollouts))))
        rewards.append(sum(r.reward for r in rollouts) / len(rollouts))
        report = audit.step_end(step)
        if recorder:
            recorder.step_end(step)
        if console:
            console.step(step, rewards[-1], losses[-1], report, rollouts)
            if diagnosed:
                console.findings = diagnose(report, token_table(rollouts, scores))
    digest = model.weights_digest(trainer.chunks)
    if last_rank:
        run = {"losses": losses, "rewards": rewards, "weights_sha256": digest}
        (args.out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
        console.close()
        print(f"weights sha256 {digest}", flush=True)
    audit.close()
    pool.close()


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING)
    args = parse_args(argv)
    start_parallel(args)
    train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
