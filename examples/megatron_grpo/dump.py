"""Keeps every step's tokens as the `table` format of rlk-audit, with a tokenizer that shows them as text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor

import task
from rollout import ENGINES, Rollout


def response_scores(rollouts: list[Rollout], scores: Tensor) -> list[list[float]]:
    """The trainer's log-probabilities of each response token, from its scores [N, S] of every label."""
    starts = [len(r.prompt) - 1 for r in rollouts]
    return [row[at : at + len(r.response)].tolist() for r, row, at in zip(rollouts, scores, starts, strict=True)]


class Dump:
    """`step_<n>.jsonl` holds one sample a line; `tokenizer.json` beside the folder names the task's tokens."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("step_*.jsonl"):  # a dump is of one run
            earlier.unlink()
        self.folder = folder
        vocabulary = {task.text([token]): token for token in range(task.VOCAB_SIZE)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(folder.parent / "tokenizer.json"))

    def write(self, step: int, rollouts: list[Rollout], scores: Tensor) -> None:
        """Write a step; scores [N, S] are the trainer's, under the weights that the engines were given."""
        with (self.folder / f"step_{step}.jsonl").open("w") as file:
            for rollout, train in zip(rollouts, response_scores(rollouts, scores), strict=True):
                sample = {
                    "step": step,
                    "sample_index": rollout.sample_index,
                    "rollout_id": rollout.group,
                    "prompt_length": len(rollout.prompt),
                    "token_ids": rollout.response,
                    "train_log_probs": train,
                    "rollout_log_probs": rollout.log_probs,
                    "labels": {"engine": ENGINES[rollout.engine]},
                }
                file.write(json.dumps(sample) + "\n")
