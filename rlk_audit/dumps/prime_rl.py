"""Dumps of prime-rl: ``token_exports/step_<N>/rank_<r>.jsonl``, one sequence a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk_audit.dumps import columns, jsonl
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.naming import listed, number_in, single_file_parts
from rlk_audit.dumps.sample import Bools, DumpFormat, DumpPart, DumpSample, ReadOptions, Tell
from rlk_audit.dumps.whole_sequence import response_of

_STEP = re.compile(r"step_([0-9]+)/[^/]*$")
_RANK = re.compile(r"rank_([0-9]+)\.[a-z]+$")
_DONE = "STABLE"


class _PrimeRL:
    name = "prime-rl"

    def recognises(self, path: Path) -> bool:
        return jsonl.has_keys(path, ("trainer_logprobs", "inference_logprobs"))

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        parts = single_file_parts(self.name, paths, _STEP, tell)
        _tell_missing_ranks(parts, tell)
        for folder in dict.fromkeys(part.paths[0].parent for part in parts if part.step is not None):
            if not (folder / _DONE).exists():
                tell(folder, f"the step has no file {_DONE}: its export was not finished when it was read")
        return parts

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        path = part.paths[0]
        rank = number_in(path.name, _RANK)
        with Faults(path, tell) as faults:
            yield from faults.samples(jsonl.records(path, faults), lambda record: _sample(record, part.step, rank))


FORMAT: DumpFormat = _PrimeRL()


def _tell_missing_ranks(parts: Sequence[DumpPart], tell: Tell) -> None:
    """Tell of steps that lack a rank which other steps of the run have: not every rank writes."""
    found: dict[Path, dict[Path, set[int]]] = {}
    for part in parts:
        path = part.paths[0]
        rank = number_in(path.name, _RANK)
        if part.step is not None and rank is not None:
            found.setdefault(path.parent.parent, {}).setdefault(path.parent, set()).add(rank)
    for steps in found.values():
        every = set.union(*steps.values())
        for folder, ranks in steps.items():
            if missing := every - ranks:
                tell(folder, f"the files of the ranks {listed(missing)} are missing, which other steps have")


def _sample(record: Mapping[str, Any], step: int | None, rank: int | None) -> DumpSample:
    if "trainer_logprobs" not in record or "inference_logprobs" not in record:
        raise SampleError("it needs trainer_logprobs and inference_logprobs")
    mask = columns.mask(record.get("loss_mask"), "loss_mask")
    response = response_of(mask, len(mask))
    rollout, missing = columns.log_probs(record["inference_logprobs"], "inference_logprobs")
    tokens = columns.optional_integers(record.get("token_ids"), "token_ids")
    own_step = columns.number(record.get("step"), "step")
    return DumpSample(
        columns.train_log_probs(record["trainer_logprobs"], "trainer_logprobs")[response],
        rollout[response],
        (mask & _sampled(record, mask))[response],
        None if missing is None or not missing[response].any() else missing[response],
        step=step if own_step is None else own_step,
        sample_index=columns.known(columns.number(record.get("export_sequence_idx"), "export_sequence_idx")),
        prompt_length=response.start,
        token_ids=None if tokens is None else tokens[response],
        labels={
            **columns.framework_labels(record),
            "rank": columns.label(record.get("rank", rank), "rank"),
        },
    )


def _sampled(record: Mapping[str, Any], mask: Bools) -> Bools:
    """Return which tokens the engine sampled: those of a pure cross-entropy term have no log-probability of it."""
    weights = [_weights(record, name, mask) for name in ("rl_weights", "ref_kl_weights")]
    if weights[0] is None:
        return mask
    return weights[0] if weights[1] is None else weights[0] | weights[1]


def _weights(record: Mapping[str, Any], name: str, mask: Bools) -> Bools | None:
    """Return where a weight is not zero, None where the record has no such weights."""
    values = record.get(name)
    if values is None or (isinstance(values, list) and all(value is None for value in values)):
        return None
    weights = columns.mask(values, name)
    if len(weights) != len(mask):
        raise SampleError(f"its {name} must be as long as its loss_mask")
    return weights
