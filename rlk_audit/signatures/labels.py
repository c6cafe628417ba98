"""The signature of a fault on some codes of a label only: an engine, a weight version, a rank."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rlk_audit.config import CONFIDENCE_EDGES
from rlk_audit.signatures.shape import shape_of
from rlk_audit.signatures.signal import CLIP, Signal, Value, clipped, drift, logit_noise, middle, noise_level, share
from rlk_audit.token_table import RANK_LABEL, Bools, Floats, Ints, TokenTable

CODE_RATIO = 3.0
"""Drift of a code against the others, of tokens of like confidence: engines with other texts differ by less."""
CODE_FLOOR = 0.02
"""Nats of a logit, mean: a code below has the noise of low precision at most, however quiet the others are."""
MIN_CODE_TOKENS = 8
MEDIAN_RATIO = 3.0
VERSION_LABEL = "weight_version"
"""What drifts on one version of the weights only is the weights: sampling settings do not change with them."""
MIN_NAMED = 50
"""Tokens of a code on which a cause more special than other weights is looked for."""
STRAY_ERRORS = 4.0
"""Standard errors that the samples of a code scatter more than the others': chance does so in one of 30,000 codes."""
STRAY_RATIO = 1.2
STRAY_BINS = 20
MIN_OTHER_SAMPLES = 6
STRAY_CLIP = 5.0
"""Times the usual scatter that a token counts at most."""
STEADY = 0.5
"""At least this part of a code's samples drift above the others: one odd sample is not the code."""


def by_label(table: TokenTable) -> Signal | None:
    """Find the label whose codes split the drift best, and drift on some of them only."""
    found = [signal for name, (codes, names) in table.groups().items() if (signal := _split(table, name, codes, names))]
    return max(found, key=lambda signal: float(signal.evidence["separation"]), default=None)


def _separation(table: TokenTable, affected: Bools) -> float:
    """Return the correlation of clipped drift with being affected: the label that splits most cleanly has the most."""
    level = clipped(table.dlogp)[table.compared]
    inside = affected[table.compared].astype(float)
    return float(np.corrcoef(level, inside)[0, 1]) if np.ptp(level) and np.ptp(inside) else 0.0


def _split(table: TokenTable, label: str, codes: Ints, names: tuple[str, ...]) -> Signal | None:
    compared = table.compared
    counts = np.bincount(codes[compared & (codes >= 0)], minlength=len(names))
    ratio = np.array([_ratio(table, codes == code, codes != code) for code in range(len(names))])
    usable = counts >= MIN_CODE_TOKENS
    if usable.sum() < 2 or not np.isfinite(ratio[usable]).all():
        return None
    quiet = usable & (ratio <= 2 * ratio[usable].min())
    others = np.isin(codes, np.flatnonzero(quiet))
    loud = [code for code in np.flatnonzero(usable & ~quiet).tolist() if _is_loud(table, codes == code, others)]
    if not loud:
        return None
    affected = np.isin(codes, loud)
    level, base = (float(np.abs(table.dlogp[where & compared]).mean()) for where in (affected, others))
    shown = ", ".join(names[code] for code in loud)
    evidence: dict[str, Value] = {"where": f"{label}={shown}", "abs_dlogp_mean": level, "abs_dlogp_mean_others": base}
    evidence |= {
        "ratio_at_like_confidence": _ratio(table, affected, others),
        "tokens": int((affected & compared).sum()),
    }
    evidence["separation"] = _separation(table, affected)
    rest = table.take(~affected)
    told = f"drift is confined to {label} {shown}: mean abs(dlogp) {level:.3g} nats against {base:.3g} elsewhere"
    nats = drift(table) - drift(rest) - base * int((affected & compared).sum())
    part = table.take(affected)
    named = label not in (RANK_LABEL, VERSION_LABEL) and int(part.compared.sum()) >= MIN_NAMED
    cause = shape_of(part, drift_of_unknown_cause=False) if named else None
    if cause is not None:
        summary = f"{cause.summary}; only on {label} {shown}"
        return replace(cause, nats=max(nats, 0.0), rest=rest, summary=summary, evidence={**cause.evidence, **evidence})
    code = "rank_local" if label == RANK_LABEL else "stale_weights"
    return Signal(code, max(nats, 0.0), evidence, told, rest)


def _expected(table: TokenTable, others: Bools) -> Floats:
    """Return for each compared token the clipped drift of the others at its confidence; NaN where they have none."""
    bins, size = np.searchsorted(np.log(CONFIDENCE_EDGES), middle(table)), len(CONFIDENCE_EDGES) + 1
    chosen = others & table.compared
    count = np.bincount(bins[chosen], minlength=size)
    total = np.bincount(bins[chosen], weights=clipped(table.dlogp)[chosen], minlength=size)
    mean = np.where(count > 0, total / np.maximum(count, 1), math.nan)
    return np.where(table.compared, mean[bins], math.nan)


def _ratio(table: TokenTable, part: Bools, others: Bools) -> float:
    """Return clipped drift of a part over what the others have at the same confidence; NaN where nothing compares."""
    expected = _expected(table, others)
    both = part & np.isfinite(expected)
    if not both.any():
        return math.nan
    return float(clipped(table.dlogp)[both].sum()) / max(float(expected[both].sum()), 1e-12)


def _is_loud(table: TokenTable, part: Bools, others: Bools) -> bool:
    noise = np.abs(logit_noise(table.take(part)))
    if _ratio(table, part, others) < CODE_RATIO or not len(noise) or np.minimum(noise, CLIP).mean() < CODE_FLOOR:
        return False
    # A few far tokens that happen to lie on one code raise its mean, not its median.
    if np.median(noise) < MEDIAN_RATIO * noise_level(table.take(others)):
        return False
    expected = _expected(table, others)
    both = part & np.isfinite(expected)
    rows, size = table.row[both], table.row_count
    level = np.bincount(rows, weights=clipped(table.dlogp)[both], minlength=size)
    usual = np.bincount(rows, weights=expected[both], minlength=size)
    of_part = np.unique(rows)
    return len(of_part) > 0 and float((level >= CODE_RATIO / 2 * usual)[of_part].mean()) >= STEADY


def stray_codes(table: TokenTable) -> Signal | None:
    """Find codes that scatter about a relation which the others keep to: noise of some ranks under a temperature.

    Such a relation makes all codes drift, so that their levels tell nothing; what they deviate from it does.
    """
    found = [signal for name, (codes, names) in table.groups().items() if (signal := _stray(table, name, codes, names))]
    return max(found, key=lambda signal: float(signal.evidence["standard_errors"]), default=None)


def _stray(table: TokenTable, label: str, codes: Ints, names: tuple[str, ...]) -> Signal | None:
    errors: dict[int, float] = {}
    others = np.ones(len(table), dtype=bool)
    while len(errors) < len(names) // 2:
        code, error = _most_scattered(table.take(others), label, codes[others], len(names))
        if error < STRAY_ERRORS:
            break
        errors[code] = error
        others &= codes != code
    rest = table.take(others)
    # Codes may scatter by their texts; a relation that the others keep to, and they do not, is another matter.
    if not errors or shape_of(rest, drift_of_unknown_cause=False) is None:
        return None
    shown, most = ", ".join(names[code] for code in sorted(errors)), max(errors.values())
    count, compared = int((~others & table.compared).sum()), int(rest.compared.sum())
    evidence: dict[str, Value] = {"where": f"{label}={shown}", "standard_errors": most, "tokens": count}
    told = (
        f"tokens of {label} {shown} scatter about the relation that the others keep to, by {most:.1f} standard errors "
        "more than they do"
    )
    nats = drift(table) - drift(rest) * (1 + share(count, compared))
    return Signal("rank_local" if label == RANK_LABEL else "stale_weights", max(nats, 0.0), evidence, told, rest)


def _most_scattered(table: TokenTable, label: str, codes: Ints, names: int) -> tuple[int, float]:
    """Return which of the codes, one a token, scatters most, and by how many standard errors of samples."""
    # A rank computes T, an engine R: the other side tells the confidence without the noise that is looked for.
    away = _scatter(table, table.rollout if label == RANK_LABEL else table.train)
    row = table.row[table.compared]
    size = np.bincount(row, minlength=table.row_count).astype(np.float64)
    level: Floats = np.bincount(row, weights=away, minlength=table.row_count).astype(np.float64)
    of_sample = codes[table.row_start]
    errors = [_standard_errors(size, level, of_sample == code) for code in range(names)]
    worst = int(np.argmax(errors))
    return worst, errors[worst]


def _scatter(table: TokenTable, confidence: Floats) -> Floats:
    """Return how far compared tokens lie from the median of d at their confidence, in usual distances."""
    confidence, d = confidence[table.compared], table.dlogp[table.compared]
    if not len(d):
        return d
    bins = np.searchsorted(np.quantile(confidence, np.linspace(0, 1, STRAY_BINS + 1)[1:-1]), confidence)
    away = np.zeros(len(d))
    for b in np.unique(bins):
        distance = np.abs(d[bins == b] - np.median(d[bins == b]))
        away[bins == b] = np.minimum(distance / max(float(np.median(distance)), 1e-9), STRAY_CLIP)
    return away


def _standard_errors(size: Floats, level: Floats, inside: Bools) -> float:
    """Return by how many standard errors the samples inside have a larger level a token; 0 where too few tell."""
    tokens, others = float(size[inside].sum()), float(size[~inside].sum())
    if not tokens or not others or int((~inside & (size > 0)).sum()) < MIN_OTHER_SAMPLES:
        return 0.0
    mean, usual = float(level[inside].sum()) / tokens, float(level[~inside].sum()) / others
    if mean < STRAY_RATIO * usual:
        return 0.0
    # Tokens of one sample go together, so that samples tell the error.
    variance = float(((level - usual * size)[~inside] ** 2).sum()) / others
    return share(mean - usual, math.sqrt(variance * (1 / tokens + 1 / others)))
