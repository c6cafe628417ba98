"""What a page is made of: charts, tables and sections, which the template knows how to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = str | float | int
Trace = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table whose first column names the row.

    Attributes:
        caption: what it holds.
        columns: their names.
        rows: of texts and numbers; NaN where there is nothing to say.
        remark: what was left out.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    remark: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart with what it says in words.

    Attributes:
        name: unique on the page.
        title: short.
        summary: what is seen, for those who do not see it and those who do.
        data, layout: plotly's; colours are names of the page's CSS variables.
        height: pixels.
        table: the same numbers.
    """

    name: str
    title: str
    summary: str
    data: Sequence[Trace]
    layout: Mapping[str, Any]
    height: int = 360
    table: Table | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"data": list(self.data), "layout": {**self.layout, "height": self.height}}


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: unique on the page. title: its heading. definition: the entry of the definitions that it links to.
        missing: why there is nothing to show.
    """

    name: str
    title: str
    definition: str
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: str = ""
