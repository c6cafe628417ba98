"""The choice of the worst tokens against a plain sort."""

from __future__ import annotations

import random

import pytest
import torch

from rlk_audit.layout import WORST_LOG_PROBS, WORST_TOKEN
from rlk_audit.worst import NO_TOKEN, abs_dlogp_of_rows, select_worst, worst_rows

VALID, SAMPLE, POSITION = (WORST_TOKEN.index(name) for name in ("valid", "sample_index", "token_position"))


def by_sorting(values: list[float], samples: list[int], positions: list[int], k: int, per_sample: bool) -> list[int]:
    order = sorted(range(len(values)), key=lambda i: (-values[i], samples[i], positions[i], i))
    chosen: list[int] = []
    for place in order:
        if values[place] >= 0 and not (
            per_sample and samples[place] != -1 and samples[place] in [samples[i] for i in chosen]
        ):
            chosen.append(place)
    return chosen[:k]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_select_worst_is_a_sort(seed: int, per_sample: bool) -> None:
    """Few different values, so that most places are ties. Kills: `topk` alone, the order key of the wrong column."""
    rng = random.Random(seed)
    count, k = rng.randint(1, 40), rng.randint(1, 6)
    values = [rng.choice([NO_TOKEN, 0.0, 0.5, 0.5, 2.0]) for _ in range(count)]
    samples = [rng.choice([-1, 0, 3, 2**40]) for _ in range(count)]
    positions = [rng.randint(-1, 4) for _ in range(count)]
    chosen, exists = select_worst(
        torch.tensor(values, dtype=torch.float64), torch.tensor(samples), torch.tensor(positions), k, per_sample
    )
    expected = by_sorting(values, samples, positions, k, per_sample)
    assert len(chosen) == len(exists) == k
    assert exists.tolist() == [True] * len(expected) + [False] * (k - len(expected))
    assert chosen[: len(expected)].tolist() == expected


def test_a_zero_drift_is_a_token_too() -> None:
    """Kills: `largest > 0` for `largest >= 0`."""
    _, exists = select_worst(torch.zeros(1, dtype=torch.float64), torch.tensor([5]), torch.tensor([0]), 2, False)
    assert exists.tolist() == [True, False]


def row(train: float, rollout: float, sample: int = 0, position: int = 0, valid: int = 1) -> list[int]:
    values = [0] * len(WORST_TOKEN)
    values[WORST_LOG_PROBS] = torch.tensor([train, rollout], dtype=torch.float64).view(torch.int64).tolist()
    values[VALID], values[SAMPLE], values[POSITION] = valid, sample, position
    return values


def test_rows_are_ordered_by_their_drift_and_empty_ones_come_last() -> None:
    """An empty row may hold anything: only `valid` tells."""
    rows = torch.tensor(
        [row(-90.0, -1.0, valid=0), row(-1.0, -1.25), row(-3.0, -1.0, sample=9), row(-1.0, -3.0, sample=2)]
    )
    before = rows.clone()
    assert abs_dlogp_of_rows(rows).tolist() == [NO_TOKEN, 0.25, 2.0, 2.0]
    worst = worst_rows(rows, 5, per_sample=False)
    assert worst[:, SAMPLE].tolist() == [2, 9, 0, 0, 0]
    assert worst[:, VALID].tolist() == [1, 1, 1, 0, 0]
    assert worst[3:].eq(0).all(), "what is not there is zero to the last field"
    assert torch.equal(rows, before)


def test_one_row_a_sample() -> None:
    rows = torch.tensor([row(-1.0, -9.0, 4, 1), row(-1.0, -9.0, 4, 0), row(-1.0, -2.0, 5, 7)])
    worst = worst_rows(rows, 3, per_sample=True)
    assert [(r[SAMPLE], r[POSITION]) for r in worst.tolist()][:2] == [(4, 0), (5, 7)]
    assert worst[:, VALID].tolist() == [1, 1, 0]
