"""A Hugging Face transformers Llama in bfloat16 with a KV cache: quick to install, other kernels than the trainer's."""

import dataclasses
import inspect

import torch
import transformers
from torch import Tensor

from engines import Completion, LlamaShape
from task import END, MAX_RESPONSE, PAD

# Recent transformers (5.24) renamed the argument and warn about the old name; 5.19 knows only the old one.
_FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
_CACHE_ARGUMENT = "cache" if "cache" in _FORWARD else "past_key_values"


def build_llama(shape: LlamaShape, dtype: torch.dtype) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        **dataclasses.asdict(shape), pad_token_id=PAD, eos_token_id=END, tie_word_embeddings=False
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def score(shape: LlamaShape, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Float32 log-probs [B, S-1] of tokens[:, 1:] under exported weights, in one forward without a cache."""
    model = build_llama(shape, torch.float32)
    model.load_state_dict(weights)
    log_probs = model(tokens[:, :-1]).logits.log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None])[..., 0]


class HfEngine:
    def __init__(self, shape: LlamaShape, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model = build_llama(shape, dtype)
        self.temperature = 1.0

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], seed: int) -> list[Completion]:
        generator = torch.Generator().manual_seed(seed)
        inputs, attention = _left_padded(prompts)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = {_CACHE_ARGUMENT: transformers.DynamicCache(config=self.model.config)}
        sampled, scores = [], []
        for _ in range(MAX_RESPONSE):
            output = self.model(inputs, attention_mask=attention, position_ids=positions, **cache)
            log_probs = (output.logits[:, -1].float() / self.temperature).log_softmax(-1)
            inputs = torch.multinomial(log_probs.exp(), 1, generator=generator)
            sampled.append(inputs)
            scores.append(log_probs.gather(-1, inputs))
            attention = torch.nn.functional.pad(attention, (0, 1), value=1)
            positions = positions[:, -1:] + 1
        return _until_end(torch.cat(sampled, 1).tolist(), torch.cat(scores, 1).tolist())

    def close(self) -> None:
        del self.model


def _left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, S]; padding on the left, so that the last column is each prompt's end."""
    length = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (length - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return tokens, attention


def _until_end(token_rows: list[list[int]], score_rows: list[list[float]]) -> list[Completion]:
    lengths = [row.index(END) + 1 if END in row else len(row) for row in token_rows]
    return [
        Completion(tokens[:n], scores[:n]) for tokens, scores, n in zip(token_rows, score_rows, lengths, strict=True)
    ]
