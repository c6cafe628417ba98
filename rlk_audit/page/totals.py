"""A run's verdict and headline numbers, from its total or, where there is none, from its steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.page.axes import finite_maximum
from rlk_audit.page.text import NOTHING, count_of, figure, quantile_name, step_name
from rlk_audit.report import StepReport, WorstToken
from rlk_audit.run_view import RunView
from rlk_audit.verdict import FAIL, NO_DATA, PASS

_QUANTILE = re.compile(r"abs_dlogp_p\d+(_\d+)?")


@dataclass(frozen=True)
class Outcome:
    """The verdict in words; ``state`` is ok, bad, empty (nothing compared) or unjudged."""

    state: str
    words: str
    detail: str


@dataclass(frozen=True)
class Headline:
    """One number of the top of the page; ``remark`` says what it is of, ``definition`` where it is defined."""

    name: str
    value: float | int
    definition: str
    remark: str = ""


def whole(view: RunView) -> StepReport | None:
    """Return the report of all tokens: the total, or the only step."""
    return view.steps[0] if view.total is None and len(view.steps) == 1 else view.total


def reports(view: RunView) -> tuple[StepReport, ...]:
    """Return every report of the view."""
    return view.steps if view.total is None else (*view.steps, view.total)


def quantile_keys(metrics: Iterable[str]) -> list[str]:
    """Return the keys of quantiles of abs(dlogp)."""
    return [key for key in metrics if _QUANTILE.fullmatch(key)]


def _outcomes(report: StepReport) -> set[str]:
    return set() if report.verdict is None else {result.outcome for result in report.verdict.limits}


def outcome(view: RunView) -> Outcome:
    """Return the verdict of the whole view; nothing compared is never said to be fine."""
    failed = [report for report in reports(view) if report.failures]
    judged = [report for report in reports(view) if report.failures or _outcomes(report) & {PASS, FAIL}]
    blank = sum(NO_DATA in _outcomes(report) for report in reports(view))
    detail = f" In {count_of(blank, 'report')} a limited metric had no data." if blank else ""
    if failed:
        first = failed[0]
        where = "the run as a whole" if first is view.total else step_name(first.step)
        told = f"{len(failed):,} of {count_of(len(judged), 'judged report')} failed. First {where}: "
        return Outcome("bad", "Limit crossed", told + "; ".join(first.failures) + "." + detail)
    if not compared_tokens(view):
        return Outcome("empty", "Nothing compared", "No token had a plausible log-probability on both sides." + detail)
    if judged:
        return Outcome("ok", "OK", f"{count_of(len(judged), 'judged report')} within the limits." + detail)
    return Outcome("unjudged", "Nothing judged", "No limit was set, or none could be decided." + detail)


def compared_tokens(view: RunView) -> int:
    """Return the compared tokens of the view."""
    everything = whole(view)
    if everything is not None:
        return _count(everything, "compared_token_count")
    return sum(_count(report, "compared_token_count") for report in view.steps)


def _count(report: StepReport, key: str) -> int:
    value = report.metrics.get(key, 0)
    return int(value) if math.isfinite(value) else 0


def headlines(view: RunView) -> tuple[Headline, ...]:
    """Return the numbers of the top of the page, in order."""
    everything = whole(view)
    if everything is None:
        return _headlines_of_steps(view)
    metrics = everything.metrics
    active, compared = (_count(everything, key) for key in ("active_token_count", "compared_token_count"))
    found = [
        Headline("compared tokens", compared, "classes"),
        Headline("mean", metrics.get("abs_dlogp_mean", math.nan), "abs_dlogp"),
        *(Headline(quantile_name(key), metrics[key], "abs_dlogp") for key in quantile_keys(metrics)),
        Headline("max", metrics.get("abs_dlogp_max", math.nan), "abs_dlogp"),
        Headline("excluded tokens", active - compared, "classes", excluded(everything.classes)),
    ]
    return (*found, *_further(metrics))


def _further(metrics: Mapping[str, float | int]) -> list[Headline]:
    names = {
        "dlogp_mean": ("bias (mean dlogp)", "dlogp"),
        "approx_kl0": ("KL (k3)", "kl"),
        "clipfrac0": ("clipped at zero update", "clipfrac"),
        "ess0": ("effective sample size", "ess"),
        "prob_pearson": ("correlation of probabilities", "prob"),
        "tail_frac_ln2": ("share beyond ln 2", "tail"),
        "abs_dlogp_sample_mean": ("mean over samples", "samples"),
        "sample_count": ("samples", "samples"),
    }
    return [Headline(name, metrics[key], where) for key, (name, where) in names.items() if key in metrics]


def _headlines_of_steps(view: RunView) -> tuple[Headline, ...]:
    """Sums and maxima are exact; a mean is weighted; quantiles of a run cannot be had from those of steps."""
    compared = compared_tokens(view)
    weighed = [
        report.metrics["abs_dlogp_mean"] * _count(report, "compared_token_count")
        for report in view.steps
        if math.isfinite(report.metrics.get("abs_dlogp_mean", math.nan))
    ]
    quantiles = list(dict.fromkeys(key for report in view.steps for key in quantile_keys(report.metrics)))
    active = sum(_count(report, "active_token_count") for report in view.steps)
    classes = {name: sum(report.classes.get(name, 0) for report in view.steps) for name in TOKEN_CLASSES}
    return (
        Headline("compared tokens", compared, "classes"),
        Headline("mean", sum(weighed) / compared if compared and weighed else math.nan, "abs_dlogp"),
        *(
            Headline(quantile_name(key), _largest(view, key), "abs_dlogp", "largest of a step; the run's is not known")
            for key in quantiles
        ),
        Headline("max", _largest(view, "abs_dlogp_max"), "abs_dlogp"),
        Headline("excluded tokens", active - compared, "classes", excluded(classes)),
    )


def _largest(view: RunView, key: str) -> float:
    return finite_maximum([float(report.metrics.get(key, math.nan)) for report in view.steps])


def excluded(classes: Mapping[str, int]) -> str:
    """Return which classes hold the tokens that were not compared."""
    return ", ".join(f"{count:,} {name}" for name, count in classes.items() if count and name != "compared")


def worst_tokens(view: RunView, most: int) -> list[tuple[int | None, WorstToken]]:
    """Return the worst tokens with their steps, worst first: of the steps, or of the total where steps have none."""
    found = [(report.step, token) for report in view.steps for token in report.worst_tokens]
    if not found and view.total is not None:
        found = [(None, token) for token in view.total.worst_tokens]
    return sorted(found, key=lambda pair: -pair[1].abs_dlogp)[:most]


def worst_sentence(view: RunView) -> str:
    """Return where the worst token is, in words; empty where there is none."""
    for step, token in worst_tokens(view, 1):
        places = {"sample": token.sample_index, "position": token.token_position, "token id": token.token_id}
        told = [] if step is None else [step_name(step)]
        told += [f"{name} {value}" for name, value in places.items() if value >= 0]
        told += [f"{name} {code}" for name, code in token.labels.items()]
        where = ", ".join(told) or NOTHING
        return (
            f"dlogp {token.dlogp:+.4g} at {where}: train {figure(token.train_logp)}, "
            f"rollout {figure(token.rollout_logp)} nats."
        )
    return ""
