"""What each number of a report is, in words: the tables of docs/metrics.md are written from these.

The formulas stand in ``metrics`` and ``samples``; a test holds the names here against those of a report.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlk_audit.config import TOKEN_CLASSES


@dataclass(frozen=True)
class Entry:
    """Names that are explained together.

    Attributes:
        names: keys as in a report.
        unit: of the numbers; empty where they have none.
        text: the formula or what is counted; T, R and d are train, rollout and train minus rollout log-probability.
    """

    names: tuple[str, ...]
    unit: str
    text: str


CLASSES = (
    Entry(
        ("rejected",), "tokens", "token ids of both sides are given and differ, or the sample's arrays differ in length"
    ),
    Entry(
        ("rollout_missing",),
        "tokens",
        "the caller says that there is no value (`None`, `rollout_missing`, or no rollout at all)",
    ),
    Entry(("rollout_sentinel", "train_sentinel"), "tokens", "finite and <= `sentinel_floor` (default -1000)"),
    Entry(("rollout_nan", "rollout_neginf", "train_nan", "train_neginf"), "tokens", "NaN, -inf"),
    Entry(("positive",), "tokens", "R or T > `positive_tolerance` (default 1e-3), +inf included"),
    Entry(("compared",), "tokens", "all else; only these enter sums, quantiles and extremes"),
)
"""Classes of active tokens, in the order in which they are tested."""

METRICS = (
    Entry(("abs_dlogp_mean", "abs_dlogp_max"), "nats", "of abs(d)"),
    Entry(
        ("abs_dlogp_p50", "abs_dlogp_p90", "abs_dlogp_p99", "abs_dlogp_p99_9"),
        "nats",
        "quantiles of abs(d): the smallest value with at least q of the tokens at or below it; one for each of "
        "`quantiles`",
    ),
    Entry(
        ("dlogp_mean", "dlogp_std", "dlogp_min", "dlogp_max", "dlogp_p01", "dlogp_p50", "dlogp_p99"),
        "nats",
        "of d; the population's standard deviation",
    ),
    Entry(("ratio0_mean", "ratio0_min", "ratio0_max"), "ratio", "exp(d)"),
    Entry(
        ("clipfrac0", "clipfrac0_low", "clipfrac0_high"),
        "share",
        "share with exp(d) outside [1 - eps_low, 1 + eps_high], strict",
    ),
    Entry(("approx_kl0",), "nats", "k3 = mean(exp(d) - 1 - d)"),
    Entry(
        ("kl0_k1", "kl0_k2"),
        "nats",
        "mean(-d), mean(d^2) / 2; all three estimate KL(rollout || train) from rollout samples",
    ),
    Entry(("chi2_0", "ess0"), "", "mean(exp(2d)) - 1; (sum exp d)^2 / (n sum exp 2d), in (0, 1]"),
    Entry(("prob_diff_mean", "prob_diff_max"), "probability", "of abs(exp T - exp R)"),
    Entry(("prob_pearson",), "", "correlation of exp T and exp R"),
    Entry(("mult_prob_error",), "ratio", "mean(exp(abs d)); 1 is perfect"),
    Entry(("train_nll", "rollout_nll", "log_ppl_diff"), "nats", "mean(-T), mean(-R), mean(R) - mean(T)"),
    Entry(("tail_frac_ln2",), "share", "share with abs(d) > ln 2: the ratio leaves [0.5, 2]"),
    Entry(("identical_frac",), "share", "share with d == 0; 1 over a positive count adds the note `self_comparison`"),
    Entry(
        (
            "overflow/ratio0_mean",
            "overflow/chi2_0",
            "overflow/ess0",
            "overflow/approx_kl0",
            "overflow/mult_prob_error",
        ),
        "tokens",
        "tokens whose exponential (exp d, its square, k3, exp abs d) left float32; that metric is then null",
    ),
    Entry(("total_token_count",), "tokens", "positions of responses; null where a padded tensor came without `valid`"),
    Entry(("active_token_count",), "tokens", "tokens with mask != 0"),
    Entry(("compared_token_count",), "tokens", "tokens of the class `compared`"),
    Entry(("mask_coverage", "compared_coverage"), "share", "active / total, compared / active"),
    Entry(
        ("updates_since_rollout_min", "updates_since_rollout_max", "updates_since_rollout"),
        "updates",
        "optimizer updates between the weights that sampled and those that score; the last only when both are equal; 0 "
        "is a true zero-update audit",
    ),
    Entry(
        ("worst_abs_dlogp", "worst_dlogp", "worst_train_logp", "worst_rollout_logp"),
        "nats",
        "the token of largest abs(d); then lower sample index, then lower position",
    ),
    Entry(
        (
            "worst_sample_index",
            "worst_rollout_id",
            "worst_token_position",
            "worst_token_id",
            "worst_rank",
            "worst_microbatch",
        ),
        "",
        "its ids, -1 where unknown; the position is relative to the response and global",
    ),
    Entry(("warning_count",), "", "the sum of all warnings; `warning/<code>` is the count of each"),
)

SAMPLE_METRICS = (
    Entry(("sample_count",), "samples", "samples that were seen, also those without a token; padding has the slot -1"),
    Entry(("zero_active_sample_count",), "samples", "those without an active token"),
    Entry(
        ("abs_dlogp_sample_mean",),
        "nats",
        "mean over samples of each one's mean of abs(d), beside the mean over tokens",
    ),
    Entry(
        ("seq_ratio0_geo_mean", "seq_ratio0_geo_min", "seq_ratio0_geo_max"),
        "ratio",
        "exp(mean d) of a sample, the geometric mean of its ratios",
    ),
    Entry(
        ("seq_log_ratio0_mean", "seq_log_ratio0_min", "seq_log_ratio0_max"),
        "nats",
        "sum of d of a sample, the logarithm of the product of its ratios",
    ),
    Entry(("seq_ess0", "seq_chi2_0"), "", "as `ess0` and `chi2_0`, of those products; null where they leave float64"),
)
"""Metrics of a report with the table of samples."""

BUCKET_FIGURES = (
    Entry(("compared_token_count",), "tokens", "its tokens"),
    Entry(("tail_frac_ln2",), "share", "share of them with abs(d) > ln 2"),
    Entry(("abs_dlogp_mean",), "nats", "mean of abs(d), each rounded to 2^-32 nats"),
    Entry(("abs_dlogp_p50", "abs_dlogp_p99"), "nats", "quantiles from a coarser sketch, within 5.9 %"),
    Entry(("abs_dlogp_max",), "nats", "exact, where one of the step's worst tokens lies in the bucket; else null"),
)
"""Figures of a breakdown's bucket."""

WARNINGS = (
    Entry(TOKEN_CLASSES[1:-1], "tokens", "tokens of the class"),
    Entry(("token_mismatch",), "tokens", "active tokens whose ids differ"),
    Entry(("zero_fill_suspect",), "tokens", "compared tokens with R exactly 0 and T < -1"),
    Entry(("length_mismatch",), "samples", "samples refused because their arrays differ in length"),
    Entry(("zero_active_sample",), "samples", "samples without an active token (with the table of samples)"),
    Entry(("sample_table_overflow",), "tokens", "active tokens that have no slot of the table of samples"),
    Entry(("update_failed",), "micro-batches", "updates that counted nothing else, since their data make no batch"),
    Entry(("duplicate_microbatch",), "micro-batches", "updates with the number of an earlier one, which are ignored"),
    Entry(("missing_metadata",), "1 a step", "any rank lacked a label that was asked for"),
    Entry(("missing_rollout_log_probs",), "1 a step", "any rank had a micro-batch without rollout log-probabilities"),
    Entry(
        ("tp_disagreement",),
        "1 a step",
        "tensor-parallel ranks measured other log-probabilities (compared at an interval)",
    ),
    Entry(
        ("unexpected_token_count",),
        "1 a step",
        "the group has another number of active tokens than `Auditor.step(..., expected_active_tokens=)` was told",
    ),
    Entry(("step_mismatch",), "1 a step", "the ranks gave the step different numbers, so it holds tokens of several"),
    Entry(("nothing_compared",), "1 a step", "no token was compared"),
)
"""Codes of warnings, each with the unit that it counts."""
