"""Draw the figures of docs/concepts.md as SVG, from the package's own bins and layout.

    python tools/figures.py [FOLDER]

A test compares docs/figures with what this draws.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch

from rlk_audit import AuditConfig
from rlk_audit.layout import StateLayout
from rlk_audit.sketch import MIN_EXPONENT, bin_bounds, bin_index, bins_per_side, magnitude_at

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
WIDTH = 760
INK, SOFT, RULE, PAPER = "#1b2430", "#55606e", "#b9c2cd", "#ffffff"
ABOVE, BELOW, QUIET, ACCENT = "#f2a654", "#7db1ec", "#e4e8ee", "#0b5cad"
PARTS = {"counters": "#8e9aab", "sketch": "#7db1ec", "sums": "#9ad0b5", "row": "#f2a654"}


class Drawing:
    """Elements of one SVG; a point is (x, y) in pixels from the upper left corner."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.elements: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = RULE) -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.elements.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.elements.append(f'<line {ends} stroke="{colour}" stroke-width="1.5"/>')

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", size: int = 13, colour: str = INK) -> None:
        look = f'text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
        self.elements.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>')

    def svg(self, title: str) -> str:
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
                f'font-family="system-ui, sans-serif">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="6" fill="{PAPER}"/>',
                *self.elements,
                "</svg>\n",
            )
        )


# --- what dlogp is --------------------------------------------------------------------------------------------------

TOKENS = ("The", "answer", "is", "[tool: 42]", "42", ".")
ROLLOUT = (-0.50, -1.20, -0.25, 0.0, -2.00, -0.10)
TRAIN = (-0.50, -1.25, -0.25, -9.50, -1.75, -0.10)
MASK = (1, 1, 1, 0, 1, 1)


def dlogp() -> str:
    drawing = Drawing(250)
    left, cell = 190, 90
    heads = ("sampled token", "R: rollout engine", "T: training", "d = T - R")
    for row, head in enumerate(heads):
        drawing.text(left - 14, 45 + 46 * row, head, anchor="end")
    for column, (token, train, rollout, mask) in enumerate(zip(TOKENS, TRAIN, ROLLOUT, MASK, strict=True)):
        d = train - rollout
        shown = (token, f"{rollout:.2f}", f"{train:.2f}", f"{d:+.2f}" if mask and d else "0" if mask else "not active")
        drift = QUIET if not mask or not d else ABOVE if d > 0 else BELOW
        for row, text in enumerate(shown):
            drawing.rect(left + cell * column, 24 + 46 * row, cell - 6, 34, drift if row == 3 else QUIET)
            size = 12 if len(text) > 7 else 13
            drawing.text(left + cell * column + (cell - 6) / 2, 45 + 46 * row, text, size=size)
    told = "Above 0: training finds the token likelier than the engine that sampled it."
    drawing.text(left, 232, told, anchor="start")
    return drawing.svg("dlogp: train minus rollout log-probability of each sampled token that is active")


# --- what the bins are ----------------------------------------------------------------------------------------------

SHOWN_POWER = 2
FIRST_EXPONENT, LAST_EXPONENT = -4, 0


def values() -> torch.Tensor:
    """The quantiles of a log-normal distribution."""
    places = torch.linspace(0.02, 0.98, 160, dtype=torch.float64)
    return torch.exp(-1.3 + 0.7 * math.sqrt(2) * torch.erfinv(2 * places - 1)).float()


def sketch() -> str:
    drawing = Drawing(300)
    left, right, ground = 30.0, WIDTH - 30.0, 210.0

    def place(value: float) -> float:
        return left + (math.log2(value) - FIRST_EXPONENT) / (LAST_EXPONENT - FIRST_EXPONENT) * (right - left)

    middle = bins_per_side(SHOWN_POWER) + 2
    counts = torch.bincount(bin_index(values(), SHOWN_POWER), minlength=2 * middle + 1)
    first, last = ((power - MIN_EXPONENT) << SHOWN_POWER for power in (FIRST_EXPONENT, LAST_EXPONENT))
    for index in range(first, last):
        low, high = bin_bounds(index, SHOWN_POWER)
        count = int(counts[middle + 2 + index])
        drawing.rect(place(low), ground - 7 * count, place(high) - place(low), 7 * count, BELOW)
    for exponent in range(FIRST_EXPONENT, LAST_EXPONENT + 1):
        drawing.line(place(2.0**exponent), ground, place(2.0**exponent), ground + 12, INK)
        drawing.text(place(2.0**exponent), ground + 28, f"{2.0**exponent:g}")
    drawing.line(left, ground, right, ground, INK)
    shown = first + 9
    low, high = bin_bounds(shown, SHOWN_POWER)
    answer = magnitude_at(shown + 2, SHOWN_POWER)
    drawing.line(place(answer), 34, place(answer), ground, ACCENT)
    told = f"any quantile in [{low:g}, {high:g}) is answered by 2ab/(a+b) = {answer:.4f}"
    drawing.text(place(answer), 26, told, colour=ACCENT)
    drawing.text(WIDTH / 2, 268, "Each power of two is cut into 2^k equal bins: 4 here (k = 2), 64 as used (k = 6).")
    drawing.text(WIDTH / 2, 288, "Bars are counts of abs(d). The axis is logarithmic; no logarithm makes the bins.")
    return drawing.svg("The bins of the sketch")


# --- what the one all-reduce carries --------------------------------------------------------------------------------

RANKS = 3


def lengths() -> dict[str, float]:
    """Part of the vector -> its width in the figure; counters and rows are drawn wider than they are."""
    sizes = StateLayout(AuditConfig(), RANKS).size_table()
    whole = 440 / (sizes["sketch"] + sizes["sums"])
    return {"counters": 50.0, "sketch": whole * sizes["sketch"], "sums": whole * sizes["sums"]}


def allreduce() -> str:
    drawing = Drawing(330)
    sizes = StateLayout(AuditConfig(), RANKS).size_table()
    row_bytes = sizes[f"rows of {RANKS} ranks"] // RANKS
    left, row = 96.0, 42.0
    names = {"counters": f"{sizes['counters']} B", "sketch": f"{sizes['sketch'] / 1000:.0f} KB"}
    names |= {"sums": f"{sizes['sums'] / 1000:.0f} KB"}
    x = left
    for name, width in lengths().items():
        drawing.text(x + width / 2, 24, name)
        drawing.text(x + width / 2, 40, names[name], size=11, colour=SOFT)
        x += width
    drawing.text(x + RANKS * row / 2, 24, "rank rows")
    drawing.text(x + RANKS * row / 2, 40, f"{row_bytes} B each", size=11, colour=SOFT)
    for number in range(RANKS):
        vector(drawing, left, 52 + 50 * number, f"rank {number}", row, {number})
        drawing.text(left + 310, 98 + 50 * number, "+" if number < RANKS - 1 else "= one all_reduce(SUM) of int64")
    vector(drawing, left, 214, "every rank", row, set(range(RANKS)))
    told = (
        "Counts and sums add up. A rank writes its own row and zeros in the others, so the",
        "same SUM gathers the rows: exact extremes, worst tokens and a table of ranks. The",
        "length does not depend on the data. (Counters and rows are drawn wider than they are.)",
    )
    for number, text in enumerate(told):
        drawing.text(left, 272 + 18 * number, text, anchor="start")
    return drawing.svg("What the one all-reduce of a step carries")


def vector(drawing: Drawing, x: float, y: float, name: str, row: float, filled: set[int]) -> None:
    drawing.text(x - 12, y + 22, name, anchor="end")
    for part, width in lengths().items():
        drawing.rect(x, y, width, 32, PARTS[part], PAPER)
        x += width
    for number in range(RANKS):
        drawing.rect(x, y, row, 32, PARTS["row"] if number in filled else QUIET, PAPER)
        drawing.text(x + row / 2, y + 21, f"row {number}" if number in filled else "0", size=11)
        x += row


FIGURES: dict[str, Callable[[], str]] = {"dlogp.svg": dlogp, "sketch.svg": sketch, "allreduce.svg": allreduce}


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
