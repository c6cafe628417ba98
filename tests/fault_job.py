"""Runs kinds of faults, one after another, on each rank that torchrun starts, and leaves what this rank saw of each.

python fault_job.py FOLDER NAME...
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from fault_kinds import KINDS, Kind, Place


class Kept(logging.Handler):
    """The sentences that the package logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def outcome(kind: Kind, place: Place) -> dict[str, str | None]:
    """What this rank saw, or where an assertion of its failed."""
    try:
        told, error = kind.act(place), None
    except Exception:
        told, error = None, traceback.format_exc()
    return {"told": told, "error": error}


def main(folder: Path, names: list[str]) -> int:
    """Return the exit code: 1 where a rank was to end, or where something is wrong."""
    kept = Kept()
    logging.getLogger("rlk_audit").addHandler(kept)
    kinds = [KINDS[name] for name in names]
    dist.init_process_group("gloo", timeout=timedelta(seconds=max(kind.timeout for kind in kinds)))
    for kind in kinds:
        kept.messages.clear()
        place = Place(dist.get_rank(), dist.get_world_size(), folder / kind.name, kept.messages)
        place.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        seen = outcome(kind, place)
        (place.folder / f"rank{place.rank}.json").write_text(json.dumps(seen | {"log": kept.messages}))
        if seen["error"] or kind.alone:  # the others may stand in another collective
            return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2:])
    logging.shutdown()
    os._exit(code) if code else sys.exit(0)
