"""What a first reading of a dump finds, and so how the second goes: steps, samples, tokens and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlk_audit.config import BUILT_IN_BREAKDOWNS, AuditConfig
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, DumpPart, DumpSample, Problem, ReadOptions
from rlk_audit.offline.labels import LabelCounts, LabelNames, choose_labels
from rlk_audit.offline.tokens import is_whole, lengths, memory_of, owned

Step = int | None
Progress = Callable[[str, int, int], None]
"""Takes (what is done, how much of it, of how much)."""

MAX_SAMPLES = 1 << 16
"""Samples of a step whose figures are kept; of larger steps none are."""
MAX_STATE_BYTES = 1 << 28
KEPT_BYTES = 1 << 28
"""Samples that the first reading keeps, so that the next ones do without the files; parts beyond are read again."""
WORST_K = 10


@dataclass
class PartScan:
    """What a part of a dump holds.

    Attributes:
        samples, tokens: by step.
        labels: tokens by the names of each label.
        refused: samples whose arrays differ in length.
        first_refused: which is the first of them, and the lengths.
    """

    samples: Counter[Step] = field(default_factory=Counter)
    tokens: Counter[Step] = field(default_factory=Counter)
    labels: LabelCounts = field(default_factory=LabelCounts)
    refused: int = 0
    first_refused: str | None = None


@dataclass
class Reading:
    """How parts are read and what was wrong with them.

    Attributes:
        options: how files may be read.
        problems: what was left out.
        kept: what whole parts held, which are not read again.
        kept_bytes: about how much that is.
    """

    options: ReadOptions
    problems: list[Problem] = field(default_factory=list)
    kept: dict[DumpPart, list[tuple[Step, DumpSample]]] = field(default_factory=dict)
    kept_bytes: int = 0

    def again(self) -> Reading:
        """Return what reads the same parts once more; what is wrong with them is told already."""
        return Reading(self.options, kept=self.kept)

    def tell(self, path: Path, message: str) -> None:
        """Note what is left out while the rest is read."""
        self.problems.append(Problem(path, message))

    def samples(self, part: DumpPart) -> Iterator[tuple[Step, DumpSample]]:
        """Yield a part's samples with their steps; what cannot be read ends it with a problem."""
        if part in self.kept:
            yield from self.kept[part]
            return
        without_train = 0
        try:
            for sample in files.read(part, self.options, self.tell):
                if sample.train_log_probs is None:
                    without_train += 1
                else:
                    yield part.step if sample.step is None else sample.step, sample
        except (DumpError, OSError) as error:  # a file may be gone by now
            self.tell(part.paths[0], str(error))
        if without_train:
            self.tell(part.paths[0], f"{without_train} samples are left out: they have no train log-probabilities")


def scan(part: DumpPart, reading: Reading) -> PartScan:
    """Read a part and count what it holds; keep its samples where there is room for all of them."""
    found = PartScan()
    kept: list[tuple[Step, DumpSample]] | None = []
    size = reading.kept_bytes
    for step, sample in reading.samples(part):
        found.samples[step] += 1
        found.tokens[step] += len(sample)
        found.labels.add(sample)
        if not is_whole(sample):
            found.refused += 1
            found.first_refused = found.first_refused or _named(part, step, found.samples.total(), sample)
        size += memory_of(sample)
        if size > KEPT_BYTES:
            kept = None
        elif kept is not None:
            kept.append((step, owned(sample)))
    if kept is not None:
        reading.kept[part] = kept
        reading.kept_bytes = size
    return found


def _named(part: DumpPart, step: Step, number: int, sample: DumpSample) -> str:
    known = {"step": -1 if step is None else step, "sample_index": sample.sample_index}
    ids = ", ".join(f"{name} {value}" for name, value in known.items() if value >= 0)
    told = ", ".join(f"{name} {length}" for name, length in lengths(sample).items())
    return f"sample {number} of {part.paths[0]}{ids and f' ({ids})'}: {told}"


@dataclass(frozen=True)
class Plan:
    """How a dump is to be audited, the same on every rank.

    Attributes:
        parts, scans: of the whole dump, in order.
        steps: ascending; None, for samples without one, comes first.
        labels: that it is broken down by.
        config: of the audit.
        notes: remarks.
    """

    parts: tuple[DumpPart, ...]
    scans: tuple[PartScan, ...]
    steps: tuple[Step, ...]
    labels: tuple[LabelNames, ...]
    config: AuditConfig
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls, parts: Sequence[DumpPart], scans: Sequence[PartScan], config: AuditConfig, asked: Sequence[str] | None
    ) -> Plan:
        """Plan the audit of scanned parts.

        Args:
            parts, scans: in order.
            config: the user's limits and intervals; breakdowns and the table of samples are added.
            asked: labels to break down by; None for all that split the tokens.

        Raises:
            ValueError: a label asked for is not in the dump.
        """
        counts = LabelCounts()
        samples: Counter[Step] = Counter()
        for found in scans:
            counts.merge(found.labels)
            samples.update(found.samples)
        labels, notes = choose_labels(counts, asked)
        if refused := sum(found.refused for found in scans):
            first = next(found.first_refused for found in scans if found.first_refused)
            notes.append(f"refused samples, whose arrays differ in length: {refused:,}, the first is {first}")
        largest = max(samples.values(), default=0)
        if largest > MAX_SAMPLES:
            notes.append(f"without figures of samples: a step has {largest}, more than {MAX_SAMPLES}")
        config = replace(
            config,
            worst_k=WORST_K,
            breakdowns=BUILT_IN_BREAKDOWNS | {label.name: label.names for label in labels},
            samples_per_step=largest if 0 < largest <= MAX_SAMPLES else None,
            max_state_bytes=MAX_STATE_BYTES,
        )
        return cls(tuple(parts), tuple(scans), sort_steps(samples), tuple(labels), config, tuple(notes))

    @property
    def tokens(self) -> int:
        """Tokens of the dump."""
        return sum(sum(found.tokens.values()) for found in self.scans)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step."""
        tokens: Counter[Step] = Counter()
        for found in self.scans:
            tokens.update(found.tokens)
        return max(tokens.values(), default=0)

    @property
    def most_open(self) -> int:
        """Most steps that a single part holds: so many may be under way at a time."""
        return max((len(found.samples) for found in self.scans), default=0)

    def first_slots(self) -> list[dict[Step, int]]:
        """Return, for each part and by step, the number of the first sample that the part adds to the step."""
        before: Counter[Step] = Counter()
        slots = []
        for found in self.scans:
            slots.append({step: before[step] for step in found.samples})
            before.update(found.samples)
        return slots


def sort_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps ascending, None first."""
    return tuple(sorted(steps, key=lambda step: (step is not None, step or 0)))
