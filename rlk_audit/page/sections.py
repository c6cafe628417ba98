"""The sections of the page, made of a view."""

from __future__ import annotations

from rlk_audit.page.axes import or_least
from rlk_audit.page.breakdown_charts import breakdown_chart, rank_chart
from rlk_audit.page.distribution import density_chart, histogram_chart, tail_chart
from rlk_audit.page.parts import Cell, Chart, Section, Table
from rlk_audit.page.step_lines import step_chart
from rlk_audit.page.text import NOTHING, step_name
from rlk_audit.page.totals import compared_tokens, whole, worst_tokens
from rlk_audit.run_view import RunView

WORST_ROWS = 20


def sections(view: RunView) -> tuple[Section, ...]:
    """Return the sections of charts and tables, in order."""
    return (
        _steps(view),
        _distribution(view),
        _density(view),
        _breakdowns(view),
        _ranks(view),
        _worst(view),
        _samples(view),
        _classes(view),
    )


def _steps(view: RunView) -> Section:
    if not view.steps:
        return Section("steps", "Steps", "abs_dlogp", missing="The source holds no reports of steps.")
    return Section("steps", "Steps", "abs_dlogp", (step_chart(view.steps),))


def _distribution(view: RunView) -> Section:
    report = whole(view)
    histogram = None if report is None else report.histogram()
    charts: tuple[Chart, ...] = ()
    missing = ""
    if report is not None and histogram is not None:
        charts = histogram_chart(histogram), tail_chart(histogram, report.metrics)
    elif not compared_tokens(view):
        missing = "No token was compared, so there is no distribution."
    else:
        missing = (
            "The distribution needs the counts of all tokens: those of steps are not added up, and a total that was "
            "read back from JSON of an earlier version has none. Make the page from the tokens, or in the run itself."
        )
    return Section("distribution", "Distribution of dlogp", "distribution", charts, missing=missing)


def _density(view: RunView) -> Section:
    chart = None if view.density is None else density_chart(view.density)
    missing = "" if chart else "The probabilities of single tokens are not in this source."
    return Section("density", "Train against rollout", "prob", (chart,) if chart else (), missing=missing)


def _breakdowns(view: RunView) -> Section:
    report = whole(view)
    breakdowns = {} if report is None else report.breakdowns
    found = [breakdown_chart(label, buckets, i) for i, (label, buckets) in enumerate(breakdowns.items())]
    charts = tuple(chart for chart in found if chart is not None)
    missing = "" if charts else "No breakdown by a label was made, or none of its buckets compared a token."
    return Section("breakdowns", "Where the drift is", "breakdowns", charts, missing=missing)


def _ranks(view: RunView) -> Section:
    chart = rank_chart(view.steps)
    missing = "" if chart else "No step lists a rank that compared a token."
    return Section("ranks", "Ranks", "ranks", (chart,) if chart else (), missing=missing)


def _worst(view: RunView) -> Section:
    tokens = worst_tokens(view, WORST_ROWS)
    if not tokens:
        return Section("worst", "Worst tokens", "worst", missing="No token was compared.")
    labels = list(dict.fromkeys(name for _, token in tokens for name in token.labels))
    columns = ("step", "dlogp", "train", "rollout", "sample", "position", "token id", "rollout id", "rank")
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            NOTHING if step is None else step_name(step),
            token.dlogp,
            token.train_logp,
            token.rollout_logp,
            *map(_id, (token.sample_index, token.token_position, token.token_id, token.rollout_id, token.rank)),
            *(token.labels.get(name, NOTHING) for name in labels),
        )
        for step, token in tokens
    )
    table = Table("Tokens of largest abs(dlogp), nats, worst first", (*columns, *labels), rows)
    return Section("worst", "Worst tokens", "worst", tables=(table,))


def _id(value: int) -> str:
    """Return an id as text, since its digits are no quantity; unknown ones are -1."""
    return NOTHING if value < 0 else str(value)


def _samples(view: RunView) -> Section:
    reports = view.steps if any(report.samples for report in view.steps) else (view.total,) if view.total else ()
    found = [(report.step, sample) for report in reports for sample in report.samples]
    if not found:
        return Section("samples", "Worst samples", "samples", missing="No table of samples was kept.")
    worst = sorted(found, key=lambda pair: -or_least(pair[1].abs_dlogp_mean))[:WORST_ROWS]
    rows = tuple(
        (
            NOTHING if step is None else step_name(step),
            str(sample.sample_slot),
            sample.compared_token_count,
            sample.active_token_count,
            sample.abs_dlogp_mean,
            sample.seq_log_ratio0,
        )
        for step, sample in worst
    )
    columns = ("step", "sample slot", "compared tokens", "active tokens", "mean abs(dlogp)", "sum of dlogp")
    return Section(
        "samples", "Worst samples", "samples", tables=(Table("Samples of largest mean abs(dlogp)", columns, rows),)
    )


def _classes(view: RunView) -> Section:
    report = whole(view)
    reports = view.steps if report is None else (report,)
    tables = []
    for caption, unit, counts in (
        ("Active tokens by class", "tokens", [r.classes for r in reports]),
        ("Warnings", "count", [r.warnings for r in reports]),
    ):
        names = dict.fromkeys(name for count in counts for name in count)
        sums = {name: sum(count.get(name, 0) for count in counts) for name in names}
        rows = tuple((name, number) for name, number in sums.items() if number)
        if rows:
            tables.append(Table(caption, ("code", unit), rows))
    missing = "" if tables else "No token was active and nothing was warned of."
    return Section("classes", "Token classes and warnings", "warnings", tables=tuple(tables), missing=missing)
