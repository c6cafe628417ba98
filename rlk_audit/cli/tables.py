"""A run in a terminal: the same figures as on the page, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlk_audit.breakdowns import UNKNOWN, Bucket
from rlk_audit.finding import NOTHING_TO_CHECK
from rlk_audit.page.text import step_name
from rlk_audit.page.totals import worst_tokens
from rlk_audit.report import StepReport, WorstToken
from rlk_audit.run_view import Causes, Excerpt, RunView

HEADLINES = {
    "compared_token_count": "tokens compared",
    "compared_coverage": "share of active tokens compared",
    "mask_coverage": "share of tokens active",
    "abs_dlogp_mean": "abs(dlogp) mean",
    "abs_dlogp_p50": "p50",
    "abs_dlogp_p90": "p90",
    "abs_dlogp_p99": "p99",
    "abs_dlogp_p99_9": "p99.9",
    "abs_dlogp_max": "max",
    "dlogp_mean": "dlogp mean",
    "approx_kl0": "approx_kl0",
    "ess0": "ess0",
    "clipfrac0": "clipfrac0",
    "prob_pearson": "prob_pearson",
    "abs_dlogp_sample_mean": "abs(dlogp) mean of samples",
}
STEP_COLUMNS = ("compared_token_count", "abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_p99", "abs_dlogp_max")
STEPS_SHOWN = 24
BUCKETS_SHOWN = 24
CAUSES_SHOWN = 12
EXCERPTS_SHOWN = 3
WORST_SHOWN = 10


def number(value: float) -> str:
    """Return a figure in four digits, ``-`` where there is none."""
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if math.isnan(value) else f"{value:.4g}"


def identity(value: int) -> str:
    """Return an id as text, since its digits are no quantity; unknown ones are -1."""
    return "-" if value < 0 else str(value)


def figure(report: StepReport, key: str) -> float:
    """Return a metric of a report, NaN where its log has none of that name."""
    return report.metrics.get(key, math.nan)


def view_tables(view: RunView) -> Iterator[RenderableType]:
    """Yield the tables of a run, the most important first."""
    whole = view.whole
    yield line(view.title, "bold")
    yield from (line(note) for note in view.notes)
    yield from problem_lines(view)
    yield _headline(view, whole)
    yield from _causes(view)
    if len(view.steps) > 1:
        yield _steps(view.steps)
    yield from (_breakdown(label, buckets) for label, buckets in whole.breakdowns.items())
    ranks = [rank for rank in whole.ranks if rank.rank >= 0]
    if ranks:
        rows = [
            (identity(rank.rank), rank.host or "-", rank.compared_token_count, rank.abs_dlogp_mean, rank.abs_dlogp_max)
            for rank in ranks
        ]
        yield table("ranks of largest drift", ("rank", "host", "tokens", "mean", "max"), rows)
    if worst := worst_tokens(view, WORST_SHOWN):
        yield _worst(worst)
    yield from (_excerpt(shown) for shown in view.excerpts[:EXCERPTS_SHOWN] if shown.texts)


def problem_lines(view: RunView) -> Iterator[Text]:
    """Yield a line for each thing that could not be read."""
    return (line(f"left out: {problem}", "yellow") for problem in view.problems)


def verdict_lines(reports: Iterable[StepReport]) -> Iterator[Text]:
    """Yield a line for each thing that failed in a step."""
    for report in reports:
        yield from (failure_line(f"{step_name(report.step)}: {told}") for told in report.failures)


def finding_lines(causes: Causes) -> Iterator[Text]:
    """Yield the findings of a range of steps, one a line."""
    where = _range(causes.first_step, causes.last_step)
    # The evidence is that of one step.
    strongest = "" if causes.first_step == causes.last_step else " in the strongest:"
    for finding in causes.findings:
        style = "green" if finding.check_first == NOTHING_TO_CHECK else "bold red"
        yield Text.assemble(
            f"{where}: ",
            (plain_text(f"{finding.code} ({finding.strength:.0%})"), style),
            f"{strongest} {plain_text(finding.advice)}",
        )


def _range(first: int | None, last: int | None) -> str:
    if first is None:
        return "all tokens" if last is None else f"up to step {last}"
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _headline(view: RunView, whole: StepReport) -> Table:
    metrics = whole.metrics
    several = view.total is not None and len(view.steps) > 1
    title = "all steps" if several else "all tokens" if whole.step is None else step_name(whole.step)
    headline = table(
        title, ("figure", "value"), [(told, metrics[key]) for key, told in HEADLINES.items() if key in metrics]
    )
    for name, count in whole.classes.items():
        if count and name != "compared":
            headline.add_row(line(f"excluded: {name}"), number(count))
    for name, count in whole.warnings.items():
        headline.add_row(line(f"warning: {name}", "yellow"), number(count))
    for note in whole.notes:
        headline.add_row(line(note, "yellow"), "")
    return headline


def _causes(view: RunView) -> Iterator[RenderableType]:
    if view.causes:
        yield Text("what made the drift", style="bold")
    for causes in view.causes[:CAUSES_SHOWN]:
        yield from finding_lines(causes)
    if len(view.causes) > CAUSES_SHOWN:
        yield Text(f"and {len(view.causes) - CAUSES_SHOWN} further ranges of steps")


def _steps(steps: Sequence[StepReport]) -> Table:
    """Return the steps, or where they are many every so-manyth with the worst of each stretch."""
    every = -(-len(steps) // STEPS_SHOWN)
    stretches = [steps[start : start + every] for start in range(0, len(steps), every)]
    shown = [max(stretch, key=lambda report: _known(figure(report, "abs_dlogp_max"))) for stretch in stretches]
    title = "steps" if every == 1 else f"steps: the one of largest max in every {every}"
    rows = [(step_name(report.step), *(figure(report, key) for key in STEP_COLUMNS)) for report in shown]
    return table(title, ("", "tokens", "mean", "p50", "p99", "max"), rows)


def _known(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _breakdown(label: str, buckets: tuple[Bucket, ...]) -> Table:
    filled = [bucket for bucket in buckets if bucket.compared_token_count]
    shown = filled if len(filled) <= BUCKETS_SHOWN else sorted(filled, key=lambda b: -b.abs_dlogp_mean)[:BUCKETS_SHOWN]
    title = f"by {label}" if len(shown) == len(filled) else f"by {label}: {len(shown)} of {len(filled)}, worst first"
    rows = [
        (b.name, b.compared_token_count, b.abs_dlogp_mean, b.abs_dlogp_p50, b.abs_dlogp_p99, b.tail_frac_ln2)
        for b in shown
    ]
    return table(title, (label, "tokens", "mean", "p50", "p99", "above ln 2"), rows)


def _worst(worst: Sequence[tuple[int | None, WorstToken]]) -> Table:
    labels = list(worst[0][1].labels)
    rows = [
        (
            "-" if step is None else str(step),
            *map(identity, (token.sample_index, token.token_position, token.token_id)),
            token.dlogp,
            token.train_logp,
            token.rollout_logp,
            *(token.labels.get(name, UNKNOWN) for name in labels),
        )
        for step, token in worst
    ]
    return table("worst tokens", ("step", "sample", "position", "token", "dlogp", "train", "rollout", *labels), rows)


def _excerpt(shown: Excerpt) -> RenderableType:
    """Return a worst token in its text, each token coloured by its abs(dlogp)."""
    tokens = Text()
    columns = (shown.positions, shown.texts, shown.train_logp, shown.rollout_logp, shown.active)
    for position, text, train, rollout, active in zip(*columns, strict=True):
        drift = abs(train - rollout)
        style = "dim" if not active else "" if not drift >= 0.1 else "yellow" if drift < 0.7 else "red"
        if position == shown.worst.token_position:
            style = "bold reverse red"
        tokens.append(plain_text(text), style)
        tokens.append(" ")
    where = "" if shown.step is None else f"step {shown.step}, "
    worst = shown.worst
    told = f"{where}sample {identity(worst.sample_index)}, position {identity(worst.token_position)}"
    return Group(Text(f"{told}, dlogp {worst.dlogp:+.3g}:", style="bold"), tokens)


def plain_text(text: str) -> str:
    """Return a text whose control characters are shown, not obeyed: a dump must not steer the terminal."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def line(text: str, style: str = "") -> Text:
    """Return a text as it is shown: neither markup nor control characters in it count."""
    return Text(plain_text(text), style)


def failure_line(told: str) -> Text:
    """Return a sentence on what failed."""
    return line(told, "bold red")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; numbers in four digits, texts so that they cannot steer the terminal."""
    made = Table(title=line(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        made.add_column(line(name), justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*(number(cell) if isinstance(cell, (int, float)) else line(str(cell)) for cell in row))
    return made
