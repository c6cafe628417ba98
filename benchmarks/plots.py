"""The pictures of docs/benchmarks.md, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")
OURS, REFERENCE, OTHERS, LIGHT = "#c0392b", "#e59866", "#5d6d7e", "#aab7b8"
PEERS = ("#2e86c1", "#85c1e9", "#229954", "#7dcea0", "#b7950b", "#8e44ad", "#c39bd3", "#1b2631", "#85929e")
STAGE_COLOURS = (
    "#aab7b8", "#85c1e9", "#2e86c1", "#f5b041", "#c0392b", "#a569bd", "#58d68d", "#7b7d7d", "#d5dbdb", "#f7dc6f",
    "#1abc9c", "#1b4f72", "#7b241c", "#d2b4de",
)  # fmt: skip
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rlk_audit",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e5e7e9",
    "figure.figsize": (7.2, 3.6),
}
Results = Mapping[str, Any]


def draw(results: Results, folder: Path) -> None:
    """Write one SVG for each group that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(STYLE):
        for group, plot in PLOTS.items():
            if group in results:
                figure, axes = pyplot.subplots()
                plot(results[group], axes)
                figure.tight_layout()
                figure.savefig(folder / f"{group}.svg", metadata={"Date": None})
                pyplot.close(figure)


def _update(group: Results, axes: Any) -> None:
    names = list(next(iter(group["sizes"].values()))["times"])
    sizes = [int(size) for size in group["sizes"]]
    for number, name in enumerate(names):
        times = [group["sizes"][str(size)]["times"][name]["median"] / size * 1e9 for size in sizes]
        ours = ":" in name
        colour = (REFERENCE if "reference" in name else OURS) if ours else PEERS[number % len(PEERS)]
        axes.plot(
            sizes, times, marker="o", ms=3, color=colour, lw=2.2 if ours else 1.0,
            ls="--" if name.endswith("report") else "-", label=name,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tokens of a micro-batch", ylabel="ns a token, one core")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _stages(group: Results, axes: Any) -> None:
    rows = [
        (f"{name}\n{int(size):,}", {stage: seconds / int(size) * 1e9 for stage, seconds in stages.items()})
        for name, variant in group["variants"].items()
        for size, stages in variant["stages"].items()
    ]
    left = [0.0] * len(rows)
    for number, stage in enumerate(dict.fromkeys(stage for _, stages in rows for stage in stages)):
        widths = [stages.get(stage, 0.0) for _, stages in rows]
        axes.barh([name for name, _ in rows], widths, left=left, color=STAGE_COLOURS[number], label=stage)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlabel="ns a token, one core", ylabel="tokens of a micro-batch")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _collective(group: Results, axes: Any) -> None:
    sizes = list(group["groups"])
    both = {size: group["groups"][size] | group["others"][size] for size in sizes}
    names = list(both[sizes[0]])
    wide = 0.8 / len(sizes)
    for number, size in enumerate(sizes):
        places = [at + wide * number for at in range(len(names))]
        times = [1e3 * both[size][name]["median"] for name in names]
        axes.barh(places, times, wide, color=(LIGHT, OTHERS, "#212f3c")[number % 3], label=f"{size} processes")
    axes.set_yticks([at + 0.4 - wide / 2 for at in range(len(names))], names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ms, slowest process")
    axes.legend(fontsize=7, frameon=False)


def _overhead(group: Results, axes: Any) -> None:
    names, base = list(group["differences"]), group["off"]["median"]
    for at, name in enumerate(names):
        found = group["differences"][name]
        low, middle, high = (100 * found[key] / base for key in ("low", "median", "high"))
        axes.errorbar([middle], [at], xerr=[[middle - low], [high - middle]], fmt="o", capsize=4, color=OURS)
    axes.axvline(0, color=OTHERS, lw=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(
        xlabel="% of a step without audit: median of paired differences, 95 % interval", ylim=(-0.6, len(names) - 0.4)
    )
    axes.invert_yaxis()


def _scale(group: Results, axes: Any) -> None:
    ranks = [row["ranks"] for row in group["rows"]]
    for algorithm, colour in (("ring", OTHERS), ("tree", OURS)):
        for kind, line in (("plain", "-"), ("all", ":")):
            times = [1e3 * row[kind][algorithm]["seconds"] for row in group["rows"]]
            label = algorithm if kind == "plain" else f"{algorithm}, with breakdowns and 4,096 samples"
            axes.plot(ranks, times, marker="o", ms=3, color=colour, ls=line, label=label)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="modelled ms of the all-reduce")
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks], fontsize=7)
    axes.minorticks_off()
    axes.legend(fontsize=7, frameon=False)


def _offline(group: Results, axes: Any) -> None:
    rows = [
        (f"{name}, {int(length):,}", found)
        for length, formats in group["lengths"].items()
        for name, found in formats.items()
    ]
    places = range(len(rows))
    for key, colour, size in (("audit", OURS, 30), ("reader", OTHERS, 16), ("library", LIGHT, 16)):
        speeds = [found["tokens"] / found["times"][key]["median"] / 1e6 for _, found in rows]
        axes.scatter(speeds, places, color=colour, s=size, label={"library": "library alone"}.get(key, key))
    axes.set_yticks(places, [name for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="million tokens a second, one process (a pass)")
    axes.legend(fontsize=7, frameon=False)


PLOTS = {
    "update": _update,
    "stages": _stages,
    "collective": _collective,
    "overhead": _overhead,
    "scale": _scale,
    "offline": _offline,
}
