"""Layouts of Megatron: groups of a rank grid behind a stand-in for its parallel_state."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import torch.distributed as dist
from slime_harness import Place

AXES = ("tp", "cp", "dp", "pp")
LAYOUTS = {
    1: [(1, 1, 1, 1)],
    2: [(1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (1, 1, 1, 2)],
    4: [(1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 1, 2)],
}[int(os.environ.get("WORLD_SIZE", "1"))]
"""Sizes of tp, cp, dp and pp, in the order in which Megatron numbers ranks."""


def name_of(sizes: tuple[int, ...]) -> str:
    return "x".join(f"{axis}{size}" for axis, size in zip(AXES, sizes, strict=True))


def coordinates(rank: int, sizes: tuple[int, ...]) -> dict[str, int]:
    found = {}
    for axis, size in zip(AXES, sizes, strict=True):
        rank, found[axis] = divmod(rank, size)
    return found


def place_of(sizes: tuple[int, ...]) -> Place:
    """Where this rank stands."""
    at = coordinates(dist.get_rank(), sizes)
    return Place(at["dp"], sizes[2], at["cp"], sizes[1], at["pp"] == sizes[3] - 1)


@functools.cache
def parallel_state(sizes: tuple[int, ...]) -> SimpleNamespace:
    """Collective: every rank must call this. Real groups behind the functions that Megatron's parallel_state has."""
    groups = {name: _group(sizes, name.split("_")) for name in ("dp", "dp_cp", "cp", "tp", "pp", "tp_pp")}
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group=lambda with_context_parallel=False: groups["dp_cp" if with_context_parallel else "dp"],
        get_context_parallel_group=lambda: groups["cp"],
        get_tensor_model_parallel_group=lambda: groups["tp"],
        get_pipeline_model_parallel_group=lambda: groups["pp"],
        get_model_parallel_group=lambda: groups["tp_pp"],
    )


def _group(sizes: tuple[int, ...], axes: list[str]) -> dist.ProcessGroup:
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dist.get_world_size()):
        at = coordinates(rank, sizes)
        members.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
    made = [dist.new_group(ranks) for ranks in members.values()]  # every rank makes all of them
    return next(one for one in made if dist.get_rank(one) >= 0)
