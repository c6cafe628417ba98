"""Dumps that hold only what the rollout engine gave: recognised to say which switch writes the other side."""

from __future__ import annotations

from pathlib import Path

from rlk_audit.dumps import jsonl, torch_file
from rlk_audit.dumps.bounds import HEAD_BYTES

_SLIME = (
    "the file holds the rollout side only: slime and miles write both sides with --dump-details or "
    "--save-debug-train-data"
)
_VERL = (
    "the file holds the rollout side only, and verl has no switch that writes the trainer's: write the table format "
    "from a batch after its old log-probabilities are computed"
)
_ROLLOUT_MOCK = (
    "the file is a pickled batch of the rollout side only, and no switch of verl or ROLL writes the trainer's: write "
    "the table format from a batch after its old log-probabilities are computed"
)
_MEGATRON = (
    "the file holds the rollout side only, and Megatron-LM never writes the trainer's: audit the run itself, or write "
    "the table format"
)
_NO_LOG_PROBS = (
    "the file holds texts and scores without log-probabilities, and verl has no switch that writes them: write the "
    "table format from a batch after its old log-probabilities are computed"
)


def sentence_on(path: Path) -> str | None:
    """Return the sentence on a dump of the rollout side, None if the file is not one that is known."""
    if torch_file.has_keys(path, "rollout_id", "samples"):
        return _SLIME
    if torch_file.has_keys(path, "tensordict", "global_steps"):
        return _VERL
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head[:1] == b"\x80" and b"DataProto" in head:
        return _ROLLOUT_MOCK
    if head.lstrip()[:1] == b"[" and b'"generation_mask"' in head and b'"logprobs"' in head:
        return _MEGATRON
    if jsonl.has_keys(path, ("input", "output", "score", "step")):
        return _NO_LOG_PROBS
    return None
