"""Dumps of SkyRL: ``trainer.dump_data_batch``, a pickle of the training batch, which is opened only if allowed."""

from __future__ import annotations

import io
import mmap
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlk_audit.dumps import columns
from rlk_audit.dumps.bounds import HEAD_BYTES, MAX_FILE_BYTES
from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.faults import Faults
from rlk_audit.dumps.naming import single_file_parts
from rlk_audit.dumps.pickle_scan import CODE_IN_FILE, names_in
from rlk_audit.dumps.sample import DumpError, DumpFormat, DumpPart, DumpSample, ReadOptions, Tell

REFUSAL = f"the file is a pickle, and {CODE_IN_FILE}"
NO_TRAIN_SIDE = (
    "the dump has no action_log_probs: SkyRL computes them where it recomputes the policy's log-probabilities"
)
_STEP = re.compile(r"step_?([0-9]+)[^/]*$")
_NEEDED = ("loss_mask", "response_mask")
_RESPONSE = ("action_log_probs", "rollout_logprobs", "loss_mask", "response_mask")
_SEQUENCE = ("sequences", "attention_mask")
_COLUMNS = (*_RESPONSE, *_SEQUENCE)
_CLASSES = ("TrainingInputBatch", "TensorBatch", "TensorList")


class _SkyRL:
    name = "skyrl"

    def recognises(self, path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return head[:1] == b"\x80" and b"TrainingInputBatch" in head

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        return single_file_parts(self.name, paths, _STEP, tell)

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        path = part.paths[0]
        if not options.allow_pickle:
            raise DumpError(REFUSAL)
        batch = _load(path)
        if batch.get("action_log_probs") is None:
            raise DumpError(NO_TRAIN_SIDE)
        with Faults(path, tell) as faults:
            rows = ((f"row {row}", row) for row in range(len(batch["action_log_probs"])))
            yield from faults.samples(rows, lambda row: _sample(batch, row, part.step))


FORMAT: DumpFormat = _SkyRL()


def _sample(batch: Mapping[str, Tensor], row: int, step: int | None) -> DumpSample:
    response = columns.mask(batch["response_mask"][row], "response_mask")  # whatever side is padded
    rollout = batch.get("rollout_logprobs")
    sequences, attention = batch.get("sequences"), batch.get("attention_mask")
    tokens = (
        None
        if sequences is None
        else columns.integers(sequences[row, sequences.shape[1] - len(response) :], "sequences")
    )
    whole = None if attention is None else columns.mask(attention[row], "attention_mask")
    return DumpSample(
        columns.train_log_probs(batch["action_log_probs"][row], "action_log_probs")[response],
        None if rollout is None else columns.log_probs(rollout[row], "rollout_logprobs")[0][response],
        columns.mask(batch["loss_mask"][row], "loss_mask")[response],
        step=step,
        sample_index=row,
        prompt_length=None if whole is None else int(whole.sum() - response.sum()),
        token_ids=None if tokens is None else tokens[response],
    )


# --- the pickle -----------------------------------------------------------------------------------------------------


class _Batch(dict[str, Any]):
    """Stands in for SkyRL's batch, so that SkyRL need not be installed: it takes the state as it is."""

    def __setstate__(self, state: Any) -> None:
        self["state"] = state


def _rebuild(kind: type, state: Any) -> _Batch:
    return _Batch(state=state)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0].startswith("skyrl"):
            if name in _CLASSES:
                return _Batch
            if name == "_rebuild_tensor_batch":
                return _rebuild
        return super().find_class(module, name)


def _load(path: Path) -> dict[str, Tensor]:
    """Return the batch's columns that are there, one row a sample."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DumpError(f"the file must be at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
    with path.open("rb") as file, told_as("the file cannot be unpickled"):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pickled:
            names_in(pickled)
        content = _Unpickler(file).load()
    state = content.get("state") if isinstance(content, _Batch) else None
    if not isinstance(state, Mapping) or not isinstance(state.get("batch_dict"), Mapping):
        raise DumpError("the pickle is no training batch of SkyRL")
    given = {name: value for name, value in state["batch_dict"].items() if name in _COLUMNS and value is not None}
    batch = {name: _tensor(name, value) for name, value in given.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if not set(_NEEDED) <= set(batch) or len({shapes[name] for name in _RESPONSE if name in batch}) > 1:
        raise DumpError(f"the batch must have {', '.join(_NEEDED)}, and {', '.join(_RESPONSE)} of one shape")
    rows, width = shapes["response_mask"]
    if any(shapes[name][0] != rows or shapes[name][1] < width for name in _SEQUENCE if name in batch):
        raise DumpError(f"the batch must have {', '.join(_SEQUENCE)} of its rows, with prompt and response")
    return batch


def _tensor(name: str, value: Any) -> Tensor:
    with told_as(f"the {name} of the batch cannot be read"):
        if isinstance(value, Tensor):
            tensor = value
        elif value.get("format") == "torch":
            tensor = torch.load(io.BytesIO(value["data"]), weights_only=True)
        else:
            array = np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
            tensor = torch.from_numpy(array.copy())
        if tensor.dim() != 2:
            raise DumpError(f"the {name} of the batch must be an array of two axes")
        return tensor
