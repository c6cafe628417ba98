"""Files found and read: which format each is of, what is no dump, and the samples of every part in order."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlk_audit.dumps import miles, nemo_rl, prime_rl, rollout_only, skyrl, slime, table
from rlk_audit.dumps.naming import natural_key
from rlk_audit.dumps.sample import DumpError, DumpFormat, DumpPart, DumpSample, ReadOptions, Tell

AUTO = "auto"
_READERS: tuple[DumpFormat, ...] = (
    slime.FORMAT, miles.FORMAT, nemo_rl.FORMAT, prime_rl.FORMAT, skyrl.FORMAT, table.FORMAT,
)  # fmt: skip
FORMATS = (AUTO, *(reader.name for reader in _READERS))
"""Names of formats, as in ``--format``."""

_SUFFIXES = (".pt", ".jsonl", ".json", ".parquet", ".npz", ".safetensors", ".pkl", ".dp")
"""Endings of files that are told where they are no dump; others in a folder are none of a dump's, such as markers."""
_NO_DUMP = "it is no dump of a known format"
_TOLD_FILES = 5
_GLOB = "*?["


def find(paths: Sequence[Path], format: str = AUTO, *, tell: Tell) -> list[DumpPart]:
    """Find the dumps among files, folders (with all folders in them) and glob patterns.

    A file's format is told by its content. With a format by name, files that were named themselves are taken for it
    whatever they hold, those of folders and patterns if they are of it.

    Returns:
        Parts by format, then by step and name.

    Raises:
        DumpError: a path does not exist, the format is unknown, or nothing was found.
    """
    if format not in FORMATS:
        raise DumpError(f"the format must be one of {', '.join(FORMATS)}, got {format}")
    readers = [reader for reader in _READERS if format in (AUTO, reader.name)]
    found: dict[str, list[Path]] = {reader.name: [] for reader in readers}
    others: list[tuple[Path, str]] = []
    for path, named in _files(paths):
        name = format if named and format != AUTO else _format_of(path, readers, others)
        if name is not None:
            found[name].append(path)
        elif named:
            others[-1] = (path, others[-1][1] or _NO_DUMP)
    parts = [part for reader in readers if found[reader.name] for part in reader.parts(found[reader.name], tell)]
    if not parts:
        raise DumpError(_nothing_found(paths, others))
    _tell_others(others, tell)
    return parts


def read(part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
    """Yield the samples of a part.

    Raises:
        DumpError: nothing, or nothing more, of the part can be read.
    """
    reader = next(reader for reader in _READERS if reader.name == part.format)
    count = 0
    try:
        if all(path.stat().st_size == 0 for path in part.paths):
            raise DumpError("the file is empty")
        for sample in reader.read(part, options, tell):
            count += 1
            yield sample
    except OSError as error:
        raise DumpError(f"the file cannot be read ({error.strerror or error})") from error
    if not count:
        raise DumpError(f"no sample of the format {part.format} could be read")


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield each file once, and whether it was named itself."""
    seen: set[Path] = set()
    for path in paths:
        matched = [path]
        if not path.exists() and any(sign in str(path) for sign in _GLOB):
            matched = sorted(map(Path, glob.glob(str(path), recursive=True)), key=natural_key)
        if not all(match.exists() for match in matched):
            raise DumpError(f"{path} does not exist")
        for match in matched:
            for file in _files_under(match) if match.is_dir() else [match]:
                if file.resolve() not in seen:
                    seen.add(file.resolve())
                    yield file, match == path and not match.is_dir()


def _files_under(folder: Path) -> list[Path]:
    files = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return sorted((file for file in files if file.is_file()), key=natural_key)


def _format_of(path: Path, readers: Sequence[DumpFormat], others: list[tuple[Path, str]]) -> str | None:
    """Return a file's format; what is no dump goes to the others with a sentence."""
    try:
        if not path.is_file():
            others.append((path, "it is no regular file"))
        elif path.stat().st_size == 0:
            others.append((path, "the file is empty" if path.suffix in _SUFFIXES else ""))
        elif (reader := next((reader for reader in readers if reader.recognises(path)), None)) is not None:
            return reader.name
        else:
            others.append((path, rollout_only.sentence_on(path) or ""))
    except OSError as error:
        others.append((path, f"the file cannot be read ({error.strerror or error})"))
    return None


def _tell_others(others: Sequence[tuple[Path, str]], tell: Tell) -> None:
    """Tell of files that are no dump: those that could be taken for one by name, the first few of a kind."""
    counts: Counter[str] = Counter()
    for path, sentence in others:
        if sentence or path.suffix in _SUFFIXES:
            sentence = sentence or _NO_DUMP
            counts[sentence] += 1
            if counts[sentence] <= _TOLD_FILES:
                tell(path, sentence)
    last = {sentence or _NO_DUMP: path for path, sentence in others}
    for sentence, count in counts.items():
        if count > _TOLD_FILES:
            tell(last[sentence].parent, f"and {count - _TOLD_FILES} more files: {sentence}")


def _nothing_found(paths: Sequence[Path], others: Sequence[tuple[Path, str]]) -> str:
    told = next(((path, sentence) for path, sentence in others if sentence), None)
    if told is not None:
        return f"no dump was found, and of {told[0].name}: {told[1]}"
    return f"no dump of a known format was found in {', '.join(map(str, paths))} ({len(others)} files looked at)"
