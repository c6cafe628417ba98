"""Files of single ranks: grouped by step, told where one is missing, and loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from rlk_audit.dumps import columns, torch_file
from rlk_audit.dumps.faults import SampleError
from rlk_audit.dumps.naming import in_order, listed, natural_key, number_in
from rlk_audit.dumps.sample import DumpError, DumpPart, ReadOptions, Tell

SIDES = ("log_probs", "rollout_log_probs")
_RANK = re.compile(r"[_/](?:rank[_-]?)?([0-9]+)$")
_STEP = re.compile(r"([0-9]+)[_/](?:rank[_-]?)?[0-9]+$")
_MAX_RANKS = 2**20


@dataclass(frozen=True)
class RankFile:
    """One rank's dump.

    Attributes:
        cp_rank, cp_size: None where the dump does not tell.
        data: the columns of the rank's data-parallel shard.
    """

    path: Path
    step: int | None
    rank: int
    cp_rank: int | None
    cp_size: int | None
    qkv_format: str
    data: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.data["response_lengths"])


def rank_parts(format_name: str, paths: Sequence[Path], every_rank: bool, tell: Tell) -> list[DumpPart]:
    """Group ``<step>_<rank>.pt`` by folder and step, and tell of ranks and steps that are missing.

    Args:
        every_rank: all ranks write, so that a hole between the ranks is a missing file, not just another step's rank.
    """
    groups: dict[tuple[Path, int | None, Path | None], list[Path]] = {}
    for path in paths:
        step = number_in(_name(path), _STEP)
        groups.setdefault((path.parent, step, path if step is None else None), []).append(path)
    parts = [
        DumpPart(format_name, tuple(sorted(files, key=natural_key)), step) for (_, step, _), files in groups.items()
    ]
    _tell_missing_ranks(parts, every_rank, tell)
    return in_order(parts, tell)


def _tell_missing_ranks(parts: Sequence[DumpPart], every_rank: bool, tell: Tell) -> None:
    ranks = {part: _ranks(part) for part in parts if part.step is not None}
    expected: dict[Path, set[int]] = {}
    for part, found in ranks.items():
        expected.setdefault(part.paths[0].parent, set()).update(
            range(max(found, default=-1) + 1) if every_rank else found
        )
    for part, found in ranks.items():
        if missing := expected[part.paths[0].parent] - found:
            tell(part.paths[0].parent, f"step {part.step} lacks the files of the ranks {listed(missing)}")


def _ranks(part: DumpPart) -> set[int]:
    ranks = {number_in(_name(path), _RANK) for path in part.paths}
    return {rank for rank in ranks if rank is not None and rank < _MAX_RANKS}


def _name(path: Path) -> str:
    """Return what tells step and rank: ``<step>_<rank>``, or a folder for each step."""
    return f"{path.parent.name}/{path.stem}"


def load(path: Path, options: ReadOptions) -> RankFile:
    """Load a rank's file.

    Raises:
        DumpError: it cannot be read, or its columns do not have one entry a sample.
    """
    content = torch_file.load(path, options)
    data = content.get("rollout_data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise DumpError("the file has no rollout_data, which a rank's dump must have")
    lengths = {
        name: len(column)
        for name, column in data.items()
        if name in (*SIDES, "tokens", "loss_masks", "total_lengths", "response_lengths") and is_column(column)
    }
    needed = ("tokens", "loss_masks", "total_lengths", "response_lengths")
    if not set(needed) <= set(lengths) or len(set(lengths.values())) > 1:
        raise DumpError(f"rollout_data must have one entry a sample in {', '.join(needed)}")
    for name in SIDES:
        if data.get(name) is not None and name not in lengths:
            raise DumpError(f"{name} must have one entry a sample")
    try:
        rank = columns.number(content.get("rank"), "rank")
        cp_size = columns.number(content.get("cp_size"), "cp_size")
        if cp_size is not None and not 0 < cp_size <= _MAX_RANKS:
            raise SampleError("cp_size must be a number of ranks")
        qkv_format = content.get("qkv_format")
        if not isinstance(qkv_format, str | None):
            raise SampleError("qkv_format must be text")
        return RankFile(
            path,
            columns.number(content.get("rollout_id"), "rollout_id"),
            columns.known(number_in(_name(path), _RANK) if rank is None else rank),
            columns.number(content.get("cp_rank"), "cp_rank"),
            cp_size,
            qkv_format or "thd",
            data,
        )
    except SampleError as error:
        raise DumpError(str(error)) from error


def is_column(column: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether something has one entry a sample."""
    return isinstance(column, (list, tuple, np.ndarray, torch.Tensor)) and getattr(column, "ndim", 1) > 0


def entry(file: RankFile, name: str, row: int) -> int | None:
    """Return a whole number of one sample, None where there is none."""
    column = file.data.get(name)
    try:
        return columns.number(column[row], name) if is_column(column) and row < len(column) else None
    except SampleError:
        return None
