"""The process behind `engines.vllm`: serves `load_weights` and `generate` over a pipe until it closes."""

import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams

from engines import LlamaShape
from engines.hf import build_llama
from task import END, MAX_RESPONSE, SEQ_LENGTH


class Worker:
    def __init__(self, shape: LlamaShape) -> None:
        with tempfile.TemporaryDirectory() as folder:
            build_llama(shape, torch.bfloat16).save_pretrained(folder)  # random; real weights arrive by load_weights
            self.llm = LLM(
                model=folder,
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=SEQ_LENGTH,
                disable_log_stats=True,
            )

    def load_weights(self, arrays: dict[str, np.ndarray]) -> None:
        weights = [(name, torch.from_numpy(array).bfloat16()) for name, array in arrays.items()]
        self.llm.apply_model(lambda model: model.load_weights(iter(weights)) and None)
        self.llm.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], seed: int) -> list[tuple[list[int], list[float]]]:
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_tokens=MAX_RESPONSE,
                logprobs=0,
                detokenize=False,
                stop_token_ids=[END],
                seed=seed * len(prompts) + index,
            )
            for index in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [result.outputs[0] for result in self.llm.generate(requests, sampling, use_tqdm=False)]
        return [(list(o.token_ids), _sampled_log_probs(o)) for o in outputs]


def _sampled_log_probs(output: Any) -> list[float]:
    return [scores[token].logprob for token, scores in zip(output.token_ids, output.logprobs, strict=True)]


def serve(connection: Connection) -> None:
    worker = Worker(LlamaShape(**connection.recv()))
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:  # the trainer closed the engine
            return
        connection.send(getattr(worker, method)(*arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
