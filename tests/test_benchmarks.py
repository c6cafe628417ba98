"""The benchmarks compare the same work, and their page is written from the numbers kept."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import goals, scale, stages, timing, write  # noqa: E402
from benchmarks.data import Batch, draw, with_faults  # noqa: E402
from benchmarks.exact_audit import disagreements, exact_audit  # noqa: E402
from benchmarks.variants import NUMBA, REFERENCE, audit_variants, default_kernel  # noqa: E402
from rlk_audit import Collector, StepReport  # noqa: E402

VARIANTS = audit_variants()


def time(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median, "rounds": 5}


def times(*names: str) -> dict[str, dict[str, float]]:
    return {name: time(0.001 * (1 + place)) for place, name in enumerate(names)}


def results() -> dict[str, Any]:
    """Numbers of every group, in the form in which they are kept."""
    place = {"cpu": "a CPU", "cores": 2, "memory_gb": 8, "python": "3.11", "packages": {"torch": "2.13"}, "threads": 1}
    made = {"date": "2026-01-02", "machine": place}
    known = {"sketch": {"error": -0.25, "bytes": 900}}
    known["rlk_audit"] = {"error": 0.001, "bytes": 95296, "sketch_bytes": 49192}
    work = [f"{ours}: {part}" for ours in (REFERENCE, NUMBA) for part in goals.WORK]
    size = {"times": times(*work, goals.EXACT, goals.HELPER), "accuracy": known}
    verl = {"version": "0.9.1", "torch": "2.13", "sizes": {"4096": times("rlk_audit: update", "verl")}}
    parts = {"tokens": 65536, "bytes": {f"{NUMBA}: plain": 94864, f"{NUMBA}: all": 94999}}
    parts["times"] = times(*parts["bytes"])
    stage = {"stages": {"4096": {"classes": 0.001, "rest": 0.003}}, "after": times("pack")}
    fast = {"stages": {"4096": {"exponentials": 0.001, "rest": 0.001}}, "after": times("pack")}
    reduced = times("rlk_audit: pack, reduce, unpack", write.BARE)
    sweep = {str(ranks): {str(size): time(1e-4 * ranks) for size in (1024, 1 << 20)} for ranks in (2, 4, 8)}
    counts = {"tokens_a_rank": 10, "micro_batches": 2, "micro_batch_tokens": 5, "step_ranks": 4, "repeats": 5}
    ways = {"groups": {"2": reduced}, "others": {"2": times("rlk_audit: all", "torchmetrics")}, "sweep": sweep}
    collective = made | counts | ways | {"steps": times(REFERENCE, NUMBA, "torchmetrics")}
    differences = {"off, once more": {"median": 0.0, "low": -0.01, "high": 0.01, "rounds": 5}, "audit": time(0.02)}
    read = {"tokens": 1000, "bytes": 9000, "library": "torch.load"}
    read["times"] = times("audit", "reader", "library", "audit, shared")
    return {
        "update": made | {"sizes": {"4096": size, "65536": size}, "parts": parts, "verl": verl},
        "stages": made | {"bandwidth": 9e9, "variants": {REFERENCE: stage, NUMBA: fast}},
        "collective": collective,
        "overhead": made | {"kernel": "numba", "ranks": 4, "off": time(0.4), "differences": differences},
        "scale": made | {"rows": scale.predictions(), "validation": scale.validation(sweep, 2)},
        "offline": made
        | {"kernel": "numba", "steps": 2, "processes": 2, "large": {"table parquet": read}}
        | {"lengths": {"1000": {"slime": read, "table parquet": read}}},
    }


def report(name: str, batch: Batch) -> StepReport:
    collector = Collector(VARIANTS[name])
    collector.update(**batch.update_arguments())
    return collector.compute()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("faulty", [False, True])
def test_the_exact_audit_says_what_the_report_says(name: str, faulty: bool) -> None:
    batch = with_faults(draw(3000, length=500)) if faulty else draw(3000, length=500)
    exact = exact_audit(batch, VARIANTS[name])
    assert disagreements(exact, report(name, batch), VARIANTS[name]) == []
    absent = {name for name, count in exact["classes"].items() if not count}
    assert absent == ({"rejected", "rollout_missing"} if faulty else set(exact["classes"]) - {"compared"})


@pytest.mark.parametrize("name", VARIANTS)
def test_another_figure_is_seen(name: str) -> None:
    batch = draw(3000, length=500)
    given = report(name, batch)
    exact = exact_audit(batch, VARIANTS[name])
    for figure, value in exact.items():
        if isinstance(value, (int, float)):
            moved = exact | {figure: value + 0.02 * (1 + abs(value))}
            assert len(disagreements(moved, given, VARIANTS[name])) == 1, figure
    train = batch.train.clone()
    train[2, 7] = -20.0
    other = exact_audit(replace(batch, train=train, mask=batch.mask | True), VARIANTS[name])
    assert any(line.startswith("worst") for line in disagreements(other, given, VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_stages_add_up_to_the_update(name: str) -> None:
    found = stages.stages(VARIANTS[name], 256)
    assert set(found) == {*stages.stages_of(VARIANTS[name].kernel), stages.REST}
    assert all(seconds > 0 for seconds in found.values())


def test_the_numba_path_is_measured_where_it_is_taken() -> None:
    assert list(VARIANTS) == ([REFERENCE, NUMBA] if default_kernel() == "numba" else [REFERENCE])
    assert {name: config.kernel for name, config in VARIANTS.items()}.items() <= {
        REFERENCE: "reference",
        NUMBA: "numba",
    }.items()


def test_goals_are_compared_with_what_was_measured() -> None:
    told = {promise.what: promise for promise in goals.goals(results())}
    assert len(told) == len(goals.goals(results()))
    exact = "65,536 tokens: faster than exact audit, torch.sort"
    first = told[f"`{REFERENCE}: update`, {exact}"]
    assert first.measured is not None and first.kept and not first.unsure
    assert (first.measured.value, first.measured.low, first.measured.high) == pytest.approx((5, 4.5 / 1.1, 5.5 / 0.9))
    reference = told[f"`{REFERENCE}: update and report`, {exact}"]
    assert reference.kept and not reference.unsure
    wide = goals.Goal("", 1.3, goals.Measured(1.2, 0.9, 1.5), at_least=False)
    assert wide.kept and wide.unsure
    assert told[f"`{NUMBA}: update and report`, {exact}"].kept is False
    assert told[f"`{NUMBA}: update`, {exact.replace('65,536', '1,048,576')}"].kept is None
    assert told["pack, reduce, unpack, 2 processes: time of bare all-reduces"].kept is True
    assert told["audit of the example: added to a training step"].measured.value == pytest.approx(5.0)
    assert told["Parquet, samples of 1,000 tokens: audit"].measured.value == pytest.approx(1.0)
    slime = told["slime, samples of 1,000 tokens: one pass of the reader, in times of torch.load"]
    assert slime.measured.value == pytest.approx(2 / 3) and slime.kept
    assert all(promise.kept is None for promise in goals.goals({}))


def test_variants_take_turns() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    taken = timing.by_turns(runs, 3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 3, "b": 3}
    assert timing.summary([1.0, 2.0, 4.0]) == {"median": 2.0, "low": 1.5, "high": 3.0, "rounds": 3}


def test_the_model_of_the_all_reduce() -> None:
    protocol = scale.Protocol(base=1.0, nvlink=10.0, infiniband=100.0, efficiency=1.0)
    assert scale.seconds("ring", protocol, 8, 0) == 1 + 14 * 10
    assert scale.seconds("ring", protocol, 16, 0) == 1 + 28 * 10 + 2 * 100
    assert scale.seconds("tree", protocol, 32, 0) == 1 + 14 * 10 + 4 * 100
    assert scale.seconds("tree", protocol, 16, 50 * 10**9) == 1 + 14 * 10 + 2 * 100 + 2
    points = {(ranks, size): 2e-3 * 2 * (ranks - 1) + 3e-9 * 2 * (ranks - 1) / ranks * size
              for ranks in (2, 4) for size in (1000, 1 << 22)}  # fmt: skip
    assert scale.fit(points, cores=8) == pytest.approx((2e-3, 3e-9))


def test_the_page_of_every_group() -> None:
    page = write.page(results(), "benchmarks")
    assert "$" not in page and "None" not in page and "nan" not in page
    long = [line for line in page.splitlines() if len(line) > write.WIDTH]
    assert all(line[0] == "|" or "https" in line for line in long)
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
        "Goals and what was measured",
        "An update",
        "Where an update spends its time",
        "The end of a step",
        "A training step with and without the audit",
        "Up to 16,384 ranks",
        "Offline",
    ]
    assert "| exact audit, torch.sort | 5.00 (4.50 to 5.50) | 5.00 | 1.67 |" in page
    assert "| torchmetrics | 3.00 (2.70 to 3.30) | 3.00 | 1.50 |" in page
    assert f"| {NUMBA}: all | 2.00 (1.80 to 2.20) | 2.00 | 94,999 |" in page
    assert "faster than helper, sample by sample | at least 20 x | 2.00 x (1.64 to 2.44) | **not met** |" in page
    assert "| at least 10 x | 3.00 x (2.45 to 3.67) | **not met** |" in page
    assert "| at most 1 % | 5.00 % (4.50 to 5.50) | **not met** |" in page
    assert "4 processes: time of bare all-reduces | at most 1.3 x | not measured |" in page
    assert "takes as long as so many bare all-reduces: 0.50 of 2 processes." in page.replace("\n", " ")
    assert "| off, once more | +0.0 | +0.0 % | -2.5 % to +2.5 % |" in page
    assert "Audit: 20 ms a step" in page
    assert "| slime | 1,000 | 9.00 | 1.00 | 0.25 | 0.50 | 0.33 (torch.load) | 200 % |" in page
    assert "| table parquet | 1.00 | 0.50 | 0.33 (torch.load) | 200 % |" in page


def test_a_page_of_some_groups() -> None:
    some = copy.deepcopy({name: group for name, group in results().items() if name in ("update", "scale")})
    some["update"]["verl"] = None
    some["scale"]["validation"] = None
    page = write.page(some, "benchmarks")
    assert "not installed" in page and "## Offline" not in page and "$" not in page


def test_every_group_has_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    plots.draw(results(), tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(write.SECTIONS)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    plots.draw(results(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert all(len(content) < 100_000 for content in first.values())
