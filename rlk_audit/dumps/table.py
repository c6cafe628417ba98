"""The project's own ``table`` format: JSONL, Parquet, npz or safetensors with one entry a sample or a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit.dumps import columns, jsonl, table_arrays, table_parquet
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.naming import single_file_parts
from rlk_audit.dumps.sample import Bools, DumpFormat, DumpPart, DumpSample, Floats, Label, ReadOptions, Tell
from rlk_audit.nonfinite import LOG_PROBS, NONFINITE, nonfinite_key

_STEP = re.compile(r"step_?-?([0-9]+)[^/]*$")
_DTYPES = {"float16": np.float16, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}

Records = Callable[[Path, Faults], Iterator[tuple[str, Mapping[str, Any]]]]


class _Table:
    name = "table"

    def recognises(self, path: Path) -> bool:
        return _records_of(path) is not None

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        return single_file_parts(self.name, paths, _STEP, tell)

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        path = part.paths[0]
        records = _records_of(path) or jsonl.records
        with Faults(path, tell) as faults:
            yield from faults.samples(records(path, faults), lambda record: _sample(record, part.step))


FORMAT: DumpFormat = _Table()


def _records_of(path: Path) -> Records | None:
    """Return what reads the records of a file, None if it is no table; names of files do not matter."""
    if table_parquet.recognises(path, LOG_PROBS):
        return table_parquet.records
    if table_arrays.is_npz(path, LOG_PROBS):
        return table_arrays.npz_records
    if table_arrays.is_safetensors(path, LOG_PROBS):
        return table_arrays.safetensors_records
    return jsonl.records if jsonl.has_keys(path, *((name,) for name in LOG_PROBS)) else None


def _sample(record: Mapping[str, Any], step: int | None) -> DumpSample:
    if record.get("train_log_probs") is None:
        raise SampleError("it has no train_log_probs")
    train = _restored(record, "train_log_probs", columns.train_log_probs(record["train_log_probs"], "train_log_probs"))
    rollout, missing = _rollout(record)
    mask = record.get("mask")
    own_step = columns.number(record.get("step"), "step")
    return DumpSample(
        train,
        rollout,
        np.ones(len(train), dtype=np.bool_) if mask is None else columns.mask(mask, "mask"),
        missing,
        step=step if own_step is None else own_step,
        sample_index=_id(record, "sample_index"),
        rollout_id=_id(record, "rollout_id"),
        prompt_length=columns.number(record.get("prompt_length"), "prompt_length"),
        token_ids=columns.optional_integers(record.get("token_ids"), "token_ids"),
        rollout_token_ids=columns.optional_integers(record.get("rollout_token_ids"), "rollout_token_ids"),
        token_position=columns.optional_integers(record.get("token_position"), "token_position"),
        labels=_labels(record),
    )


def _rollout(record: Mapping[str, Any]) -> tuple[Floats | None, Bools | None]:
    if record.get("rollout_log_probs") is None:
        return None, None
    rollout, missing = columns.log_probs(record["rollout_log_probs"], "rollout_log_probs")
    told = record.get("rollout_missing")
    if told is not None:
        marked = columns.mask(told, "rollout_missing")
        if len(marked) != len(rollout):
            raise SampleError("its rollout_missing must be as long as its rollout_log_probs")
        missing = marked if missing is None else missing | marked
    if missing is not None:
        # A place that holds NaN or an infinity is written as null beside its name, and is not missing.
        missing = missing.copy()
        missing[list(_nonfinite_places(record, "rollout_log_probs", len(rollout)))] = False
    rollout = _restored(record, "rollout_log_probs", rollout)
    return rollout, missing if missing is not None and missing.any() else None


def _restored(record: Mapping[str, Any], name: str, values: Floats) -> Floats:
    """Return values as they were before strict JSON: in their dtype, NaN and infinities in their places."""
    dtype = _DTYPES.get(str(record.get(f"{name}_dtype")))
    values = values.astype(values.dtype if dtype is None else dtype)
    for place, value in _nonfinite_places(record, name, len(values)).items():
        values[place] = value
    return values


def _nonfinite_places(record: Mapping[str, Any], name: str, length: int) -> dict[int, float]:
    told = record.get(nonfinite_key(name))
    if told is None:
        return {}
    if not isinstance(told, Mapping) or not set(told) <= set(NONFINITE):
        raise SampleError("its places of NaN and infinities must be lists by NaN, Infinity and -Infinity")
    places = {name: columns.integers(found, "the places of NaN and infinities") for name, found in told.items()}
    if any(np.any((found < 0) | (found >= length)) for found in places.values()):
        raise SampleError("its places of NaN and infinities must be inside its arrays")
    return {int(place): NONFINITE[kind] for kind, found in places.items() for place in found}


def _id(record: Mapping[str, Any], name: str) -> int:
    """Return an id of a sample; -1 also where its tokens have several."""
    value = record.get(name)
    if isinstance(value, (list, np.ndarray)):
        several = set(columns.integers(value, name).tolist())
        return several.pop() if len(several) == 1 else columns.UNKNOWN
    return columns.known(columns.number(value, name))


def _labels(record: Mapping[str, Any]) -> dict[str, Label]:
    given = record.get("labels")
    given = (
        dict(given) if isinstance(given, list) and all(isinstance(p, tuple) and len(p) == 2 for p in given) else given
    )
    if given is not None and not isinstance(given, Mapping):
        raise SampleError("its labels must be an object of names and labels")
    labels = {str(name): columns.label(value, str(name)) for name, value in (given or {}).items()}
    if record.get("rank") is not None:
        labels.setdefault("rank", columns.label(record["rank"], "rank"))
    return labels
