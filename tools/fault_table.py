"""Run every kind of fault under torchrun and write what was seen.

    python tools/fault_table.py docs/faults.md

Ends with 1, and writes nothing, if a rank found something wrong.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fault_kinds import KINDS, Kind
from fault_launch import RANKS, Launch, launch

HEAD = """# Faults

What happens when something goes wrong in an audited run, as seen under torchrun on {ranks} ranks with gloo. `make
faults` writes this page; `tests/test_faults.py` runs the same as a test.

In each kind, every rank that goes on compares every report, also those of the steps before and after the fault, and the
run's total with the brute-force oracle of the tests. Unless the row says otherwise, every report is found in
`audit.jsonl`, whole and once. Where a kind is about data, it is that of the last rank in the second of three steps;
rank 0 writes. `n of m active tokens are compared` is of the whole group. A rank that gets a signal does so in step 4,
while the others wait for it in the reduction; the timeout of the process group is 5 s then.

| kind | what is done | what happens |
| --- | --- | --- |
"""
NOISE = (
    (re.compile(r"\[/\S+\] "), ""),  # where in gloo's source
    (re.compile(r" \[[\d.:a-f]+\]:\d+"), ""),  # an address
    (re.compile(r" This is typically caused by .*?(?=[)\"])"), ""),
    (re.compile(r"'/\S[^']*/(?=[^'/]+')"), "'.../"),
)


def readable(told: str) -> str:
    """A sentence without what is another in each run, and without what would end a cell."""
    for pattern, text in NOISE:
        told = pattern.sub(text, told)
    return told.replace("|", "\\|")


def row(kind: Kind, launched: Launch) -> str:
    """One line of the table.

    Raises:
        SystemExit: a rank found something wrong.
    """
    left = {rank: seen for rank, seen in enumerate(launched.seen[kind.name]) if seen is not None}
    wrong = [seen["error"] for seen in left.values() if seen["error"]]
    if wrong or not left or launched.left_over or launched.code != int(kind.alone):
        sys.exit(f"{kind.name}: {wrong}\n{launched.log}")
    told: dict[str, list[int]] = {}
    for rank, seen in left.items():
        told.setdefault(readable(seen["told"]), []).append(rank)
    everybody = len(told) == 1 and len(left) == RANKS
    texts = [text if everybody else f"{named(ranks)}: {text}" for text, ranks in told.items()]
    if kind.alone:
        texts.append(f"torchrun ends with {launched.code}, no process is left")
    return f"| {kind.name} | {kind.done} | {'; '.join(texts)} |\n"


def named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + " and ".join(map(str, ranks))


def launched(names: list[str]) -> Launch:
    with tempfile.TemporaryDirectory() as folder:
        return launch(names, Path(folder))


def main(path: Path) -> None:
    together = launched([name for name, kind in KINDS.items() if not kind.alone])
    rows = [row(kind, launched([name]) if kind.alone else together) for name, kind in KINDS.items()]
    path.write_text(HEAD.format(ranks=RANKS) + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
