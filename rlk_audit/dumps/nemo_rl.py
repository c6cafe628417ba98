"""Dumps of NeMo-RL: ``train_data_step<N>.jsonl`` in its log folder, one sample a line, arrays over whole sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk_audit.dumps import columns, jsonl
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.naming import single_file_parts
from rlk_audit.dumps.sample import DumpError, DumpFormat, DumpPart, DumpSample, Label, ReadOptions, Tell
from rlk_audit.dumps.whole_sequence import response_of

NO_TRAIN_SIDE = (
    "the dump has no prev_logprobs: NeMo-RL writes them where it computes them, which loss_fn.force_on_policy_ratio "
    "turns off"
)
_STEP = re.compile(r"step_?([0-9]+)\.[a-z]+$")


class _NemoRL:
    name = "nemo-rl"

    def recognises(self, path: Path) -> bool:
        return jsonl.has_keys(
            path, ("generation_logprobs", "token_loss_mask"), ("generation_logprobs", "input_lengths")
        )

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        return single_file_parts(self.name, paths, _STEP, tell)

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        path = part.paths[0]
        with Faults(path, tell) as faults:
            yield from faults.samples(jsonl.records(path, faults), lambda record: _sample(record, part.step))


FORMAT: DumpFormat = _NemoRL()


def _sample(record: Mapping[str, Any], step: int | None) -> DumpSample:
    if record.get("prev_logprobs") is None and "generation_logprobs" in record:
        raise DumpError(NO_TRAIN_SIDE)
    token_mask = columns.mask(record.get("token_loss_mask"), "token_loss_mask")
    length = columns.number(record.get("input_lengths"), "input_lengths")
    length = len(token_mask) if length is None else length
    if not 0 <= length <= len(token_mask):
        raise SampleError("its input_lengths must be at most the length of its arrays")
    response = response_of(token_mask, length)
    sample_mask = record.get("sample_loss_mask", 1)
    kept = columns.mask(sample_mask if isinstance(sample_mask, list) else [sample_mask], "sample_loss_mask").all()
    rollout, missing = columns.log_probs(record.get("generation_logprobs"), "generation_logprobs")
    tokens = columns.optional_integers(record.get("token_ids"), "token_ids")
    return DumpSample(
        columns.train_log_probs(record.get("prev_logprobs"), "prev_logprobs")[response],
        rollout[response],
        token_mask[response] & bool(kept),
        None if missing is None or not missing[response].any() else missing[response],
        step=step,
        sample_index=columns.known(columns.number(record.get("idx"), "idx")),
        prompt_length=response.start,
        token_ids=None if tokens is None else tokens[response],
        labels=_labels(record),
    )


def _labels(record: Mapping[str, Any]) -> dict[str, Label]:
    labels = columns.framework_labels(record)
    agent = record.get("agent_ref")
    if isinstance(agent, Mapping) and isinstance(agent.get("name"), str):
        labels["env"] = agent["name"]
    return labels
