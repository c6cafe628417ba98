"""Dumps of every rank by itself: copies of a data-parallel shard found, and context-parallel pieces put together.

A file holds the columns of its rank's data-parallel shard. Tokens and masks are whole on every rank of it;
log-probabilities are the rank's own context-parallel piece of them, in the zigzag order, and absent on ranks that are
not on the last pipeline stage. Tensor-parallel ranks hold copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit.dumps import columns
from rlk_audit.dumps.faults import Faults, SampleError
from rlk_audit.dumps.naming import listed
from rlk_audit.dumps.rank_files import SIDES, RankFile, entry, is_column, load
from rlk_audit.dumps.sample import Bools, DumpError, DumpPart, DumpSample, Floats, Ints, Label, ReadOptions, Tell
from rlk_audit.places import zigzag_spans

_IDENTITY = ("sample_indices", "partition", "total_lengths", "response_lengths", "tokens")
"""Columns that are equal on all ranks of one data-parallel shard, and on no others."""


def read_shards(part: DumpPart, options: ReadOptions, tell: Tell, no_train_side: str) -> Iterator[DumpSample]:
    """Yield the samples of all ranks of a step, each once and whole.

    Raises:
        DumpError: no file can be read, or none has both sides.
    """
    shards: dict[bytes, list[RankFile]] = {}
    readable, scored = 0, False
    for path in part.paths:
        file = load(path, options) if len(part.paths) == 1 else _load_or_tell(path, options, tell)
        if file is not None:
            shards.setdefault(_identity(file), []).append(file)
            readable += 1
            scored |= file.data.get("log_probs") is not None
    if not readable:
        raise DumpError("none of the files of its ranks can be read")
    if not scored:
        raise DumpError(no_train_side)
    for files in shards.values():
        yield from _read_shard(files, tell)


def _load_or_tell(path: Path, options: ReadOptions, tell: Tell) -> RankFile | None:
    try:
        return load(path, options)
    except DumpError as error:
        tell(path, str(error))
        return None


def _identity(file: RankFile) -> bytes:
    digest = hashlib.sha256()
    for name in _IDENTITY:
        column = file.data.get(name)
        for values in column if is_column(column) else ():
            digest.update(_bytes_of(columns.integers, values if is_column(values) else [values]))
    return digest.digest()


def _bytes_of(read: Callable[[Any, str], Ints | Floats], values: Any) -> bytes:
    """Return what tells one sample's values from others; those that cannot be read are told with their sample."""
    try:
        array = read(values, "values")
    except SampleError as error:
        return str(error).encode()
    return f"{len(array)} ".encode() + array.tobytes()


def _read_shard(files: list[RankFile], tell: Tell) -> Iterator[DumpSample]:
    scored = [file for file in files if file.data.get("log_probs") is not None]
    first = files[0]
    samples = f"its {len(first)} samples are left out"
    if not scored:
        tell(first.path, f"no rank of its data-parallel shard has log_probs: {samples}")
        return
    pieces = _by_cp_rank(scored, tell)
    if pieces is None:
        tell(first.path, f"which context-parallel rank wrote it is not told by its lengths or its ranks: {samples}")
        return
    size = _cp_size(pieces)
    if missing := set(range(size)) - set(pieces):
        tell(
            first.path,
            f"of its {size} context-parallel ranks the files of {listed(missing)} are missing: {samples}",
        )
        return
    ordered = [pieces[rank] for rank in range(size)]
    with Faults(ordered[0].path, tell) as faults:
        rows = ((f"sample {row}", row) for row in range(len(first)))
        yield from faults.samples(rows, lambda row: _sample(ordered, row))


def _cp_size(pieces: Mapping[int, RankFile]) -> int:
    declared = next(iter(pieces.values())).cp_size
    return len(pieces) if declared is None else declared


def _by_cp_rank(files: Sequence[RankFile], tell: Tell) -> dict[int, RankFile] | None:
    """Return the file of each context-parallel rank, copies of tensor-parallel ranks dropped; None if unknowable."""
    pieces: dict[int, RankFile] = {}
    if all(file.cp_rank is not None and file.cp_size is not None for file in files):
        for file in files:
            kept = pieces.setdefault(columns.known(file.cp_rank), file)
            if _content(kept) != _content(file):
                tell(file.path, f"its log-probabilities differ from those of rank {kept.rank}, which are taken")
        sizes = {file.cp_size or 0 for file in files}
        return pieces if len(sizes) == 1 and set(pieces) <= set(range(min(sizes))) else None
    distinct = {_content(file): file for file in sorted(files, key=lambda file: file.rank, reverse=True)}
    # Megatron numbers context-parallel ranks in the order of global ranks.
    guess = dict(enumerate(sorted(distinct.values(), key=lambda file: file.rank)))
    fits = all(
        _length(file.data["log_probs"][row]) == sum(map(len, spans))
        for rank, file in guess.items()
        for row in range(len(file))
        if (spans := _spans_of(file, row, rank, len(guess))) is not None
    )
    return guess if fits else None


def _content(file: RankFile) -> bytes:
    digest = hashlib.sha256()
    for name in SIDES:
        column = file.data.get(name)
        for values in column if is_column(column) else ():
            digest.update(_bytes_of(_log_probs, values))
    return digest.digest()


def _length(values: Any) -> int:
    return len(values) if is_column(values) else -1


# --- one sample -----------------------------------------------------------------------------------------------------


def _spans_of(file: RankFile, row: int, cp_rank: int, cp_size: int) -> tuple[range, range] | None:
    total, response, padded = (entry(file, name, row) for name in ("total_lengths", "response_lengths", "max_seq_lens"))
    if total is None or response is None or not 0 <= response <= total:
        return None
    return zigzag_spans(total, response, total if file.qkv_format == "thd" else padded or total, cp_rank, cp_size)


def _sample(files: Sequence[RankFile], row: int) -> DumpSample:
    first = files[0]
    response, total = entry(first, "response_lengths", row), entry(first, "total_lengths", row)
    spans = [_spans_of(file, row, rank, len(files)) for rank, file in enumerate(files)]
    if response is None or total is None or None in spans:
        raise SampleError(
            "its response_lengths and total_lengths must be whole numbers, the first not above the second"
        )
    if first.qkv_format != "thd" and len(files) > 1 and entry(first, "max_seq_lens", row) is None:
        raise SampleError(
            f"its pieces in the format {first.qkv_format!r:.40} cannot be put together without max_seq_lens"
        )
    train = _joined(files, row, "log_probs", spans, response, columns.train_log_probs)
    rollout = missing = None
    if first.data.get("rollout_log_probs") is not None:
        rollout = _joined(files, row, "rollout_log_probs", spans, response, _log_probs)
        missing = _joined(files, row, "rollout_log_probs", spans, response, _missing)
    tokens = columns.integers(first.data["tokens"][row], "tokens")
    labels: dict[str, Label] = columns.framework_labels(
        {name: _row_of(column, row) for name, column in first.data.items() if isinstance(column, (list, tuple))}
    )
    return DumpSample(
        train,
        rollout,
        columns.mask(first.data["loss_masks"][row], "loss_masks"),
        missing if missing is not None and missing.any() else None,
        step=first.step,
        sample_index=columns.known(entry(first, "sample_indices", row)),
        rollout_id=columns.known(entry(first, "rollout_ids", row)),
        prompt_length=total - response,
        token_ids=tokens[total - response : total],
        labels={**labels, "rank": _rank_label(files, spans, response)},
    )


def _row_of(column: Sequence[Any], row: int) -> Any:
    return column[row] if row < len(column) else None


def _log_probs(values: Any, name: str) -> Floats:
    return columns.log_probs(values, name)[0]


def _missing(values: Any, name: str) -> Bools:
    array, missing = columns.log_probs(values, name)
    return np.zeros(len(array), dtype=np.bool_) if missing is None else missing


def _joined(
    files: Sequence[RankFile],
    row: int,
    name: str,
    spans: Sequence[tuple[range, range] | None],
    response: int,
    read: Callable[[Any, str], Any],
) -> Any:
    """Put a column's pieces together; an array that was not cut is kept as it came, whatever its length."""
    pieces = [read(_row_of(file.data.get(name, ()), row), name) for file in files]
    if len(pieces) == 1:
        return pieces[0]
    if any(len(piece) != sum(map(len, span or ())) for piece, span in zip(pieces, spans, strict=True)):
        raise SampleError(f"the pieces of its {name} do not have the lengths of context-parallel pieces")
    whole = np.zeros(response, dtype=np.result_type(*pieces))
    for piece, span in zip(pieces, spans, strict=True):
        early, late = span or (range(0), range(0))
        whole[early.start : early.stop] = piece[: len(early)]
        whole[late.start : late.stop] = piece[len(early) :]
    return whole


def _rank_label(files: Sequence[RankFile], spans: Sequence[tuple[range, range] | None], response: int) -> Label:
    """Return the rank that wrote the sample, or of each token where several did."""
    if len(files) == 1:
        return str(files[0].rank)
    ranks = [str(files[0].rank)] * response
    for file, span in zip(files, spans, strict=True):
        for run in span or ():
            ranks[run.start : run.stop] = [str(file.rank)] * len(run)
    return ranks
