"""Dumps of slime: ``--save-debug-train-data``, or ``--dump-details``, in its second layout and in the older one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk_audit.dumps import columns, shards, torch_file
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.naming import in_order, number_in
from rlk_audit.dumps.rank_files import rank_parts
from rlk_audit.dumps.sample import DumpError, DumpFormat, DumpPart, DumpSample, ReadOptions, Tell

VERSION = 2
NO_TRAIN_SIDE = (
    "the dump has no log_probs of the trainer: slime writes them with --get-mismatch-metrics, and not with "
    "--use-rollout-logprobs"
)
_STEP = re.compile(r"([0-9]+)(?:_[0-9]+)?\.[a-z]+$")


class _Slime:
    name = "slime"

    def recognises(self, path: Path) -> bool:
        if torch_file.has_keys(path, "format_version", "samples", "rollout_id"):
            return True
        return _is_per_rank(path) and not torch_file.has_keys(path, "cp_size")

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        per_rank: list[Path] = []
        alone: list[Path] = []
        for path in paths:
            (per_rank if _is_per_rank(path) else alone).append(path)
        whole = [DumpPart(self.name, (path,), number_in(path.name, _STEP)) for path in alone]
        return in_order(whole, tell) + rank_parts(self.name, per_rank, False, tell)

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        if _is_per_rank(part.paths[0]):
            return shards.read_shards(part, options, tell, NO_TRAIN_SIDE)
        return _read_whole(part, options, tell)


FORMAT: DumpFormat = _Slime()


def _is_per_rank(path: Path) -> bool:
    return torch_file.has_keys(path, "rollout_data", "response_lengths")


def _read_whole(part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
    path = part.paths[0]
    content = torch_file.load(path, options)
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, (list, tuple)):
        raise DumpError("the dump must be a mapping with a list of samples")
    try:
        version = columns.number(content.get("format_version"), "format_version")
        step = columns.number(content.get("rollout_id"), "rollout_id")
    except SampleError as error:
        raise DumpError(str(error)) from error
    if version != VERSION:
        raise DumpError(f"the dump must have the format_version {VERSION}")
    if samples and not any(isinstance(sample, dict) and sample.get("log_probs") is not None for sample in samples):
        raise DumpError(NO_TRAIN_SIDE)
    with Faults(path, tell) as faults:
        records = ((f"sample {place}", sample) for place, sample in enumerate(samples))
        yield from faults.samples(records, lambda sample: _sample(sample, step, content.get("rank")))


def _sample(record: Any, step: int | None, rank: Any) -> DumpSample:
    if not isinstance(record, Mapping):
        raise SampleError("it is no mapping")
    mask = columns.mask(record.get("loss_masks"), "loss_masks")
    response = columns.number(record.get("response_lengths"), "response_lengths")
    tokens = columns.optional_integers(record.get("tokens"), "tokens")
    response = len(mask) if response is None else response
    if tokens is not None and not 0 <= response <= len(tokens):
        raise SampleError("its response_lengths must be at most the number of its tokens")
    rollout = missing = None
    if record.get("rollout_log_probs") is not None:
        rollout, missing = columns.log_probs(record["rollout_log_probs"], "rollout_log_probs")
    return DumpSample(
        columns.train_log_probs(record.get("log_probs"), "log_probs"),
        rollout,
        mask,
        missing,
        step=step,
        sample_index=columns.known(columns.number(record.get("sample_index"), "sample_index")),
        rollout_id=columns.known(columns.number(record.get("rollout_id"), "rollout_id")),
        prompt_length=None if tokens is None else len(tokens) - response,
        token_ids=None if tokens is None else tokens[len(tokens) - response :],
        labels={
            **columns.framework_labels(record),
            "rank": columns.label(record.get("data_parallel_rank", rank), "rank"),
        },
    )
