"""How many values the row groups of a Parquet file claim, read from its footer.

pyarrow tells it too, but ends the process where the footer is damaged. The footer is a struct of Thrift's compact
protocol: of it only the fields on the way to the numbers of values are kept.
"""

from __future__ import annotations

import struct
from pathlib import Path

from rlk_audit.dumps.bounds import MAX_FOOTER_BYTES, MAX_NESTING
from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.sample import DumpError

_TAIL = struct.Struct("<I4s")
_ROW_GROUPS = (4,)
_NUM_VALUES = (4, 1, 3, 5)
"""Fields on the way: row groups of the file, columns of a row group, metadata of a column, its number of values."""
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


def most_values(path: Path) -> list[int]:
    """Return for each row group the number of values of its longest column.

    Raises:
        DumpError: the file is cut off, or its footer is damaged or beyond the bounds.
    """
    with told_as("the footer of the Parquet file is cut off or damaged"), path.open("rb") as file:
        file.seek(-_TAIL.size, 2)
        length, magic = _TAIL.unpack(file.read(_TAIL.size))
        if magic != b"PAR1" or length > MAX_FOOTER_BYTES:
            raise DumpError(f"the Parquet file must end in a footer of at most {MAX_FOOTER_BYTES} bytes")
        file.seek(-_TAIL.size - length, 2)
        footer = _Footer(file.read(length))
        footer.read_struct(())
        return footer.most


class _Footer:
    """Reads Thrift's compact protocol; IndexError or ValueError where it is damaged."""

    def __init__(self, data: bytes):
        self._data = data
        self._at = 0
        self.most: list[int] = []

    def read_struct(self, path: tuple[int, ...]) -> None:
        field = 0
        while (head := self._byte()) != _STOP:
            field = field + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            if kind not in (_TRUE, _FALSE):  # which are values themselves
                self._read(kind, (*path, field))

    def _read(self, kind: int, path: tuple[int, ...]) -> None:
        if len(path) > MAX_NESTING:
            raise ValueError("it is nested too deep")
        if kind in (_TRUE, _FALSE, _BYTE):
            self._skip(1)
        elif kind in (_I16, _I32, _I64):
            value = self._signed()
            if path == _NUM_VALUES:
                self.most[-1] = max(self.most[-1], value)
        elif kind == _DOUBLE:
            self._skip(8)
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind in (_LIST, _SET):
            self._read_list(path)
        elif kind == _MAP:
            self._read_map(path)
        elif kind == _STRUCT:
            self.read_struct(path)
        else:
            raise ValueError(f"it has a value of the unknown kind {kind}")

    def _read_list(self, path: tuple[int, ...]) -> None:
        head = self._byte()
        size = head >> 4 if head >> 4 < 15 else self._varint()
        if head & 15 in (_LIST, _SET, _MAP):
            raise ValueError("it has lists in lists, which Parquet has not")
        for _ in range(size):
            if path == _ROW_GROUPS:
                self.most.append(0)
            self._read(head & 15, path)

    def _read_map(self, path: tuple[int, ...]) -> None:
        size = self._varint()
        kinds = self._byte() if size else 0
        for _ in range(size):
            self._read(kinds >> 4, (*path, 0))
            self._read(kinds & 15, (*path, 0))

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self._at - 1]

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError("it ends too early")

    def _signed(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise ValueError("it has a number of more than 64 bits")
