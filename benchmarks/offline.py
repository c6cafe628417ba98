"""Tokens a second of an audit of a dump, by format, in one process and in two, beside reading the files alone.

    python -m benchmarks.offline [--tokens 786432]

A dump is audited as `rlk-audit report` does it, with everything but the page. Reading alone is one pass of the
package's own reader, and one pass of the library that the reader stands on; an audit makes a second pass over what it
could not keep.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import processes, timing
from benchmarks.data import draw
from benchmarks.variants import default_kernel
from rlk_audit.allreduce import world_group
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import ReadOptions
from rlk_audit.offline.audit import audit_dump

TESTS = Path(__file__).parents[1] / "tests"
TOKENS = 3 << 18
STEPS = 4
LENGTHS = (1000, 8000)
ROUNDS = 3
PROCESSES = 2
LARGE_TOKENS, LARGE_LENGTH = 1 << 23, 8000
LARGE_FORMATS = ("slime", "table parquet", "table safetensors")
"""Of a dump whose steps are so large that what a step costs beside its tokens matters little."""
FORMATS = (
    "slime", "miles", "nemo-rl", "prime-rl", "skyrl", "table jsonl", "table parquet", "table npz", "table safetensors",
)  # fmt: skip


def write(folder: Path, name: str, tokens: int, length: int) -> list[Path]:
    """Write a dump of some steps by the writers that the tests have."""
    from dump_writers import WRITERS, Given

    writer = WRITERS[name][1]
    samples = max(2, tokens // length // STEPS)
    for step in range(1, STEPS + 1):
        batch = draw(samples * length, seed=step, length=length)
        ids = torch.randint(1, 9000, (samples, length + 4), generator=torch.Generator().manual_seed(step)).tolist()
        nothing = np.zeros(length, dtype=bool)
        given = [
            Given(index, ids[index][:4], ids[index][4:], train, rollout, mask, nothing)
            for index, (train, rollout, mask) in enumerate(
                zip(batch.train.numpy(), batch.rollout.numpy(), batch.mask.numpy(), strict=True)
            )
        ]
        writer(folder, step, given)
    return sorted(path for path in folder.rglob("*") if path.suffix in LIBRARIES)


def _torch_load(path: Path) -> object:
    return torch.load(path, weights_only=True)


def _json_lines(path: Path) -> object:
    with path.open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)) for line in lines)


def _pyarrow(path: Path) -> object:
    from pyarrow import parquet

    return parquet.read_table(path, use_threads=False)


def _numpy(path: Path) -> object:
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays.files]


def _safetensors(path: Path) -> object:
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(path).items()}


LIBRARIES: dict[str, tuple[str, Callable[[Path], object]]] = {
    ".pt": ("torch.load", _torch_load),
    ".jsonl": ("json.loads", _json_lines),
    ".parquet": ("pyarrow", _pyarrow),
    ".npz": ("numpy.load", _numpy),
    ".safetensors": ("safetensors", _safetensors),
    ".pkl": ("read_bytes", Path.read_bytes),
}
"""Ending -> what reads a file without any meaning. SkyRL's pickles need SkyRL's own classes, so only bytes are read."""


def _quiet(path: Path, sentence: str) -> None:
    """Tell nothing."""


def options(name: str) -> ReadOptions:
    return ReadOptions(allow_pickle=name == "skyrl")


def read(folder: Path, name: str) -> int:
    """Return the tokens that one pass of the package's reader gives."""
    parts = files.find([folder], tell=_quiet)
    return sum(len(sample) for part in parts for sample in files.read(part, options(name), _quiet))


def library(paths: Sequence[Path]) -> None:
    for path in paths:
        LIBRARIES[path.suffix][1](path)


def of_one_dump(folder: Path, name: str, tokens: int, length: int) -> dict[str, Any]:
    """Return the times of one dump in one process."""
    paths = write(folder, name, tokens, length)
    runs: dict[str, Callable[[], object]] = {
        "audit": partial(audit_dump, [folder], options=options(name)),
        "reader": partial(read, folder, name),
        "library": partial(library, paths),
    }
    taken = timing.by_turns(runs, ROUNDS, warmup=0)
    return {
        "tokens": read(folder, name),
        "bytes": sum(path.stat().st_size for path in paths),
        "library": LIBRARIES[paths[0].suffix][0],
        "times": timing.summaries(taken),
    }


def shared(folders: dict[str, Path]) -> dict[str, list[float]]:
    """Audit every dump on one rank of a group."""
    runs: dict[str, Callable[[], object]] = {
        name: partial(audit_dump, [folder], options=options(name), group=world_group())
        for name, folder in folders.items()
    }
    dist.barrier()
    return timing.by_turns(runs, ROUNDS, warmup=0)


def of_length(folder: Path, tokens: int, length: int) -> dict[str, Any]:
    folders = {name: folder / name for name in FORMATS}
    found = {name: of_one_dump(where, name, tokens, length) for name, where in folders.items()}
    together = timing.summaries(processes.slowest(processes.group(PROCESSES, partial(shared, folders))))
    for name, times in together.items():
        found[name]["times"]["audit, shared"] = times
    return found


def of_large_steps() -> dict[str, Any]:
    """Return the times of dumps of large steps, one after another, so that one at a time is on the disk."""
    found = {}
    for name in LARGE_FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = of_one_dump(Path(folder), name, LARGE_TOKENS, LARGE_LENGTH)
    return found


def result(tokens: int) -> dict[str, Any]:
    """Return the group's results."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(TESTS))
    lengths: dict[str, Any] = {}
    kernel = default_kernel()  # compiled before anything is timed
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            lengths[str(length)] = of_length(Path(folder), tokens, length)
    made = {"kernel": kernel, "steps": STEPS, "processes": PROCESSES, "lengths": lengths, "large": of_large_steps()}
    return timing.made() | made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a dump")
    print(json.dumps(result(parser.parse_args().tokens)))
