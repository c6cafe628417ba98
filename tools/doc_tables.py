"""Write the tables of the documents that the code knows, between the lines that mark them.

    python tools/doc_tables.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; a test compares the documents
with what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rlk_audit import metric_table
from rlk_audit.diagnose import CHECK_FIRST
from rlk_audit.metric_table import Entry
from rlk_audit.sketch import bins_per_side, relative_accuracy, sketch_length
from rlk_audit.warning_log import MEANINGS

DOCS = Path(__file__).parents[1] / "docs"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a sign that would end a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def entries(head: Sequence[str], found: Iterable[Entry]) -> str:
    rows = ((", ".join(f"`{name}`" for name in entry.names), entry.unit, entry.text) for entry in found)
    return table(head, rows)


def classes() -> str:
    return table(("class", "when"), ((", ".join(map("`{}`".format, e.names)), e.text) for e in metric_table.CLASSES))


def metrics() -> str:
    return entries(("key", "unit", "formula"), metric_table.METRICS)


def sample_metrics() -> str:
    return entries(("key", "unit", "formula"), metric_table.SAMPLE_METRICS)


def bucket_figures() -> str:
    return entries(("figure of a bucket", "unit", "what"), metric_table.BUCKET_FIGURES)


def warnings() -> str:
    return entries(("code", "unit", "counts"), metric_table.WARNINGS)


def meanings() -> str:
    return table(("warning", "what it means"), ((f"`{code}`", text) for code, text in MEANINGS.items()))


def causes() -> str:
    return table(("finding", "check first"), ((f"`{code}`", text) for code, text in CHECK_FIRST.items()))


def sketch() -> str:
    rows = (
        (str(k), f"{bins_per_side(k):,}", f"{8 * sketch_length(k) / 1000:.0f} KB", f"{relative_accuracy(k):.3%}")
        for k in range(5, 9)
    )
    return table(("k", "bins a side", "counts", "bound e"), rows)


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (classes, metrics, sample_metrics, bucket_figures, warnings, meanings, causes, sketch)
}


def with_tables(text: str) -> str:
    """The text of a document with its tables as the code has them; a name that is unknown is a KeyError."""
    return MARKED.sub(lambda marked: f"{marked[1]}\n{TABLES[marked[2]]()}\n{marked[3]}", text)


def main() -> None:
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (written := with_tables(text)) != text:
            path.write_text(written, encoding="utf-8")
            print(path.name)


if __name__ == "__main__":
    main()
