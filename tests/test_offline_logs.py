"""Logs of runs, baselines and comparisons of two runs."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_writers import WRITERS, draw
from offline_views import plain, record, steady, write
from rich.console import Console
from strategies import bits

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.cli import tables
from rlk_audit.cli.comparison import comparison_tables
from rlk_audit.dumps.sample import DumpError, ReadOptions
from rlk_audit.offline import baseline, compare, gate, run_log
from rlk_audit.offline.audit import audit_dump
from rlk_audit.offline.moved import Shared, shared_tokens
from rlk_audit.offline.run_log import follow, is_run_log, read_run_logs
from rlk_audit.page.write import page_html
from rlk_audit.sinks.jsonl import JsonlSink


def report(step: int | None, drift: float = 0.1, scope: str = "group") -> StepReport:
    collector = Collector(AuditConfig())
    collector.update(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0 - drift, -2.0]), torch.ones(2))
    return StepReport.from_vector(collector.pack(), collector.config, step=step, scope=scope)


def log(path: Path, *reports: StepReport) -> Path:
    path.write_text("".join(one.to_json() + "\n" for one in reports))
    return path


def steps(view: Any) -> list[int | None]:
    return [one.step for one in view.steps]


# --- samples of two dumps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[1, 2], [2, 1, 0], [0, 1, 2], [2, 0]])
def test_samples_of_one_index_are_found_by_their_tokens(order: list[int], tmp_path: Path) -> None:
    """As several completions of one prompt, of which a side lacks some or has another order."""
    rows = [steady(i, 5, step=1) | {"sample_index": 0, "token_ids": [i] * 5} for i in range(3)]
    a, b = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", [rows[i] for i in order])
    shared = shared_tokens([a], [b], "auto", ReadOptions())
    assert (shared.samples, shared.moved, shared.identical) == (len(order), (), len(order) == 3)


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_log_gives_its_reports(tmp_path: Path) -> None:
    reports = [report(step, 0.1 * step) for step in (1, 2, 3)]
    path = log(tmp_path / "audit.jsonl", *reports)
    assert is_run_log(path)
    view = read_run_logs([path])
    assert [bits(one.to_dict()) for one in view.steps] == [bits(one.to_dict()) for one in reports]
    assert not view.problems and view.total is None and view.sample_means is None


def test_the_later_of_two_reports_of_a_step_stands(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", report(2, 0.1), report(3, 0.1), report(2, 0.5), report(None), report(None))
    view = read_run_logs([path])
    assert steps(view) == [None, None, 2, 3]
    assert view.steps[2].metrics["abs_dlogp_max"] == pytest.approx(0.5)
    assert [(one.step, one.metrics["abs_dlogp_max"]) for one in view.replaced] == [(2, pytest.approx(0.1))]
    assert view.notes == ("reports that a later one of their step replaces, as after a restart: 1",)


def test_parts_that_were_moved_aside_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "[odd] name.jsonl"
    sink = JsonlSink(path, max_bytes=1)
    for step in range(12):
        sink.write(report(step, 0.01 * step))
    sink.close()
    (tmp_path / "[odd] name.old.jsonl").write_text("nothing")
    view = read_run_logs([path, path])
    assert steps(view) == list(range(12)) and not view.problems


def test_lines_that_are_no_report_are_told(tmp_path: Path) -> None:
    path = log(tmp_path / "a.jsonl", report(1))
    counts = json.loads(report(2).to_json()) | {"metrics": {}}
    with path.open("a") as file:
        file.write(
            "[" * 100_000 + "\n" + '{"kind": "step"}\n' + "7\n" + json.dumps(counts) + "\n" + report(3).to_json()[:50]
        )
    view = read_run_logs([path])
    assert steps(view) == [1]
    assert [int(told.split("line ")[1].split(" ")[0]) for told in view.problems] == [2, 3, 4, 5, 6]


def test_reports_of_single_ranks_are_told(tmp_path: Path) -> None:
    view = read_run_logs([log(tmp_path / "a.jsonl", report(1, scope="rank"), report(2))])
    assert view.problems == (f"{tmp_path / 'a.jsonl'}: 1 reports are of a single rank, not of the group",)


def test_what_is_no_log(tmp_path: Path) -> None:
    for name, text in {"a": "", "b": "[1]", "c": "{}\n", "d": "\x00\xff", "e": "[" * 10**5}.items():
        (tmp_path / name).write_text(text)
        assert not is_run_log(tmp_path / name)
    assert not is_run_log(tmp_path) and not is_run_log(tmp_path / "none")
    total = report(None)
    total.kind = "run"
    with pytest.raises(DumpError, match="no report of a step"):
        read_run_logs([log(tmp_path / "f.jsonl", total)])


# --- following ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_POLL_SECONDS", 0.01)


class Follower(threading.Thread):
    """Follows a log until it has seen so many reports."""

    def __init__(self, path: Path, count: int) -> None:
        super().__init__(daemon=True)
        self.path, self.count, self.steps = path, count, []
        self.start()

    def run(self) -> None:
        for one in follow(self.path):
            self.steps.append(one.step)
            if len(self.steps) == self.count:
                return

    def seen(self, count: int) -> list[int | None]:
        deadline = time.monotonic() + 20
        while len(self.steps) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.steps


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_following_through_rotation(pause: float, tmp_path: Path) -> None:
    """The file is missing at first, and may be moved aside several times between two looks."""
    path = tmp_path / "new" / "audit.jsonl"
    follower = Follower(path, 15)
    time.sleep(0.05)
    sink = JsonlSink(path, max_bytes=1)
    sink.write(report(0))
    assert follower.seen(1) == [0]
    for step in range(1, 15):
        sink.write(report(step))
        time.sleep(pause)
    sink.close()
    assert follower.seen(15) == list(range(15))


@pytest.mark.usefixtures("quick")
def test_following_through_a_restart_that_cuts_off_a_partial_line(tmp_path: Path) -> None:
    path = log(tmp_path / "audit.jsonl", report(1))
    with path.open("a") as file:
        file.write(report(2).to_json()[:400])
    follower = Follower(path, 4)
    assert follower.seen(1) == [1]
    time.sleep(0.05)
    sink = JsonlSink(path)
    for step in (2, 3, 4):  # more than was cut off, before the next look
        sink.write(report(step))
    sink.close()
    assert follower.seen(4) == [1, 2, 3, 4]


@pytest.mark.usefixtures("quick")
def test_following_a_line_that_grows_and_a_file_begun_anew(tmp_path: Path) -> None:
    path = log(tmp_path / "audit.jsonl", report(1), report(2))
    follower = Follower(path, 5)
    assert follower.seen(2) == [1, 2]
    text = report(3).to_json() + "\n"
    for start in range(0, len(text), 300):
        with path.open("a") as file:
            file.write(text[start : start + 300])
        time.sleep(0.015)
    assert follower.seen(3) == [1, 2, 3]
    log(path, report(0))  # the same file, cut to nothing and written again
    assert follower.seen(4) == [1, 2, 3, 0]
    os.unlink(path)
    time.sleep(0.05)
    log(path, report(7))
    assert follower.seen(5) == [1, 2, 3, 0, 7]


def test_following_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(follow(tmp_path / "none.jsonl", once=True))
    path = log(tmp_path / "a.jsonl", report(1))
    with path.open("a") as file:
        file.write("damaged\n" + report(2).to_json() + "\n" + "{")
    assert [one.step for one in follow(path, once=True)] == [1, 2]
    monkeypatch.setattr(run_log, "_MAX_LINE", 100)  # what is longer than any line is passed over
    assert not list(follow(path, once=True))


# --- baselines ------------------------------------------------------------------------------------------------------


def dump(path: Path, noise: float = 0.02, count: int = 12, seed: int = 0) -> Path:
    rng = np.random.default_rng(7)
    records = []
    for index in range(count):
        one = steady(index, 40, seed, step=index % 3)
        offset = noise * rng.standard_normal(40)
        one["rollout_log_probs"] = np.minimum(np.array(one["train_log_probs"]) + offset, 0.0).tolist()
        records.append(one)
    return write(path, records)


def test_a_baseline_holds_what_may_not_grow(tmp_path: Path) -> None:
    view = audit_dump([dump(tmp_path / "a.jsonl")])
    file = tmp_path / "accepted.json"
    file.write_text(json.dumps(view.to_dict()))
    bounds = baseline.read(file)
    assert set(bounds) == set(baseline.METRICS)
    assert not list(baseline.crossed(view, bounds, 1.0))
    worse = audit_dump([dump(tmp_path / "b.jsonl", 0.05)])
    told = list(baseline.crossed(worse, bounds, 1.5))
    assert "abs_dlogp_p50" in {sentence.split(" ")[0] for sentence in told}
    assert any("2.5 times the baseline's" in sentence for sentence in told)
    assert not list(baseline.crossed(worse, {"abs_dlogp_mean": bounds["abs_dlogp_mean"]}, 3.0))


def test_a_baseline_of_nothing_and_of_zero(tmp_path: Path) -> None:
    empty = audit_dump([write(tmp_path / "a.jsonl", [record([-1.0], [-1.0], mask=[0])])])
    assert list(baseline.crossed(empty, {"abs_dlogp_p99": 0.5}, 1.5)) == [
        "abs_dlogp_p99 has no value, the baseline's is 0.5"
    ]
    some = audit_dump([dump(tmp_path / "b.jsonl")])
    assert "the baseline's is 0;" in next(baseline.crossed(some, {"abs_dlogp_p99": 0.0}, 1.5))
    file = tmp_path / "empty.json"
    file.write_text(json.dumps(empty.to_dict()))
    with pytest.raises(ValueError, match="compared nothing"):
        baseline.read(file)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_ratio_that_says_nothing(ratio: float) -> None:
    with pytest.raises(ValueError, match="positive number"):
        baseline.check_ratio(ratio)


FIGURE = '{"total": {"metrics": {"abs_dlogp_p99": %s}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"total": null, "steps": []}', "7", '{"total": 7}', "[" * 10**5, FIGURE % '"x"', FIGURE % "NaN"],
)
def test_what_is_no_baseline(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="no baseline"):
        baseline.read(tmp_path / "a.json")
    with pytest.raises(ValueError, match="cannot be read"):
        baseline.read(tmp_path)


# --- two runs -------------------------------------------------------------------------------------------------------


def shared(a: Path, b: Path) -> Shared:
    return shared_tokens([a], [b], "auto", ReadOptions(allow_pickle=True))


def test_the_same_data_is_identical_in_any_format_that_keeps_it(tmp_path: Path) -> None:
    samples = [plain(one) for one in draw(np.random.default_rng(3), 6)]
    for name in ("table jsonl", "table npz", "table parquet", "table safetensors"):
        WRITERS[name][1](tmp_path / name, 1, samples)
        assert shared(tmp_path / "table jsonl", tmp_path / name).identical, name
    for name in ("slime", "nemo-rl", "prime-rl"):
        for folder in ("x", "y"):
            WRITERS[name][1](tmp_path / folder / name, 1, samples)
        assert shared(tmp_path / "x" / name, tmp_path / "y" / name).identical, name


def test_tokens_that_moved(tmp_path: Path) -> None:
    a, b = dump(tmp_path / "a.jsonl"), dump(tmp_path / "b.jsonl")
    records = [json.loads(line) for line in b.read_text().splitlines()]
    records[4]["rollout_log_probs"][7] -= 3.0
    del records[5]
    found = shared(a, write(b, records))
    assert (found.samples, found.samples_a, found.samples_b, found.identical, found.complete) == (
        11,
        12,
        11,
        False,
        True,
    )
    moved = found.moved[0]
    assert (moved.step, moved.sample_index, moved.token_position) == (1, 4, 7)
    assert moved.change == pytest.approx(3.0) and moved.dlogp_b - moved.dlogp_a == pytest.approx(3.0)
    assert len(found.moved) == 1


def test_samples_without_indices_are_known_by_their_tokens(tmp_path: Path) -> None:
    records = [{k: v for k, v in steady(i, 5).items() if k != "sample_index"} for i in range(4)]
    a, b = write(tmp_path / "a.jsonl", records), write(tmp_path / "b.jsonl", records[::-1])
    assert shared(a, b).identical
    other = [one | {"token_ids": [9999] * 5} for one in records]
    assert shared(a, write(b, other)).samples == 0


def test_one_side_has_more(tmp_path: Path) -> None:
    one, other = steady(0, 5), steady(1, 5)
    a, twice, more = (
        write(tmp_path / f"{name}.jsonl", records)
        for name, records in {"a": [one], "twice": [one, one], "more": [one, other]}.items()
    )
    for b in (twice, more):
        for found in (shared(a, b), shared(b, a)):
            assert (found.samples, found.identical) == (1, False)


def test_more_of_a_than_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_audit.offline.moved.MAX_TOKENS", 100)
    a = dump(tmp_path / "a.jsonl")
    found = shared(a, a)
    assert (found.samples, found.identical, found.complete) == (2, False, False)


def test_the_test_of_samples() -> None:
    rng = np.random.default_rng(0)
    a = rng.exponential(0.01, 200)
    assert compare.sample_test(a[:7], a) is None
    same = compare.sample_test(a, a)
    assert same is not None and same.p_value == 1.0 and "no difference is shown" in str(same)
    worse = compare.sample_test(a, a * 2)
    assert worse is not None and worse.p_value == 0.001 and 0 < worse.low < worse.difference < worse.high
    ties = compare.sample_test(np.ones(20), np.ones(30))
    assert ties is not None and ties.p_value == 1.0
    falsely = [compare.sample_test(rng.exponential(1.0, 30), rng.exponential(1.0, 40)) for _ in range(60)]
    assert sum(one is not None and one.p_value <= 0.05 for one in falsely) < 9


def recordings() -> Iterator[tuple[str, list[dict[str, np.ndarray]]]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "diagnosis"))
    try:
        from recordings import PAIRS, read
    finally:
        sys.path.pop(0)
    yield from read(PAIRS / "tune" / "s1.npz").conditions.items()


def test_engines_of_two_precisions_are_told_apart(tmp_path: Path) -> None:
    conditions = dict(recordings())
    views = {}
    for name in ("bf16", "fp16"):
        condition = next(found for found in sorted(conditions) if found.endswith(name) or found == name)
        records = [
            record(one["train"].tolist(), one["rollout"].tolist(), sample_index=index)
            for index, one in enumerate(conditions[condition])
        ]
        views[name] = audit_dump([write(tmp_path / f"{name}.jsonl", records)])
    told = " ".join(compare.difference_in_words(views["bf16"], views["fp16"]))
    assert "as of bfloat16 (A) against float16" in told, told
    again = " ".join(compare.difference_in_words(views["fp16"], views["bf16"]))
    assert "as of bfloat16 (B) against float16" in again, again
    assert compare.difference_in_words(views["bf16"], views["bf16"]) == ["both show healthy"]


def test_a_log_may_lack_any_figure(tmp_path: Path) -> None:
    """Whatever metric its reports do not have, it is read, shown, drawn, gated and compared."""
    config = AuditConfig(samples_per_step=2, breakdowns={"engine": 2, "position": "auto"})

    def values_of(times: int, **fields: Any) -> dict[str, Any]:
        collector = Collector(config)
        for codes in (0, 1) * times:
            train, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.3, math.nan]])
            collector.update(train, rollout, torch.ones(1, 2), sample_slot=codes, labels={"engine": codes})
        return collector.compute().to_dict() | {"scope": "group"} | fields

    values = [values_of(1, step=1), values_of(1, step=2), values_of(2, step=None, kind="run")]
    whole = read_run_logs([write(tmp_path / "whole.jsonl", values)])
    assert whole.total is not None and list(gate.doubts(whole, []))
    refused = set()
    for absent in [*values[0]["metrics"], None]:
        keep = [n for n in values[0]["metrics"] if n != absent] if absent else ["compared_token_count"]
        left = [one | {"metrics": {name: one["metrics"][name] for name in keep}} for one in values]
        for lines in (left, [*left[:2], values[2]], [*values[:2], left[2]]):
            path = write(tmp_path / "part.jsonl", lines)
            try:
                view = read_run_logs([path])
            except DumpError:
                refused.add(absent)
                continue
            console = Console(file=io.StringIO())
            for table in (*tables.view_tables(view), *comparison_tables(whole, view, None), *gate.doubts(view, [])):
                console.print(table)
            json.dumps(view.to_dict(), allow_nan=False)
        assert len(page_html(view)) > 10_000
    assert refused == {"compared_token_count"}  # without which no line is known as a report
