"""The lines over steps: every step where there are few, and no spike lost where there are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rlk_audit.page.axes import ZERO_NOTE, LogScale, or_least
from rlk_audit.page.parts import Cell, Chart, Table, Trace
from rlk_audit.page.text import NOTHING, chart_text, count_of, figure, quantile_name, quantile_share, step_name
from rlk_audit.page.totals import quantile_keys
from rlk_audit.report import StepReport

POINTS = 1000
"""Steps that a line shows one by one; of more it keeps about as many points."""
TABLE_ROWS = 100
MARKS = 200
"""Places on which failed steps are marked."""
_SENTENCE = 160

_DASHES = {"abs_dlogp_mean": "dash"}


def thinned(values: Sequence[float], points: int = POINTS) -> list[int]:
    """Return the places that a line keeps: of each group of neighbours the least, the largest and the first gap."""
    column = np.asarray(values, dtype=np.float64)
    if len(column) <= points:
        return list(range(len(column)))
    kept: set[int] = set()
    for group in np.array_split(np.arange(len(column)), points // 2):
        part = column[group]
        finite, gaps = group[np.isfinite(part)], group[~np.isfinite(part)]
        if len(finite):
            kept |= {int(finite[np.argmin(column[finite])]), int(finite[np.argmax(column[finite])])}
        kept |= set(gaps[:1].tolist())
    return sorted(kept)


def step_chart(steps: Sequence[StepReport]) -> Chart:
    """Return the lines of mean, quantiles and maximum of abs(dlogp), with the steps that failed marked; needs steps."""
    numbers = step_numbers(steps)
    keys = line_keys(steps)
    columns = {key: [float(report.metrics.get(key, math.nan)) for report in steps] for key in keys}
    scale = LogScale.of(value for column in columns.values() for value in column)
    failed = [place for place, report in enumerate(steps) if report.failures]
    data = [_line(key, columns[key], numbers, steps, scale, at) for at, key in enumerate(keys)]
    data += [_marks(failed, steps, numbers)] if failed else []
    layout = {
        "xaxis": {"title": {"text": "step" if numbers_known(steps) else "report (steps are not known)"}},
        "yaxis": scale.axis("abs(dlogp), nats") | {"domain": [0, 0.93 if failed else 1]},
        "hovermode": "x unified" if len(steps) <= POINTS else "closest",
    }
    if failed:
        layout["yaxis2"] = {"domain": [0.95, 1], "visible": False, "range": [0, 1], "fixedrange": True}
    return Chart(
        "steps",
        "abs(dlogp) of each step",
        _summary(steps, columns, failed, scale),
        data,
        layout,
        440,
        _table(steps, columns, failed),
    )


def line_keys(steps: Sequence[StepReport]) -> tuple[str, ...]:
    """Return the metrics that have a line: the quantiles that any step has, maximum and mean."""
    quantiles = {key: None for report in steps for key in quantile_keys(report.metrics)}
    return ("abs_dlogp_mean", *sorted(quantiles, key=quantile_share), "abs_dlogp_max")


def numbers_known(steps: Sequence[StepReport]) -> bool:
    """Return whether the steps have numbers that grow."""
    known = [report.step for report in steps if report.step is not None]
    return len(known) == len(steps) and all(a < b for a, b in pairwise(known))


def step_numbers(steps: Sequence[StepReport]) -> list[int]:
    """Return where the steps stand on the axis: at their numbers, or in their order from 1."""
    if numbers_known(steps):
        return [report.step for report in steps if report.step is not None]
    return list(range(1, len(steps) + 1))


def _line(
    key: str, values: list[float], numbers: list[int], steps: Sequence[StepReport], scale: LogScale, at: int
) -> Trace:
    kept = thinned(values)
    shown = scale.places(values[place] for place in kept)
    alone = [
        y is not None and (i == 0 or shown[i - 1] is None) and (i + 1 == len(shown) or shown[i + 1] is None)
        for i, y in enumerate(shown)
    ]
    few = len(kept) <= 40
    colour = f"--line-{at % 7}"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": chart_text(quantile_name(key)),
        "x": [numbers[place] for place in kept],
        "y": shown,
        "text": [figure(values[place]) for place in kept],
        "hovertemplate": "%{text}" if len(steps) <= POINTS else "step %{x}: %{text}",
        "line": {"color": colour, "width": 2, "dash": _DASHES.get(key, "solid")},
        "marker": {"color": colour, "size": [5 if few or by_itself else 0 for by_itself in alone]},
        "connectgaps": False,
    }


def _marks(failed: list[int], steps: Sequence[StepReport], numbers: list[int]) -> Trace:
    groups = [group.tolist() for group in np.array_split(np.asarray(failed), min(len(failed), MARKS))]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "limit crossed",
        "x": [numbers[group[0]] for group in groups],
        "y": [0.5] * len(groups),
        "yaxis": "y2",
        "text": [_failed_text(group, steps) for group in groups],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"symbol": "x", "size": 9, "color": "--bad"},
    }


def _failed_text(group: list[int], steps: Sequence[StepReport]) -> str:
    first = steps[group[0]]
    told = f"{step_name(first.step)}: {first.failures[0]}"
    if len(group) > 1:
        told = f"{len(group)} failed steps up to {step_name(steps[group[-1]].step)}; {told}"
    return chart_text(told, _SENTENCE)


def _summary(steps: Sequence[StepReport], columns: dict[str, list[float]], failed: list[int], scale: LogScale) -> str:
    largest = columns["abs_dlogp_max"]
    finite = [place for place, value in enumerate(largest) if math.isfinite(value)]
    if not finite:
        told = f"{count_of(len(steps), 'step')}, none of which compared a token."
    else:
        worst = max(finite, key=lambda place: largest[place])
        told = f"{count_of(len(steps), 'step')}; the largest abs(dlogp), {figure(largest[worst])}, "
        told += f"is of {step_name(steps[worst].step)}."
    gaps = len(steps) - len(finite)
    if gaps and finite:
        told += f" {count_of(gaps, 'step')} without a number {'is a gap' if gaps == 1 else 'are gaps'}."
    if failed:
        told += f" {count_of(len(failed), 'step')} crossed a limit, marked by crosses above the lines."
    if len(steps) > POINTS:
        told += (
            f" Of each {-(-2 * len(steps) // POINTS)} neighbouring steps a line shows the least and the largest value "
            "and one gap, so no spike is left out."
        )
    return f"{told} {ZERO_NOTE}" if scale.has_zero else told


def _table(steps: Sequence[StepReport], columns: dict[str, list[float]], failed: list[int]) -> Table:
    places = list(range(len(steps)))
    remark = ""
    if len(steps) > TABLE_ROWS:
        wrong = set(failed)
        by_drift = sorted(places, key=lambda i: (i not in wrong, -or_least(columns["abs_dlogp_max"][i]), i))
        places = sorted(by_drift[:TABLE_ROWS])
        remark = f"{TABLE_ROWS} of {len(steps):,} steps: those that crossed a limit, then those of the largest maximum."
    rows: list[tuple[Cell, ...]] = [
        (
            step_name(steps[i].step),
            steps[i].metrics.get("compared_token_count", math.nan),
            *(columns[key][i] for key in columns),
            "; ".join(steps[i].failures) or NOTHING,
        )
        for i in places
    ]
    names = tuple(quantile_name(key) for key in columns)
    return Table("abs(dlogp) of steps, nats", ("step", "compared tokens", *names, "failed"), tuple(rows), remark)
