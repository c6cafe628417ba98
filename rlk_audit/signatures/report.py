"""Signatures that a step's report alone can answer, without its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlk_audit.config import BUILT_IN_BREAKDOWNS
from rlk_audit.report import StepReport
from rlk_audit.signatures.labels import CODE_FLOOR, MIN_CODE_TOKENS
from rlk_audit.signatures.shape import TAIL_FLOOR
from rlk_audit.signatures.signal import MIN_TOKENS, NOISE_CEILING, Signal, Value, share
from rlk_audit.signatures.tokens import DROPPED_NATS
from rlk_audit.token_table import TokenTable

PART_RATIO = 4.0
"""Mean abs(dlogp) of a code or rank against the quietest: more than for tokens, since confidence cannot be matched."""
FAR_FROM_PAIRED = 0.5
"""Correlation of probabilities below this: the values are hardly of the same tokens."""
DRIFT_FLOOR = 0.05
"""Nats, mean abs(dlogp): beyond what low precision makes, whatever the confidence."""
ONE_SIDED_NATS = 0.02
"""The 1 % quantiles on the quiet side lie within noise of zero."""
TAIL_RATIO = 50.0
"""p99.9 over p50 of abs(dlogp): noise that shrinks with confidence stays below."""


def report_signals(report: StepReport) -> tuple[float, list[Signal]]:
    """Return the step's drift in nats (dropped tokens included) and what the report says about it."""
    metrics = report.metrics
    compared = int(metrics.get("compared_token_count", 0))
    mean = float(metrics.get("abs_dlogp_mean", math.nan))
    dropped = report.classes.get("train_neginf", 0)
    total = (0.0 if math.isnan(mean) else mean * compared) + DROPPED_NATS * dropped
    signals = list(_counts(report, compared, mean))
    if compared >= MIN_TOKENS:
        signals += map(_by_figures, list(_parts(report)) or _shape(metrics, mean * compared))
    return total, signals


def _by_figures(signal: Signal) -> Signal:
    told = "(by the step's figures alone; a diagnosis of its tokens says more)"
    return replace(signal, summary=f"{signal.summary} {told}")


def _signal(code: str, nats: float, evidence: Mapping[str, Value], summary: str) -> Signal:
    return Signal(code, nats, evidence, summary, TokenTable.from_lists([], []))


def _counts(report: StepReport, compared: int, mean: float) -> Iterator[Signal]:
    active = sum(report.classes.values())
    if "self_comparison" in report.notes and compared >= MIN_TOKENS:
        told = f"all {compared} tokens have bitwise the same value on both sides"
        yield _signal("self_comparison", 0.0, {"identical_tokens": compared}, told)
    dropped = report.classes.get("train_neginf", 0)
    if dropped:
        told = f"train log-prob is -inf on {dropped} of {active} tokens that the engine sampled"
        yield _signal("train_filter", DROPPED_NATS * dropped, {"tokens": dropped}, told)
    filled = report.warnings.get("zero_fill_suspect", 0)
    if filled > 1 and not math.isnan(mean):
        # Each is off by 1 nat at least; the rest of the drift has other causes.
        told = f"rollout log-prob is exactly 0 on {filled} of {compared} tokens that the trainer gives less than 1/e"
        evidence: dict[str, Value] = {"tokens": filled, "token_share": share(filled, compared)}
        yield _signal("zero_fill", min(mean * compared, float(filled) * max(1.0, mean)), evidence, told)


def _parts(report: StepReport) -> Iterator[Signal]:
    """Compare the codes of each of the caller's labels, and the ranks, with the quietest."""
    tables = {
        name: [(bucket.name, bucket.compared_token_count, bucket.abs_dlogp_mean) for bucket in buckets]
        for name, buckets in report.breakdowns.items()
        if name not in BUILT_IN_BREAKDOWNS
    }
    tables["rank"] = [(str(r.rank), r.compared_token_count, r.abs_dlogp_mean) for r in report.rank_table]
    found = []
    for label, rows in tables.items():
        usable = [row for row in rows if row[1] >= MIN_CODE_TOKENS]
        base = min((mean for *_, mean in usable), default=math.nan)
        loud = [row for row in usable if row[2] > max(CODE_FLOOR, PART_RATIO * base)]
        if not loud:
            continue
        shown, nats = ", ".join(name for name, *_ in loud), sum(count * (mean - base) for _, count, mean in loud)
        evidence: dict[str, Value] = {"where": f"{label}={shown}", "abs_dlogp_mean_others": base}
        evidence["abs_dlogp_mean"] = share(sum(count * mean for _, count, mean in loud), sum(row[1] for row in loud))
        level = evidence["abs_dlogp_mean"]
        told = f"drift is confined to {label} {shown}: mean abs(dlogp) {level:.3g} nats against {base:.3g}"
        found.append(_signal("rank_local" if label == "rank" else "stale_weights", nats, evidence, told))
    # One fault shows in every label that follows it: the one that takes most of the drift is meant.
    yield from sorted(found, key=lambda signal: -signal.nats)[:1]


def _shape(metrics: Mapping[str, float | int], nats: float) -> list[Signal]:
    names = ("abs_dlogp_mean", "abs_dlogp_p50", "dlogp_p01", "dlogp_p99", "dlogp_min", "dlogp_max", "prob_pearson")
    mean, p50, p01, p99, low, high, pearson = (float(metrics.get(name, math.nan)) for name in names)
    far = float(metrics.get("abs_dlogp_p99_9", math.nan))
    if p50 <= NOISE_CEILING and far > max(TAIL_FLOOR, TAIL_RATIO * p50) and low < -TAIL_FLOOR and high > TAIL_FLOOR:
        told = f"abs(dlogp) has a median of {p50:.2g} nats but a p99.9 of {far:.2g}: few tokens make the drift"
        return [_signal("routing_tail", nats / 2, {"abs_dlogp_p50": p50, "abs_dlogp_p99_9": far}, told)]
    if not mean > DRIFT_FLOOR:
        return []
    if pearson < FAR_FROM_PAIRED:
        told = f"train and rollout probabilities correlate by {pearson:.2f}: the values are hardly of the same tokens"
        return [_signal("misaligned", nats, {"prob_pearson": pearson, "abs_dlogp_mean": mean}, told)]
    for side, quiet in (("rollout", p99), ("train", -p01)):
        if quiet < ONE_SIDED_NATS:
            told = (
                f"the {side} side is never lower (dlogp from {low:.3g} to {high:.3g}): renormalised, or another token's"
            )
            return [_signal("renormalised", nats / 2, {"side": side, "dlogp_min": low, "dlogp_max": high}, told)]
    told = f"mean abs(dlogp) is {mean:.3g} nats, more than low precision makes, on both sides of zero"
    return [_signal("stale_weights", nats / 2, {"where": "all", "abs_dlogp_mean": mean}, told)]
