"""Files of ``torch.save``: recognised by the text of their pickle, and loaded without running code of theirs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from rlk_audit.dumps.bounds import HEAD_BYTES, MAX_FILE_BYTES, MAX_PICKLE_BYTES
from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.pickle_scan import CODE_IN_FILE, has_text, names_in
from rlk_audit.dumps.sample import DumpError, ReadOptions

_ZIP_MAGIC = b"PK\x03\x04"
_PLAIN_NAMES = (
    "collections.OrderedDict", "torch.Size", "torch.device", "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
)  # fmt: skip
"""What tensors and plain values need. The list of torch's own unpickler is wider, and lets files reserve memory."""


def has_keys(path: Path, *keys: str) -> bool:
    """Return whether a file of ``torch.save`` has all these texts in its pickle, which is not unpickled.

    Of a damaged file only the beginning is searched.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(_ZIP_MAGIC):
        return False
    try:
        with told_as("the file is cut off or damaged"), zipfile.ZipFile(path) as archive:
            text = _pickle_of(archive)
    except DumpError:
        text = head
    return all(has_text(text, key) for key in keys)


def load(path: Path, options: ReadOptions) -> Any:
    """Load a file of ``torch.save``; its tensors stay on disk until they are used.

    Raises:
        DumpError: it is damaged or no such file, or it holds more than tensors and plain values and
            ``options.allow_pickle`` is not set.
    """
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise DumpError(f"the file must be at most {MAX_FILE_BYTES} bytes, got {size}")
    with told_as("the file is cut off or damaged"), zipfile.ZipFile(path) as archive:
        _check_archive(archive, size)
        pickled = _pickle_of(archive)
    names = sorted(name for name in names_in(pickled) if not _is_plain(name))
    if names and not options.allow_pickle:
        raise DumpError(f"the file holds {names[0][:100]} beside tensors and plain values, and {CODE_IN_FILE}")
    with told_as("the file cannot be unpickled"):
        return torch.load(path, map_location="cpu", weights_only=not options.allow_pickle, mmap=True)


def _check_archive(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse archives that are damaged or would grow: what torch writes is never compressed."""
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DumpError("the file has compressed entries, which torch.save does not write")
    if sum(entry.file_size for entry in entries) > size:
        raise DumpError("the entries of the file claim more bytes than it has")
    damaged = archive.testzip()  # torch checks no checksums
    if damaged is not None:
        raise DumpError(f"the file is damaged: the checksum of its entry {damaged[-100:]!r} is wrong")


def _pickle_of(archive: zipfile.ZipFile) -> bytes:
    entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(entries) != 1:
        raise DumpError("the file is an archive, but not one of torch.save")
    if entries[0].file_size > MAX_PICKLE_BYTES:
        raise DumpError(f"the pickle in the file must be at most {MAX_PICKLE_BYTES} bytes")
    return archive.read(entries[0])


def _is_plain(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    kind = getattr(torch, attribute, None) if module == "torch" else None
    return name in _PLAIN_NAMES or isinstance(kind, torch.dtype) or (kind is not None and attribute.endswith("Storage"))
