"""Per-sample metadata through rollout partitions: which engine, weights and contract each sample came from.

    parts = partition_metadata(rollout_data, partitions)          # where samples are dealt to data-parallel ranks
    for data, part in zip(rank_data, parts, strict=True):
        data.update(part)
    ...
    log_rollout_metrics(strip_audit_keys(rollout_data))           # on a rank: metadata is nothing to average
    fields = batch_fields(rollout_data, config, trainer_version)  # on a rank: what the collector is told

Rollout data is a dict of columns with one entry a sample: lists, tensors or arrays. Every key that the audit adds
begins with ``rlk_audit_``. Nothing here changes what it is given.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlk_audit.config import AuditConfig

KEY_PREFIX = "rlk_audit_"
FIELDS = (
    "sample_index",
    "rollout_id",
    "engine",
    "weight_version",
    "turn",
    "model_name",
    "backend_id",
    "contract_id",
    "batch_layout_fingerprint",
    "provenance_fingerprint",
)
"""The fields that are carried unless others are asked for."""
PLURALS = {"sample_index": "sample_indices", "rollout_id": "rollout_ids", "weight_version": "weight_versions"}
"""Field -> the key under which frameworks keep its column, where that is not the field's own name."""
SAMPLE_RECORDS = "metadata"
"""Key of the column that holds a mapping of its own for each sample; a field without a column is looked up there."""
WEIGHT_LAG = "weight_lag"
"""The label that follows from ``weight_version``: optimizer updates since the rollout."""
UNKNOWN = -1

Metadata = Mapping[str, Any]


def audit_key(field: str) -> str:
    """Return the key of a field in rollout data."""
    return KEY_PREFIX + field


def audit_keys(rollout_data: Metadata) -> tuple[str, ...]:
    """Return the keys that belong to the audit: a rollout metric must not be made of them."""
    return tuple(key for key in rollout_data if isinstance(key, str) and key.startswith(KEY_PREFIX))


def strip_audit_keys(rollout_data: Metadata) -> dict[str, Any]:
    """Return a shallow copy without the audit's keys."""
    ours = set(audit_keys(rollout_data))
    return {key: column for key, column in rollout_data.items() if key not in ours}


def partition_metadata(
    rollout_data: Metadata, partitions: Sequence[Iterable[int]], fields: Sequence[str] = FIELDS
) -> list[dict[str, Any]]:
    """Return for each partition the audit's columns of its samples, in the partition's order.

    A field is looked up under ``rlk_audit_<field>``, ``<field>``, the plural in PLURALS, and in the per-sample mappings
    of the ``metadata`` column, in this order; so a part can be partitioned again, into micro-batches. A field found
    nowhere has no key, and every partition has the same keys, the empty ones too. Lists stay lists, tensors tensors,
    arrays arrays; a single value stands for all samples. ``sample_index``, if not given, is the place in
    ``rollout_data``.

    Args:
        rollout_data: columns with one entry a sample; an entry of None is a sample that lacks the field.
        partitions: for each data-parallel rank the places of its samples, or a mask of them; a sample may be in none or
            in several.
        fields: the names to carry, such as further labels of ``AuditConfig.breakdowns``.

    Raises:
        ValueError, TypeError: two columns differ in length, or a place is not in them, or is no integer.
    """
    columns = {field: column for field in fields if (column := _column(rollout_data, field)) is not None}
    places = [_places(partition) for partition in partitions]
    _check_lengths(columns, places)
    parts = [{audit_key(field): _pick(column, part) for field, column in columns.items()} for part in places]
    if "sample_index" in fields and "sample_index" not in columns:
        for part, metadata in zip(places, parts, strict=True):
            metadata[audit_key("sample_index")] = list(part)
    return parts


def batch_fields(
    metadata: Metadata, config: AuditConfig, trainer_version: int | None = None, *, per_row: bool = False
) -> dict[str, Any]:
    """Return what the collector is told of samples: ``sample_index, rollout_id, updates_since_rollout, labels``.

    They are int64 tensors [samples] for the constructors of TokenBatch, or [samples, 1] for ``Collector.update`` of
    arrays [samples, length]. What is not known is -1: a sample without a value, a name that the configuration does not
    declare, a version that is no number or newer than the trainer's. A field that no sample has is left out.

    Args:
        metadata: columns under the audit's keys, as ``partition_metadata`` returns them; other keys are ignored.
        config: its ``breakdowns`` name the labels and their codes. A text is the code of that name; a whole number is
            a code itself, unless a declared name is a whole number: then it is matched by its digits. ``weight_lag``,
            if it has no column of its own, is ``updates_since_rollout``.
        trainer_version: weight version that scores. Without it ``updates_since_rollout`` is left out. Of a sample that
            several versions wrote, the oldest counts, so that 0 is never claimed of a mixed one.
        per_row: give the tensors a last axis of 1.

    Raises:
        TypeError: a column is a single value.
    """

    def tensor(values: list[int]) -> Tensor:
        column = torch.tensor(values, dtype=torch.int64, device="cpu")
        return column[:, None] if per_row else column

    trainer_version = None if trainer_version is None else operator.index(trainer_version)
    ids: dict[str, list[int]] = {}
    for name in ("sample_index", "rollout_id"):
        values = _values(metadata, name)
        if values is not None:
            ids[name] = [_integer(value) for value in values]
    updates = _updates_since_rollout(metadata, trainer_version)
    if updates is not None:
        ids["updates_since_rollout"] = [UNKNOWN if value is None else value for value in updates]
    labels = {}
    for name in config.caller_labels:
        given = _label_values(metadata, name, trainer_version)
        if given is not None:
            codes = _codes(config.breakdowns[name])
            labels[name] = tensor([codes(value) for value in given])
    return {name: tensor(values) for name, values in ids.items()} | {"labels": labels}


def missing_fields(
    metadata: Metadata, config: AuditConfig, trainer_version: int | None = None, required: Iterable[str] = ()
) -> tuple[str, ...]:
    """Return the fields asked for that are absent, or None on some of the samples.

    Asked for are the labels of ``config.breakdowns`` and ``required``. A label that is absent altogether sets the
    step's ``missing_metadata`` by itself; one that only some samples lack, or a required field that is no label, does
    so by ``if missing_fields(...): collector.flag("missing_metadata")``. A name that is given but not declared is
    unknown, not missing: see ``undeclared_names``.
    """
    asked = dict.fromkeys((*config.caller_labels, *required))
    found = {name: _label_values(metadata, name, trainer_version) for name in asked}
    return tuple(name for name, values in found.items() if values is None or any(value is None for value in values))


def undeclared_names(
    metadata: Metadata, config: AuditConfig, trainer_version: int | None = None
) -> dict[str, tuple[str, ...]]:
    """Return label -> what its samples have and ``config.breakdowns`` does not declare, so that it counts as unknown.

    A label without such values has no key. None and -1 mean unknown, and are none of them.
    """
    undeclared = {}
    for name in config.caller_labels:
        codes = _codes(config.breakdowns[name])
        values = [
            value for value in _label_values(metadata, name, trainer_version) or () if value not in (None, UNKNOWN)
        ]
        told = dict.fromkeys(str(value) for value in values if codes(value) == UNKNOWN)
        if told:
            undeclared[name] = tuple(told)
    return undeclared


# --- columns --------------------------------------------------------------------------------------------------------


def _column(rollout_data: Metadata, field: str) -> Any:
    """Return the field's column, or one value for all samples, or None where it is absent."""
    for key in (audit_key(field), field, PLURALS.get(field)):
        if key is not None and rollout_data.get(key) is not None:
            return rollout_data[key]
    records = rollout_data.get(SAMPLE_RECORDS)
    if not isinstance(records, (list, tuple)):
        return None
    values = [record.get(field) if isinstance(record, Mapping) else None for record in records]
    return None if all(value is None for value in values) else values


def _is_column(column: Any) -> bool:
    if isinstance(column, (Tensor, np.ndarray)):
        return column.ndim > 0
    return isinstance(column, (list, tuple))


def _check_lengths(columns: Mapping[str, Any], places: Sequence[Sequence[int]]) -> None:
    lengths = {field: len(column) for field, column in columns.items() if _is_column(column)}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{field} {length}" for field, length in lengths.items())
        raise ValueError(f"metadata columns must have one entry a sample, got the lengths {told}")
    used = [place for part in places for place in part]
    samples = min(lengths.values(), default=max(used, default=0) + 1)
    outside = [place for place in used if not 0 <= place < samples]
    if outside:
        raise ValueError(f"a partition must hold places from 0 to {samples - 1}, got {outside[0]}")


def _places(partition: Iterable[Any]) -> list[int]:
    """Return a partition's places; a mask of booleans means the places where it holds."""
    given = [_plain(place) for place in partition]
    if given and all(isinstance(place, bool) for place in given):
        return [place for place, chosen in enumerate(given) if chosen]
    return [operator.index(place) for place in given]


def _pick(column: Any, places: list[int]) -> Any:
    if not _is_column(column):
        return [_plain(column)] * len(places)
    if isinstance(column, Tensor):
        return column[torch.tensor(places, dtype=torch.int64, device=column.device)]
    if isinstance(column, np.ndarray):
        return column[np.array(places, dtype=np.int64)]
    return [column[place] for place in places]


def _values(metadata: Metadata, field: str) -> list[Any] | None:
    """Return a field's entries as plain values, or None where it is absent."""
    column = metadata.get(audit_key(field))
    if column is None:
        return None
    if not _is_column(column):
        raise TypeError(f"{audit_key(field)} must be a list, a tensor or an array, got {type(column).__name__}")
    return [_plain(value) for value in (column if isinstance(column, (list, tuple)) else column.tolist())]


def _plain(value: Any) -> Any:
    """Take a value out of a tensor or an array; what holds one value per token becomes a list."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value


# --- what values mean -----------------------------------------------------------------------------------------------


def _integer(value: Any) -> int:
    """Read a whole number that int64 can hold, also in a text; anything else is UNKNOWN."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if known else UNKNOWN


def _codes(names: Sequence[str]) -> Callable[[Any], int]:
    """Return what gives the code of a label's value; a number is a code itself, where no name could be meant by it."""
    by_name = {name: code for code, name in enumerate(names)}
    are_numbers = any(map(str.isdecimal, names))

    def code(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and not are_numbers:
            return value if 0 <= value < len(names) else UNKNOWN
        return UNKNOWN if value is None else by_name.get(str(value), UNKNOWN)

    return code


def _oldest_version(value: Any) -> int:
    """Return the oldest of a sample's weight versions, UNKNOWN if one of them is."""
    versions = value if isinstance(value, (list, tuple)) else [value]
    return min((_integer(version) for version in versions), default=UNKNOWN)


def _updates_since_rollout(metadata: Metadata, trainer_version: int | None) -> list[int | None] | None:
    """Return each sample's number of updates, None where it has no version; None where nothing is known of any."""
    versions = _values(metadata, "weight_version")
    if versions is None or trainer_version is None:
        return None

    def updates(value: Any) -> int | None:
        if value is None or value == []:
            return None
        version = _oldest_version(value)
        return trainer_version - version if 0 <= version <= trainer_version else UNKNOWN

    return [updates(value) for value in versions]


def _label_values(metadata: Metadata, name: str, trainer_version: int | None) -> Sequence[Any] | None:
    values = _values(metadata, name)
    return _updates_since_rollout(metadata, trainer_version) if values is None and name == WEIGHT_LAG else values
