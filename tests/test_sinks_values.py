"""What sinks share: keys, values, scope, intervals, and refusals at set-up."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sink_reports import add_tokens, report, run

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.report import metric_names
from rlk_audit.sinks import (
    ConsoleSink,
    EveryNth,
    JsonlSink,
    MlflowSink,
    TensorBoardSink,
    WandbSink,
    build_sinks,
    logged_values,
)
from rlk_audit.sinks.base import HISTOGRAM_KEY, STEP_KEY, TABLE_KEY, VERDICT_KEY, worst_table
from rlk_audit.verdict import FAIL, NO_DATA, PASS, PENDING, LimitResult, Verdict

CONFIG = AuditConfig(breakdowns={"engine": ("e0", "e1"), "turn": 3}, quantiles=("0.5", "0.001", "0.9999"))


class Kept:
    """Keeps the numbers of the steps that it got."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []
        self.closed = False

    def write(self, report: StepReport) -> None:
        self.steps.append(report.step)

    def close(self) -> None:
        self.closed = True


# --- keys and values --------------------------------------------------------------------------------------------------


def test_keys_have_plain_letters_and_none_is_a_path_prefix_of_another() -> None:
    """Every key that can be logged, with a limit on every metric."""
    metrics = metric_names(CONFIG)
    verdicts = [VERDICT_KEY.format(name) for name in ("all", *metrics)]
    keys = [CONFIG.prefix + key for key in (*metrics, *verdicts, STEP_KEY, HISTOGRAM_KEY, TABLE_KEY)]
    assert len(set(keys)) == len(keys) > 140
    for key in keys:
        assert re.fullmatch(r"[A-Za-z0-9_.-][A-Za-z0-9_./ -]*", key), key
        assert not key.endswith("/")
        folders = {key.rsplit("/", depth)[0] for depth in range(1, key.count("/") + 1)}
        assert not folders & set(keys), f"{key} has a key among its folders"


def test_logged_values_are_the_metrics_without_nulls() -> None:
    values = logged_values(report())
    metrics = report().metrics
    assert values == {f"rlk_audit/{name}": value for name, value in metrics.items() if not math.isnan(value)}
    assert any(math.isnan(value) for value in metrics.values())
    assert {type(value) for value in values.values()} == {float}


def test_with_nothing_compared_there_are_counts_alone() -> None:
    values = logged_values(report(tokens=0))
    assert values["rlk_audit/compared_token_count"] == 0.0
    assert values["rlk_audit/warning/nothing_compared"] == 1.0
    assert all(math.isfinite(value) for value in values.values())
    assert not [key for key in values if "abs_dlogp" in key or key.startswith("rlk_audit/worst")]


def test_verdicts_are_logged_where_there_is_one() -> None:
    judged = report()
    judged.verdict = Verdict(
        (
            LimitResult("abs_dlogp_p99", "<=", 1.0, 0.5, PASS),
            LimitResult("ess0", ">=", 0.5, 0.9, PASS),
            LimitResult("ess0", "<=", 0.8, 0.9, FAIL),
            LimitResult("ess0", "<=", 1.0, 0.9, PASS),
            LimitResult("mask_coverage", ">=", 0.5, math.nan, NO_DATA),
            LimitResult("kl0_k1", "<=", math.nan, 0.5, PENDING),
        )
    )
    verdicts = {key: value for key, value in logged_values(judged).items() if "verdict" in key}
    assert verdicts == {
        "rlk_audit/verdict/all": 0.0,
        "rlk_audit/verdict/abs_dlogp_p99": 1.0,
        "rlk_audit/verdict/ess0": 0.0,
    }


def test_the_table_of_worst_tokens() -> None:
    collector = Collector(AuditConfig(breakdowns={"engine": ("e0", "e1")}))
    collector.update([-1.0, -2.0], [-1.5, -2.25], [1, 1], sample_index=4, labels={"engine": 1})
    columns, rows = worst_table(StepReport.from_vector(collector.pack(), collector.config, step=7))
    assert columns[:3] == ["step", "abs_dlogp", "dlogp"]
    assert columns[-1] == "label/engine"
    assert [(row[0], row[1], row[-1]) for row in rows] == [(7, 0.5, "e1"), (7, 0.25, "e1")]
    assert worst_table(report(tokens=0)) == ([], [])


# --- histogram --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [5, 6, 8])
def test_the_histogram_counts_every_token_in_its_bin(power: int) -> None:
    """Against a search over the same edges; magnitudes of a bin are closed below and open above, on both sides."""
    generator = np.random.default_rng(0)
    magnitudes = 2.0 ** generator.uniform(-36, 9, 2000)
    dlogp = np.concatenate(
        [magnitudes * generator.choice([-1, 1], 2000), [0.0] * 5, [0.5, -0.5, 2.0**-32, -(2.0**-32)]]
    )
    collector = Collector(AuditConfig(grouping_power=power))
    train = np.minimum(dlogp, 0.0)
    collector.update(train, train - dlogp, np.ones(len(dlogp)))
    seen = train - (train - dlogp)
    histogram = StepReport.from_vector(collector.pack(), collector.config).histogram()
    assert histogram is not None
    edges = np.array(histogram.edges)
    assert (np.diff(edges) > 0).all()
    assert histogram.counts[0] > 0 < histogram.counts[-1]
    assert len(histogram.counts) < 512
    compared = seen[(train > -1000) & (train - dlogp > -1000)].astype(np.float32).astype(float)
    bins = (
        np.where(compared > 0, np.searchsorted(edges, compared, "right"), np.searchsorted(edges, compared, "left")) - 1
    )
    expected = np.bincount(bins, minlength=len(histogram.counts))
    assert list(histogram.counts) == expected.tolist()


def test_the_histogram_is_read_back_and_without_tokens_there_is_none() -> None:
    assert report(tokens=0).histogram() is None
    assert report().histogram() is not None
    for given in (report(), report(tokens=0)):
        again = StepReport.from_dict(json.loads(given.to_json())).histogram()
        assert again == given.histogram()
    earlier = {name: value for name, value in report().to_dict().items() if name != "histogram"}
    assert StepReport.from_dict(earlier).histogram() is None
    with pytest.raises(ValueError, match="a histogram has 385 bins"):
        StepReport.from_dict(report().to_dict() | {"histogram": {"first": 385, "counts": [1]}})


# --- scope and interval -----------------------------------------------------------------------------------------------


def test_a_report_of_one_rank_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """Kills: one rank's numbers in a chart, where they pass for the group's."""
    makers: list[Callable[[bool], object]] = [
        lambda accept: ConsoleSink(io.StringIO(), accept_rank_scope=accept),
        lambda accept: JsonlSink(tmp_path / "audit.jsonl", accept_rank_scope=accept),
        lambda accept: TensorBoardSink(tmp_path, accept_rank_scope=accept),
    ]
    for make in makers:
        strict, willing = make(False), make(True)
        with pytest.raises(ValueError, match="covers one rank, not the group"):
            strict.write(report(scope="rank"))
        willing.write(report(scope="rank"))
        strict.close()
        willing.close()


def test_every_nth_step_each_failed_one_and_the_total() -> None:
    kept = Kept()
    config = AuditConfig(limits={"abs_dlogp_max": 0.3})
    run(config, [EveryNth(kept, 5)], {step: (0.5 if step == 7 else 0.1, 4) for step in range(3, 13)})
    assert kept.steps == [5, 7, 10, None]
    assert kept.closed


def test_an_interval_is_at_least_one_step() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        EveryNth(Kept(), 0)


# --- console ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("drift", "colour"), [(0.5, "\x1b[1;31m"), (0.1, None)])
def test_a_terminal_gets_colour_and_still_one_line(
    drift: float, colour: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    run(AuditConfig(limits={"abs_dlogp_max": 0.3}), [ConsoleSink(stream)], {1: (drift, 4)})
    step, *_, total = stream.getvalue().splitlines()
    assert step.startswith(colour or "rlk_audit step 1 |")
    assert ("FAILED abs_dlogp_max is 0.375, must be <= 0.3" in step) == (colour is not None)
    assert "rlk_audit run | tokens 4" in total


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    ConsoleSink(stream).write(report())
    assert stream.getvalue().startswith("rlk_audit step 7 | tokens 8 |")
    assert "\x1b" not in stream.getvalue()


# --- set-up -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboard", "tensorboard", lambda folder: TensorBoardSink(folder)),
        ("wandb", "wandb", lambda folder: WandbSink()),
        ("mlflow", "mlflow", lambda folder: MlflowSink()),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    package: str, extra: str, make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"cannot be imported .*: pip install rlk_audit\[{extra}\]$"):
        make(tmp_path)


def test_sinks_are_built_by_name(tmp_path: Path) -> None:
    console, jsonl = build_sinks(["console", "jsonl", "console"], tmp_path / "out")
    assert (type(console), type(jsonl)) == (ConsoleSink, JsonlSink)
    assert (tmp_path / "out" / "audit.jsonl").exists()
    jsonl.close()
    (tenth,) = build_sinks(["console"], tmp_path, log_interval=10)
    assert isinstance(tenth, EveryNth)
    with pytest.raises(ValueError, match="unknown sinks csv; the sinks are console, jsonl, tensorboard, wandb, mlflow"):
        build_sinks(["console", "csv"], tmp_path)


def test_a_rank_scope_collector_needs_no_step_in_a_record() -> None:
    """A record needs no step's number; a chart does."""
    collector = Collector()
    add_tokens(collector, 0.5, 4)
    stream = io.StringIO()
    ConsoleSink(stream, accept_rank_scope=True).write(collector.compute())
    assert stream.getvalue().startswith("rlk_audit step - | tokens 4")
