"""Two runs or dumps side by side: which figures differ, by how much, and whether chance could do that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlk_audit.run_view import RunView

Floats = npt.NDArray[np.float64]

ROUNDS = 999
"""Random relabellings of samples; the smallest p-value is 1 / (ROUNDS + 1)."""
MAX_SAMPLES = 20_000
"""Samples of a side that a test takes, drawn at random where there are more."""
MIN_SAMPLES = 8
MIN_BUCKET_TOKENS = 100
BUCKETS_SHOWN = 12
LEAST_DIFFERENCE = 0.05
"""Of a ratio from 1, for a bucket to be shown."""
_SEED = 20_240_229
_POWER_80 = 1.96 + 0.84
"""Standard errors that a difference must have to be seen at 5 % in four of five experiments."""

HEADLINES = (
    "compared_token_count", "abs_dlogp_mean", "abs_dlogp_sample_mean", "abs_dlogp_p50", "abs_dlogp_p90",
    "abs_dlogp_p99", "abs_dlogp_p99_9", "abs_dlogp_max", "dlogp_mean", "approx_kl0", "chi2_0", "ess0", "clipfrac0",
    "tail_frac_ln2", "identical_frac", "prob_diff_mean", "prob_pearson", "train_nll", "compared_coverage",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A figure of both sides; NaN where a side has none."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        """B over A; NaN where that says nothing."""
        return self.b / self.a if self.a > 0 and self.b > 0 else math.nan


@dataclass(frozen=True)
class SampleTest:
    """Whether the samples of A and B drift alike.

    Attributes:
        count_a, count_b: samples.
        difference: mean of the sample means of abs(dlogp), B minus A, nats.
        low, high: its 95 % interval, from the samples' own spread.
        p_value: share of random relabellings of the samples with a difference at least as large.
        detectable: the difference that so many samples would show in four of five experiments, nats.
    """

    count_a: int
    count_b: int
    difference: float
    low: float
    high: float
    p_value: float
    detectable: float

    def __str__(self) -> str:
        told = (
            f"mean abs(dlogp) of samples: B - A = {self.difference:+.3g} nats (95 % from {self.low:+.3g} to "
            f"{self.high:+.3g}), permutation test p = {self.p_value:.3g} on {self.count_a} and {self.count_b} samples"
        )
        if self.p_value > 0.05:
            told += f"; no difference is shown, and one below about {self.detectable:.2g} nats could not be"
        return told


def sample_test(a: Floats, b: Floats) -> SampleTest | None:
    """Compare the means of two sets of sample means; None where a side has fewer than MIN_SAMPLES.

    A two-sided permutation test (Fisher 1935; p-values as in Phipson and Smyth 2010) whose unit is the sample, since
    the tokens of a sample are no independent draws. Samples of one prompt, or of neighbouring steps, are not quite so
    either: a p-value near 0.05 is no proof.
    """
    random = np.random.default_rng(_SEED)
    counts = len(a), len(b)
    if min(counts) < MIN_SAMPLES:
        return None
    a, b = (side if len(side) <= MAX_SAMPLES else random.choice(side, MAX_SAMPLES, replace=False) for side in (a, b))
    difference = float(b.mean() - a.mean())
    pooled = np.concatenate([a, b])
    larger = 0
    for _ in range(ROUNDS):
        random.shuffle(pooled)
        larger += abs(pooled[len(a) :].mean() - pooled[: len(a)].mean()) >= abs(difference) * (1 - 1e-12)
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return SampleTest(
        *counts,
        difference,
        difference - 1.96 * error,
        difference + 1.96 * error,
        (1 + larger) / (ROUNDS + 1),
        _POWER_80 * error,
    )


def headlines(a: RunView, b: RunView) -> list[Pair]:
    """Return the headline figures that both sides have."""
    ours, theirs = a.whole.metrics, b.whole.metrics
    return [Pair(name, ours[name], theirs[name]) for name in HEADLINES if name in ours and name in theirs]


def buckets(a: RunView, b: RunView) -> list[Pair]:
    """Return the mean abs(dlogp) of the buckets that differ most, by ratio."""
    ours, theirs = a.whole.breakdowns, b.whole.breakdowns
    pairs = []
    for label in (label for label in ours if label in theirs):
        others = {bucket.name: bucket for bucket in theirs[label]}
        for bucket in ours[label]:
            other = others.get(bucket.name)
            if other is not None and min(bucket.compared_token_count, other.compared_token_count) >= MIN_BUCKET_TOKENS:
                pairs.append(Pair(f"{label} {bucket.name}", bucket.abs_dlogp_mean, other.abs_dlogp_mean))
    known = [pair for pair in pairs if abs(pair.ratio - 1) > LEAST_DIFFERENCE]
    return sorted(known, key=lambda pair: -abs(math.log(pair.ratio)))[:BUCKETS_SHOWN]


def steps(a: RunView, b: RunView, metric: str) -> Iterator[tuple[int | None, Pair]]:
    """Yield a metric of every step that both sides have."""
    theirs = {report.step: report for report in b.steps}
    for report in a.steps:
        if report.step in theirs:
            other = theirs[report.step]
            yield report.step, Pair(metric, report.metrics.get(metric, math.nan), other.metrics.get(metric, math.nan))


def codes(view: RunView) -> list[str]:
    """Return the codes of what was found in a run, those of most ranges of steps first."""
    counted: dict[str, int] = {}
    for causes in view.causes:
        for finding in causes.findings:
            counted[finding.code] = counted.get(finding.code, 0) + 1
    return sorted(counted, key=lambda code: -counted[code])


def noise(view: RunView) -> float:
    """Return the median precision noise of a logit over what was found healthy; NaN where nothing was, or was 0."""
    found = [
        float(finding.evidence["logit_noise_median"])
        for causes in view.causes
        for finding in causes.findings
        if finding.code == "healthy" and finding.evidence.get("logit_noise_median")
    ]
    return float(np.median(found)) if found else math.nan


def difference_in_words(a: RunView, b: RunView) -> list[str]:
    """Return sentences on how the sides differ in what made their drift."""
    ours, theirs = codes(a), codes(b)
    if not ours or not theirs:
        return ["what made the drift was not diagnosed on both sides"]
    only = [f"{name} alone shows {', '.join(found)}" for name, found in _only(ours, theirs) if found]
    if only:
        return only
    said = [f"both show {', '.join(ours)}"]
    level_a, level_b = noise(a), noise(b)
    if level_a > 0 and level_b > 0 and not 0.75 < level_b / level_a < 1.33:
        bits = math.log2(level_b / level_a)
        more = "B" if bits > 0 else "A"
        told = f"{more}'s precision noise is {2 ** abs(bits):.1f} times as large, {abs(bits):.1f} bits of precision"
        if 2 <= abs(bits) <= 4:
            told += f", as of bfloat16 ({more}) against float16"
        said.append(told)
    return said


def _only(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, list[str]]]:
    return [("A", [c for c in ours if c not in theirs]), ("B", [c for c in theirs if c not in ours])]
