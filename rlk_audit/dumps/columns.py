"""Values of a dump, whatever kind they came in, turned into the arrays of a sample or refused with a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit.dumps.bounds import MAX_SAMPLE_TOKENS
from rlk_audit.dumps.faults import SampleError
from rlk_audit.dumps.sample import Bools, Floats, Ints, Label

UNKNOWN = -1

_INT64 = np.iinfo(np.int64)
_LABEL_KEYS = {
    "engine": ("engine",),
    "weight_version": ("weight_version", "weight_versions"),
    "env": ("env", "env_name", "source_name"),
}
"""Label -> the keys under which frameworks keep it."""


def log_probs(values: Any, name: str) -> tuple[Floats, Bools | None]:
    """Return log-probabilities (float [n], in the dtype they came in) and where there is none, if anywhere.

    Raises:
        SampleError: ``values`` is no flat array or list of numbers and None.
    """
    array, missing = _array(values, name)
    if array.dtype.kind in "iu":  # whole numbers are meant as log-probabilities all the same
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise SampleError(f"{name} must be numbers, got {array.dtype.name}")
    if array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return array, missing


def train_log_probs(values: Any, name: str) -> Floats:
    """Return log-probabilities of the trainer; NaN where there is none, for JSON writes NaN and infinities so."""
    array, missing = log_probs(values, name)
    if missing is not None:
        array = array.copy()
        array[missing] = np.nan
    return array


def mask(values: Any, name: str) -> Bools:
    """Return a mask: bool [n], active where a value is not zero.

    Raises:
        SampleError: ``values`` is no flat array or list of numbers or booleans.
    """
    array, missing = _array(values, name)
    if missing is not None or array.dtype.kind not in "biuf" or np.isnan(array).any():
        raise SampleError(f"{name} must be numbers or booleans")
    return np.asarray(array != 0)


def integers(values: Any, name: str) -> Ints:
    """Return whole numbers: int64 [n], -1 where there is none.

    Raises:
        SampleError: ``values`` is no flat array or list of whole numbers and None.
    """
    array, missing = _array(values, name)
    if array.dtype.kind == "f" and np.all(array == np.rint(array)) and np.all(np.abs(array) < 2**53):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and np.any(array > _INT64.max)):
        raise SampleError(f"{name} must be whole numbers of 64 bits")
    whole = array.astype(np.int64)
    return whole if missing is None else np.where(missing, UNKNOWN, whole)


def optional_integers(values: Any, name: str) -> Ints | None:
    """Return whole numbers, None for None."""
    return None if values is None else integers(values, name)


def number(value: Any, name: str) -> int | None:
    """Return one whole number, None for None.

    Raises:
        SampleError: it is no whole number of 64 bits.
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and _size(value) == 1:
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not _INT64.min <= value <= _INT64.max:
        raise SampleError(f"{name} must be a whole number of 64 bits")
    return value


def known(value: int | None) -> int:
    """Return an id; -1 for an unknown one."""
    return UNKNOWN if value is None else value


def label(value: Any, name: str) -> Label:
    """Return a label: one name, or a list with one a token; numbers stand for their digits.

    Raises:
        SampleError: it is neither text, a number, None nor a flat list of those.
    """
    if _is_one_number(value):  # common, and names are slow to make
        return [str(value[0])] * value.size
    if isinstance(value, (np.ndarray, np.generic, Tensor)) and _size(value) <= MAX_SAMPLE_TOKENS:
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        if len(value) > MAX_SAMPLE_TOKENS:
            raise SampleError(f"the label {name} has more than {MAX_SAMPLE_TOKENS} entries")
        return _names(value, name)
    return _name(value, name)


def _is_one_number(value: Any) -> bool:
    """Return whether a value is an array of one whole number, however often."""
    if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iu":
        return False
    return 0 < value.size <= MAX_SAMPLE_TOKENS and bool((value == value[0]).all())


def _names(values: list[Any] | tuple[Any, ...], name: str) -> list[str | None]:
    """Return the names of all entries; each different one is looked at once, since there is one a token."""
    kinds = set(map(type, values))
    if kinds <= {str, type(None)}:
        return list(values)
    if kinds <= {int} or kinds <= {float}:  # 1, 1.0 and True are one key
        known_names = {value: _name(value, name) for value in set(values)}
        return list(map(known_names.__getitem__, values))
    return [_name(value, name) for value in values]


def framework_labels(record: Mapping[str, Any]) -> dict[str, Label]:
    """Return the labels that frameworks keep with a sample under keys of their own."""
    labels: dict[str, Label] = {}
    for name, keys in _LABEL_KEYS.items():
        value = next((record[key] for key in keys if record.get(key) is not None), None)
        if name == "weight_version" and isinstance(value, (list, tuple)):
            value = _oldest(value)
        if value is not None:
            labels[name] = label(value, name)
    return labels


def _size(values: npt.NDArray[Any] | np.generic | Tensor) -> int:
    return values.numel() if isinstance(values, Tensor) else values.size


def _oldest(versions: list[Any] | tuple[Any, ...]) -> Any:
    """Return the oldest of the versions that sampled one response."""
    try:
        return min(versions, key=int, default=None)
    except (TypeError, ValueError):
        return versions[0]


def _name(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    raise SampleError(f"the label {name} must be text or numbers, got {type(value).__name__}")


def _array(values: Any, name: str) -> tuple[npt.NDArray[Any], Bools | None]:
    """Return a flat array and where it has None, if anywhere."""
    missing = None
    if isinstance(values, Tensor):
        array = _of_tensor(values, name)
    elif isinstance(values, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(values)
        array = values.filled(0)
    elif isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, (list, tuple)):
        array, missing = _of_list(values, name)
    else:
        raise SampleError(f"{name} must be an array, got {type(values).__name__}")
    if array.ndim != 1:
        raise SampleError(f"{name} must be one value a token, got an array of {array.ndim} axes")
    if len(array) > MAX_SAMPLE_TOKENS:
        raise SampleError(f"{name} has more than {MAX_SAMPLE_TOKENS} values")
    return array, missing if missing is not None and missing.any() else None


def _of_tensor(tensor: Tensor, name: str) -> npt.NDArray[Any]:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        raise SampleError(f"{name} must be a plain tensor")
    if tensor.numel() > MAX_SAMPLE_TOKENS:  # before the copy: a tensor of stride 0 has more values than bytes
        raise SampleError(f"{name} has more than {MAX_SAMPLE_TOKENS} values")
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)  # numpy has no bfloat16 or float8; float32 holds their values exactly
    return np.array(tensor.numpy(), copy=True)


def _of_list(values: list[Any] | tuple[Any, ...], name: str) -> tuple[npt.NDArray[Any], Bools | None]:
    kinds = set(map(type, values))
    odd = kinds - {int, float, bool, type(None)}
    if odd or (bool in kinds and kinds != {bool}):
        raise SampleError(f"{name} must be numbers or null, got {min((odd or {bool}), key=str).__name__}")
    missing = np.array([value is None for value in values]) if type(None) in kinds else None
    plain = [0 if value is None else value for value in values] if missing is not None else values
    dtype = np.bool_ if kinds == {bool} else np.float64 if float in kinds or not kinds else np.int64
    if kinds == {type(None)}:
        dtype = np.float64
    try:
        return np.array(plain, dtype=dtype), missing
    except OverflowError as error:
        raise SampleError(f"{name} must be numbers of 64 bits") from error
