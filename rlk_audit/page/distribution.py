"""How dlogp is distributed: its histogram, its cumulative share and its tail, and the density of the probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rlk_audit.metrics import Histogram
from rlk_audit.page.axes import LogScale
from rlk_audit.page.parts import Chart, Table
from rlk_audit.page.text import NOTHING, figure, power_of_ten, quantile_name, quantile_share
from rlk_audit.page.totals import quantile_keys
from rlk_audit.run_view import Density

_CENTRAL_SHARE = 0.05
"""The axis is linear around zero as far as this share of the tokens that are not there."""


class SignedAxis:
    """A logarithmic axis to both sides of zero, linear within ``linear`` nats (a power of ten)."""

    def __init__(self, histogram: Histogram) -> None:
        magnitudes = np.abs(np.asarray(histogram.edges))
        outer = np.maximum(magnitudes[:-1], magnitudes[1:])
        counts = np.asarray(histogram.counts)
        outside = outer > 2.0**-31  # without the bin of zero
        least = _share_below(outer[outside], counts[outside], _CENTRAL_SHARE)
        self.linear = 10.0 ** max(-9, min(-1, math.floor(math.log10(least))))
        self._largest = float(max(outer.max(), 10 * self.linear))

    def place(self, value: float) -> float:
        """Return where a value stands."""
        if abs(value) <= self.linear:
            return value / self.linear
        return math.copysign(1 + math.log10(abs(value) / self.linear), value)

    def axis(self, title: str) -> dict[str, Any]:
        """Return the axis of plotly."""
        lowest = round(math.log10(self.linear))
        highest = math.floor(math.log10(self._largest))
        exponents = range(highest, lowest, -max(1, math.ceil((highest - lowest) / 3)))[::-1]
        ticks = [(self.place(10.0**e), power_of_ten(e)) for e in exponents]
        ticks = [(-at, f"-{name}") for at, name in reversed(ticks)] + [(0.0, "0")] + ticks
        end = self.place(self._largest) * 1.02
        return {
            "title": {"text": title},
            "range": [-end, end],
            "tickvals": [at for at, _ in ticks],
            "ticktext": [name for _, name in ticks],
            "tickangle": 0,
        }


def _share_below(magnitudes: Any, counts: Any, share: float) -> float:
    """Return the magnitude below which a share of the counts lies; a small one where there are none."""
    if not counts.sum():
        return 1e-6
    order = np.argsort(magnitudes, kind="stable")
    reached = np.cumsum(counts[order]) >= share * counts.sum()
    return float(magnitudes[order][np.argmax(reached)])


def histogram_chart(histogram: Histogram) -> Chart:
    """Return the tokens by signed dlogp, with the cumulative share under it on the same axis."""
    axis = SignedAxis(histogram)
    edges, counts = histogram.edges, histogram.counts
    total = sum(counts)
    left, right = ([axis.place(edge) for edge in side] for side in (edges[:-1], edges[1:]))
    shares = [float(share) for share in np.cumsum(counts) / total]
    texts = [
        f"{figure(low)} to {figure(high)} nats: {count:,} tokens ({count / total:.2%})"
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
    ]
    bars = {
        "type": "bar",
        "x": [(a + b) / 2 for a, b in zip(left, right, strict=True)],
        "width": [b - a for a, b in zip(left, right, strict=True)],
        "y": list(counts),
        "text": texts,
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": "--accent", "line": {"width": 0}},
    }
    curve = {
        "type": "scatter",
        "mode": "lines",
        "x": [left[0], *right],
        "y": [0.0, *shares],
        "yaxis": "y2",
        "text": [f"{share:.4%} at or below {figure(edge)}" for edge, share in zip(edges, [0.0, *shares], strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
        "line": {"color": "--line-5", "width": 2},
    }
    layout = {
        "xaxis": axis.axis("dlogp = train minus rollout, nats") | {"anchor": "y2"},
        "yaxis": {"title": {"text": "tokens"}, "domain": [0.4, 1]},
        "yaxis2": {"title": {"text": "share ≤"}, "domain": [0, 0.32], "range": [0, 1.02], "tickformat": ".0%"},
        "showlegend": False,
        "bargap": 0,
    }
    below = sum(count for high, count in zip(edges[1:], counts, strict=True) if high <= 0)
    above = sum(count for low, count in zip(edges[:-1], counts, strict=True) if low >= 0)
    summary = (
        f"{below / total:.1%} of {total:,} tokens have a dlogp below zero, {above / total:.1%} one above, "
        f"{(total - below - above) / total:.1%} one within 2⁻³² of zero. Bins are a quarter of a power of two wide; "
        f"the axis is linear within ±{power_of_ten(round(math.log10(axis.linear)))}."
    )
    rows = tuple(
        (f"{figure(low)} to {figure(high)}", count, share)
        for low, high, count, share in zip(edges[:-1], edges[1:], counts, shares, strict=True)
        if count
    )
    table = Table("Tokens by dlogp, nats; empty bins are left out", ("dlogp", "tokens", "share at or below"), rows)
    return Chart("histogram", "dlogp and its cumulative share", summary, [bars, curve], layout, 480, table)


def survival(histogram: Histogram) -> tuple[list[float], list[int]]:
    """Return magnitudes, ascending, and how many tokens have an abs(dlogp) of at least each."""
    least: dict[float, int] = {}
    for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], histogram.counts, strict=True):
        inner = 0.0 if low < 0 < high else min(abs(low), abs(high))
        least[inner] = least.get(inner, 0) + count
    magnitudes = sorted(least)
    beyond = np.cumsum([least[magnitude] for magnitude in reversed(magnitudes)])[::-1]
    return magnitudes, [int(count) for count in beyond]


def tail_chart(histogram: Histogram, metrics: Mapping[str, float | int]) -> Chart:
    """Return the share of tokens at or beyond each abs(dlogp), both logarithmic, with the quantiles marked."""
    total = sum(histogram.counts)
    pairs = [(size, n) for size, n in zip(*survival(histogram), strict=True) if size > 0 and n]
    whole = sum(n >= 0.99 * total for _, n in pairs)
    pairs = pairs[max(0, whole - 1) :]  # a long level line would take the place of the tail
    pairs += [(float(metrics["abs_dlogp_max"]), 1)] if metrics.get("abs_dlogp_max", math.nan) > 0 else []
    shares = LogScale.of([n / total for _, n in pairs])
    sizes = LogScale.of([size for size, _ in pairs])
    found = [(key, float(metrics[key]), 1 - quantile_share(key)) for key in quantile_keys(metrics)]
    marks = [(key, size, share) for key, size, share in found if size > 0 and share > 0]  # both axes are logarithmic
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "tokens",
            "x": [size for size, _ in pairs],
            "y": [n / total for _, n in pairs],
            "text": [f"{n:,} tokens ({n / total:.4%}) with abs(dlogp) ≥ {figure(size)}" for size, n in pairs],
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"color": "--accent", "width": 2},
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "quantiles",
            "x": [value for _, value, _ in marks],
            "y": [share for _, _, share in marks],
            "text": [quantile_name(key) for key, _, _ in marks],
            "textposition": "bottom left",
            "customdata": [figure(value) for _, value, _ in marks],
            "hovertemplate": "%{text} is %{customdata}<extra></extra>",
            "marker": {"color": "--line-5", "size": 8},
        },
    ]
    layout = {
        "xaxis": sizes.axis("abs(dlogp), nats"),
        "yaxis": shares.axis("share of tokens at or beyond"),
        "showlegend": False,
    }
    beyond = metrics.get("tail_frac_ln2", math.nan)
    told = NOTHING if math.isnan(beyond) else f"{beyond:.2%}"
    summary = f"{told} of the tokens have abs(dlogp) above ln 2, where the ratio leaves [0.5, 2]."
    rows = tuple((figure(size), n, n / total) for size, n in pairs)
    table = Table("Tokens at or beyond an abs(dlogp), nats", ("abs(dlogp)", "tokens", "share"), rows)
    return Chart("tail", "Tail of abs(dlogp)", summary, data, layout, 380, table)


def density_chart(density: Density) -> Chart | None:
    """Return the tokens by rollout and train probability; None where there are none."""
    counts = density.counts.T  # rows are train, columns are rollout
    total = int(counts.sum())
    if not total:
        return None
    largest = int(counts.max())
    centers = [(a + b) / 2 for a, b in pairwise(density.edges)]
    exponents = range(math.ceil(math.log10(largest)) + 1)
    heat = {
        "type": "heatmap",
        "x": centers,
        "y": centers,
        "z": [[math.log10(n) if n else None for n in row] for row in counts.tolist()],
        "text": [[f"{n:,} tokens" for n in row] for row in counts.tolist()],
        "hovertemplate": "rollout %{x:.3f}, train %{y:.3f}: %{text}<extra></extra>",
        "hoverongaps": False,
        "colorscale": "--heat",
        "zmin": 0,
        "zmax": max(math.log10(largest), 1),
        "colorbar": {
            "title": {"text": "tokens", "side": "right"},
            "orientation": "h",
            "y": -0.22,
            "yanchor": "top",
            "tickvals": list(exponents),
            "ticktext": [power_of_ten(e) for e in exponents],
            "thickness": 12,
            "outlinewidth": 0,
        },
    }
    line = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "line": {"color": "--ink", "width": 1, "dash": "dot"}}
    layout = {
        "xaxis": {"title": {"text": "rollout probability"}, "range": [0, 1], "constrain": "domain"},
        "yaxis": {
            "title": {"text": "train probability"},
            "range": [0, 1],
            "scaleanchor": "x",
            "constrain": "domain",
        },
        "shapes": [line],
    }
    on, above = int(np.trace(counts)), int(np.tril(counts, -1).sum())
    summary = (
        f"Of {total:,} tokens {on / total:.1%} have both probabilities in the same bin, on the dotted diagonal; "
        f"to {above / total:.1%} training gives the higher probability and to {(total - on - above) / total:.1%} the "
        "engine does."
    )
    return Chart("density", "Train against rollout probability", summary, [heat], layout, 560, _density_table(density))


def _density_table(density: Density) -> Table:
    centers = (np.asarray(density.edges[1:]) + np.asarray(density.edges[:-1])) / 2
    rows = []
    parts = np.array_split(np.arange(len(centers)), min(10, len(centers)))
    for part in parts:
        counts = density.counts[part].sum(axis=0)
        n = int(counts.sum())
        mean = float((counts * centers).sum() / n) if n else math.nan
        low, high = density.edges[int(part[0])], density.edges[int(part[-1]) + 1]
        rows.append((f"{low:.3g} to {high:.3g}", n, mean))
    columns = ("rollout probability", "tokens", "mean train probability, of bins")
    return Table("Tokens by rollout probability", columns, tuple(rows))
