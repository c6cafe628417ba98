"""A look into a pickle without unpickling it."""

from __future__ import annotations

import pickletools
import struct
from typing import IO, Any

from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.sample import DumpError

CODE_IN_FILE = (
    "unpickling it would run code of the file's choosing: --allow-pickle reads it, for files of your own only"
)
"""Why a pickle is refused, and what allows it."""
COMPUTED = "names that are computed"
"""Stands for what a pickle names in a way that only running it tells."""

_NAMED = ("GLOBAL", "INST")
_COMPUTED = ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
_MEMO = ("PUT", "BINPUT", "LONG_BINPUT")


def names_in(pickled: IO[bytes], size: int) -> set[str]:
    """Return the dotted names of all classes and functions that a pickle of ``size`` bytes names.

    Raises:
        DumpError: it is damaged; also if it numbers its objects higher than its size, for which unpicklers would
            reserve memory.
    """
    names = set()
    bounded: Any = _Bounded(pickled, size)
    with told_as("the pickle is damaged"):
        for opcode, argument, _ in pickletools.genops(bounded):
            if opcode.name in _NAMED:
                names.add(str(argument).replace(" ", ".", 1))
            elif opcode.name in _COMPUTED:
                names.add(COMPUTED)
            elif opcode.name in _MEMO and int(argument or 0) > size:
                raise DumpError("the pickle is damaged: it numbers more objects than it can hold")
    return names


class _Bounded:
    """A file that is never asked for more bytes than it has, for which Python would reserve memory."""

    def __init__(self, file: IO[bytes], size: int):
        self._file, self._size = file, size
        self.readline, self.tell = file.readline, file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))


def has_text(pickled: bytes, text: str) -> bool:
    """Return whether a pickle holds a text, in one of the two ways in which pickles hold short ones."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data in pickled or b"\x8c" + bytes([len(data)]) + data in pickled
