"""npz and safetensors files of the ``table`` format: arrays over all samples, cut into one record a sample."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlk_audit.dumps import columns
from rlk_audit.dumps.bounds import HEAD_BYTES, MAX_DECODED_BYTES, MAX_FILE_BYTES
from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.packages import need
from rlk_audit.dumps.sample import DumpError

LABEL_PREFIX = "labels/"
"""A label's array is called by this and its name."""

_PER_TOKEN = (
    "train_log_probs", "rollout_log_probs", "mask", "rollout_missing", "token_ids", "rollout_token_ids",
    "token_position",
)  # fmt: skip
_PER_SAMPLE = ("sample_index", "rollout_id", "prompt_length", "step")
_CUTS = ("lengths", "cu_seqlens")
_ZIP_MAGIC = b"PK\x03\x04"
_HEADER_LENGTH = struct.Struct("<Q")

Arrays = dict[str, "npt.NDArray[Any] | Tensor"]
Records = Iterator[tuple[str, Mapping[str, Any]]]


# --- npz ------------------------------------------------------------------------------------------------------------


def is_npz(path: Path, names: Sequence[str]) -> bool:
    """Return whether a file is an npz with one of the arrays; of a damaged one whether its beginning names one."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(_ZIP_MAGIC):
        return False
    try:
        with told_as("damaged"), zipfile.ZipFile(path) as archive:
            found = set(archive.namelist())
        return any(f"{name}.npy" in found for name in names)
    except DumpError:
        return any(f"{name}.npy".encode() in head for name in (*_PER_TOKEN, *_CUTS))


def npz_records(path: Path, faults: Faults) -> Records:
    """Yield (place, columns) of every sample of an npz file; never unpickles.

    Raises:
        DumpError: the file is damaged, beyond the bounds, or its arrays do not fit together.
    """
    with told_as("the npz file is cut off or damaged"), zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
        declared = sum(entry.file_size for entry in entries)
        if declared > MAX_DECODED_BYTES:
            raise DumpError(f"the arrays must be at most {MAX_DECODED_BYTES} bytes, got {declared}")
        arrays: Arrays = {entry.filename.removesuffix(".npy"): _npy(archive, entry) for entry in entries}
    return _cut(arrays, {})


def _npy(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Read one array after a look at its header: what it claims must be what the entry holds."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is None:
            raise DumpError(f"the array {entry.filename} is written in an unknown version of npy")
        shape, fortran, dtype = read_header(file)
        if dtype.kind not in "biufU" or len(shape) > 2 or min(shape, default=0) < 0:
            raise DumpError(f"the array {entry.filename} must hold numbers or text in one or two axes")
        size = dtype.itemsize
        for length in shape:
            size *= int(length)
        if size > entry.file_size:
            raise DumpError(f"the array {entry.filename} claims more bytes than it has")
        data = file.read(entry.file_size)
    if len(data) != size:
        raise DumpError(f"the array {entry.filename} must have {size} bytes, got {len(data)}")
    return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")


# --- safetensors ----------------------------------------------------------------------------------------------------


def is_safetensors(path: Path, names: Sequence[str]) -> bool:
    """Return whether a file begins as safetensors with one of the arrays."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return head[8:].lstrip()[:1] == b"{" and head[8:9] == b"{" and any(f'"{name}"'.encode() in head for name in names)


def safetensors_records(path: Path, faults: Faults) -> Records:
    """Yield (place, columns) of every sample of a safetensors file.

    Raises:
        DumpError: safetensors is not installed, the file is damaged, or its arrays do not fit together.
    """
    safetensors = need("safetensors", path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH.size)
    if size > MAX_FILE_BYTES or len(start) < _HEADER_LENGTH.size or _HEADER_LENGTH.unpack(start)[0] > size:
        raise DumpError("the safetensors file is cut off, damaged or too large")
    with told_as("the safetensors file is damaged"), safetensors.safe_open(path, framework="pt") as tensors:
        metadata = tensors.metadata() or {}
        arrays: Arrays = {name: tensors.get_tensor(name) for name in filter(_is_known, tensors.keys())}
        names = {name: json.loads(metadata[name]) for name in arrays if name in metadata}
    return _cut(arrays, names)


def _is_known(name: str) -> bool:
    return name in (*_PER_TOKEN, *_PER_SAMPLE, *_CUTS) or name.startswith(LABEL_PREFIX)


# --- samples --------------------------------------------------------------------------------------------------------


def _cut(arrays: Arrays, label_names: Mapping[str, Any]) -> Records:
    """Return the records of all samples; arrays are checked here, before the first is taken."""
    train = arrays.get("train_log_probs")
    if train is None:
        raise DumpError("the file has no train_log_probs")
    if train.ndim not in (1, 2):
        raise DumpError("train_log_probs must have one or two axes")
    padded = train.ndim == 2
    spans = _padded_spans(arrays, train.shape[0], train.shape[1]) if padded else _flat_spans(arrays, train.shape[0])
    for name, array in arrays.items():
        per_token = name in _PER_TOKEN or (name.startswith(LABEL_PREFIX) and array.shape == train.shape)
        if per_token and array.shape != train.shape:
            raise DumpError(f"{name} must have the shape of train_log_probs, {tuple(train.shape)}")
        if not per_token and name not in _CUTS and _is_known(name) and tuple(array.shape) != (len(spans),):
            raise DumpError(f"{name} must have one entry a sample, {len(spans)}")
    return _records(arrays, label_names, spans, padded)


def _records(arrays: Arrays, label_names: Mapping[str, Any], spans: Sequence[slice], padded: bool) -> Records:
    train = arrays["train_log_probs"]
    for i, span in enumerate(spans):
        cut = (i, span) if padded else (span,)
        record: dict[str, Any] = {name: arrays[name][cut] for name in _PER_TOKEN if name in arrays}
        record |= {name: arrays[name][i] for name in _PER_SAMPLE if name in arrays}
        record["labels"] = {
            name.removeprefix(LABEL_PREFIX): _named(
                array[cut] if array.shape == train.shape else array[i], label_names.get(name)
            )
            for name, array in arrays.items()
            if name.startswith(LABEL_PREFIX)
        }
        yield f"sample {i}", record


def _named(codes: Any, names: Any) -> Any:
    """Return the names of codes, None for a code without one; text and codes without names stay as they are."""
    if not isinstance(names, list):
        return codes
    values = codes.tolist()
    if isinstance(values, list):
        return [_name_of(code, names) for code in values]
    return _name_of(values, names)


def _name_of(code: Any, names: list[Any]) -> Any:
    return names[code] if isinstance(code, int) and 0 <= code < len(names) else None


def _flat_spans(arrays: Arrays, tokens: int) -> list[slice]:
    """Return the tokens of each sample in flat arrays."""
    lengths = _lengths(arrays)
    if lengths is None:
        raise DumpError("flat arrays need lengths, one a sample, or cu_seqlens, their bounds from 0 on")
    ends = np.cumsum(lengths)
    if np.any(lengths < 0) or (int(ends[-1]) if len(ends) else 0) != tokens:
        raise DumpError(f"the lengths must be of all {tokens} tokens together")
    return [slice(int(end - length), int(end)) for length, end in zip(lengths, ends, strict=True)]


def _padded_spans(arrays: Arrays, samples: int, width: int) -> list[slice]:
    """Return the tokens of each row: up to its length, or else from its first active token to its last."""
    lengths = _lengths(arrays)
    if lengths is not None:
        if len(lengths) != samples or np.any((lengths < 0) | (lengths > width)):
            raise DumpError(f"the lengths must be one a sample, from 0 to {width}")
        return [slice(0, int(length)) for length in lengths]
    mask = arrays.get("mask")
    if mask is None or tuple(mask.shape) != (samples, width):
        raise DumpError("padded arrays need a mask of their shape, or lengths")
    spans = []
    for row in mask:
        try:
            active = np.flatnonzero(columns.mask(row, "mask"))
        except SampleError as error:
            raise DumpError(str(error)) from error
        spans.append(slice(int(active[0]), int(active[-1]) + 1) if len(active) else slice(0, 0))
    return spans


def _lengths(arrays: Arrays) -> npt.NDArray[np.int64] | None:
    try:
        if "lengths" in arrays:
            return columns.integers(arrays["lengths"], "lengths")
        if "cu_seqlens" in arrays:
            bounds = columns.integers(arrays["cu_seqlens"], "cu_seqlens")
            if not len(bounds) or bounds[0] != 0:
                raise DumpError("cu_seqlens must begin with 0")
            return np.diff(bounds)
    except SampleError as error:
        raise DumpError(str(error)) from error
    return None
