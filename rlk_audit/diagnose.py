"""Diagnosis: what made the drift of a step, ranked by how much of it each cause explains.

The signatures run in a fixed order, the most specific first. What one explains is taken out (values re-paired, tokens
left out) before the next looks, so that a fault is not found again under other names, and a second one underneath is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from rlk_audit.finding import HEALTHY, NOTHING_TO_CHECK, TOO_FEW
from rlk_audit.finding import Finding as Finding
from rlk_audit.report import StepReport
from rlk_audit.signatures.labels import by_label, stray_codes
from rlk_audit.signatures.pairing import cp_order, row_order, shift
from rlk_audit.signatures.report import report_signals
from rlk_audit.signatures.shape import shape_of
from rlk_audit.signatures.signal import MIN_TOKENS, Signal, Value, drift, logit_noise, share
from rlk_audit.signatures.tokens import rounded, self_comparison, synthetic_end, train_filter, zero_fill
from rlk_audit.token_table import TokenTable as TokenTable

NOTHING = "nothing_compared"

LEAST_STRENGTH = 0.01
"""What is found has at least this strength: rounding and filters matter also beside a large drift."""

CHECK_FIRST = {
    "shift": "index both sides by the token they score: logits at i score token i + 1",
    "temperature": "score at the sampling temperature on both sides, dividing logits, or take raw log-probs on both",
    "renormalised": "top-p and top-k: report raw log-probs, or apply the same filter to the trainer's logits",
    "train_filter": "the trainer's own top-p or top-k, and its mask of logits",
    "stale_weights": "weight versions: did the engines take the last update, and the same checkpoint?",
    "rank_local": "those ranks' hardware, kernels, weights and their part of the batch",
    "zero_fill": "the loss mask: tool, observation and prompt tokens were never sampled",
    "synthetic_end": "end tokens that the rollout code appended: mask them or score them",
    "rounded": "the dtype in which log-probs are kept and sent: keep float32",
    "wrong_token": "the gather of log-probs: by the sampled token's id, not the first or likeliest entry",
    "row_order": "the order of rows between rollout and training: join by a sample id",
    "cp_order": "the gather over context parallel ranks: undo the zigzag order, and pad alike",
    "self_comparison": "whether the rollout's own log-probs reach the comparison",
    "routing_tail": "mixture of experts: replay the rollout's routing, or compare the router's precision",
    "misaligned": "pairing of tokens: run again with tokens to tell shift, row and shard order apart",
    HEALTHY: NOTHING_TO_CHECK,
    NOTHING: "the mask, and whether the engine returns log-probs",
    TOO_FEW: "more tokens",
}


def diagnose(report: StepReport | None, tokens: TokenTable | None = None) -> tuple[Finding, ...]:
    """Name the causes of a step's drift, strongest first.

    Args:
        report: the step's numbers; what they alone can answer is used where there are no tokens.
        tokens: the step's active tokens, or a part of them; all signatures run.

    Returns:
        Findings; the single one ``healthy`` where nothing is wrong, ``too_few_tokens`` where too little was compared to
        say, ``nothing_compared`` where nothing was.
    """
    if tokens is not None and len(tokens):
        total, signals = _of_tokens(tokens)
        compared = int(tokens.compared.sum())
        healthy = _healthy_tokens(tokens.blanked())
    elif report is not None:
        total, signals = report_signals(report)
        compared = int(report.metrics.get("compared_token_count", 0))
        healthy = _healthy_report(report)
    else:
        total, signals, compared, healthy = 0.0, [], 0, None
    findings = [_finding(signal, total) for signal in signals]
    if not compared:
        findings.insert(0, _remark(NOTHING, 1.0, {}, "no token had a plausible log-probability on both sides"))
    elif not findings and (compared < MIN_TOKENS or healthy is None):
        findings = [_remark(TOO_FEW, 1.0, {"tokens": compared}, f"{compared} compared tokens are too few to say")]
    elif not findings and healthy is not None:
        findings = [healthy]
    return tuple(sorted(findings, key=lambda finding: -finding.strength))


# --- tokens ---------------------------------------------------------------------------------------------------------

Signature = Callable[[TokenTable], Signal | None]

ORDER: tuple[tuple[Signature, int], ...] = (
    (self_comparison, 1),
    (rounded, 1),
    (cp_order, 1),
    (shift, 2),
    (row_order, 1),
    (zero_fill, 1),
    (synthetic_end, 1),
    (by_label, 2),
    (stray_codes, 1),
    (shape_of, 2),
)
"""Each signature and how often it may find something: several lags, labels and shapes can lie in one step."""


def _of_tokens(table: TokenTable) -> tuple[float, list[Signal]]:
    """Return the drift in nats and what explains it."""
    filtered = train_filter(table)
    signals = [] if filtered is None else [filtered]
    total = drift(table) + sum(signal.nats for signal in signals)
    table = table.blanked()
    for signature, times in ORDER:
        for _ in range(times):
            found = signature(table)
            if found is None:
                break
            signals.append(found)
            table = found.rest
            if found.code == "self_comparison":
                return total, signals
    return total, signals


def _healthy_tokens(table: TokenTable) -> Finding | None:
    noise = np.abs(logit_noise(table))
    d = np.abs(table.dlogp[table.compared])
    if not len(d):
        return None
    median = float(np.median(noise)) if len(noise) else 0.0
    evidence: dict[str, Value] = {"tokens": len(d), "abs_dlogp_mean": float(d.mean()), "abs_dlogp_max": float(d.max())}
    evidence |= {"logit_noise_median": median, "noise_at_half": median / 2}
    summary = (
        f"looks like precision noise of about {median / 2:.2g} nats at probability 0.5 (mean abs(dlogp) "
        f"{d.mean():.2g}, largest {d.max():.2g}), shrinking with confidence"
    )
    return _remark(HEALTHY, 1.0, evidence, summary)


def _healthy_report(report: StepReport) -> Finding | None:
    metrics = report.metrics
    mean, p99 = (float(metrics.get(name, math.nan)) for name in ("abs_dlogp_mean", "abs_dlogp_p99"))
    if math.isnan(mean):
        return None
    told = f"nothing in the report points at a fault: mean abs(dlogp) {mean:.2g} nats, p99 {p99:.2g}"
    return _remark(HEALTHY, 1.0, {"abs_dlogp_mean": mean, "abs_dlogp_p99": p99}, told)


# --- findings -------------------------------------------------------------------------------------------------------


def _finding(signal: Signal, total: float) -> Finding:
    strength = 1.0 if signal.code == "self_comparison" else share(signal.nats, total)
    return _remark(signal.code, min(1.0, max(LEAST_STRENGTH, strength)), signal.evidence, signal.summary)


def _remark(code: str, strength: float, evidence: Mapping[str, Value], summary: str) -> Finding:
    return Finding(code, strength, dict(evidence), CHECK_FIRST[code], summary)
