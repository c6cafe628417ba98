"""The sample table: exact figures of whole samples, wherever ranks and micro-batches cut them apart.

A row a slot, of integers that add up: how often the sample was seen, its active and compared tokens, and the sums of
dlogp and abs(dlogp) in fixed point, which hold 2 million tokens of a sample at the largest abs(dlogp). The row behind
the last slot takes the active tokens that have no slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit.exact_sum import FRACTION_BITS, fixed_point

COLUMNS = ("seen", "active", "compared", "dlogp", "abs_dlogp")
ROW_LENGTH = len(COLUMNS)

Table = npt.NDArray[np.int64]

SAMPLE_METRICS = (
    "abs_dlogp_sample_mean",
    "seq_ratio0_geo_mean",
    "seq_ratio0_geo_min",
    "seq_ratio0_geo_max",
    "seq_log_ratio0_mean",
    "seq_log_ratio0_min",
    "seq_log_ratio0_max",
    "seq_chi2_0",
    "seq_ess0",
)
"""Metrics over the samples that compared a token."""


@dataclass(frozen=True)
class SampleFigures:
    """One sample of the step.

    Attributes:
        sample_slot: its slot, as given by the caller.
        active_token_count, compared_token_count: its tokens.
        abs_dlogp_mean: nats a token.
        seq_log_ratio0: sum of its dlogp, the logarithm of the product of its ratios.
    """

    sample_slot: int
    active_token_count: int
    compared_token_count: int
    abs_dlogp_mean: float
    seq_log_ratio0: float


def table_length(slots: int | None) -> int:
    """Return the integers of a table, 0 without one."""
    return 0 if slots is None else (slots + 1) * ROW_LENGTH


def add_tokens(table: Tensor, slot: Tensor, active: Tensor, compared: Tensor, dlogp: Tensor) -> None:
    """Add tokens to a table.

    Args:
        table: int64 [table_length], changed in place.
        slot: int64 [n], negative where there is none.
        active, compared: bool [n].
        dlogp: float64 [n], 0 where not compared.
    """
    rows = table.view(-1, ROW_LENGTH)
    place = _places(rows, slot)
    fixed = fixed_point(dlogp)
    columns = (slot >= 0, active, compared, fixed, fixed.abs())
    rows.scatter_add_(0, place[:, None].expand(-1, ROW_LENGTH), torch.stack([c.long() for c in columns], dim=1))


def add_seen(table: Tensor, slot: Tensor) -> None:
    """Note that samples exist, whether or not they have a token.

    Args:
        table: int64 [table_length], changed in place.
        slot: int64 [samples], negative where there is none.
    """
    rows = table.view(-1, ROW_LENGTH)
    rows[:, 0].scatter_add_(0, _places(rows, slot), torch.ones_like(slot))


def _places(rows: Tensor, slot: Tensor) -> Tensor:
    slots = len(rows) - 1
    return torch.where((slot >= 0) & (slot < slots), slot, slots)


@dataclass(frozen=True)
class SampleTable:
    """A summed table, read on the host: ``rows`` int64 [slots, ROW_LENGTH], and the active tokens without a slot."""

    rows: Table
    unplaced: int

    @classmethod
    def of(cls, numbers: Table) -> SampleTable:
        """Split the table's integers."""
        rows = numbers.reshape(-1, ROW_LENGTH)
        return cls(rows[:-1], int(rows[-1, COLUMNS.index("active")]))

    def column(self, name: str) -> Table:
        """Return one column of every slot."""
        return self.rows[:, COLUMNS.index(name)]

    @property
    def zero_active(self) -> int:
        """Samples that were seen and have no active token."""
        return int(((self.column("seen") > 0) & (self.column("active") == 0)).sum())

    def metrics(self) -> dict[str, float | int]:
        """Return the figures over samples; NaN where some active token has no slot, or nothing was compared."""
        counts = ("sample_count", "zero_active_sample_count")
        if self.unplaced:
            return dict.fromkeys((*counts, *SAMPLE_METRICS), math.nan)
        values: dict[str, float | int] = dict.fromkeys(SAMPLE_METRICS, math.nan)
        values |= dict(zip(counts, (int((self.column("seen") > 0).sum()), self.zero_active), strict=True))
        samples = self.figures()
        if not samples:
            return values
        logs = [sample.seq_log_ratio0 for sample in samples]
        geometric = [_exp(sample.seq_log_ratio0 / sample.compared_token_count) for sample in samples]
        values |= {
            "abs_dlogp_sample_mean": _mean([sample.abs_dlogp_mean for sample in samples]),
            "seq_ratio0_geo_mean": _finite(_mean(geometric)),
            "seq_ratio0_geo_min": _finite(min(geometric)),
            "seq_ratio0_geo_max": _finite(max(geometric)),
            "seq_log_ratio0_mean": _mean(logs),
            "seq_log_ratio0_min": min(logs),
            "seq_log_ratio0_max": max(logs),
        }
        return values | _moments(logs)

    def figures(self) -> list[SampleFigures]:
        """Return the samples that compared a token, by slot."""
        compared = self.column("compared")
        scale = 2.0**FRACTION_BITS
        return [
            SampleFigures(slot, int(active), int(n), int(absolute) / (int(n) << FRACTION_BITS), int(dlogp) / scale)
            for slot, (_, active, n, dlogp, absolute) in enumerate(self.rows)
            if compared[slot]
        ]

    def worst(self, k: int) -> tuple[SampleFigures, ...]:
        """Return the k samples of largest mean abs(dlogp); of equal ones the lower slot first."""
        return tuple(sorted(self.figures(), key=lambda sample: (-sample.abs_dlogp_mean, sample.sample_slot))[:k])


def _exp(value: float) -> float:
    """Return exp(value), infinite where it leaves float64."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(value: float) -> float:
    """Return the value; NaN where it is infinite."""
    return value if math.isfinite(value) else math.nan


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _moments(logs: list[float]) -> dict[str, float]:
    """Return ess and chi2 of the ratios exp(logs), which may leave float64 themselves."""
    top = max(logs)
    first = math.fsum(math.exp(value - top) for value in logs)
    second = math.fsum(math.exp(2 * (value - top)) for value in logs)
    return {
        "seq_ess0": min(first * first / (len(logs) * second), 1.0),
        "seq_chi2_0": _finite(_exp(2 * top) * second / len(logs) - 1),
    }
