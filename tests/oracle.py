"""Brute force for every step metric: plain lists, `math.fsum`, `fractions`.

The oracle shares no code with the package and imports nothing from it. numpy serves for one thing only: rounding to
float32. Every token is looked at by itself, every sum is an exact `Fraction`, every quantile comes from a sorted list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction

import numpy as np

CLASSES = (
    "rollout_missing", "rollout_sentinel", "train_sentinel", "rollout_nan", "rollout_neginf", "train_nan",
    "train_neginf", "positive",
)  # fmt: skip
QUANTILES = ("0.5", "0.9", "0.99", "0.999")
SIGNED_QUANTILES = ("0.01", "0.5", "0.99")
OVERFLOWS = ("ratio0_mean", "chi2_0", "ess0", "approx_kl0", "mult_prob_error")
GROUPING_POWER = 6
SMALLEST_BINNED = 2.0**-32
UNDERFLOW_ERROR = 2.0**-33

# How closely a reported figure must agree. Sums of d and T are exact integers, so only the last division may round.
# A transcendental may differ by one float32 step between two libraries, and that step is all that is forgiven.
LAST_BITS = 5e-16
FLOAT32_STEP = 1e-6
SMALLEST_FLOAT32 = 2.0**-149
FROM_EXACT_SUMS = (
    "abs_dlogp_mean", "dlogp_mean", "dlogp_std", "kl0_k1", "kl0_k2", "train_nll", "rollout_nll", "log_ppl_diff",
    "mask_coverage", "compared_coverage", "clipfrac0", "clipfrac0_low", "clipfrac0_high", "tail_frac_ln2",
    "identical_frac",
)  # fmt: skip
FROM_EXPONENTIALS = (
    "ratio0_mean", "ratio0_min", "ratio0_max", "approx_kl0", "chi2_0", "ess0", "prob_diff_mean", "prob_diff_max",
    "mult_prob_error",
)  # fmt: skip
# Derived in float64 from exact integers: a few roundings, by another order of the same operations.
FROM_SAMPLES = (
    "abs_dlogp_sample_mean", "seq_ratio0_geo_mean", "seq_ratio0_geo_min", "seq_ratio0_geo_max", "seq_log_ratio0_mean",
    "seq_log_ratio0_min", "seq_log_ratio0_max", "seq_ess0", "seq_chi2_0",
)  # fmt: skip
FEW_ROUNDINGS = 1e-12


@dataclass
class Sample:
    """One response. `None` in `rollout` means that the engine gave no value; a mask of `None` means all active."""

    train: Sequence[float | None]
    rollout: Sequence[float | None]
    mask: Sequence[float] | None = None
    sample_index: int = -1
    rollout_id: int = -1
    token_ids: Sequence[int] | None = None
    rollout_token_ids: Sequence[int] | None = None
    labels: dict[str, int] = field(default_factory=dict)
    updates_since_rollout: int | None = None
    prompt_length: int = 0
    slot: int = -1

    def __len__(self) -> int:
        return len(self.train)


@dataclass
class Worst:
    """A token with the largest abs(d): the fields that no cutting over ranks may change."""

    abs_dlogp: float
    dlogp: float
    train_logp: float
    rollout_logp: float
    sample_index: int
    rollout_id: int
    token_position: int
    token_id: int
    labels: dict[str, int]


@dataclass
class Expected:
    """What one step must report. `slack` is the absolute error allowed to a figure beyond the rule of its kind."""

    metrics: dict[str, float]
    warnings: dict[str, int]
    worst: list[Worst]
    slack: dict[str, float]
    tokens: list[_Token]


@dataclass
class _Token:
    train: float
    rollout: float
    worst: Worst
    updates_since_rollout: int | None

    @property
    def d(self) -> float:
        return self.train - self.rollout


def float32(value: float) -> float:
    """The value rounded to the nearest float32; infinite where it leaves the range."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def exp(value: float) -> float:
    """exp in float64, infinite instead of raising."""
    return math.exp(value) if value < 709.7 else math.inf


def k3(d: float) -> float:
    """exp(d) - 1 - d. By its series where the subtraction would cancel."""
    if abs(d) < 1e-3:
        return math.fsum(d**power / math.factorial(power) for power in range(2, 8))
    return exp(d) - 1.0 - d


def token_class(
    train: float | None, rollout: float | None, ids_differ: bool, *, floor: float = -1000.0, tolerance: float = 1e-3
) -> str:
    """The one class of an active token, tested in the order of the definition."""
    if ids_differ:
        return "token_mismatch"
    if rollout is None:
        return "rollout_missing"
    train = math.nan if train is None else train
    if math.isfinite(rollout) and rollout <= floor:
        return "rollout_sentinel"
    if math.isfinite(train) and train <= floor:
        return "train_sentinel"
    if math.isnan(rollout):
        return "rollout_nan"
    if rollout == -math.inf:
        return "rollout_neginf"
    if math.isnan(train):
        return "train_nan"
    if train == -math.inf:
        return "train_neginf"
    if rollout > tolerance or train > tolerance:
        return "positive"
    return "compared"


def order_index(quantile: str, count: int) -> int:
    """Place in the sorted list of the smallest value with at least `quantile` of the tokens at or below it."""
    return max(0, math.ceil(Fraction(quantile) * count) - 1)


def exact_quantile(values: Iterable[float], quantile: str) -> float:
    ordered = sorted(values)
    return ordered[order_index(quantile, len(ordered))]


def quantile_error(value: float, grouping_power: int = GROUPING_POWER) -> float:
    """The promised bound on the error of a quantile whose exact value is `value`."""
    if value == 0.0:
        return 0.0
    if abs(value) < SMALLEST_BINNED:
        return UNDERFLOW_ERROR
    half_bin = 2.0 ** -(grouping_power + 1)
    # A float64 value is rounded to float32 before it is filed, which may move it by 2^-24 of itself.
    return abs(value) * (half_bin / (1.0 + half_bin) + 2.0**-23)


def quantile_name(prefix: str, quantile: str) -> str:
    """ "0.5" -> p50, "0.01" -> p01, "0.999" -> p99_9."""
    percent = Fraction(quantile) * 100
    whole, rest = divmod(percent, 1)
    digits = f"{int(whole):02d}"
    return f"{prefix}_p{digits}" + (f"_{str(float(rest))[2:]}" if rest else "")


def audit(
    samples: Sequence[Sample],
    *,
    quantiles: Sequence[str] = QUANTILES,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    worst_k: int = 4,
    total_known: bool = True,
    sentinel_floor: float = -1000.0,
    positive_tolerance: float = 1e-3,
) -> Expected:
    """Everything that a step over these samples must report."""
    counts = dict.fromkeys(("active", "total", "length_mismatch", "token_mismatch", "zero_fill_suspect", *CLASSES), 0)
    tokens: list[_Token] = []
    for sample in samples:
        _read(sample, counts, tokens, sentinel_floor, positive_tolerance)
    metrics = _count_metrics(counts, len(tokens), total_known)
    slack: dict[str, float] = {}
    _dlogp_metrics(metrics, tokens, quantiles, eps_low, eps_high)
    _exponential_metrics(metrics, slack, tokens)
    _update_age_metrics(metrics, tokens)
    worst = sorted((t.worst for t in tokens), key=lambda w: (-w.abs_dlogp, w.sample_index, w.token_position))[:worst_k]
    _worst_metrics(metrics, worst)
    warnings = {code: counts[code] for code in counts if code not in ("active", "total") and counts[code]}
    if not tokens:
        warnings["nothing_compared"] = 1
    return Expected(metrics, warnings, worst, slack, tokens)


def _read(sample: Sample, counts: dict[str, int], tokens: list[_Token], floor: float, tolerance: float) -> None:
    """File every token of one sample; a sample whose two sides differ in length is refused whole."""
    mask = [1] * len(sample.train) if sample.mask is None else list(sample.mask)
    counts["total"] += len(mask)
    active = [m != 0 for m in mask]
    counts["active"] += sum(active)
    if not len(sample.train) == len(sample.rollout) == len(mask):
        counts["length_mismatch"] += 1
        return
    for position, (train, rollout) in enumerate(zip(sample.train, sample.rollout, strict=True)):
        if not active[position]:
            continue
        ours = -1 if sample.token_ids is None else sample.token_ids[position]
        theirs = ours if sample.token_ids is None or sample.rollout_token_ids is None \
            else sample.rollout_token_ids[position]  # fmt: skip
        name = token_class(train, rollout, ours != theirs, floor=floor, tolerance=tolerance)
        if name != "compared":
            counts[name] += 1
            continue
        counts["zero_fill_suspect"] += rollout == 0.0 and train < -1.0
        worst = Worst(
            abs(train - rollout), train - rollout, train, rollout, sample.sample_index, sample.rollout_id, position,
            ours, dict(sample.labels),
        )  # fmt: skip
        tokens.append(_Token(train, rollout, worst, sample.updates_since_rollout))


def _count_metrics(counts: dict[str, int], compared: int, total_known: bool) -> dict[str, float]:
    active, total = counts["active"], counts["total"]
    return {
        "active_token_count": active,
        "compared_token_count": compared,
        "total_token_count": total if total_known else math.nan,
        "mask_coverage": active / total if total_known and total else math.nan,
        "compared_coverage": compared / active if active else math.nan,
    }


def _mean(values: Sequence[float]) -> Fraction:
    return sum(map(Fraction, values), Fraction(0)) / len(values)


def _root(value: Fraction) -> float:
    """Square root of an exact value, to the last bit or nearly, also where the value itself leaves float64."""
    if value == 0:
        return 0.0
    exponent = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(float(value / Fraction(4) ** exponent)), exponent)


def _dlogp_metrics(
    metrics: dict[str, float], tokens: list[_Token], quantiles: Sequence[str], eps_low: float, eps_high: float
) -> None:
    """Figures of d alone, T and R: no transcendental function enters but the two clip thresholds."""
    names = (*FROM_EXACT_SUMS[:8], *FROM_EXACT_SUMS[10:], "abs_dlogp_max", "dlogp_min", "dlogp_max")
    keys = [(quantile_name("abs_dlogp", q), q, True) for q in quantiles]
    keys += [(quantile_name("dlogp", q), q, False) for q in SIGNED_QUANTILES]
    if not tokens:
        metrics.update(dict.fromkeys((*names, *(key for key, _, _ in keys)), math.nan))
        return
    d = [t.d for t in tokens]
    rounded = [float32(value) for value in d]
    count, mean = len(d), _mean(rounded)
    square, train = _mean([Fraction(value) ** 2 for value in rounded]), _mean([float32(t.train) for t in tokens])
    metrics["abs_dlogp_mean"] = float(_mean([abs(value) for value in rounded]))
    metrics["dlogp_mean"], metrics["dlogp_std"] = float(mean), _root(square - mean**2)
    metrics["kl0_k1"], metrics["kl0_k2"] = float(-mean), float(square / 2)
    metrics["train_nll"], metrics["rollout_nll"] = float(-train), float(mean - train)
    metrics["log_ppl_diff"] = float(-mean)
    metrics["abs_dlogp_max"] = max(map(abs, d))
    metrics["dlogp_min"], metrics["dlogp_max"] = min(d), max(d)
    low = sum(value < math.log1p(-eps_low) for value in d)
    high = sum(value > math.log1p(eps_high) for value in d)
    metrics["clipfrac0"], metrics["clipfrac0_low"], metrics["clipfrac0_high"] = (
        (low + high) / count, low / count, high / count
    )  # fmt: skip
    metrics["tail_frac_ln2"] = sum(abs(value) > math.log(2.0) for value in d) / count
    metrics["identical_frac"] = sum(value == 0.0 for value in d) / count
    for key, quantile, absolute in keys:
        metrics[key] = exact_quantile(map(abs, d) if absolute else d, quantile)


def _exponential_metrics(metrics: dict[str, float], slack: dict[str, float], tokens: list[_Token]) -> None:
    """Figures of exp d, p = exp T and q = exp R, each rounded to float32 once before it is used."""
    metrics.update(dict.fromkeys((*FROM_EXPONENTIALS, "prob_pearson"), math.nan))
    metrics.update({f"overflow/{name}": 0 for name in OVERFLOWS})
    if not tokens:
        return
    d = [t.d for t in tokens]
    ratio = [float32(exp(value)) for value in d]
    square = [value * value for value in ratio]
    figures = {
        "ratio0_mean": ratio,
        "approx_kl0": [float32(k3(value)) for value in d],
        "mult_prob_error": [float32(exp(abs(value))) for value in d],
    }
    for name, values in figures.items():
        metrics[f"overflow/{name}"] = sum(map(math.isinf, values))
        if not metrics[f"overflow/{name}"]:
            metrics[name] = float(_mean(values))
    outside = sum(math.isinf(float32(value)) for value in square)
    metrics["overflow/chi2_0"] = metrics["overflow/ess0"] = outside
    if not outside:
        second = _mean([Fraction(value) ** 2 for value in ratio])
        metrics["chi2_0"] = float(second - 1)
        slack["chi2_0"] = FLOAT32_STEP * float(second)
        if second:
            metrics["ess0"] = float(_mean(ratio) ** 2 / second)
    # The extremes come from those of d, so only leaving float64 makes them null.
    for name, extreme in (("ratio0_min", min(d)), ("ratio0_max", max(d))):
        metrics[name] = exp(extreme) if exp(extreme) < math.inf else math.nan
    # expm1(d) - d is exact only to the last bit of expm1(d) in float64.
    slack["approx_kl0"] = 2.0**-52 * math.fsum(map(abs, d)) / len(d)
    _probability_metrics(metrics, slack, tokens)


def _probability_metrics(metrics: dict[str, float], slack: dict[str, float], tokens: list[_Token]) -> None:
    p, q = [float32(exp(t.train)) for t in tokens], [float32(exp(t.rollout)) for t in tokens]
    difference = [float32(abs(a - b)) for a, b in zip(p, q, strict=True)]
    metrics["prob_diff_mean"], metrics["prob_diff_max"] = float(_mean(difference)), max(difference)
    # p and q may each be a float32 step off in another library, and their difference then by as much.
    slack["prob_diff_mean"] = slack["prob_diff_max"] = 2.0**-22
    p_square, q_square = _mean([Fraction(v) ** 2 for v in p]), _mean([Fraction(v) ** 2 for v in q])
    p_var, q_var = p_square - _mean(p) ** 2, q_square - _mean(q) ** 2
    covariance = _mean([Fraction(a) * Fraction(b) for a, b in zip(p, q, strict=True)]) - _mean(p) * _mean(q)
    if p_var and q_var:
        product = p_var * q_var
        metrics["prob_pearson"] = math.copysign(_root(covariance**2 / product), covariance)
        # One float32 step of p moves the variance by that share of the mean square.
        slack["prob_pearson"] = min(2.0, FLOAT32_STEP * float(p_square / p_var + q_square / q_var))


def _update_age_metrics(metrics: dict[str, float], tokens: list[_Token]) -> None:
    ages = [t.updates_since_rollout for t in tokens if t.updates_since_rollout is not None]
    if ages:
        metrics["updates_since_rollout_min"], metrics["updates_since_rollout_max"] = min(ages), max(ages)
        if min(ages) == max(ages):
            metrics["updates_since_rollout"] = min(ages)


def _worst_metrics(metrics: dict[str, float], worst: list[Worst]) -> None:
    values = ("worst_abs_dlogp", "worst_dlogp", "worst_train_logp", "worst_rollout_logp")
    if not worst:
        metrics.update(dict.fromkeys(values, math.nan))
        return
    first = worst[0]
    metrics.update(zip(values, (first.abs_dlogp, first.dlogp, first.train_logp, first.rollout_logp), strict=True))
    metrics["worst_sample_index"], metrics["worst_rollout_id"] = first.sample_index, first.rollout_id
    metrics["worst_token_position"], metrics["worst_token_id"] = first.token_position, first.token_id


# --- parts of a step --------------------------------------------------------------------------------------------------

FIXED_POINT = 2**32
COARSE_POWER = 3


@dataclass
class Part:
    """What one bucket of a breakdown must report."""

    compared_token_count: int
    tail_frac_ln2: float
    abs_dlogp_mean: float
    abs_dlogp_p50: float
    abs_dlogp_p99: float
    abs_dlogp_max: float


def position_bucket(position: int) -> str:
    if position < 2:
        return "unknown" if position < 0 else str(position)
    low = 2 ** (position.bit_length() - 1)
    return "65536-up" if position >= 65536 else f"{low}-{2 * low - 1}"


def confidence_bucket(rollout: float) -> str:
    edges = ("0", "0.01", "0.1", "0.3", "0.5", "0.7", "0.9", "0.99", "1")
    below = [edge for edge in edges[1:-1] if rollout >= math.log(float(edge))]
    return f"{edges[len(below)]}-{edges[len(below) + 1]}"


def parts(expected: Expected, bucket: Callable[[Worst], str]) -> dict[str, Part]:
    """The figures of every bucket that has a token; `bucket` names a token's."""
    split: dict[str, list[float]] = {}
    for token in expected.tokens:
        split.setdefault(bucket(token.worst), []).append(token.worst.abs_dlogp)
    made = {}
    for name, values in split.items():
        fixed = sum(round(Fraction(value) * FIXED_POINT) for value in values)
        mean, tail = float(Fraction(fixed, FIXED_POINT * len(values))), sum(v > math.log(2.0) for v in values)
        p50, p99 = (exact_quantile(values, quantile) for quantile in ("0.5", "0.99"))
        made[name] = Part(len(values), tail / len(values), mean, p50, p99, max(values))
    return made


MAX_EXP = 709.0
"""exp of a little more leaves float64."""


def sample_metrics(samples: Sequence[Sample], expected: Expected) -> dict[str, float]:
    """The metrics over samples, each of which has a slot of its own."""
    by_slot: dict[int, list[float]] = {}
    index = {sample.sample_index: sample.slot for sample in samples}
    for token in expected.tokens:
        by_slot.setdefault(index[token.worst.sample_index], []).append(token.d)
    fixed = {slot: [round(Fraction(d) * FIXED_POINT) for d in values] for slot, values in by_slot.items()}
    empty = [s for s in samples if not sum(map(bool, [1] * len(s) if s.mask is None else s.mask))]
    metrics: dict[str, float] = {"sample_count": len(samples), "zero_active_sample_count": len(empty)}
    if not fixed:
        return metrics
    means = [Fraction(sum(map(abs, v)), FIXED_POINT * len(v)) for v in fixed.values()]
    logs = [float(Fraction(sum(v), FIXED_POINT)) for v in fixed.values()]
    metrics["abs_dlogp_sample_mean"] = float(sum(means) / len(means))
    exponents = [log / len(v) for log, v in zip(logs, fixed.values(), strict=True)]
    if max(exponents) < MAX_EXP:
        geometric = list(map(math.exp, exponents))
        metrics["seq_ratio0_geo_mean"] = math.fsum(geometric) / len(geometric)
        metrics["seq_ratio0_geo_max"] = max(geometric)
    if min(exponents) < MAX_EXP:
        metrics["seq_ratio0_geo_min"] = math.exp(min(exponents))
    metrics["seq_log_ratio0_mean"] = math.fsum(logs) / len(logs)
    metrics["seq_log_ratio0_min"], metrics["seq_log_ratio0_max"] = min(logs), max(logs)
    first, second = (sum((power * Decimal(log)).exp() for log in logs) for power in (1, 2))
    metrics["seq_ess0"] = float(first**2 / (len(logs) * second))
    if max(logs) < 300:
        metrics["seq_chi2_0"] = float(second / len(logs) - 1)
    return metrics


def _is_quantile(name: str) -> bool:
    return "dlogp_p" in name


def _allowed_error(name: str, value: float, slack: float, grouping_power: int) -> float:
    if _is_quantile(name):
        return quantile_error(value, grouping_power)
    if name in FROM_EXACT_SUMS:
        return LAST_BITS * abs(value)
    if name in FROM_SAMPLES:
        return FEW_ROUNDINGS * (1.0 + abs(value))
    if name in FROM_EXPONENTIALS:
        return FLOAT32_STEP * abs(value) + SMALLEST_FLOAT32 + slack
    return slack


def differences(
    reported: dict[str, float], expected: Expected, *, grouping_power: int = GROUPING_POWER, relative: float = 0.0
) -> list[str]:
    """One line for each reported metric that is missing or farther from the oracle's than its kind allows.

    `relative` widens the rule of every figure that is not a count, for data that reached the two sides differently.
    """
    found = []
    for name, value in expected.metrics.items():
        got = reported.get(name, 0 if name.startswith("overflow/") else None)
        if got is None:
            found.append(f"{name}: not reported, expected {value!r}")
            continue
        if math.isnan(value) != math.isnan(got):
            found.append(f"{name}: got {got!r}, expected {value!r}")
            continue
        allowed = _allowed_error(name, value, expected.slack.get(name, 0.0), grouping_power)
        if not math.isnan(value) and abs(got - value) > allowed + relative * abs(value):
            found.append(f"{name}: got {got!r}, expected {value!r} within {allowed!r}")
    return found
