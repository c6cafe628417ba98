"""What every reader makes of a dump: samples, and sentences on what could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Label = str | Sequence[str | None] | None
"""A label of a sample: one name, or one a token; None is unknown."""


class DumpError(ValueError):
    """A file cannot be used; the text is one sentence: what was expected, what came, what to do."""


@dataclass(frozen=True)
class Problem:
    """Something in a dump that was left out.

    Attributes:
        path: the file, or the folder that lacks one.
        message: one sentence.
    """

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


@dataclass(frozen=True, eq=False)
class DumpSample:
    """One sample of a dump, its response whole: one entry a response token in every array.

    Arrays of unequal length are kept as they came: the audit counts and refuses such a sample.

    Attributes:
        train_log_probs, rollout_log_probs: float [n] in the dtype of the dump (bfloat16 as float32, which holds it
            exactly); None where the dump has no such side.
        mask: bool [n], active tokens.
        rollout_missing: bool [n], where the engine gave no value; None if nowhere.
        step: the training step or rollout number; None where the dump does not say.
        sample_index, rollout_id: -1 where unknown.
        prompt_length: tokens in front of the response; None where unknown.
        token_ids, rollout_token_ids: int64 [n]; None where unknown.
        token_position: int64 [n], place in the response; None for 0 to n - 1.
        labels: name -> label, such as ``engine``, ``env``, ``rank``.
    """

    train_log_probs: Floats | None
    rollout_log_probs: Floats | None
    mask: Bools
    rollout_missing: Bools | None = None
    step: int | None = None
    sample_index: int = -1
    rollout_id: int = -1
    prompt_length: int | None = None
    token_ids: Ints | None = None
    rollout_token_ids: Ints | None = None
    token_position: Ints | None = None
    labels: Mapping[str, Label] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.mask)


@dataclass(frozen=True)
class ReadOptions:
    """How files may be read.

    Attributes:
        allow_pickle: unpickle files that need it, which runs whatever code they hold: for files of one's own only.
    """

    allow_pickle: bool = False


@dataclass(frozen=True)
class DumpPart:
    """Files that make samples only together: mostly one; those of all ranks where samples are cut over ranks.

    Attributes:
        step: the step that the names of the files tell; None where only the content does.
    """

    format: str
    paths: tuple[Path, ...]
    step: int | None = None


Tell = Callable[[Path, str], None]
"""Takes (file, sentence) on what is left out while the rest is read."""


class DumpFormat(Protocol):
    """One format of dumps; a module of this folder holds one in a constant ``FORMAT``."""

    name: str
    """As in ``--format``."""

    def recognises(self, path: Path) -> bool:
        """Return whether a file is of this format, by its name and its first bytes or members; it never unpickles.

        True must mean that ``read`` is meant for it, damaged or not; never raises for the file's content.
        """
        ...

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        """Group files of this format into parts, by step and name, and tell of ranks or steps that are missing."""
        ...

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        """Yield a part's samples one by one, holding no more than a file in memory.

        Raises:
            DumpError: nothing (more) of the part can be read. What is bad about one sample is told and skipped.
        """
        ...
