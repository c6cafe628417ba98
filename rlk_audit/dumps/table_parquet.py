"""Parquet files of the ``table`` format, read in batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit.dumps.bounds import BATCH_VALUES, HEAD_BYTES, MAX_ROW_GROUP_VALUES, MAX_SAMPLE_TOKENS
from rlk_audit.dumps.damage import told_as
from rlk_audit.dumps.faults import Faults
from rlk_audit.dumps.packages import need
from rlk_audit.dumps.parquet_footer import most_values
from rlk_audit.dumps.sample import DumpError

_MAGIC = b"PAR1"


def recognises(path: Path, names: Sequence[str]) -> bool:
    """Return whether a file is Parquet and has one of the columns; of a damaged one whether it begins as Parquet."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            return False
        file.seek(max(0, size - HEAD_BYTES))
        tail = file.read(HEAD_BYTES)
    return not tail.endswith(_MAGIC) or any(name.encode() in tail for name in names)


def records(path: Path, faults: Faults) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (place, columns) of every row; lists of numbers come as arrays, masked where there is null.

    Raises:
        DumpError: pyarrow is not installed, or the file is damaged or beyond the bounds.
    """
    parquet = need("pyarrow.parquet", path)
    number = 0
    most = most_values(path)
    with told_as("the Parquet file is damaged"), parquet.ParquetFile(path) as file:
        for group, rows in _batches(file, most):
            for batch in file.iter_batches(batch_size=rows, row_groups=[group], use_threads=False):
                cells = {name: _cells(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
                for row in range(batch.num_rows):
                    number += 1
                    yield f"row {number}", {name: cell(row) for name, cell in cells.items()}


def _batches(file: Any, most: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each row group with the rows to decode at a time, after a look at what the file claims to hold."""
    for group, values in enumerate(most[: file.metadata.num_row_groups]):
        rows = file.metadata.row_group(group).num_rows
        if rows > 0:
            if values > MAX_ROW_GROUP_VALUES or values > rows * MAX_SAMPLE_TOKENS:
                raise DumpError(
                    f"a row group must hold at most {MAX_ROW_GROUP_VALUES} values of a column, got {values}"
                )
            yield group, max(1, BATCH_VALUES * rows // max(values, 1))


def _cells(column: Any) -> Callable[[int], Any]:
    """Return what gives the cells of a column by their row: arrays, masked where there is null, or plain values."""
    if _numeric(column):
        plain: list[Any] = column.to_pylist()
        return plain.__getitem__
    values: Any = getattr(column, "values", None)
    ends_at_the_next = hasattr(column, "offsets") and not hasattr(column, "sizes")  # unlike in a list view
    if ends_at_the_next and _numeric(values) and not column.null_count and not values.null_count:
        numbers, offsets = np.asarray(values.to_numpy(zero_copy_only=False)), column.offsets.to_pylist()
        return lambda row: numbers[offsets[row] : offsets[row + 1]]
    return lambda row: _value(column[row])


def _numeric(values: Any) -> bool:
    """Return whether Arrow values are numbers or booleans."""
    return str(getattr(values, "type", "")).startswith(("float", "double", "halffloat", "int", "uint", "bool"))


def _value(scalar: Any) -> Any:
    values: Any = getattr(scalar, "values", None)
    if not _numeric(values):
        return scalar.as_py()
    array = np.asarray(values.to_numpy(zero_copy_only=False))
    if not values.null_count:
        return array
    filled = values.fill_null(False if str(values.type) == "bool" else 0).to_numpy(zero_copy_only=False)
    return np.ma.MaskedArray(filled, mask=values.is_null().to_numpy(zero_copy_only=False))
