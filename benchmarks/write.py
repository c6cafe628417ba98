"""Write docs/benchmarks.md from what was measured; nothing is measured here.

python -m benchmarks.write docs/benchmarks/results.json docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Any

from benchmarks.goals import BARE, UNPACKED, Goal, goals
from benchmarks.scale import SOURCES
from benchmarks.variants import KERNELS

Results = Mapping[str, Any]
Times = Mapping[str, Mapping[str, float]]
TEMPLATE = Path(__file__).with_name("template.md")
WIDTH = 120
WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
BYTES_A_TOKEN = 9


def page(results: Results, pictures: str) -> str:
    """Return the page; `pictures` is the folder of the plots as the page links it."""
    head, *sections = re.split(r"^<!-- (\w+) -->\n", TEMPLATE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = [Template(head).substitute(_head(results))]
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        if name in results:
            parts.append(Template(text).substitute(SECTIONS[name](results[name])))
            parts.append(f"![{text.splitlines()[0].removeprefix('## ')}]({pictures}/{name}.svg)")
    return wrapped("\n\n".join(part.strip() for part in parts)) + "\n"


def wrapped(text: str) -> str:
    """Return the text with its paragraphs broken into lines anew, since what was put in moved their ends."""
    blocks = [block if block[0] in "#|!-" else fill(block, WIDTH, **WHOLE_WORDS) for block in text.split("\n\n")]
    return "\n\n".join(blocks)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table whose columns behind the first are right-aligned."""
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def number(value: float) -> str:
    """Return about three significant digits, without an exponent."""
    if value == 0:
        return "0"
    places = next((places for limit, places in ((99.95, 0), (9.995, 1), (0.0995, 2)) if abs(value) >= limit), 3)
    return f"{value:,.{places}f}"


def milliseconds(found: Mapping[str, float]) -> str:
    """Return median and quartiles."""
    low, median, high = (number(1e3 * found[key]) for key in ("low", "median", "high"))
    return f"{median} ({low} to {high})"


def ratio(found: Mapping[str, float], base: Mapping[str, float]) -> str:
    return number(found["median"] / base["median"])


def rounds(times: Times) -> int:
    return int(next(iter(times.values()))["rounds"])


def _compared(times: Times) -> list[list[str]]:
    """Return a row for each variant, with its ratio to the first."""
    base = next(iter(times.values()))
    return [[name, milliseconds(found), ratio(found, base)] for name, found in times.items()]


def _ours(times: Times, ending: str = "") -> list[str]:
    """Return the names of the paths of the audit among what was timed."""
    return [name + ending for name in KERNELS if name + ending in times]


def _to_each(times: Times, bases: Sequence[str]) -> str:
    """Return a table with the ratios to several."""
    rows = [[n, milliseconds(found), *(ratio(found, times[base]) for base in bases)] for n, found in times.items()]
    return table(["", "ms", *(f"to {base}" for base in bases)], rows)


def _head(results: Results) -> dict[str, str]:
    places = sorted({json.dumps(group["machine"], sort_keys=True) for group in results.values()})
    dates = sorted({group["date"] for group in results.values()})
    return {
        "dates": " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        "machines": "; and on ".join(_machine(json.loads(place)) for place in places),
        "goals": table(["", "goal", "measured", "outcome"], map(_goal, goals(results))),
    }


def _goal(goal: Goal) -> list[str]:
    bound = f"{'at least' if goal.at_least else 'at most'} {goal.limit:g}{goal.unit}"
    if goal.measured is None:
        return [goal.what, bound, "not measured", ""]
    outcome = ("met" if goal.kept else "**not met**") + (", within the spread" if goal.unsure else "")
    value, low, high = (number(each) for each in (goal.measured.value, goal.measured.low, goal.measured.high))
    return [goal.what, bound, f"{value}{goal.unit} ({low} to {high})", outcome]


def _machine(place: Results) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in sorted(place["packages"].items()))
    return (
        f"{place['cores']} cores ({place['cpu']}), {place['memory_gb']} GB of memory, "
        f"Python {place['python']}; {packages}"
    )


def _update(group: Results) -> dict[str, object]:
    sizes = group["sizes"]
    bases = _ours(next(iter(sizes.values()))["times"], ": update")
    parts = group["parts"]
    return {
        "rounds": ", ".join(f"{rounds(found['times'])} of {int(size):,}" for size, found in sizes.items()),
        "bases": " and to ".join(f"`{base}`" for base in bases),
        "times": _by_size({f"{int(size):,}": found["times"] for size, found in sizes.items()}, bases, "tokens"),
        "verl": _verl(group["verl"]),
        "accuracy": _accuracy(sizes),
        "parts_tokens": f"{parts['tokens']:,}",
        "parts_rounds": rounds(parts["times"]),
        "parts": table(["", "ms", "ratio", "bytes reduced"], _parts(parts)),
    }


def _parts(parts: Results) -> Iterable[list[str]]:
    """Yield a row for each part, with its ratio to the plain update by the same path."""
    for name, found in parts["times"].items():
        plain = parts["times"][f"{name.rsplit(': ', 1)[0]}: plain"]
        yield [name, milliseconds(found), ratio(found, plain), f"{parts['bytes'][name]:,}"]


def _verl(verl: Results | None) -> str:
    if verl is None:
        return "verl's own functions: not installed, so not measured."
    rows = [[f"{int(size):,}", *row] for size, times in verl["sizes"].items() for row in _compared(times)]
    return (
        f"verl {verl['version']}, in a run of its own environment: `calculate_debug_metrics` and\n"
        "`compute_offpolicy_metrics`, which give means, maxima and a correlation of one process, and no quantile, no\n"
        f"classes, no worst token:\n\n{table(['tokens', '', 'ms', 'ratio'], rows)}"
    )


def _accuracy(sizes: Results) -> str:
    names = next(iter(sizes.values()))["accuracy"]
    rows = []
    for name in ("rlk_audit", *(name for name in names if name != "rlk_audit")):
        found = [size["accuracy"][name] for size in sizes.values()]
        told = f"{found[-1]['bytes']:,}"
        if "sketch_bytes" in found[-1]:
            told += f" (sketch: {found[-1]['sketch_bytes']:,})"
        rows.append([name, *(f"{100 * each['error']:+.2f} %" for each in found), told])
    return table(["error at p99.9", *(f"{int(size):,} tokens" for size in sizes), "bytes to send"], rows)


def _stages(group: Results) -> dict[str, object]:
    floor = BYTES_A_TOKEN / group["bandwidth"]
    blocks = []
    for name, variant in group["variants"].items():
        sizes = variant["stages"]
        totals = {size: sum(stages.values()) for size, stages in sizes.items()}
        rows: list[list[str]] = []
        for stage in next(iter(sizes.values())):
            shares = {size: (stages[stage], stages[stage] / totals[size]) for size, stages in sizes.items()}
            rows.append([stage, *(f"{number(1e9 * t / int(n))} ({100 * s:.0f} %)" for n, (t, s) in shares.items())])
        rows.append(["**all of update**", *(f"**{number(1e9 * t / int(n))}**" for n, t in totals.items())])
        rows.append(["reading 9 bytes a token once", *[number(1e9 * floor)] * len(sizes)])
        blocks.append(table([f"{name}, ns a token", *(f"{int(size):,} tokens" for size in sizes)], rows))
        after = [[step, milliseconds(found)] for step, found in variant["after"].items()]
        blocks.append(f"The end of a step in one process:\n\n{table(['', 'ms'], after)}")
    return {"bandwidth": f"{group['bandwidth'] / 1e9:.1f}", "stages": "\n\n".join(blocks)}


def _by_size(groups: Mapping[str, Times], bases: Sequence[str], of: str = "processes") -> str:
    """Return a table with columns of milliseconds and of the ratios to `bases`, for each size."""
    signs = ["ratio"] if len(bases) == 1 else [f"to {base.removesuffix(': update').split()[-1]}" for base in bases]
    head = [""]
    for size in groups:
        head += [f"ms, {size} {of}", *signs]
    rows = []
    for name in next(iter(groups.values())):
        row = [name]
        for times in groups.values():
            row += [milliseconds(times[name]), *(ratio(times[name], times[base]) for base in bases)]
        rows.append(row)
    return table(head, rows)


def _collective(group: Results) -> dict[str, object]:
    groups = group["groups"]
    first = next(iter(groups.values()))
    told = []
    for name in (name for name in first if name.endswith(UNPACKED)):
        ratios = [f"{ratio(times[name], times[BARE])} of {size}" for size, times in groups.items()]
        told.append(f"`{name}` takes as long as so many bare all-reduces: {', '.join(ratios)} processes.")
    return {
        "tokens": f"{group['tokens_a_rank']:,}",
        "rounds": rounds(first),
        "repeats": group["repeats"],
        "told": " ".join(told),
        "audits": _by_size(groups, [BARE]),
        "others": _by_size(group["others"], [next(iter(group["others"][next(iter(groups))]))]),
        "other_rounds": rounds(group["others"][next(iter(groups))]),
        "micro_batches": group["micro_batches"],
        "micro_batch_tokens": f"{group['micro_batch_tokens']:,}",
        "step_ranks": group["step_ranks"],
        "step_rounds": rounds(group["steps"]),
        "steps": _to_each(group["steps"], _ours(group["steps"])),
    }


def _overhead(group: Results) -> dict[str, object]:
    off = group["off"]
    rows, verdicts = [], []
    for name, found in group["differences"].items():
        low, median, high = (100 * found[key] / off["median"] for key in ("low", "median", "high"))
        rows.append([name, f"{1e3 * found['median']:+.1f}", f"{median:+.1f} %", f"{low:+.1f} % to {high:+.1f} %"])
        if not name.startswith("off"):
            noise = "not told from nothing" if low <= 0 <= high else f"{1e3 * found['median']:.0f} ms a step"
            verdicts.append(f"{name[0].upper()}{name[1:]}: {noise}")
    return {
        "kernel": group["kernel"],
        "ranks": group["ranks"],
        "off": milliseconds(off),
        "rounds": int(off["rounds"]),
        "differences": table(["", "ms", "of a step", "95 % interval"], rows),
        "verdicts": "; ".join(verdicts),
        "cores": group["machine"]["cores"],
    }


def _scale(group: Results) -> dict[str, object]:
    rows = []
    for row in group["rows"]:
        cells = [f"{row['ranks']:,}"]
        for kind in (row["plain"], row["all"]):
            cells.append(f"{kind['bytes']:,}")
            cells += [f"{number(1e3 * kind[a]['seconds'])} ({kind[a]['protocol']})" for a in ("ring", "tree")]
        rows.append(cells)
    head = ["ranks", "bytes", "ring, ms", "tree, ms", "bytes with parts", "ring, ms", "tree, ms"]
    return {
        "sources": "; ".join(f"{what}: <{link}>" for what, link in SOURCES.items()),
        "predictions": table(head, rows),
        "validation": _validation(group["validation"]),
    }


def _validation(found: Results | None) -> str:
    if found is None:
        return "The form of the model was not tested on measured groups."
    rows, predicted = [], []
    for row in found["rows"]:
        share = row["model"] / row["measured"]
        times = [number(1e3 * row[key]) for key in ("measured", "model")]
        rows.append([row["ranks"], f"{row['bytes']:,}", *times, number(share)])
        if not row["fitted"]:
            predicted.append(share)
    fitted = f"{number(1e6 * found['alpha'])} us a step, {number(1e9 * found['beta'])} ns a byte"
    spread = f"{number(min(predicted))} to {number(max(predicted))}" if predicted else "nothing: none was measured"
    return (
        "Does the form hold? It is fitted to a bare gloo all-reduce, a ring, of 2 and 4 processes, and predicts that\n"
        f"of 8. Processes that outnumber the {found['cores']} cores run by turns, so a step and a byte count\n"
        f"processes / cores times. The fit is {fitted}; of 8 processes, model / measured is {spread}.\n\n"
        + table(["processes", "bytes", "measured, ms", "model, ms", "model / measured"], rows)
    )


def _offline(group: Results) -> dict[str, object]:
    rows = []
    for length, formats in group["lengths"].items():
        for name, found in formats.items():
            speeds = _speeds(found)
            row = [name, f"{int(length):,}", number(found["bytes"] / found["tokens"])]
            rows.append([*row, speeds["audit"], speeds["audit, shared"], *_reading(found)])
    columns = ["format", "sample length", "bytes a token", "audit", f"in {group['processes']} processes"]
    reading = ["reader alone", "library alone", "a pass of the reader, of the audit"]
    large = [[name, _speeds(found)["audit"], *_reading(found)] for name, found in group["large"].items()]
    return {
        "tokens": f"{found['tokens']:,}",
        "kernel": group["kernel"],
        "steps": group["steps"],
        "rounds": rounds(found["times"]),
        "table": table([*columns, *reading], rows),
        "large_tokens": f"{next(iter(group['large'].values()))['tokens']:,}",
        "large": table(["format", "audit", *reading], large),
    }


def _speeds(found: Results) -> dict[str, str]:
    """Return million tokens a second of everything that was timed of a dump."""
    return {key: number(found["tokens"] / seconds["median"] / 1e6) for key, seconds in found["times"].items()}


def _reading(found: Results) -> list[str]:
    """Return the cells that say what part of an audit reading is."""
    speeds, times = _speeds(found), found["times"]
    share = 100 * times["reader"]["median"] / times["audit"]["median"]
    return [speeds["reader"], f"{speeds['library']} ({found['library']})", f"{share:.0f} %"]


SECTIONS: dict[str, Callable[[Results], dict[str, object]]] = {
    "update": _update,
    "stages": _stages,
    "collective": _collective,
    "overhead": _overhead,
    "scale": _scale,
    "offline": _offline,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    folder = args.results.parent
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no plots: {error}", file=sys.stderr)
    else:
        plots.draw(results, folder)
    args.page.write_text(page(results, folder.relative_to(args.page.parent).as_posix()))


if __name__ == "__main__":
    main()
