"""A step's figures by keeping every token and sorting, in float64: what an audit without a sketch would do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Batch
from benchmarks.variants import WORST_K
from rlk_audit import AuditConfig, StepReport
from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.sketch import relative_accuracy

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}
SIGNED_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
FLOAT32_STEP = 2.0**-23
"""Relative error that the report's single rounding to float32, and its exponentials, may have."""


def classes_of(batch: Batch, config: AuditConfig) -> Tensor:
    """Return each active token's class, an index into TOKEN_CLASSES; -1 where not active."""
    train, rollout = batch.train.double(), batch.rollout.double()
    floor, tolerance = config.sentinel_floor, config.positive_tolerance
    holds = {
        "rollout_sentinel": (rollout <= floor) & (rollout > -math.inf),
        "train_sentinel": (train <= floor) & (train > -math.inf),
        "rollout_nan": rollout.isnan(),
        "rollout_neginf": rollout == -math.inf,
        "train_nan": train.isnan(),
        "train_neginf": train == -math.inf,
        "positive": (train > tolerance) | (rollout > tolerance),
    }
    classes = torch.full(train.shape, TOKEN_CLASSES.index("compared"))
    for name in reversed(holds):
        classes[holds[name]] = TOKEN_CLASSES.index(name)
    classes[~batch.mask] = -1
    return classes


def exact_audit(batch: Batch, config: AuditConfig) -> dict[str, Any]:
    """Return the figures of a step report, by its keys; `classes` and `worst` beside them."""
    classes = classes_of(batch, config)
    counts = torch.bincount(classes[classes >= 0], minlength=len(TOKEN_CLASSES)).tolist()
    compared = classes == TOKEN_CLASSES.index("compared")
    train, rollout = batch.train[compared].double(), batch.rollout[compared].double()
    d = train - rollout
    figures: dict[str, Any] = {"compared_token_count": len(d), "active_token_count": sum(counts)}
    figures |= _order_figures(d)
    figures |= _mean_figures(d, train, rollout, config)
    figures["classes"] = dict(zip(TOKEN_CLASSES, counts, strict=True))
    figures["worst"] = _worst(d.abs(), batch.sample[compared], batch.position[compared])
    return figures


def _order_figures(d: Tensor) -> dict[str, float]:
    magnitude, signed = d.abs().sort().values, d.sort().values
    figures = {f"abs_dlogp_{name}": _quantile(magnitude, q) for name, q in QUANTILES.items()}
    figures |= {f"dlogp_{name}": _quantile(signed, q) for name, q in SIGNED_QUANTILES.items()}
    figures |= {"dlogp_min": float(signed[0]), "dlogp_max": float(signed[-1]), "abs_dlogp_max": float(magnitude[-1])}
    return figures


def _quantile(ordered: Tensor, q: float) -> float:
    """Return the smallest value with at least q of the values at or below it."""
    return float(ordered[max(0, math.ceil(round(q * len(ordered), 6)) - 1)])


def _mean_figures(d: Tensor, train: Tensor, rollout: Tensor, config: AuditConfig) -> dict[str, float]:
    ratio, p, q = d.exp(), train.exp(), rollout.exp()
    square, difference = ratio.square(), (p - q).abs()
    low, high = d < math.log1p(-config.eps_low), d > math.log1p(config.eps_high)
    figures = {
        "abs_dlogp_mean": d.abs().mean(),
        "dlogp_mean": d.mean(),
        "dlogp_std": d.std(correction=0),
        "kl0_k2": d.square().mean() / 2,
        "approx_kl0": (d.expm1() - d).mean(),
        "ratio0_mean": ratio.mean(),
        "ratio0_min": ratio.min(),
        "ratio0_max": ratio.max(),
        "chi2_0": square.mean() - 1,
        "ess0": ratio.sum().square() / (len(d) * square.sum()),
        "mult_prob_error": d.abs().exp().mean(),
        "prob_diff_mean": difference.mean(),
        "prob_diff_max": difference.max(),
        "prob_pearson": torch.corrcoef(torch.stack([p, q]))[0, 1],
        "train_nll": -train.mean(),
        "rollout_nll": -rollout.mean(),
        "clipfrac0_low": low.double().mean(),
        "clipfrac0_high": high.double().mean(),
        "clipfrac0": (low | high).double().mean(),
        "tail_frac_ln2": (d.abs() > math.log(2.0)).double().mean(),
        "identical_frac": (d == 0).double().mean(),
    }
    return {name: float(value) for name, value in figures.items()}


def _worst(magnitude: Tensor, sample: Tensor, position: Tensor) -> list[tuple[int, int]]:
    """Return (sample, position) of the worst tokens; ties go to the lower sample, then the lower position."""
    least = magnitude.topk(min(WORST_K, len(magnitude))).values[-1]
    places = (magnitude >= least).nonzero()[:, 0]
    found = zip((-magnitude[places]).tolist(), sample[places].tolist(), position[places].tolist(), strict=True)
    return [(index, at) for _, index, at in sorted(found)[:WORST_K]]


def disagreements(exact: dict[str, Any], report: StepReport, config: AuditConfig) -> list[str]:
    """Return one line for each figure that is farther from the report's than the documents allow."""
    found = []
    for name, value in exact.items():
        if name not in ("classes", "worst"):
            got = report.metrics[name]
            if not abs(got - value) <= _allowed(name, value, exact, config):
                found.append(f"{name}: exact {value!r}, reported {got!r}")
    if exact["classes"] != report.classes:
        found.append(f"classes: exact {exact['classes']}, reported {report.classes}")
    worst = [(token.sample_index, token.token_position) for token in report.worst_tokens]
    if exact["worst"] != worst:
        found.append(f"worst tokens: exact {exact['worst']}, reported {worst}")
    return found


def _allowed(name: str, value: float, exact: dict[str, Any], config: AuditConfig) -> float:
    if "dlogp_p" in name:
        return max(relative_accuracy(config.grouping_power) * abs(value), 2.0**-33)
    if name in ("dlogp_mean", "dlogp_std"):
        return FLOAT32_STEP * (exact["abs_dlogp_mean"] + exact["dlogp_std"])
    if name == "chi2_0":
        return FLOAT32_STEP * (1 + 2 * value)
    if name.startswith("prob_") or name in ("ess0", "approx_kl0"):
        return FLOAT32_STEP * (2 + abs(value)) if name != "approx_kl0" else FLOAT32_STEP * value + 2.0**-52
    if name.startswith(("ratio0", "mult")) or name.endswith(("mean", "nll", "k2")):
        return 2 * FLOAT32_STEP * abs(value)
    return 1e-12 * abs(value)  # counts, shares and extremes are exact
