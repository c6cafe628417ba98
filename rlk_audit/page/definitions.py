"""How each number of the page is defined, in the order in which the page says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """An entry of the page's last section; ``name`` is what headings link to."""

    name: str
    term: str
    text: str


DEFINITIONS = (
    Definition(
        "dlogp",
        "dlogp, bias",
        "d = T - R: train minus rollout log-probability of the sampled token, natural logarithm, in nats. Above zero "
        "training finds the token likelier than the engine that sampled it. Its mean is the bias.",
    ),
    Definition(
        "abs_dlogp",
        "mean, p50 ... p99.9, max",
        "Of abs(d) over the compared tokens of all ranks. A quantile is the smallest value with at least that share of "
        "the tokens at or below it; at the default setting within 0.78 % of the exact one. Max is exact, and so "
        "is the sum behind the mean, of values rounded to float32.",
    ),
    Definition(
        "classes",
        "compared and excluded tokens",
        "Tokens with mask != 0 are active and fall in exactly one class: rejected (token ids or lengths differ), "
        "rollout_missing, rollout_sentinel and train_sentinel (placeholders at or below -1000 by default), "
        "rollout_nan, rollout_neginf, train_nan, train_neginf, positive (no log-probability), or compared. "
        "Only compared tokens enter the other numbers.",
    ),
    Definition(
        "verdict",
        "verdict",
        "A report failed if one of its metrics crossed a limit that was set, or something occurred that must not. "
        "Without limits nothing is judged, and a limited metric without a number is said to have no data.",
    ),
    Definition(
        "causes",
        "causes and their strength",
        "A strength is the share of abs(d) that a cause explains, 0 to 100 %. What one cause explains is taken out "
        "before the next is looked for. The evidence is what it was decided on.",
    ),
    Definition(
        "distribution",
        "distribution and tail",
        "Counts of d in bins that are a quarter of a power of two wide, merged from a sketch; the tail is the share of "
        "tokens with abs(d) at or beyond each bin's edge.",
    ),
    Definition(
        "prob",
        "probabilities",
        "exp T against exp R of each compared token, and their correlation.",
    ),
    Definition(
        "breakdowns",
        "breakdowns",
        "The compared tokens, split by a label. p50 and p99 are within 5.9 %; the mean is exact to 2^-33 nats. "
        "position is that in the response; confidence is exp R; weight_lag counts optimizer updates between the "
        "weights that sampled and those that score; unknown are tokens without a code.",
    ),
    Definition("ranks", "ranks", "The tokens that each process held; a drift on some ranks only points at them."),
    Definition(
        "worst",
        "worst tokens",
        "Those of largest abs(d), then of lower sample index, then of lower position in the response.",
    ),
    Definition(
        "samples",
        "samples",
        "Mean abs(d) of each sample, and the sum of its d: the logarithm of the product of its ratios.",
    ),
    Definition("kl", "KL (k3)", "mean(exp(d) - 1 - d), which estimates KL(rollout || train) before any update."),
    Definition(
        "clipfrac",
        "clipped at zero update",
        "Share of tokens whose ratio exp(d) lies outside the clip interval, by default [0.8, 1.2], though no update "
        "was made.",
    ),
    Definition("ess", "effective sample size", "(sum exp d)^2 / (n sum exp 2d), in (0, 1]; 1 is without drift."),
    Definition("tail", "share beyond ln 2", "Share of tokens with abs(d) > ln 2: the ratio leaves [0.5, 2]."),
    Definition("warnings", "warnings", "What was met while measuring; each code counts its own unit."),
)
