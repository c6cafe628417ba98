"""A look into a pickle without unpickling it."""

from __future__ import annotations

import mmap
import pickletools
import struct
from collections.abc import Iterator

from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.sample import DumpError

CODE_IN_FILE = (
    "unpickling it would run code of the file's choosing: --allow-pickle reads it, for files of your own only"
)
"""Why a pickle is refused, and what allows it."""
COMPUTED = "names that are computed"
"""Stands for what a pickle names in a way that only running it tells."""

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_STOP = _CODES["STOP"]
_NAMED = frozenset(_CODES[name] for name in ("GLOBAL", "INST"))
_COMPUTED = frozenset(_CODES[name] for name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"))
_PUT, _LONG_PUT = _CODES["PUT"], _CODES["LONG_BINPUT"]
_NOTABLE = _NAMED | _COMPUTED | {_PUT, _LONG_PUT}

_ENDED, _UNKNOWN = pickletools.UP_TO_NEWLINE, -100
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: struct.Struct("<B"),
    pickletools.TAKEN_FROM_ARGUMENT4: struct.Struct("<i"),
    pickletools.TAKEN_FROM_ARGUMENT4U: struct.Struct("<I"),
    pickletools.TAKEN_FROM_ARGUMENT8U: struct.Struct("<Q"),
}
"""How an argument of no fixed length tells it in its first bytes."""


def _argument_lengths() -> list[int]:
    """Return the length of each opcode's argument, or how it is told: a key of _LENGTHS, _ENDED by a line's end."""
    lengths = [_UNKNOWN] * 256
    for opcode in pickletools.opcodes:
        lengths[ord(opcode.code)] = 0 if opcode.arg is None else opcode.arg.n
    return lengths


_ARGUMENTS = _argument_lengths()


def names_in(pickled: bytes | mmap.mmap) -> set[str]:
    """Return the dotted names of all classes and functions that a pickle names.

    Raises:
        DumpError: it is damaged; also if it numbers its objects higher than its size, for which unpicklers would
            reserve memory.
    """
    names = set()
    with told_as("the pickle is damaged"):
        for code, argument in _notable(pickled):
            if code in _NAMED:
                names.add(".".join(argument.decode("ascii").split("\n")[:2]))
            elif code in _COMPUTED:
                names.add(COMPUTED)
            elif (int(argument) if code == _PUT else int.from_bytes(argument, "little")) > len(pickled):
                raise DumpError("the pickle is damaged: it numbers more objects than it can hold")
    return names


def _notable(pickled: bytes | mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Yield (opcode, argument) of those that name something or number an object, and step over all others.

    ``pickletools.genops`` decodes every argument, which takes as long as unpickling them.
    """
    place, code = 0, -1
    while code != _STOP:
        if place >= len(pickled):
            raise ValueError("it ends before its end is told")
        code = pickled[place]
        start = place + 1
        length = _ARGUMENTS[code]
        place = start + length if length >= 0 else _end_of_argument(pickled, code, start)
        if code in _NOTABLE:
            yield code, pickled[start:place]


def _end_of_argument(pickled: bytes | mmap.mmap, code: int, start: int) -> int:
    kind = _ARGUMENTS[code]
    if kind == _UNKNOWN:
        raise ValueError(f"it has the unknown opcode {code} at {start - 1}")
    if kind == _ENDED:
        end = start
        for _ in range(2 if code in _NAMED else 1):
            end = pickled.find(b"\n", end) + 1
            if not end:
                raise ValueError("a line in it has no end")
        return end
    told = _LENGTHS[kind]
    (length,) = told.unpack(pickled[start : start + told.size])
    if length < 0:
        raise ValueError(f"it has an argument of {length} bytes at {start}")
    return start + told.size + int(length)


def has_text(pickled: bytes, text: str) -> bool:
    """Return whether a pickle holds a text, in one of the two ways in which pickles hold short ones."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data in pickled or b"\x8c" + bytes([len(data)]) + data in pickled
