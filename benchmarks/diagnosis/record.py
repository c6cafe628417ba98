"""Record log-probabilities of small trained models: what a rollout engine reports and what a trainer scores.

    python benchmarks/diagnosis/record.py [SEED ...]

For each seed a Llama is trained on a synthetic language (a Markov chain over token classes with sharp and flat
contexts, and stretches copied from earlier in the sequence), and trained on for a few or many steps on another such
language, which gives weights that are apart by so many updates. A Hugging Face engine with a KV cache samples in
bfloat16 or float16; the trainer scores in float32, or in bfloat16 with other batch shapes, both with the weights that
the engine was given, rounded to bfloat16.
Everything goes into one compressed file a seed, `pairs/tune/s<seed>.npz` or `pairs/held_out/s<seed>.npz`.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

PAIRS = Path(__file__).parent / "pairs"
PROMPT = 8
TOP_K, TOP_PS, TEMPERATURES = 20, (0.8, 0.95), (0.7, 1.3)
MOVES = (("tiny", 3, 3e-4), ("small", 6, 5e-4), ("large", 12, 8e-4))
"""Steps of training, and their rate, by which stale weights are behind."""
# Recent transformers renamed the argument and warn about the old name.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


@dataclass(frozen=True)
class Setting:
    """One seed's model and responses."""

    split: str
    vocabulary: int
    hidden: int
    layers: int
    samples: int
    longest: int
    train_steps: int


SETTINGS = {
    1: Setting("tune", 64, 64, 2, 96, 48, 700),
    2: Setting("tune", 512, 96, 3, 80, 64, 600),
    3: Setting("tune", 2048, 96, 2, 96, 40, 500),
    4: Setting("tune", 256, 64, 4, 24, 256, 600),
    12: Setting("tune", 128, 64, 2, 24, 256, 600),
    13: Setting("tune", 1024, 128, 3, 80, 56, 500),
    14: Setting("tune", 4096, 96, 2, 80, 48, 400),
    15: Setting("tune", 8192, 64, 2, 72, 48, 350),
    16: Setting("tune", 384, 96, 4, 96, 32, 600),
    18: Setting("tune", 96, 96, 4, 48, 128, 600),
    21: Setting("tune", 64, 64, 3, 80, 48, 700),
    23: Setting("tune", 768, 96, 4, 72, 64, 500),
    24: Setting("tune", 3072, 96, 2, 72, 48, 400),
    25: Setting("tune", 8192, 64, 2, 64, 48, 350),
    41: Setting("tune", 64, 64, 3, 80, 48, 700),
    42: Setting("tune", 192, 96, 2, 24, 256, 600),
    43: Setting("tune", 640, 96, 4, 72, 64, 500),
    44: Setting("tune", 2560, 96, 2, 72, 48, 400),
    45: Setting("tune", 8192, 64, 2, 64, 48, 350),
    46: Setting("tune", 8192, 96, 2, 64, 40, 400),
    47: Setting("tune", 320, 64, 2, 48, 48, 500),
    48: Setting("tune", 1280, 96, 2, 36, 64, 300),
    51: Setting("tune", 128, 64, 2, 48, 48, 300),
    52: Setting("tune", 320, 96, 2, 40, 56, 300),
    53: Setting("tune", 896, 64, 3, 36, 64, 300),
    54: Setting("tune", 1536, 128, 2, 56, 40, 250),
    55: Setting("tune", 4096, 64, 2, 48, 48, 250),
    56: Setting("tune", 12288, 64, 2, 44, 48, 200),
    61: Setting("held_out", 80, 64, 3, 64, 48, 500),
    62: Setting("held_out", 224, 96, 2, 24, 192, 400),
    63: Setting("held_out", 704, 64, 4, 48, 56, 350),
    64: Setting("held_out", 1792, 96, 2, 56, 40, 300),
    65: Setting("held_out", 6144, 64, 2, 48, 48, 250),
    66: Setting("held_out", 16384, 96, 2, 44, 40, 200),
}


class Language:
    """Tokens fall into classes; a class decides how sharp the next token's distribution is."""

    classes = 24

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vocabulary = vocabulary
        sharpness = self.random.choice([0.3, 0.8, 1.5, 3.0, 8.0], self.classes)
        ranks = np.log(np.arange(1, vocabulary + 1))
        self.cumulative = np.stack([np.cumsum(np.exp(-s * ranks)) / np.exp(-s * ranks).sum() for s in sharpness])
        self.order = np.stack([self.random.permutation(vocabulary) for _ in range(self.classes)])

    def batch(self, rows: int, length: int) -> Tensor:
        """Sample int64 [rows, length]."""
        tokens = np.zeros((rows, length), dtype=np.int64)
        tokens[:, 0] = self.random.integers(self.vocabulary, size=rows)
        copied = np.zeros(rows, dtype=bool)
        for t in range(1, length):
            kinds = tokens[:, t - 1] % self.classes
            drawn = self.random.random(rows)
            places = (self.cumulative[kinds] < drawn[:, None]).sum(1).clip(0, self.vocabulary - 1)
            tokens[:, t] = self.order[kinds, places]
            # Some stretches repeat what stood 8 tokens earlier: near-certain tokens, as real text has many.
            copied = np.where(copied, self.random.random(rows) < 0.85, self.random.random(rows) < 0.06)
            if t >= PROMPT:
                tokens[:, t] = np.where(copied, tokens[:, t - PROMPT], tokens[:, t])
        return torch.from_numpy(tokens)


def train(model: torch.nn.Module, language: Language, steps: int, rate: float) -> float:
    """Train for some steps and return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        tokens = language.batch(16, 64)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def processed(log_probs: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Return the log-probabilities an engine samples from."""
    scaled = (log_probs / temperature).log_softmax(-1)
    if top_k:
        floor = scaled.topk(min(top_k, scaled.shape[-1])).values[..., -1:]
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if top_p < 1:
        ordered, places = scaled.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, places, before >= top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled.log_softmax(-1)


@torch.no_grad()
def rollout(
    model: torch.nn.Module, prompts: Tensor, length: int, seed: int, temperature=1.0, top_p=1.0, top_k=0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample with a KV cache: (tokens, raw log-probs, processed log-probs), each [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    cache = {CACHE: transformers.DynamicCache(config=model.config)}
    inputs, kept = prompts, []
    for _ in range(length):
        output = model(inputs, use_cache=True, **cache)
        raw = output.logits[:, -1].float().log_softmax(-1)
        sampling = processed(raw, temperature, top_p, top_k)
        inputs = torch.multinomial(sampling.exp(), 1, generator=generator)
        kept.append((inputs[:, 0], raw.gather(-1, inputs)[:, 0], sampling.gather(-1, inputs)[:, 0]))
    tokens, raw_scores, scores = (torch.stack(column, 1) for column in zip(*kept, strict=True))
    return tokens, raw_scores, scores


@torch.no_grad()
def score(model: torch.nn.Module, prompts: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Log-softmax over the vocabulary [rows, length, V] of a forward over the whole sequences, `rows` at a time."""
    sequences = torch.cat([prompts, tokens], 1)
    parts = [
        model(part[:, :-1]).logits[:, prompts.shape[1] - 1 :].float().log_softmax(-1) for part in sequences.split(rows)
    ]
    return torch.cat(parts)


def rounded_copy(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in `dtype`, with weights that bfloat16 holds exactly."""
    return copy.deepcopy(model).to(torch.bfloat16).to(dtype).eval()


def of_tokens(log_probs: Tensor, tokens: Tensor) -> np.ndarray:
    return log_probs.gather(-1, tokens[..., None])[..., 0].numpy().astype(np.float32)


def trained_model(seed: int, setting: Setting) -> tuple[torch.nn.Module, Language, float]:
    """Return a model trained on a language, the language, and the last loss."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.hidden,
        intermediate_size=3 * setting.hidden,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    language = Language(setting.vocabulary, seed)
    return model, language, train(model, language, setting.train_steps, 2e-3)


def moved_models(trained: torch.nn.Module, setting: Setting, seed: int) -> list[torch.nn.Module]:
    """Return the model after each of MOVES: a few steps towards another language."""
    models = []
    for _, steps, rate in MOVES:
        models.append(copy.deepcopy(trained))
        train(models[-1], Language(setting.vocabulary, seed + 1000), steps, rate)
    return models


def record(seed: int) -> dict[str, np.ndarray]:
    """Return the columns of one seed: `<condition>/<column>` -> [samples, longest], and `lengths`."""
    setting = SETTINGS[seed]
    trained, language, loss = trained_model(seed, setting)
    moved = dict(zip((name for name, _, _ in MOVES), moved_models(trained, setting, seed), strict=True))
    trainer = rounded_copy(trained, torch.float32)
    trainer_bf16 = rounded_copy(trained, torch.bfloat16)
    prompts = language.batch(setting.samples, PROMPT)
    columns: dict[str, np.ndarray] = {}

    def keep(name: str, engine: torch.nn.Module, number: int, **sampling: float) -> tuple[Tensor, Tensor]:
        tokens, raw, scores = rollout(engine, prompts, setting.longest, seed * 100 + number, **sampling)
        log_probs = score(trainer, prompts, tokens, 32)
        columns[f"{name}/train"] = of_tokens(log_probs, tokens)
        columns[f"{name}/rollout"] = raw.numpy()
        if sampling:
            columns[f"{name}/processed"] = scores.numpy()
        return tokens, log_probs

    bf16 = rounded_copy(trained, torch.bfloat16)
    tokens, log_probs = keep("bf16", bf16, 0)
    columns["bf16/train_bf16"] = of_tokens(score(trainer_bf16, prompts, tokens, 7), tokens)
    columns["bf16/likeliest"] = log_probs.max(-1).values.numpy()
    columns["bf16/token_ids"] = tokens.numpy().astype(np.int16)
    keep("fp16", rounded_copy(trained, torch.float16), 1)
    for number, temperature in enumerate(TEMPERATURES, 2):
        tokens, log_probs = keep(f"temperature_{temperature}", bf16, number, temperature=temperature)
        columns[f"temperature_{temperature}/train_scaled"] = of_tokens(
            (log_probs / temperature).log_softmax(-1), tokens
        )
    for number, top_p in enumerate(TOP_PS, 4):
        keep(f"top_p_{top_p}", bf16, number, top_p=top_p)
    keep(f"top_k_{TOP_K}", bf16, 6, top_k=TOP_K)
    for number, (name, model) in enumerate(moved.items(), 7):
        keep(f"stale_{name}", rounded_copy(model, torch.bfloat16), number)
    shortest = max(4, setting.longest // 8)
    columns["lengths"] = np.random.default_rng(seed).integers(shortest, setting.longest + 1, setting.samples)
    columns["vocabulary"] = np.array(setting.vocabulary)
    drift = columns["bf16/train"] - columns["bf16/rollout"]
    print(
        f"seed {seed}: loss {loss:.2f}; mean R {columns['bf16/rollout'].mean():.2f}; std d {drift.std():.4f}; "
        + ", ".join(
            f"{n} {(columns[f'{n}/train'] - columns[f'{n}/rollout']).std():.4f}"
            for n in ("fp16", *(f"stale_{name}" for name, _, _ in MOVES))
        ),
        flush=True,
    )
    return columns


def pack(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Cut the columns to the samples' lengths and join them, so that no byte is spent on what is not used."""
    lengths = columns["lengths"]
    real = np.arange(columns["bf16/train"].shape[1]) < lengths[:, None]
    return {name: column[real] if column.ndim == 2 else column for name, column in columns.items()}


def main() -> None:
    transformers.logging.set_verbosity_error()
    for seed in map(int, sys.argv[1:] or SETTINGS):
        start = time.time()
        folder = PAIRS / SETTINGS[seed].split
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"s{seed}.npz"
        np.savez_compressed(path, **pack(record(seed)))
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
