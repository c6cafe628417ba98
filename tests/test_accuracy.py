"""How close the figures are to the exact ones: quantiles within their bound, extremes and sums without error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    QUANTILES,
    SIGNED_QUANTILES,
    Sample,
    audit,
    differences,
    exact_quantile,
    quantile_error,
    quantile_name,
)
from strategies import observe

from rlk_audit import AuditConfig, LogHistogram, StepReport

DATA_SETS = 5000
MANY_QUANTILES = ("0", "0.001", "0.25", "0.5", "0.7", "0.9", "0.99", "0.999", "1")


def report_of(
    train: np.ndarray,
    rollout: np.ndarray,
    config: AuditConfig | None = None,
    position: torch.Tensor | None = None,
) -> StepReport:
    update = {
        "train_log_probs": torch.from_numpy(train),
        "rollout_log_probs": torch.from_numpy(rollout),
        "mask": torch.ones(len(train)),
        "token_position": torch.arange(len(train)) if position is None else position,
    }
    return observe(update, config=config)


# --- data sets: drifts d with T and R such that T - R is d ----------------------------------------------------------


def of_drifts(drift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(T, R) with R = 0 for negative drifts and T = 0 for positive ones: T - R is the drift to the last bit."""
    return np.minimum(drift, 0.0), np.minimum(-drift, 0.0)


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(0.0, 10.0 ** rng.uniform(-6, 1.5), n).clip(-999.0, 999.0)


def ties(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice(rng.normal(0.0, 0.1, 3), n)


def zeros(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.7, 0.0, rng.laplace(0.0, 0.02, n))


def subnormals(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], n) * 2.0 ** rng.uniform(-149, -20, n)


def huge(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], n) * rng.uniform(0.0, 999.9, n)


def decades(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], n) * 10.0 ** rng.uniform(-12, 2.9, n)


def powers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Powers of two and their neighbours: the edges of the bins."""
    exact = 2.0 ** rng.integers(-33, 9, n).astype(np.float64)
    return rng.choice([-1.0, 1.0], n) * np.nextafter(exact, rng.choice([0.0, 1e9], n))


def one_sided(rng: np.random.Generator, n: int) -> np.ndarray:
    return -np.abs(rng.laplace(0.0, 0.05, n)) - 1e-4


KINDS: tuple[Callable[..., np.ndarray], ...] = (normal, ties, zeros, subnormals, huge, decades, powers, one_sided)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_quantiles_are_within_their_bound(kind: Callable[..., np.ndarray]) -> None:
    """5,000 data sets in all, in float64 and float32, against sorted lists.

    Kills: `floor` for `ceil` in the order index; a bin's edge as its representative; a float rank; averaged halves.
    """
    rng = np.random.default_rng(KINDS.index(kind))
    config = AuditConfig(quantiles=MANY_QUANTILES)
    for number in range(DATA_SETS // len(KINDS)):
        train, rollout = of_drifts(kind(rng, int(rng.choice([1, 2, 3, 10, 100, 101, 400]))))
        if number % 3 == 0:
            train, rollout = train.astype(np.float32), rollout.astype(np.float32)
        drift = train.astype(np.float64) - rollout.astype(np.float64)
        metrics = report_of(train, rollout, config).metrics
        checks = [(quantile_name("abs_dlogp", q), np.abs(drift).tolist(), q) for q in MANY_QUANTILES]
        checks += [(quantile_name("dlogp", q), drift.tolist(), q) for q in SIGNED_QUANTILES]
        for name, values, quantile in checks:
            exact = exact_quantile(values, quantile)
            assert abs(metrics[name] - exact) <= quantile_error(exact), (number, name, metrics[name], exact)
        assert metrics["abs_dlogp_max"] == metrics["abs_dlogp_p100"] == np.abs(drift).max()
        assert metrics["abs_dlogp_p00"] == np.abs(drift).min()
        assert (metrics["dlogp_min"], metrics["dlogp_max"]) == (drift.min(), drift.max())


@pytest.mark.parametrize("power", [5, 6, 7, 8])
def test_the_bound_follows_the_grouping_power(power: int) -> None:
    rng = np.random.default_rng(power)
    config = AuditConfig(grouping_power=power)
    worst = 0.0
    for _ in range(150):
        train, rollout = of_drifts(decades(rng, 300))
        drift = np.abs(train - rollout).tolist()
        metrics = report_of(train, rollout, config).metrics
        for quantile in QUANTILES:
            exact, got = exact_quantile(drift, quantile), metrics[quantile_name("abs_dlogp", quantile)]
            assert abs(got - exact) <= quantile_error(exact, power)
            worst = max(worst, abs(got - exact) / exact)
    assert worst > 0.5 * 2.0 ** -(power + 1), "the bound should be tight, or the data cannot show a finer sketch"


@given(st.lists(st.floats(-900.0, 900.0), min_size=1, max_size=60))
@settings(max_examples=100)
def test_any_floats_are_within_the_bound(drifts: list[float]) -> None:
    train, rollout = of_drifts(np.array(drifts))
    assert not differences(
        report_of(train, rollout).metrics,
        audit([Sample(train.tolist(), rollout.tolist())], total_known=False),
    )


# --- exact figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 4097])
def test_constants_have_no_spread(dtype: type, count: int) -> None:
    """std is exactly 0 and every quantile the constant itself. Kills: variance from rounded sums; the bin's middle."""
    for drift in (0.1, -0.1, 1e-7, -3.3, 5e-324, 700.7, 1 / 3, 2.0**-140):
        train, rollout = (side.astype(dtype) for side in of_drifts(np.full(count, drift)))
        exact = float(train[0]) - float(rollout[0])
        metrics = report_of(train, rollout).metrics
        assert metrics["dlogp_std"] == 0.0
        for name in ("dlogp_p01", "dlogp_p50", "dlogp_p99", "dlogp_min", "dlogp_max"):
            assert metrics[name] == exact
        for name in ("abs_dlogp_p50", "abs_dlogp_p99_9", "abs_dlogp_max", "worst_abs_dlogp"):
            assert metrics[name] == abs(exact)
        assert metrics["dlogp_mean"] == float(np.float32(exact))
        assert math.isnan(metrics["prob_pearson"])
        assert metrics["ess0"] == 1.0 or (drift == 700.7 and math.isnan(metrics["ess0"]))


def test_bounds_that_rounding_must_not_break() -> None:
    """ess0 <= 1, abs(correlation) <= 1, variance >= 0, k3 >= 0, also where values agree to the last bits.

    Kills: moments in float64; `mean of squares - square of mean` without exact sums; a k3 that cancels below zero.
    """
    rng = np.random.default_rng(0)
    for number in range(600):
        n = int(rng.integers(2, 40))
        base, spread = -(10.0 ** rng.uniform(-8, 1.5)), 10.0 ** rng.uniform(-17, 0)
        train = np.minimum(base + rng.normal(0, spread, n), 0.0)
        rollout = np.minimum(
            train * rng.choice([1.0, 1.0 + 1e-7, 0.5]) + rng.choice([0.0, spread]) * rng.normal(0, 1, n), 0.0
        )
        if number % 2:
            train, rollout = train.astype(np.float32), rollout.astype(np.float32)
        metrics = report_of(train, rollout).metrics
        assert math.isnan(metrics["ess0"]) or 0.0 < metrics["ess0"] <= 1.0
        assert math.isnan(metrics["prob_pearson"]) or abs(metrics["prob_pearson"]) <= 1.0
        assert metrics["dlogp_std"] >= 0.0 and metrics["kl0_k2"] >= 0.0
        assert metrics["approx_kl0"] >= 0.0 or math.isnan(metrics["approx_kl0"])
        assert metrics["mult_prob_error"] >= 1.0


def test_perfect_correlation_is_one() -> None:
    """The same p on both sides correlates to exactly 1."""
    values = np.log(np.linspace(0.1, 0.9, 33)).astype(np.float32)
    assert report_of(values, values).metrics["prob_pearson"] == 1.0


def test_probabilities_below_the_normal_range_correlate_too() -> None:
    """p and q that float32 holds as subnormals, some or all. Kills: a subnormal's exponent taken as one less."""
    rng = np.random.default_rng(3)
    for low, high in ((-95.0, -88.0), (-92.0, -84.0), (-89.0, -86.0)):
        train = rng.uniform(low, high, 50)
        rollout = train + rng.normal(0.0, 0.3, 50)
        found = differences(
            report_of(train, rollout).metrics, audit([Sample(train.tolist(), rollout.tolist())], total_known=False)
        )
        assert not found
        assert abs(report_of(train, rollout).metrics["prob_pearson"]) > 0.5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_figures_are_those_of_exact_sums(kind: Callable[..., np.ndarray]) -> None:
    """Every figure against the oracle's `Fraction` sums: those of d and T to the last bits.

    Kills: a float32 or float64 running sum; a value rounded twice; a lost carry between the two parts of a square.
    """
    rng = np.random.default_rng(40 + KINDS.index(kind))
    for number in range(25):
        train, rollout = of_drifts(kind(rng, int(rng.choice([1, 5, 64, 300]))))
        if number % 3 == 0:
            train, rollout = train.astype(np.float32), rollout.astype(np.float32)
        sample = Sample(train.astype(np.float64).tolist(), rollout.astype(np.float64).tolist())
        assert not differences(report_of(train, rollout).metrics, audit([sample], total_known=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_is_widened_exactly(dtype: torch.dtype) -> None:
    """Kills: d computed in the dtype of the inputs; float64 inputs narrowed before the subtraction."""
    generator = torch.Generator().manual_seed(1)
    train = -torch.rand(500, generator=generator, dtype=torch.float64) * 8
    rollout = (train + torch.randn(500, generator=generator, dtype=torch.float64) * 1e-3).clamp(max=0.0)
    for other in (dtype, torch.float32):
        t, r = train.to(dtype), rollout.to(other)
        where = {"mask": torch.ones(500, dtype=torch.bool), "token_position": torch.arange(500)}
        report = observe({"train_log_probs": t, "rollout_log_probs": r} | where)
        expected = audit([Sample(t.double().tolist(), r.double().tolist())], total_known=False)
        assert not differences(report.metrics, expected)
        assert report.worst_tokens[0].dlogp == expected.worst[0].dlogp


def test_order_of_tokens_leaves_no_trace() -> None:
    """A permutation of the tokens gives the same bits, over sums of values 30 decades apart."""
    rng = np.random.default_rng(5)
    train, rollout = of_drifts(decades(rng, 3000))
    first = report_of(train, rollout).metrics
    for _ in range(5):
        order = rng.permutation(3000)
        again = report_of(train[order], rollout[order], position=torch.from_numpy(order)).metrics
        assert {k: v.hex() if isinstance(v, float) else v for k, v in again.items()} == {
            k: v.hex() if isinstance(v, float) else v for k, v in first.items()
        }


def test_k3_does_not_cancel() -> None:
    """exp(d) - 1 - d is d^2 / 2 for small d, of either sign. Kills: `exp(d) - 1 - d` in float32 or float64."""
    for drift in [sign * 10.0**power for sign in (-1, 1) for power in range(-9, -1)]:
        train, rollout = of_drifts(np.full(3, drift))
        series = drift**2 / 2 + drift**3 / 6 + drift**4 / 24 + drift**5 / 120
        assert report_of(train, rollout).metrics["approx_kl0"] == pytest.approx(series, rel=1e-6)


def test_clip_and_tail_limits_are_strict() -> None:
    """A ratio at the limit is inside, the next float outside. Kills: `>=`; `exp(d)` compared, not d."""
    config = AuditConfig(eps_low=0.2, eps_high=0.28)
    low, high, ln2 = math.log1p(-0.2), math.log1p(0.28), math.log(2.0)
    cases = {
        low: (0, 0, 0), math.nextafter(low, -1): (1, 0, 0), high: (0, 0, 0), math.nextafter(high, 1): (0, 1, 0),
        ln2: (0, 1, 0), math.nextafter(ln2, 1): (0, 1, 1), -ln2: (1, 0, 0), -math.nextafter(ln2, 1): (1, 0, 1),
    }  # fmt: skip
    for drift, (below, above, tail) in cases.items():
        train, rollout = of_drifts(np.array([drift, 0.0]))
        metrics = report_of(train, rollout, config).metrics
        assert metrics["clipfrac0_low"] == below / 2 and metrics["clipfrac0_high"] == above / 2
        assert metrics["clipfrac0"] == (below + above) / 2 and metrics["tail_frac_ln2"] == tail / 2


def test_large_updates_are_exact_too() -> None:
    """More tokens than a chunk holds. Kills: a chunk lost or counted twice at its edge."""
    rng = random.Random(2)
    values = np.array([rng.choice([0.0, 0.25, -0.5, 1.5]) for _ in range(150_001)])
    train, rollout = of_drifts(values)
    metrics = report_of(train.astype(np.float32), rollout.astype(np.float32)).metrics
    assert metrics["compared_token_count"] == 150_001
    assert metrics["abs_dlogp_mean"] == math.fsum(np.abs(values)) / 150_001
    assert metrics["identical_frac"] == np.count_nonzero(values == 0.0) / 150_001


def test_the_histogram_alone_keeps_the_bound() -> None:
    """LogHistogram by itself: updates, a merge, all order indices."""
    rng = np.random.default_rng(9)
    values = decades(rng, 400).astype(np.float32)
    first, second = LogHistogram(), LogHistogram()
    first.update(torch.from_numpy(values[:150]))
    second.update(torch.from_numpy(values[150:]))
    first.merge(second)
    assert first.count == 400 and (first.min, first.max) == (values.min(), values.max())
    for hundredths in range(0, 101):
        quantile = str(hundredths / 100)
        exact = exact_quantile(values.tolist(), quantile)
        assert abs(first.quantile(quantile) - exact) <= quantile_error(exact)
