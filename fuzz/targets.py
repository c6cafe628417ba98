"""What is fuzzed: each target takes bytes, and raises for a defect alone.

An input begins with a byte that says what the rest stands for. Archives are made whole around it, with right checksums:
an archive that was changed as bytes would be refused at once, and nothing behind the checksums would be reached.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from fuzz import seeds
from rlk_audit.cli.tables import view_tables
from rlk_audit.dumps import files
from rlk_audit.dumps.pickle_scan import names_in
from rlk_audit.dumps.sample import DumpError, DumpSample, ReadOptions
from rlk_audit.offline.run_log import read_run_logs
from rlk_audit.page.causes import cause_groups
from rlk_audit.page.sections import sections
from rlk_audit.page.totals import headlines, outcome, worst_sentence
from rlk_audit.report import StepReport
from rlk_audit.run_view import RunView
from rlk_audit.sinks.console import summary_line


class Kind(NamedTuple):
    """A dump of one format; the input stands for its first file, or for an entry of that file, which is an archive."""

    writer: str
    entry: str | None = None


KINDS = (
    Kind("nemo-rl"),
    Kind("prime-rl"),
    Kind("table jsonl"),
    Kind("table parquet"),
    Kind("table safetensors"),
    Kind("table npz"),
    Kind("table npz", "train_log_probs.npy"),
    Kind("table npz", "mask.npy"),
    Kind("slime"),
    Kind("slime", "data.pkl"),
    Kind("slime per rank", "data.pkl"),
    Kind("miles", "data.pkl"),
    Kind("skyrl"),
)


def dump(data: bytes) -> None:
    """A dump of any format ends in samples and sentences, or in a DumpError of one sentence."""
    if not data:
        return
    kind, content = KINDS[data[0] % len(KINDS)], data[1:]
    with tempfile.TemporaryDirectory() as folder:
        first, *others = seeds.files(kind.writer).items()
        changed = content if kind.entry is None else _archive(first[1], kind.entry, content)
        for name, whole in ((first[0], changed), *others):
            Path(folder, name).write_bytes(whole)
        told: list[str] = []
        try:
            parts = files.find([Path(folder)], tell=lambda _, sentence: told.append(sentence))
            for part in parts:
                for sample in files.read(part, ReadOptions(), lambda _, sentence: told.append(sentence)):
                    _check_sample(sample)
        except DumpError as error:
            told.append(str(error))
    assert all(sentence and "\n" not in sentence for sentence in told), told


def _archive(template: bytes, entry: str, content: bytes) -> bytes:
    """Return an archive with one entry replaced."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(template)) as given, zipfile.ZipFile(made, "w") as archive:
        for name in given.namelist():
            archive.writestr(name, content if name == entry or name.endswith("/" + entry) else given.read(name))
    return made.getvalue()


def _check_sample(sample: DumpSample) -> None:
    for values, kinds in (
        (sample.train_log_probs, "f"),
        (sample.rollout_log_probs, "f"),
        (sample.mask, "b"),
        (sample.rollout_missing, "b"),
        (sample.token_ids, "i"),
        (sample.rollout_token_ids, "i"),
        (sample.token_position, "i"),
    ):
        assert values is None or (isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in kinds)


def pickled(data: bytes) -> None:
    """A look into a pickle ends in names or in a DumpError."""
    with contextlib.suppress(DumpError):
        assert all(isinstance(name, str) for name in names_in(data))


def report(data: bytes) -> None:
    """A report's values become a report that says the same again, or a ValueError."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        first = StepReport.from_dict(values)
    except ValueError:
        return
    text = first.to_json()
    assert StepReport.from_dict(json.loads(text)).to_json() == text


def log(data: bytes) -> None:
    """A log ends in the reports of its good lines, which can be shown, or in a DumpError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "audit.jsonl")
        path.write_bytes(data)
        try:
            view = read_run_logs([path])
        except DumpError:
            return
        _show(view)


def _show(view: RunView) -> None:
    """Make all that is shown of a log: its JSON, the tables of a terminal, a line a step, the parts of the page."""
    json.dumps(view.to_dict(), allow_nan=False)
    console = Console(file=io.StringIO())
    for part in view_tables(view):
        console.print(part)
    for report in view.steps:
        summary_line(report)
    for parts_of in (sections, headlines, outcome, worst_sentence, cause_groups):
        parts_of(view)


TARGETS: Mapping[str, Callable[[bytes], None]] = {"dump": dump, "pickled": pickled, "report": report, "log": log}
