"""Where the drift is: by each label's buckets and by rank, as rows of one kind of chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlk_audit.breakdowns import Bucket
from rlk_audit.page.axes import ZERO_NOTE, LogScale, finite_maximum
from rlk_audit.page.parts import Chart, Table, Trace
from rlk_audit.page.text import NOTHING, chart_text, figure
from rlk_audit.report import RankSummary, StepReport

ROWS = 40
"""Buckets or ranks that a chart or table shows, those of largest mean."""
_LABEL = 18


@dataclass(frozen=True)
class _Row:
    name: str
    count: int
    figures: dict[str, float]


def breakdown_chart(label: str, buckets: Sequence[Bucket], number: int) -> Chart | None:
    """Return p50, mean and p99 of abs(dlogp) of a label's buckets, with their tokens; None where all are empty."""
    filled = [bucket for bucket in buckets if bucket.compared_token_count]
    rows = [
        _Row(b.name, b.compared_token_count, {"p50": b.abs_dlogp_p50, "mean": b.abs_dlogp_mean, "p99": b.abs_dlogp_p99})
        for b in filled
    ]
    if not rows:
        return None
    shown, remark = _most_drifting(rows)
    names = {row.name for row in shown}
    table = Table(
        f"abs(dlogp) by {label}, nats",
        (label, "compared tokens", "mean", "p50", "p99", "max", "share beyond ln 2"),
        tuple(
            (
                b.name,
                b.compared_token_count,
                b.abs_dlogp_mean,
                b.abs_dlogp_p50,
                b.abs_dlogp_p99,
                b.abs_dlogp_max,
                b.tail_frac_ln2,
            )
            for b in filled
            if b.name in names
        ),
        remark,
    )
    return _chart(f"breakdown-{number}", f"By {label}", label, shown, table, remark)


def rank_chart(steps: Sequence[StepReport]) -> Chart | None:
    """Return mean and maximum of abs(dlogp) of ranks over the steps that list them; None where no step lists any."""
    ranks: dict[int, list[RankSummary]] = {}
    for report in steps:
        for rank in report.rank_table:
            ranks.setdefault(rank.rank, []).append(rank)
    rows = [_rank_row(number, ranks[number]) for number in sorted(ranks)]
    compared = [row for row in rows if row.count]
    if not compared:
        return None
    shown, remark = _most_drifting(compared)
    names = {row.name for row in shown}
    table = Table(
        "abs(dlogp) by rank, nats, over the steps that list it",
        ("rank", "host", "steps", "compared tokens", "mean", "max", "failed updates"),
        tuple(
            (
                row.name,
                ranks[number][-1].host or NOTHING,
                len(ranks[number]),
                row.count,
                row.figures["mean"],
                row.figures["max"],
                sum(rank.update_failed for rank in ranks[number]),
            )
            for number, row in zip(sorted(ranks), rows, strict=True)
            if row.name in names or not row.count
        ),
        (remark + " A report that was read back lists its eight worst ranks only.").strip(),
    )
    return _chart("ranks", "By rank", "rank", shown, table, remark)


def _rank_row(number: int, summaries: list[RankSummary]) -> _Row:
    count = sum(rank.compared_token_count for rank in summaries)
    total = sum(rank.abs_dlogp_mean * rank.compared_token_count for rank in summaries if rank.compared_token_count)
    largest = finite_maximum([rank.abs_dlogp_max for rank in summaries])
    return _Row(str(number), count, {"mean": total / count if count else math.nan, "max": largest})


def _most_drifting(rows: list[_Row]) -> tuple[list[_Row], str]:
    """Return the rows that are shown, in their order, and what is said of the others."""
    if len(rows) <= ROWS:
        return rows, ""
    worst = sorted(range(len(rows)), key=lambda i: -rows[i].figures["mean"])[:ROWS]
    return [rows[i] for i in sorted(worst)], f"The {ROWS} of largest mean of {len(rows):,}."


def _chart(name: str, title: str, label: str, rows: list[_Row], table: Table, remark: str) -> Chart:
    scale = LogScale.of(value for row in rows for value in row.figures.values())
    places = list(range(len(rows)))
    worst = max(rows, key=lambda row: row.figures["mean"])
    summary = f"Largest mean: {label} {worst.name}, {figure(worst.figures['mean'])} nats over {worst.count:,} tokens."
    told = [summary, remark, ZERO_NOTE if scale.has_zero else ""]
    counts = {
        "type": "bar",
        "orientation": "h",
        "name": "tokens",
        "x": [row.count for row in rows],
        "y": places,
        "width": 0.5,
        "xaxis": "x2",
        "text": [f"{row.count:,} tokens" for row in rows],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": "--quiet"},
        "showlegend": False,
    }
    layout = {
        "xaxis": scale.axis("abs(dlogp), nats") | {"domain": [0, 0.76]},
        "xaxis2": {"domain": [0.85, 1], "nticks": 3, "tickformat": "~s", "title": {"text": "tokens"}, "tickangle": 0},
        "yaxis": {
            "tickvals": places,
            "ticktext": [chart_text(row.name, _LABEL) for row in rows],
            "range": [len(rows) - 0.5, -0.5],
            "automargin": True,
        },
        "hovermode": "closest",
    }
    data = [_span(rows, scale), *(_dots(rows, key, scale) for key in rows[0].figures), counts]
    return Chart(name, title, " ".join(filter(None, told)), data, layout, 150 + 26 * len(rows), table)


def _span(rows: list[_Row], scale: LogScale) -> Trace:
    """Return a line in each row from its least to its largest figure."""
    xs: list[float | None] = []
    ys: list[int | None] = []
    for place, row in enumerate(rows):
        ends = [x for x in scale.places(row.figures.values()) if x is not None]
        if ends:
            xs += [min(ends), max(ends), None]
            ys += [place, place, None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "y": ys,
        "line": {"color": "--quiet", "width": 3},
        "hoverinfo": "skip",
        "showlegend": False,
    }


_MARKS = {
    "p50": ("--line-1", "circle"),
    "mean": ("--line-0", "diamond"),
    "p99": ("--line-3", "square"),
    "max": ("--line-5", "square"),
}


def _dots(rows: list[_Row], key: str, scale: LogScale) -> Trace:
    colour, symbol = _MARKS[key]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": key,
        "x": scale.places(row.figures[key] for row in rows),
        "y": list(range(len(rows))),
        "text": [f"{chart_text(row.name, 60)}: {key} {figure(row.figures[key])}" for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "symbol": symbol, "size": 10},
    }
