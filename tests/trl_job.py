"""A GRPO training of the real trl on a model of a few thousand weights, for test_trl.py; processes write rank<N>.pt.

    python trl_job.py --out DIR --sampler engine --audit
    torchrun --standalone --nproc-per-node 2 trl_job.py ...

Samplers: `plain` is trl's own generation; `rollout_func` one of ours; `vllm` the real one in this process; `engine`
stands in for it: trl's `VLLMGeneration` is replaced by a class of its interface, and all else of trl's path is real.
The recorder that the tests trust wraps the trainer before the audit does, and knows nothing of it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

WORDS = [f"w{number}" for number in range(60)]
PROMPTS = [" ".join(WORDS[i : i + 3 + i % 4]) for i in range(32)]
LONGEST = (12, 3)
"""Tokens of a completion at most, on even and on odd ranks: ranks that hold unequal numbers of tokens."""


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model_folder(out: Path) -> Path:
    """The folder of a random model and its tokenizer; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    folder = out / f"model{os.environ.get('RANK', '0')}"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Engine:
    """Another program: samples with the trainer's weights, coarsely rounded, and with random numbers of its own."""

    def __init__(self, model: torch.nn.Module, **settings: Any) -> None:
        self.model = model
        self.rank = int(os.environ.get("RANK", "0"))
        self.random = torch.Generator().manual_seed(self.rank)
        self.copy: torch.nn.Module | None = None

    def sync_weights(self) -> None:
        # A new model, since trl has put a forward of its own into this one, which a copy would share.
        self.copy = LlamaForCausalLM(self.model.config).eval()
        self.copy.load_state_dict({name: (w * 16).round() / 16 for name, w in self.model.state_dict().items()})

    @torch.no_grad()
    def complete(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        if self.copy is None:
            self.sync_weights()
        ids, log_probs = list(prompt), []
        for _ in range(LONGEST[self.rank % 2]):
            scores = self.copy(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(scores.exp(), 1, generator=self.random))
            ids.append(token)
            log_probs.append(float(scores[token]))
            if token == 1:
                break
        return ids[len(prompt) :], log_probs

    def generate(self, prompts: list[list[int]], **settings: Any) -> tuple[Any, Any, Any, Any]:
        """As trl's `VLLMGeneration.generate`; one value of the first sample is one that the engine could not give."""
        found = [self.complete(prompt) for prompt in prompts]
        values = [[[value] for value in log_probs] for _, log_probs in found]
        values[0][0] = [None]
        return prompts, [ids for ids, _ in found], values, None


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout function; every other token came from a tool."""
    engine = Engine(trainer.model)
    engine.random.manual_seed(100 * trainer.state.global_step + engine.rank)
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    found = [engine.complete(prompt) for prompt in ids]
    return {
        "prompt_ids": ids,
        "completion_ids": [completion for completion, _ in found],
        "logprobs": [log_probs for _, log_probs in found],
        "env_mask": [[1 - place % 2 for place in range(len(completion))] for completion, _ in found],
    }


def reward(completions: list[str], **fields: Any) -> list[float]:
    return [len(set(text.split())) / 10 for text in completions]


class Recorder:
    """What the audit should see: the values of each optimizer step that trl has at hand, on this rank."""

    def __init__(self, trainer: Any) -> None:
        self.tokens: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self._scored = None
        generate, compute_loss = trainer._generate_and_score_completions, trainer._compute_loss
        score = trainer._get_per_token_logps_and_entropies

        def generated(inputs: Any) -> Any:
            batch = generate(inputs)
            self.old_known = "old_per_token_logps" in batch
            self.first_pass = trainer.args.steps_per_generation
            if self.old_known:
                self._keep(trainer, batch, batch["old_per_token_logps"])
            return batch

        def scored(*args: Any, **kwargs: Any) -> Any:
            result = score(*args, **kwargs)
            self._scored = result[0].detach().clone()
            return result

        def loss(model: Any, inputs: Any) -> Any:
            value = compute_loss(model, inputs)
            self.losses.append(float(value))
            if not self.old_known and self.first_pass > 0:
                self._keep(trainer, inputs, self._scored)
            self.first_pass -= 1
            return value

        trainer._generate_and_score_completions, trainer._compute_loss = generated, loss
        trainer._get_per_token_logps_and_entropies = scored

    def _keep(self, trainer: Any, batch: Any, train: torch.Tensor) -> None:
        mask = batch["completion_mask"]
        self.tokens.append(
            {
                "step": trainer.state.global_step + 1,
                "train": train.tolist(),
                "rollout": batch["sampling_per_token_logps"].tolist() if "sampling_per_token_logps" in batch else None,
                "mask": (mask * batch.get("tool_mask", 1)).tolist(),
                "valid": mask.tolist(),
                "ids": batch["completion_ids"].tolist(),
            }
        )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sampler", choices=("plain", "rollout_func", "engine", "vllm"), required=True)
    parser.add_argument("--audit", action="store_true")
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--trl", type=json.loads, default={}, help="further fields of GRPOConfig")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = model_folder(args.out)
    if args.sampler == "engine":
        grpo_trainer.VLLMGeneration = Engine
    settings = {
        "output_dir": str(args.out / "trainer"), "max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": max(LONGEST), "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "bf16": False, "use_cpu": True, "learning_rate": 1e-2, "beta": 0.0, "disable_tqdm": True,
        "use_vllm": args.sampler in ("engine", "vllm"),
    } | args.trl  # fmt: skip
    trainer = GRPOTrainer(
        str(folder),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=tokenizer(),
        rollout_func=rollout if args.sampler == "rollout_func" else None,
    )
    recorder = Recorder(trainer)
    if args.audit:
        from rlk_audit import AuditConfig
        from rlk_audit.integrations.trl import GrpoAudit
        from rlk_audit.sinks import JsonlSink

        GrpoAudit(trainer, AuditConfig(**args.config), sinks=[JsonlSink(args.out / "audit.jsonl")])
    stopped = None
    try:
        trainer.train()
    except RuntimeError as error:
        stopped = f"{type(error).__name__}: {error}"
    kept = {
        "tokens": recorder.tokens,
        "losses": recorder.losses,
        "log": trainer.state.log_history,
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
        "stopped": stopped,
    }
    torch.save(kept, args.out / f"rank{trainer.accelerator.process_index}.pt")
    trainer.accelerator.wait_for_everyone()  # a gloo thread that lets go of a tensor as Python ends aborts the process


if __name__ == "__main__":
    main()
