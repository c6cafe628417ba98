"""Exact quantiles: a further reading that collects only the values in the sketch's bins where the answers lie.

A bin holds the values of a stretch of the sorted data, so the answer is known from the values of one bin and the number
of values below it. The sketch's own answer tells which bin it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from rlk_audit.config import AuditConfig, quantile_suffix
from rlk_audit.dumps.sample import DumpError, DumpSample
from rlk_audit.offline.plan import Step
from rlk_audit.offline.tokens import BATCH_TOKENS, Tokens
from rlk_audit.report import StepReport
from rlk_audit.sketch import bin_index, order_index

COMPRESS_AT = 1 << 20
"""Values that are held before equal ones are put together."""
ARRAY_COST = 64
"""Values that take as much memory as an array by itself."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class BinValues:
    """The values of one bin, equal ones counted once."""

    def __init__(self) -> None:
        self._values: list[Floats] = []
        self._counts: list[Ints] = []
        self._held = 0
        self._compress_at = COMPRESS_AT

    def add(self, values: Floats, counts: Ints | None = None) -> None:
        """Add values, each as often as counted."""
        if not len(values):
            return
        self._values.append(values)
        self._counts.append(np.ones(len(values), dtype=np.int64) if counts is None else counts)
        self._held += len(values) + ARRAY_COST
        if self._held > self._compress_at:
            self._compress()
            self._compress_at = max(COMPRESS_AT, 2 * self._held)  # where few are equal, seldom

    def merge(self, other: BinValues) -> None:
        """Add another's values."""
        for values, counts in zip(other._values, other._counts, strict=True):
            self.add(values, counts)

    def at(self, order: int) -> float:
        """Return the value at a place in sorted order, from 0.

        Raises:
            DumpError: there is no such place.
        """
        if not 0 <= order < sum(int(counts.sum()) for counts in self._counts):
            raise DumpError("the dump changed while it was read, so that exact quantiles cannot be told; read it again")
        self._compress()
        place = int(np.searchsorted(np.cumsum(self._counts[0]), order, side="right"))
        return float(self._values[0][place])

    def _compress(self) -> None:
        values, inverse = np.unique(np.concatenate(self._values), return_inverse=True)
        counts = np.bincount(inverse, np.concatenate(self._counts), len(values)).astype(np.int64)
        self._values, self._counts, self._held = [values], [counts], len(values)


@dataclass
class Wanted:
    """The bins of a report's quantiles.

    Attributes:
        bins: quantile -> bin of abs(dlogp) that holds the answer.
        below: quantile -> values below the bin.
        values: quantile -> those in it.
    """

    bins: dict[str, int]
    below: dict[str, int] = field(default_factory=dict)
    values: dict[str, BinValues] = field(default_factory=dict)

    @classmethod
    def of(cls, report: StepReport, config: AuditConfig) -> Wanted:
        """Find the bins of the report's quantiles; none where nothing was compared."""
        answers = {q: float(report.metrics[f"abs_dlogp_{quantile_suffix(q)}"]) for q in config.quantiles}
        known = {q: answer for q, answer in answers.items() if answer == answer}
        bins = _bins(np.array(list(known.values())), config.grouping_power)
        wanted = cls(dict(zip(known, bins.tolist(), strict=True)))
        wanted.below = dict.fromkeys(known, 0)
        wanted.values = {q: BinValues() for q in known}
        return wanted

    def add(self, magnitude: Floats, bins: Ints) -> None:
        """Look at values whose bins are known."""
        for q, wanted in self.bins.items():
            self.below[q] += int(np.count_nonzero(bins < wanted))
            self.values[q].add(magnitude[bins == wanted])

    def merge(self, other: Wanted) -> None:
        """Add what another rank saw of the same report."""
        for q in self.bins:
            self.below[q] += other.below[q]
            self.values[q].merge(other.values[q])

    def answers(self, report: StepReport) -> StepReport:
        """Return the report with exact quantiles."""
        count = int(report.metrics["compared_token_count"])
        exact = {
            f"abs_dlogp_{quantile_suffix(q)}": self.values[q].at(order_index(q, count) - self.below[q])
            for q in self.bins
        }
        values = report.to_dict()
        return StepReport.from_dict(values | {"metrics": values["metrics"] | exact})


def collect(
    samples: Iterable[tuple[Step, int, DumpSample]], reports: Sequence[StepReport], config: AuditConfig
) -> list[Wanted]:
    """Read samples and return what each report's quantiles need; the last report is that of all steps."""
    wanted = [Wanted.of(report, config) for report in reports]
    of_step = {report.step: want for report, want in zip(reports[:-1], wanted, strict=False)}
    for step, numbered in groupby(samples, key=lambda found: found[0]):
        for tokens in _batches(((slot, sample) for _, slot, sample in numbered), config):
            magnitude = np.abs(tokens.dlogp[tokens.compared])
            bins = _bins(magnitude, config.grouping_power)
            of_step[step].add(magnitude, bins)
            wanted[-1].add(magnitude, bins)
    return wanted


def _batches(numbered: Iterable[tuple[int, DumpSample]], config: AuditConfig) -> Iterable[Tokens]:
    waiting: list[tuple[int, DumpSample]] = []
    held = 0
    for slot, sample in numbered:
        waiting.append((slot, sample))
        held += len(sample)
        if held >= BATCH_TOKENS:
            yield Tokens.join(waiting, config=config)
            waiting, held = [], 0
    if waiting:
        yield Tokens.join(waiting, config=config)


def _bins(magnitude: Floats, grouping_power: int) -> Ints:
    """Return the sketch's bin of each abs(dlogp), filed as float32 as the sketch does."""
    return np.asarray(bin_index(torch.from_numpy(magnitude).float(), grouping_power).numpy())
