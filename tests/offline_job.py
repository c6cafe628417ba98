"""Run by every process of a torchrun: audits each dump of a folder and leaves what the view says, bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from offline_views import everything

from rlk_audit.allreduce import group_place, launched_group
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, ReadOptions
from rlk_audit.offline import plan
from rlk_audit.offline.audit import Asked, audit_dump


def audit(folder: Path, out: Path) -> None:
    with launched_group() as group:
        rank, size = group_place(group)
        room = plan.KEPT_BYTES
        for dump in sorted(folder.iterdir()):
            plan.KEPT_BYTES = 0 if dump.name == "broken" else room  # what fails midway must be read twice
            try:
                view = audit_dump([dump], asked=Asked(exact=True), options=ReadOptions(), group=group)
                told = f"{everything(view)}\n{[problem.split('/')[-1] for problem in view.problems]}"
                shared = f"{[report.metrics for report in view.steps]}"
            except ValueError as error:
                told = shared = f"{type(error).__name__}: {error}"
            if rank == 0:
                (out / f"{dump.name}.{size}").write_text(told)
            (out / f"{dump.name}.{size}.rank{rank}").write_text(shared)


def fail_midway() -> None:
    """Let a part fail in the middle of its second reading, and another be gone by then."""
    reading = files.read
    seen: dict[Path, int] = {}

    def read(part, options, tell):
        path = part.paths[0]
        seen[path] = seen.get(path, 0) + 1
        for number, sample in enumerate(reading(part, options, tell)):
            if path.name == "fails.jsonl" and seen[path] > 1 and number == 2:
                raise DumpError("the disk is gone")
            yield sample

    files.read = read


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fail_midway()
    audit(Path(sys.argv[1]), Path(sys.argv[2]))
