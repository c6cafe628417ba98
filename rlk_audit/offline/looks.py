"""What is looked at token by token beside the state: excerpts around worst tokens, densities, means of samples."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlk_audit.dumps.sample import DumpSample
from rlk_audit.offline.plan import WORST_K, Step
from rlk_audit.offline.tokens import Tokens
from rlk_audit.report import WorstToken
from rlk_audit.run_view import Density, Excerpt

NEIGHBOURS = 12
"""Tokens shown on either side of a worst one."""
DENSITY_BINS = 64

_SHOWN = ("train_log_probs", "rollout_log_probs", "mask", "rollout_missing", "token_ids", "rollout_token_ids")

_Key = tuple[float, int, int, bool, int, int]


@dataclass(frozen=True, eq=False)
class Cutting:
    """A token of large abs(dlogp) with its neighbours; ids are -1 where unknown.

    Attributes:
        key: by which the worst come first: as the worst tokens of a report, then the earlier step and sample.
        step, sample, place: where it stands; ``place`` counts within the sample.
    """

    key: _Key
    step: Step
    sample: DumpSample
    place: int

    def __lt__(self, other: Cutting) -> bool:
        return self.key > other.key  # the least drifted is the first to go

    @property
    def first(self) -> int:
        """Place of the first token shown."""
        return max(self.place - NEIGHBOURS, 0)

    @property
    def last(self) -> int:
        """Place behind the last token shown."""
        return min(self.place + NEIGHBOURS + 1, len(self.sample))


class Cuttings:
    """Keeps the WORST_K worst tokens of a dump with their neighbours."""

    def __init__(self) -> None:
        self._kept: list[Cutting] = []

    def add(self, step: Step, tokens: Tokens) -> None:
        """Look at the tokens of a step."""
        at = _largest(np.where(tokens.compared, np.abs(tokens.dlogp), -1.0), self._floor)
        number = np.searchsorted(tokens.starts, at, side="right") - 1
        magnitude, index, position = np.abs(tokens.dlogp[at]), tokens.sample_index[number], tokens.position[at]
        # Many may tie, as where a side is offset by a constant.
        order = np.lexsort((tokens.slots[number], position, index, -magnitude))[:WORST_K]
        for place in order.tolist():
            key = (
                -float(magnitude[place]), int(index[place]), int(position[place]), step is not None, step or 0,
                int(tokens.slots[number[place]]),
            )  # fmt: skip
            sample = tokens.samples[number[place]]
            self._offer(key, step, sample, int(at[place] - tokens.starts[number[place]]))

    @property
    def _floor(self) -> float:
        return -self._kept[0].key[0] if len(self._kept) == WORST_K else 0.0

    def _offer(self, key: _Key, step: Step, sample: DumpSample, place: int) -> None:
        if len(self._kept) < WORST_K:
            heapq.heappush(self._kept, _cut(key, step, sample, place))
        elif key < self._kept[0].key:
            heapq.heapreplace(self._kept, _cut(key, step, sample, place))

    def worst(self, others: Iterable[Cuttings] = ()) -> list[Cutting]:
        """Return the worst of this and others, worst first."""
        kept = [cutting for cuttings in (self, *others) for cutting in cuttings._kept]
        return sorted(kept, key=lambda cutting: cutting.key)[:WORST_K]


def _largest(magnitude: npt.NDArray[np.float64], floor: float) -> npt.NDArray[np.int64]:
    """Return the places of values of at least ``floor`` that may be among the WORST_K largest."""
    if len(magnitude) > WORST_K:
        floor = max(floor, float(np.partition(magnitude, -WORST_K)[-WORST_K]))
    return np.flatnonzero(magnitude >= floor)


def _cut(key: _Key, step: Step, sample: DumpSample, place: int) -> Cutting:
    """Copy the neighbourhood out of the sample, so that the file's arrays can go."""
    whole = Cutting(key, step, sample, place)
    shown = slice(whole.first, whole.last)

    def part(values: npt.NDArray[np.generic] | None) -> npt.NDArray[np.generic] | None:
        return None if values is None else values[shown].copy()

    positions = np.arange(len(sample)) if sample.token_position is None else sample.token_position
    columns = {name: part(getattr(sample, name)) for name in _SHOWN}
    cut = replace(sample, token_position=positions[shown].copy(), labels={}, **columns)  # type: ignore[arg-type]
    return Cutting(key, step, cut, place - whole.first)


def excerpt(cutting: Cutting, worst: WorstToken, texts: tuple[str, ...]) -> Excerpt:
    """Return a cutting as it is shown.

    Args:
        cutting: around the worst token.
        worst: the token of the report.
        texts: of the cutting's tokens, or empty.
    """
    sample = cutting.sample
    nothing = np.full(len(sample), np.nan)
    train, rollout = (nothing if v is None else v for v in (sample.train_log_probs, sample.rollout_log_probs))
    if sample.rollout_missing is not None:
        rollout = np.where(sample.rollout_missing, np.nan, rollout)
    positions = sample.token_position
    return Excerpt(
        cutting.step,
        worst,
        tuple(() if positions is None else positions.tolist()),
        texts,
        tuple(map(float, train)),
        tuple(map(float, rollout)),
        tuple(sample.mask.tolist()),
    )


def is_of(cutting: Cutting, worst: WorstToken) -> bool:
    """Return whether a cutting is that of a report's worst token."""
    magnitude, sample_index, position, *_ = cutting.key
    return (-magnitude, sample_index, position) == (worst.abs_dlogp, worst.sample_index, worst.token_position)


class ProbabilityDensity:
    """Counts compared tokens by their two probabilities."""

    def __init__(self) -> None:
        self.counts = np.zeros((DENSITY_BINS, DENSITY_BINS), dtype=np.int64)

    def add(self, tokens: Tokens) -> None:
        """Count tokens."""
        sides = (np.exp(side[tokens.compared].astype(np.float64)) for side in (tokens.rollout, tokens.train))
        rows, columns = (np.minimum((side * DENSITY_BINS).astype(np.int64), DENSITY_BINS - 1) for side in sides)
        cells = np.bincount(rows * DENSITY_BINS + columns, minlength=DENSITY_BINS**2)
        self.counts += cells.reshape(DENSITY_BINS, DENSITY_BINS)

    def density(self, others: Iterable[ProbabilityDensity] = ()) -> Density:
        """Return the counts of this and others."""
        edges = tuple((np.arange(DENSITY_BINS + 1) / DENSITY_BINS).tolist())
        return Density(edges, sum((other.counts for other in others), self.counts))


def sample_means(tokens: Tokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the number and the mean abs(dlogp) of every sample that compared a token."""
    filled = np.flatnonzero(tokens.lengths)
    if not len(filled):
        return tokens.slots[:0], np.zeros(0)
    starts = tokens.starts[filled]
    counts = np.add.reduceat(tokens.compared.astype(np.int64), starts)
    sums = np.add.reduceat(np.abs(tokens.dlogp), starts)
    compared = counts > 0
    return tokens.slots[filled][compared], sums[compared] / counts[compared]
