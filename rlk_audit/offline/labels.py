"""Labels of a dump: any texts there, and the names under which an audit breaks down by them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk_audit.breakdowns import UNKNOWN
from rlk_audit.config import BUILT_IN_BREAKDOWNS
from rlk_audit.dumps.sample import DumpSample, Label

MAX_NAMES = 64
"""Codes of a label; if a dump has more names, those of fewest tokens share the code ``other``."""
MAX_LABELS = 16
MAX_COUNTED = 1 << 14
"""Names of a label that are counted in a part of a dump, those that come first; the others are ``other``."""
OTHER = "other"
_MORE = ""
"""In the place of a name: those that are not counted by themselves."""
_NAME_LENGTH = 64
_NO_NAME_SIGN = re.compile(r"[^A-Za-z0-9_.-]")


class LabelCounts:
    """Counts tokens by the name of each label.

    Attributes:
        tokens: label -> name -> tokens, "" for an empty name and those beyond MAX_COUNTED.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, Counter[str]] = {}

    def add(self, sample: DumpSample) -> None:
        """Count a sample's tokens."""
        for name, label in sample.labels.items():
            counts = self.tokens.setdefault(name, Counter())
            label = _same_for_all(label, len(sample))
            given = Counter({label: len(sample)}) if isinstance(label, str) else Counter(label or ())
            for text, tokens in given.items():
                if text is not None:
                    counts[text if text in counts or len(counts) < MAX_COUNTED else _MORE] += tokens

    def merge(self, other: LabelCounts) -> None:
        """Add another's counts."""
        for name, counts in other.tokens.items():
            self.tokens.setdefault(name, Counter()).update(counts)


@dataclass(frozen=True)
class LabelNames:
    """A label that an audit breaks down by.

    Attributes:
        key: in the dump. name: in the report.
        codes: text in the dump -> code.
        names: of the codes, in the report; one more than codes where the other texts share one.
    """

    key: str
    name: str
    codes: Mapping[str, int]
    names: tuple[str, ...]

    @classmethod
    def of(cls, key: str, name: str, counts: Counter[str]) -> LabelNames:
        """Name a label's codes, in the natural order of the dump's texts."""
        most = sorted(counts, key=lambda text: (-counts[text], _natural(text)))
        shared = len(most) > MAX_NAMES
        own = sorted(most[: MAX_NAMES - 1] if shared else most, key=_natural)
        codes = {text: code for code, text in enumerate(own)}
        return cls(key, name, codes, _different(map(_plain_name, own), [OTHER] if shared else []))

    def code(self, label: Label, length: int) -> npt.NDArray[np.int64]:
        """Return the codes of a sample's tokens (int64 [length]), -1 where unknown."""
        other = len(self.codes) if len(self.names) > len(self.codes) else -1
        label = _same_for_all(label, length)
        if label is None or isinstance(label, str):
            return np.full(length, -1 if label is None else self.codes.get(label, other), dtype=np.int64)
        codes = [-1 if text is None else self.codes.get(text, other) for text in label[:length]]
        return np.array(codes + [-1] * (length - len(codes)), dtype=np.int64)


def _same_for_all(label: Label, length: int) -> Label:
    """Return one name where the label has that name for each of ``length`` tokens; else the label as it is."""
    if isinstance(label, list) and 0 < len(label) == length == label.count(label[0]):
        first: str | None = label[0]
        return first
    return label


def label_name(key: str) -> str:
    """Return the name in reports of a label of a dump."""
    name = _plain_name(key)
    return name if name[0].isalpha() and name not in BUILT_IN_BREAKDOWNS else f"label_{name}"


def choose_labels(counts: LabelCounts, asked: Sequence[str] | None) -> tuple[list[LabelNames], list[str]]:
    """Return the labels to break down by, and remarks on those left out.

    Args:
        counts: of the dump.
        asked: labels that the user asked for; None for all that split the tokens.

    Raises:
        ValueError: a label asked for is not in the dump.
    """
    keys = sorted((key for key in counts.tokens if counts.tokens[key]), key=lambda key: (label_name(key) != key, key))
    there = dict(zip(_different(map(label_name, keys), ()), keys, strict=True))
    if asked is not None:
        asked = [
            name
            for name in ({key: name for name, key in there.items()}.get(given, given) for given in asked)
            if name not in BUILT_IN_BREAKDOWNS
        ]
        absent = [name for name in asked if name not in there]
        if absent:
            known = ", ".join(there) if there else "none"
            raise ValueError(f"the dump has no label {', '.join(absent)}; it has {known}")
        return [LabelNames.of(there[name], name, counts.tokens[there[name]]) for name in dict.fromkeys(asked)], []
    remarks = []
    several = []
    for name, key in there.items():
        if len(counts.tokens[key]) > 1:
            several.append(LabelNames.of(key, name, counts.tokens[key]))
        else:
            remarks.append(f"{name} is {_plain_name(next(iter(counts.tokens[key])))} wherever it is known")
    if len(several) > MAX_LABELS:
        left_out = ", ".join(label.name for label in several[MAX_LABELS:])
        remarks.append(f"not broken down by {left_out}: at most {MAX_LABELS} labels, or those asked for by name")
    return several[:MAX_LABELS], remarks


def _plain_name(text: str) -> str:
    return _NO_NAME_SIGN.sub("_", text)[:_NAME_LENGTH] or "_"


def _natural(text: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key under which ``e10`` follows ``e9``, and no two texts are alike."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)], text


def _different(names: Iterable[str], reserved: Sequence[str]) -> tuple[str, ...]:
    """Return names with a number behind those that an earlier one has already; the reserved come last."""
    taken = {UNKNOWN, *reserved}
    chosen = []
    for name in names:
        number, free = 2, name
        while free in taken:
            free, number = f"{name}_{number}", number + 1
        taken.add(free)
        chosen.append(free)
    return (*chosen, *reserved)
