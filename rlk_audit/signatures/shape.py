"""Signatures that show in how d depends on the confidence and on which side of zero it lies."""

from __future__ import annotations

import math

import numpy as np

from rlk_audit.signatures.signal import (
    CERTAIN,
    CLIP,
    MIN_TOKENS,
    NOISE_CEILING,
    Signal,
    Value,
    at,
    drift,
    logit_noise,
    middle,
    noise_level,
    share,
    where,
)
from rlk_audit.signatures.tokens import rounded
from rlk_audit.token_table import Bools, Floats, TokenTable

FAR = NOISE_CEILING
"""Nats: a token beyond is counted as affected."""
ONE_SIDED = 0.05
"""Of the nats, at most this part lies on the other side of zero: noise and moved weights lie on both alike."""
MIN_AFFECTED = 8
RENORMALISED_SHARE = 0.05
"""A filter cuts something in at least so many contexts, or it does not matter."""
BOTH_FIT = 0.03
"""Probabilities of two different tokens add up to 1 at most; so many affected tokens beyond, and it is one token."""
CONSTANT = 0.35
"""Standard deviation over mean: a filter cuts flat distributions by much the same mass."""
SAME_OFFSET = 0.1
"""The same of one token's values, which no other token's keep to."""
ALIKE = 0.5
"""Squared correlation of T and R where a filter moved both alike; another token's value has near 0."""
LEAST_RATIO = 1.1
"""A ratio of temperatures that matters; see `_unnormalised_ratio`."""
LARGEST_ENTROPY = 13.0
"""Nats: of a flat distribution over 440,000 tokens, more than vocabularies have; see `_unnormalised_ratio`."""
EXPLAINED_BY_CONFIDENCE = 0.55
"""Part of the variance of d / (1 - p) between bins of confidence: a temperature stretches all tokens by one rule."""
EXPLAINED_ALONE = 0.82
"""The same where too few likely tokens confirm it by their stretch: moved weights reach 0.80."""
STEADY_STRETCH = 0.38
"""See `_steadiness`: recorded temperatures lie above 0.4, and above 0.55 in all models but one."""
ALL_TOGETHER = 1.4
"""Sum of the two and half of `_law_room`: recorded temperatures reach 1.42 or more, moved weights 1.39 at most."""
UNKNOWN_ROOM = 0.2
"""Of the law where too few tokens tell: about the least of recorded temperatures whose vocabulary is not tiny."""
LAW_SLACK = 0.03
"""Precision noise, in the logarithm of a temperature ratio."""
BREAKS_LAW = 0.0006
"""See `_breaks_law`: recorded temperatures have 0.00006 at most, a few odd tokens among them make it 0.0005; moved
weights that pass all else mostly have 0.001 or more."""
LAW_CLIP = 0.2
"""Nats of a logit: a token breaks the law by so much at most, so that one odd token does not decide."""
RATIOS = np.geomspace(1.03, 4.0, 100)
"""Ratios of temperatures that are tried; neighbours are nearer than precision noise tells apart."""
MIN_LIKELY = 20
FEW = 5
"""Tokens that tell an edge of a distribution."""
NOISE_CLIP = 3.0
"""Nats of a logit: rare tokens are so far off at most, so that they do not decide alone."""
STRETCH_CORRELATION = 0.3
ONE_SIGN = 0.97
"""Likely tokens all move to one side under a temperature, by the bound on the normaliser."""
SMALL_FIT = 0.98
"""For tables below MIN_SHAPE tokens a line must fit nearly exactly."""
MIN_SHAPE, MIN_STEADY_SHAPE = 150, 80
VERY_STEADY = 0.7
"""See `_steadiness`: moved weights reach 0.62, so that fewer tokens, MIN_STEADY_SHAPE, tell the shape."""
EXACT_FIT = 0.02
"""A log-prob that was divided is the other one times a number: precision alone leaves this part of d's square."""
DIVIDED_FLOOR = 0.05
"""Nats, root mean square: a smaller drift may be noise that happens to fit a line."""
RATIO_FLOOR = 0.02
TAIL_FLOOR = 0.1
"""Nats: a flipped expert moves a token by more than this, low precision by less."""
TAIL_TIMES = 12.0
"""... and by so many times the median noise at its confidence."""
TAIL_SHARE = (0.0005, 0.3)
MIN_TAIL = 2
TAIL_NATS = 0.12
"""Part of the drift that lies in the tail."""
BIAS_F = 8.0
"""F statistic, less 1, of the means of d over bins of confidence: chance gives 0, and 8 in none of a billion runs."""
BIAS_FLOOR = 0.005
"""Nats of a logit, mean: what is systematic but below the quietest bfloat16 engine is not worth a finding."""
BIAS_BINS = 10
MIN_IN_BIN = 10
LEAN_OF_NOISE = 0.42
"""Mean of likely tokens' noise over its root mean square, less a standard error: recorded engines lean by 0.36 at most.
A bound on the size, not on chance alone: an engine's rounding leans in earnest, which any number of tokens confirms."""
LEAN_CLIP = 0.1
"""Nats of a logit: a token counts at most so much in that, so that a few far ones do not hide it."""
MIN_LEANING = 50


def shape_of(table: TokenTable, drift_of_unknown_cause: bool = True) -> Signal | None:
    """Tell by how d depends on the confidence and its sign; the exact relations come first, moved weights last."""
    if int(table.compared.sum()) < MIN_TOKENS or not table.dlogp.any():
        return None
    for signature in (divided, renormalised, temperature, wrong_token):
        if (found := signature(table)) is not None:
            return found
    return (routing_tail(table) or stale_weights(table)) if drift_of_unknown_cause else None


def _compared(table: TokenTable) -> tuple[Floats, Floats]:
    return table.train[table.compared], table.rollout[table.compared]


def divided(table: TokenTable) -> Signal | None:
    """R = T / ratio exactly: log-probs were divided by a temperature, which only logits may be."""
    train, rollout = _compared(table)
    if np.ptp(train) == 0 or np.dot(train, train) == 0:
        return None
    slope = float(np.dot(train, rollout) / np.dot(train, train))
    noise, d = rollout - slope * train, train - rollout
    left = share(float(np.dot(noise, noise)), float(np.dot(d, d)))
    if abs(slope - 1) < RATIO_FLOOR or slope <= 0 or left > EXACT_FIT or np.sqrt((d**2).mean()) < DIVIDED_FLOOR:
        return None
    # In a narrow range of log-probs a constant offset looks like a factor: the better of the two is meant.
    if float(((d - d.mean()) ** 2).sum()) < 4 * float(np.dot(noise, noise)):
        return None
    evidence: dict[str, Value] = {"kind": "log-probs divided", "slope": slope, "left_over_square": left}
    summary = (
        f"rollout log-probs are {slope:.3f} times the train ones, {1 - left:.2%} of the drift's square: log-probs, not "
        f"logits, were divided by a temperature of {1 / slope:.2f}"
    )
    return Signal("temperature", drift(table), evidence, summary, table.take(~table.compared))


def _one_side(d: Floats) -> int:
    """Return 1 if d lies above zero, -1 if below, 0 if on both sides."""
    above, below = float(np.maximum(d, 0).sum()), float(np.maximum(-d, 0).sum())
    if min(above, below) > ONE_SIDED * max(above, below):
        return 0
    return 1 if above > below else -1


def _affected(table: TokenTable) -> Bools:
    return table.compared & (np.abs(table.dlogp) > FAR)


def renormalised(table: TokenTable) -> Signal | None:
    """One side's log-probs are above the other's by minus the log of the kept mass, never below."""
    d = table.dlogp[table.compared]
    side, far = _one_side(d), _affected(table)
    count = int(far.sum())
    if not side or count < min(MIN_AFFECTED, len(d)) or count < RENORMALISED_SHARE * len(d) or not _of_one_token(table):
        return None
    kept = np.exp(-np.abs(table.dlogp[far]))
    spread = float(np.std(table.dlogp[far]) / np.abs(table.dlogp[far]).mean())
    ratio = _unnormalised_ratio(table, side)
    constant = spread <= CONSTANT and (side < 0 or float(np.median(kept)) >= 0.7)
    if ratio and not constant:
        return _unnormalised(table, side, ratio)
    filtered = "rollout" if side < 0 else "train"
    evidence: dict[str, Value] = {"side": filtered, "kept_mass_median": float(np.median(kept))}
    evidence |= {"implied_top_p": float(np.quantile(kept, 0.005)), "tokens": count, "token_share": share(count, len(d))}
    summary = (
        f"the {filtered} side is higher on {share(count, len(d)):.0%} of tokens and never lower: renormalised after "
        f"top-p or top-k, keeping a mass of {evidence['implied_top_p']:.3g} at least, "
        f"{evidence['kept_mass_median']:.3g} in the median"
    )
    return Signal("renormalised", drift(table), evidence, summary, table.take(~table.compared))


def _of_one_token(table: TokenTable) -> bool:
    """Whether both sides speak of the same token: probabilities of two tokens cannot exceed 1 together."""
    far = _affected(table)
    train, rollout = table.train[far], table.rollout[far]
    if float((np.exp(train) + np.exp(rollout) > 1).mean()) > BOTH_FIT:
        return True
    d = train - rollout
    if float(d.std()) <= SAME_OFFSET * float(np.abs(d).mean()):
        return True
    return bool(np.ptp(train) and np.ptp(rollout)) and float(np.corrcoef(train, rollout)[0, 1]) ** 2 >= ALIKE


def _unnormalised_ratio(table: TokenTable, side: int) -> float:
    """Return the ratio of temperatures if R = (raw log-prob) / t without a normaliser fits, else 0.

    With T = R - log Z and Z the sum of p^(1/t), Z is at least q + (1 - q^t)^(1/t) for t > 1 (q = exp R), at most that
    for t < 1: d has a bound that grows as t leaves 1. And t leaves 1 so far as the largest d needs: log Z is 1 - 1/t
    times a Renyi entropy, which hardly exceeds the surprise of the least likely token that was sampled. A filter leaves
    many tokens nearer to zero than that.
    """
    rollout = np.minimum(table.rollout[table.compared], 0.0)
    d, q = table.dlogp[table.compared], np.exp(rollout)
    surprise = -float(np.minimum(rollout, table.train[table.compared]).min())
    needed = 1 + side * float(np.quantile(np.abs(d), 0.99)) / min(surprise, LARGEST_ENTROPY)
    if needed <= 0:
        return 0.0
    t = max(LEAST_RATIO, 1 / needed) if side < 0 else min(1 / LEAST_RATIO, 1 / needed)
    certain = rollout > math.log(0.999)
    bound = np.abs(np.log(q + (1 - np.minimum(q, 1.0) ** t) ** (1 / t)))
    fits = np.abs(d)[~certain] >= bound[~certain] - NOISE_CEILING * (1 - q[~certain])
    # Where one token has all the mass there is nothing to normalise; a filter that keeps one token shows just there.
    alone = np.maximum(rollout, table.train[table.compared]) > -1e-6
    if float((np.abs(d[alone]) > FAR).sum()) > 0.01 * len(d):
        return 0.0
    likely = (q[~certain] > 0.2).sum()
    if likely < MIN_TOKENS / 2 or float(fits.mean()) < 0.99:
        return 0.0
    return t


def _unnormalised(table: TokenTable, side: int, bound: float) -> Signal:
    d = float(table.dlogp[table.compared].mean())
    evidence: dict[str, Value] = {"kind": "log-probs divided, train scaled", "dlogp_mean": d, "bound": bound}
    told = "below" if side > 0 else "above"  # both of the train side and of a temperature of 1
    summary = (
        f"rollout log-probs lie {told} the train ones by {abs(d):.3g} nats on average and never the other way: they "
        f"were divided by a temperature {told} 1 without being normalised"
    )
    return Signal("temperature", drift(table), evidence, summary, table.take(~table.compared))


def temperature(table: TokenTable) -> Signal | None:
    """D is a function of the confidence: likely tokens move one way, unlikely ones the other."""
    m = middle(table)
    uncertain = table.compared & (m < math.log(CERTAIN))
    m, d = m[uncertain], table.dlogp[uncertain]
    if len(d) < MIN_TOKENS or np.ptp(d) == 0 or np.ptp(m) == 0 or noise_level(table) < NOISE_CEILING / 2:
        return None
    correlation = float(np.corrcoef(m, d)[0, 1])
    sign = 1 if correlation > 0 else -1
    steadiness = _steadiness(table, sign)
    explained, needed = correlation**2, SMALL_FIT
    if len(d) >= (MIN_STEADY_SHAPE if steadiness >= VERY_STEADY else MIN_SHAPE):
        explained = max(explained, _explained_by_bins(m, np.clip(d / (1 - np.exp(m)), -NOISE_CLIP, NOISE_CLIP)))
        needed = EXPLAINED_ALONE if math.isnan(steadiness) else EXPLAINED_BY_CONFIDENCE
    likely = d[m > math.log(0.5)]
    agree = float((sign * likely > 0).mean()) if len(likely) >= MIN_LIKELY else 1.0
    if explained < needed or abs(correlation) < STRETCH_CORRELATION or agree < ONE_SIGN or _one_side(d):
        return None
    room = _law_room(table, sign)
    if steadiness < STEADY_STRETCH or explained + steadiness + room / 2 < ALL_TOGETHER or room < 0:
        return None
    if _breaks_law(table, sign) > BREAKS_LAW:
        return None
    evidence: dict[str, Value] = {"kind": "other temperature", "variance_explained": explained}
    least, most = _ratio_bounds(table, sign)
    evidence |= {"correlation": correlation, "stretch_steadiness": steadiness}
    evidence |= {"temperature_ratio_least": least, "temperature_ratio_most": most}
    told = "sharper" if sign < 0 else "flatter"
    times = f"{least:.2f} to {most:.2f}" if f"{least:.2f}" != f"{most:.2f}" else f"{least:.2f}"
    summary = (
        f"rollout log-probs are those of a {told} distribution: the confidence explains {explained:.0%} of the "
        f"variance of d, as if the rollout's temperature were {times} times the trainer's"
    )
    return Signal("temperature", drift(table), evidence, summary, table.take(~table.compared))


def _explained_by_bins(m: Floats, d: Floats) -> float:
    """Return the part of d's variance between bins of equally many tokens, less chance's (adjusted R2)."""
    bins = np.searchsorted(np.quantile(m, np.linspace(0, 1, BIAS_BINS + 1)[1:-1]), m)
    count = np.bincount(bins, minlength=BIAS_BINS)
    mean = np.bincount(bins, weights=d, minlength=BIAS_BINS) / np.maximum(count, 1)
    within = share(float(((d - mean[bins]) ** 2).sum()), float(((d - d.mean()) ** 2).sum()))
    return 1 - within * (len(d) - 1) / max(len(d) - BIAS_BINS, 1)


def _steadiness(table: TokenTable, sign: int) -> float:
    """Return how steadily log-odds of likely tokens are stretched; NaN where they are too few.

    A temperature ratio r stretches the log-odds of a token above 1/2 by at least 1/r for r < 1, and by just that where
    one other token is in question; moved weights stretch some tokens and leave others. The measure is the logarithm of
    the least stretch (5 %) over that of the median one.
    """
    stretches = _stretches(*_sharp_and_flat(table, sign))
    if len(stretches) < MIN_LIKELY:
        return math.nan
    least, median = np.quantile(stretches, (0.05, 0.5))
    return float(np.log(max(least, 1e-3)) / np.log(median)) if median > 1 else 0.0


def _ratio_bounds(table: TokenTable, sign: int) -> tuple[float, float]:
    """Return bounds of the rollout's temperature over the trainer's; by the slope of R on T where few tokens tell."""
    sharpness = _sharpness_bounds(*_sharp_and_flat(table, sign))
    if sharpness is None or sharpness[0] > sharpness[1]:
        slope = float(np.polyfit(*_compared(table), 1)[0])
        ratio = 1 / slope if slope > 0 else math.nan
        return ratio, ratio
    least, most = sharpness
    return (1 / most, 1 / least) if sign < 0 else (least, most)


def _sharpness_bounds(sharp: Floats, flat: Floats) -> tuple[float, float] | None:
    """Return between what the flatter side's temperature over the sharper one's lies; None where few tokens tell.

    The sharper side is r times the flatter one less the logarithm of a normaliser, sum p^r, which is at most 1 for
    r > 1: the ratio of the log-probs bounds r from below, that of likely tokens' log-odds from above.
    """
    unlikely = np.minimum(sharp, flat) < math.log(0.2)
    stretches = _stretches(sharp, flat)
    if min(int(unlikely.sum()), len(stretches)) < FEW:
        return None
    least = float(np.quantile(sharp[unlikely] / np.minimum(flat[unlikely], -1e-12), 0.98))
    return max(least, 1e-3), max(float(np.quantile(stretches, 0.05)), 1e-3)


def _sharp_and_flat(table: TokenTable, sign: int) -> tuple[Floats, Floats]:
    """Return the compared log-probs of the side with the sharper distributions, and of the other."""
    train, rollout = _compared(table)
    return (rollout, train) if sign < 0 else (train, rollout)


def _stretches(sharp: Floats, flat: Floats) -> Floats:
    """Return the ratio of the log-odds of likely tokens."""
    likely = (np.minimum(sharp, flat) > math.log(0.55)) & (np.maximum(sharp, flat) < math.log(0.98))
    return _log_odds(sharp[likely]) / _log_odds(flat[likely])


def _log_odds(log_probs: Floats) -> Floats:
    return np.asarray(log_probs - np.log(-np.expm1(log_probs)))


def _breaks_law(table: TokenTable, sign: int) -> float:
    """Return the part of the log-odds' drift that no ratio of temperatures allows, at the ratio that allows most.

    If p becomes p^r / Z, the log-odds become r log-odds(p) + (r - 1) H, where H, the Renyi entropy of the other tokens,
    is not negative: every token's are at least r times what they were, whatever its context. One r must do for the
    likely tokens, which bound it from above, and for the unlikely ones, which bound it from below.
    """
    certain = middle(table)[table.compared] > math.log(0.98)
    sharp, flat = (_log_odds(np.minimum(side[~certain], -1e-9)) for side in _sharp_and_flat(table, sign))
    moved = float(np.minimum(np.abs(sharp - flat), NOISE_CLIP).sum())
    beyond = [float(np.clip(r * flat - sharp - NOISE_CEILING, 0, LAW_CLIP).sum()) for r in RATIOS]
    return share(min(beyond), moved)


def _law_room(table: TokenTable, sign: int) -> float:
    """Return how much room for one ratio r > 1 of temperatures all tokens leave, 0 to 1; negative if none.

    Moved weights know no such r, or hardly one. The room is the distance of the bounds' logarithms, as a part of the
    upper one, see `_sharpness_bounds`.
    """
    bounds = _sharpness_bounds(*_sharp_and_flat(table, sign))
    if bounds is None:
        return UNKNOWN_ROOM
    least, most = map(math.log, bounds)
    if least > most + LAW_SLACK:
        return -1.0
    return min(1.0, max(0.0, (most - least) / max(most, math.log(LEAST_RATIO))))


def wrong_token(table: TokenTable) -> Signal | None:
    """Some tokens' values on one side are those of another, mostly likelier token: far off, on one side of zero."""
    far = _affected(table)
    d = table.dlogp[far]
    count, total = int(far.sum()), int(table.compared.sum())
    side = _one_side(table.dlogp[table.compared])
    if not side or count < max(MIN_AFFECTED, 0.01 * total) or _of_one_token(table):
        return None
    other = "rollout" if side < 0 else "train"
    evidence: dict[str, Value] = {"side": other, "tokens": count, "token_share": share(count, total)}
    evidence |= {"dlogp_mean": float(d.mean()), **where(table, far)}
    summary = (
        f"on {share(count, total):.0%} of tokens the {other} log-prob is higher, by {np.abs(d).mean():.3g} nats on "
        "average, and never lower, with little relation to the other side: it is that of another, likelier token"
    )
    rest = table.take(~far)
    return Signal("wrong_token", drift(table) - drift(rest), evidence, summary, rest)


def routing_tail(table: TokenTable) -> Signal | None:
    """A few tokens far out on both sides, over a body as quiet as low precision: expert routing flipped."""
    body = noise_level(table)
    probability = np.exp(middle(table))
    far = table.compared & (np.abs(table.dlogp) > np.maximum(TAIL_FLOOR, TAIL_TIMES * body * (1 - probability)))
    count, total = int(far.sum()), int(table.compared.sum())
    rest = table.take(~far)
    in_tail = share(drift(table) - drift(rest), drift(table))
    if body > NOISE_CEILING or count < MIN_TAIL or in_tail < TAIL_NATS:
        return None
    if not TAIL_SHARE[0] <= share(count, total) <= TAIL_SHARE[1]:
        return None
    evidence: dict[str, Value] = {"tokens": count, "token_share": share(count, total), "drift_share": in_tail}
    evidence |= {"body_median": body, "tail_mean": float(np.abs(table.dlogp[far]).mean()), **where(table, far)}
    summary = (
        f"{share(count, total):.2%} of tokens{at(evidence)} drift by {evidence['tail_mean']:.3g} nats on average and "
        f"make {in_tail:.0%} of the drift, while the rest is as quiet as low precision (median {body:.2g})"
    )
    return Signal("routing_tail", drift(table) - drift(rest), evidence, summary, rest)


def stale_weights(table: TokenTable) -> Signal | None:
    """Drift on both sides of zero, larger than low precision makes it, or leaning with the confidence."""
    noise = logit_noise(table)
    if len(noise) < 2 * MIN_TOKENS:
        return None
    level, mean = float(np.median(np.abs(noise))), float(np.abs(noise).mean())
    lean = _lean(table) if _lean_of_noise(table) >= LEAN_OF_NOISE else 0.0
    # Rounded values err by more than the engine does.
    coarse = rounded(table)
    ceiling = NOISE_CEILING + (0.0 if coarse is None else 2 * float(coarse.evidence["abs_error_mean"]))
    if level < ceiling and (lean < BIAS_F or mean < BIAS_FLOOR):
        return None
    d = table.dlogp[table.compared]
    evidence: dict[str, Value] = {"where": "all", "logit_noise_median": level, "logit_noise_mean": mean, "lean": lean}
    evidence |= {"abs_dlogp_mean": float(np.abs(d).mean()), "ratio0_mean": float(np.exp(np.minimum(d, 50.0)).mean())}
    why = "more than low precision makes" if level >= ceiling else "leaning with the confidence, as noise does not"
    summary = (
        f"drift of {evidence['abs_dlogp_mean']:.3g} nats on average (median {level:.2g} of a logit) on all tokens, "
        f"{why}: other weights, or a far cruder engine"
    )
    return Signal("stale_weights", drift(table), evidence, summary, table.take(~table.compared))


def _lean_of_noise(table: TokenTable) -> float:
    """Return how far likely tokens lean to one side, in units of the run's own noise, whatever its cause.

    It is less a standard error, so that few tokens say less; 0 where there are too few.
    """
    m = middle(table)
    likely = table.compared & (m > math.log(0.5)) & (m < math.log(0.97))
    if likely.sum() < MIN_LEANING or not table.dlogp[likely].any():
        return 0.0
    noise = np.clip(table.dlogp[likely] / (1 - np.exp(m[likely])), -LEAN_CLIP, LEAN_CLIP)
    return abs(float(noise.mean())) / math.sqrt(float((noise**2).mean())) - 1 / math.sqrt(len(noise))


def _lean(table: TokenTable) -> float:
    """Return the F statistic, less 1, of mean logit_noise over bins of confidence: 0 for noise, large for others."""
    m = middle(table)
    uncertain = table.compared & (m < math.log(CERTAIN))
    n = int(uncertain.sum())
    if n < MIN_IN_BIN * BIAS_BINS:
        return 0.0
    noise = np.clip(table.dlogp[uncertain] / (1 - np.exp(m[uncertain])), -CLIP, CLIP)
    explained = _explained_by_bins(m[uncertain], noise)
    return explained / (BIAS_BINS - 1) / max(1 - explained, 1e-9) * (n - BIAS_BINS)
