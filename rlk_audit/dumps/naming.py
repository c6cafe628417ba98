"""What the names of files tell: their order, their step, and which of a sequence are missing."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from rlk_audit.dumps.sample import DumpPart, Tell

_SHOWN = 8


def natural_key(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Return a key by which files sort as people count them: ``step_9`` before ``step_10``."""
    pieces = re.split(r"([0-9]+)", str(path))
    return tuple((0, int(piece), piece) if piece.isdigit() else (1, 0, piece) for piece in pieces if piece)


def number_in(text: str, pattern: re.Pattern[str]) -> int | None:
    """Return the number that the first group of a pattern finds in a text, or None."""
    found = pattern.search(text)
    return int(found[1]) if found and len(found[1]) < 19 else None


def single_file_parts(format_name: str, paths: Sequence[Path], pattern: re.Pattern[str], tell: Tell) -> list[DumpPart]:
    """Return one part a file, by step and name, and tell of missing steps; the pattern finds the step in a path."""
    parts = [DumpPart(format_name, (path,), number_in(str(path), pattern)) for path in paths]
    return in_order(parts, tell)


def in_order(parts: Sequence[DumpPart], tell: Tell) -> list[DumpPart]:
    """Return parts by step and name, those of unknown step last, and tell of steps that are missing."""
    ordered = sorted(parts, key=lambda part: (part.step is None, part.step or 0, natural_key(part.paths[0])))
    steps = sorted({part.step for part in parts if part.step is not None})
    # A run may dump every k-th step: what is missing is missing from the rhythm of the others.
    gap = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(steps)))
    if len(steps) > 2 and (steps[-1] - steps[0]) // gap + 1 > len(steps):
        expected = (steps[-1] - steps[0]) // gap + 1
        shown = _first_missing(steps, gap)
        tell(
            ordered[0].paths[0].parent,
            f"{expected - len(steps)} steps are missing between {steps[0]} and {steps[-1]}: {shown}",
        )
    return ordered


def listed(numbers: Collection[int]) -> str:
    """Return numbers as text, the first few by name."""
    shown = [str(number) for number in sorted(numbers)[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else "")


def _first_missing(steps: Sequence[int], gap: int) -> str:
    missing: list[str] = []
    for earlier, later in itertools.pairwise(steps):
        if len(missing) < _SHOWN:
            missing += [str(step) for step in range(earlier + gap, min(later, earlier + gap * (_SHOWN + 1)), gap)]
    more = (steps[-1] - steps[0]) // gap + 1 - len(steps) - len(missing[:_SHOWN])
    return ", ".join(missing[:_SHOWN]) + (f" and {more} more" if more else "")
