"""Files of ``torch.save``: recognised by the text of their pickle, and loaded without running code of theirs."""

from __future__ import annotations

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from rlk_audit.dumps.bounds import HEAD_BYTES, MAX_FILE_BYTES, MAX_PICKLE_BYTES
from rlk_audit.dumps.sample import DumpError, ReadOptions

_ZIP_MAGIC = b"PK\x03\x04"
_SAFE_MODULES = ("torch", "torch._utils", "collections")
_SAFE_NAMES = {"OrderedDict", "Size", "device", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"}
_TEXT_GLOBALS = ("GLOBAL", "INST")
_STACK_GLOBALS = ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4")


def has_keys(path: Path, *keys: str) -> bool:
    """Return whether a file of ``torch.save`` has all these texts in its pickle, which is not unpickled.

    Of a damaged file only the beginning is searched.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(_ZIP_MAGIC):
        return False
    try:
        text = _pickle_of(path)
    except DumpError:
        text = head
    return all(_has_text(text, key) for key in keys)


def load(path: Path, options: ReadOptions) -> Any:
    """Load a file of ``torch.save``; its tensors stay on disk until they are used.

    Raises:
        DumpError: it is damaged or no such file, or it holds more than tensors and plain values and
            ``options.allow_pickle`` is not set.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DumpError(f"the file must be at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
    _check_archive(path)
    if not options.allow_pickle:
        _check_globals(_pickle_of(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=not options.allow_pickle, mmap=True)
    except Exception as error:  # damaged pickles raise nearly anything
        raise DumpError(f"the file cannot be unpickled ({_first_line(error)})") from error


def _check_archive(path: Path) -> None:
    """Refuse archives that are damaged or would grow: what torch writes is never compressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise DumpError("the file has compressed entries, which torch.save does not write")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise DumpError("the entries of the file claim more bytes than it has")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"the file is cut off or damaged ({_first_line(error)})") from error
    if damaged is not None:
        raise DumpError(f"the file is damaged: the checksum of its entry {damaged} is wrong")


def _pickle_of(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(entries) != 1:
                raise DumpError("the file is an archive, but not one of torch.save")
            if entries[0].file_size > MAX_PICKLE_BYTES:
                raise DumpError(f"the pickle in the file must be at most {MAX_PICKLE_BYTES} bytes")
            return archive.read(entries[0])
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise DumpError(f"the file is cut off or damaged ({_first_line(error)})") from error


def _check_globals(text: bytes) -> None:
    """Refuse a pickle that names anything but plain tensors: torch's own list is wider than dumps need."""
    try:
        for opcode, argument, _ in pickletools.genops(text):
            if opcode.name in _STACK_GLOBALS:
                raise DumpError(_needs_pickle("classes"))
            if opcode.name in _TEXT_GLOBALS and not _is_safe(*str(argument).split(" ", 1)):
                raise DumpError(_needs_pickle(str(argument).replace(" ", ".", 1)[:100]))
    except (ValueError, IndexError, struct.error, OverflowError) as error:
        if isinstance(error, DumpError):
            raise
        raise DumpError(f"the pickle in the file is damaged ({_first_line(error)})") from error


def _is_safe(module: str, name: str = "") -> bool:
    plain = name in _SAFE_NAMES or name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
    return module in _SAFE_MODULES and plain and "." not in name


def _needs_pickle(what: str) -> str:
    return (
        f"the file holds {what} besides tensors and plain values, and unpickling it would run code of the file's "
        "choosing: --allow-pickle reads it, for files of your own only"
    )


def _has_text(pickled: bytes, text: str) -> bool:
    """Return whether a pickle holds a text, in one of the two ways in which pickles hold short ones."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data in pickled or b"\x8c" + bytes([len(data)]) + data in pickled


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
