"""TensorBoard, W&B and MLflow: what their stores hold is what the JSONL holds.

W&B and MLflow are large and are not installed for development; with them in the environment their tests run too.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sink_reports import files_of_at_most, lines_of, report, run

from rlk_audit import AuditConfig, StepReport
from rlk_audit.sinks import JsonlSink, MlflowSink, TensorBoardSink, WandbSink, build_sinks
from rlk_audit.sinks.base import findings_table, worst_table

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)

CONFIG = AuditConfig(limits={"abs_dlogp_max": 0.3, "ess0": (">=0.5", "<=1")}, metadata={"run": "test"})
STEPS = {7: (0.1, 8), 8: (0.0, 0), 9: (2.0, 64), 5: (0.2, 3)}
"""Of one run: a step with nothing compared, one that fails, and then one that was resumed earlier."""

Numbers = dict[int, dict[str, float]]


def expected_values(path: Path) -> Numbers:
    """Step -> key with prefix -> number, from the lines of a JSONL."""
    values: Numbers = {}
    for line in lines_of(path):
        if line["kind"] == "step":
            numbers = {name: value for name, value in line["metrics"].items() if value is not None}
            numbers["verdict/all"] = line["verdict"]["passed"]
            for result in line["verdict"]["limits"]:
                if result["outcome"] != "no_data":
                    key = f"verdict/{result['metric']}"
                    numbers[key] = min(numbers.get(key, 1), result["outcome"] == "pass")
            values[line["step"]] = {line["prefix"] + name: float(value) for name, value in numbers.items()}
    return values


# --- reading the stores -----------------------------------------------------------------------------------------------


def tensorboard_events(folder: Path) -> Any:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def tensorboard_values(folder: Path) -> Numbers:
    events = tensorboard_events(folder)
    values: Numbers = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            values.setdefault(event.step, {})[tag] = event.value
    return values


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of an offline run: a log in blocks of 32 KiB, as LevelDB's, behind a header of 7 bytes."""
    # Its service writes in blocks, and the last one when it ends.
    importlib.import_module("wandb").teardown()
    protocol = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield protocol.Record.FromString(parts)
            parts = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def mlflow_values(client: Any, run_id: str) -> Numbers:
    values: Numbers = {}
    for key in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, key):
            values.setdefault(metric.step, {})[key] = metric.value
    return values


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    package = pytest.importorskip("wandb")
    yield package
    package.finish()
    package.teardown()


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return pytest.importorskip("mlflow")


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_numbers_of_the_jsonl(tmp_path: Path) -> None:
    """As float32, at the steps that they are of, with nothing where there is nothing."""
    run(CONFIG, build_sinks(["jsonl", "tensorboard"], tmp_path), STEPS)
    assert tensorboard_values(tmp_path / "tensorboard") == {
        step: {key: float(np.float32(value)) for key, value in values.items()}
        for step, values in expected_values(tmp_path / "audit.jsonl").items()
    }


def test_a_tensorboard_histogram_is_that_of_the_sketch(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(report(7, tokens=64))
    sink.close()
    (event,) = tensorboard_events(tmp_path).Histograms("rlk_audit/dlogp_histogram")
    written, histogram, metrics = event.histogram_value, report(7, tokens=64).histogram(), report(7, tokens=64).metrics
    assert event.step == 7
    assert (list(written.bucket), list(written.bucket_limit)) == (list(histogram.counts), list(histogram.edges[1:]))
    assert (written.num, written.min, written.max) == (64, metrics["dlogp_min"], metrics["dlogp_max"])
    assert written.sum == pytest.approx(metrics["dlogp_mean"] * 64)
    assert written.sum_squares == pytest.approx(metrics["kl0_k2"] * 128)


def test_tensorboard_has_each_step_on_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may be slow, so that the step is waited for shows in the calls."""
    from torch.utils.tensorboard import SummaryWriter

    calls: list[str] = []
    sink = TensorBoardSink(tmp_path)
    for name in ("add_scalar", "add_histogram_raw", "flush"):
        original = getattr(SummaryWriter, name)
        monkeypatch.setattr(SummaryWriter, name, noting(calls, name, original))
    sink.write(report(7))
    assert calls[-2:] == ["add_histogram_raw", "flush"]
    assert list(tensorboard_values(tmp_path)) == [7]
    sink.close()


def noting(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return noted


def test_a_run_s_total_has_no_place_in_a_chart(tmp_path: Path) -> None:
    total = StepReport.from_dict({**report(None).to_dict(), "kind": "run"})
    sink = TensorBoardSink(tmp_path)
    sink.write(total)
    sink.close()
    assert tensorboard_values(tmp_path) == {}


def test_a_writer_that_exists_is_used_and_left_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer=writer)
    sink.write(report(7))
    sink.close()
    writer.add_scalar("loss", 1.5, global_step=8)
    writer.close()
    values = tensorboard_values(tmp_path)
    assert values[8] == {"loss": 1.5}
    assert values[7]["rlk_audit/abs_dlogp_max"] == report(7).metrics["abs_dlogp_max"]
    with pytest.raises(ValueError, match="either log_dir or writer"):
        TensorBoardSink(tmp_path, writer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_goes_on_after_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Kills: a writer whose thread died, and which refuses every later step."""
    sink = TensorBoardSink(tmp_path)
    sink.write(report(1))
    with files_of_at_most(500):
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink.write(report(step))
    sink.write(report(4))
    sink.close()
    # A writer's thread that has yet to die of its exception would do so in a later test.
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(30)
    values = tensorboard_values(tmp_path)
    assert values[1] == values[4]


def test_tensorboard_makes_a_deleted_folder_anew(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    sink = TensorBoardSink(folder)
    sink.write(report(1))
    shutil.rmtree(folder)
    sink.write(report(2))
    sink.close()
    assert list(tensorboard_values(folder)) == [2]


def test_tensorboard_fails_at_set_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        TensorBoardSink(tmp_path / "file" / "logs")


def test_a_chart_needs_a_step_number(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    with pytest.raises(ValueError, match="no step number"):
        sink.write(report(None))
    sink.close()


# --- W&B --------------------------------------------------------------------------------------------------------------


def test_wandb_holds_the_numbers_of_the_jsonl(tmp_path: Path, wandb: Any) -> None:
    sink = WandbSink(dir=str(tmp_path), project="test", table_interval=2)
    reports = run(CONFIG, [JsonlSink(tmp_path / "audit.jsonl"), sink], STEPS)
    expected = expected_values(tmp_path / "audit.jsonl")
    rows = wandb_rows(tmp_path)
    assert [row["rlk_audit/step"] for row in rows] == list(STEPS)
    for row, audited in zip(rows, reports, strict=True):
        values = expected[audited.step]
        assert {key: row[key] for key in values} == values
        assert_no_more_wandb_keys(row, values)
        if audited.histogram() is not None:
            assert row["rlk_audit/dlogp_histogram/values"] == list(audited.histogram().counts)
            assert row["rlk_audit/dlogp_histogram/bins"] == pytest.approx(list(audited.histogram().edges))
    assert ["rlk_audit/worst_tokens/nrows" in row for row in rows] == [True, False, True, False]
    tables = [
        json.loads(path.read_text())
        for path in sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.json"))
    ]
    failed = [report for report in reports if report.findings]
    assert [report.verdict.passed for report in failed] == [False] * len(failed) and failed
    told = [findings_table(report) for report in failed]
    made = [worst_table(reports[place]) for place in (0, 2)] + told
    found = sorted(((table["columns"], table["data"]) for table in tables), key=str)
    assert found == sorted(((columns, rows) for columns, rows in made), key=str)


MEDIA = ("dlogp_histogram", "worst_tokens", "findings")


def assert_no_more_wandb_keys(row: dict[str, Any], values: dict[str, float]) -> None:
    ours = {key for key in row if key.startswith("rlk_audit/")}
    media = {key for key in ours if key.startswith(tuple(f"rlk_audit/{name}/" for name in MEDIA))}
    assert ours - media == values.keys() | {"rlk_audit/step"}


def test_wandb_charts_stand_over_the_audits_own_steps(tmp_path: Path, wandb: Any) -> None:
    sink = WandbSink(dir=str(tmp_path))
    sink.write(report(7))
    sink.close()
    metrics = {r.metric.name: r.metric for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "metric"}
    (row,) = wandb_rows(tmp_path)
    charted = {"/".join(key.split("/")[:2]) if "histogram" in key or "worst_tokens" in key else key for key in row}
    for key in charted:
        if key.startswith("rlk_audit/"):
            assert metrics[key].step_metric == ("" if key == "rlk_audit/step" else "rlk_audit/step"), key
    assert metrics["rlk_audit/step"].options.hidden


def test_a_wandb_run_that_exists_keeps_its_counter_and_loses_nothing(tmp_path: Path, wandb: Any) -> None:
    """Kills: our values dropped for a step behind the counter; the caller's dropped because ours moved it on."""
    mine = wandb.init(dir=str(tmp_path))
    sink = WandbSink(mine)
    mine.log({"loss": 1.0}, step=40)
    sink.write(report(7))
    mine.log({"evaluation": 2.0}, step=40)
    mine.log({"loss": 3.0}, step=41)
    sink.write(report(5))
    sink.write(report(6))
    mine.log({"loss": 4.0}, step=43)
    sink.close()
    mine.log({"loss": 5.0}, step=44)
    mine.finish()
    rows = wandb_rows(tmp_path)
    seen = [(row["_step"], row.get("loss"), row.get("evaluation"), row.get("rlk_audit/step")) for row in rows]
    assert seen == [
        (40, 1.0, 2.0, 7),
        (41, 3.0, None, 5),
        (42, None, None, 6),
        (43, 4.0, None, None),
        (44, 5.0, None, None),
    ]


def test_the_module_or_the_active_run_is_joined_and_not_finished(tmp_path: Path, wandb: Any) -> None:
    """The module is what Megatron hands out as its writer."""
    mine = wandb.init(dir=str(tmp_path))
    for sink in (WandbSink(wandb), WandbSink()):
        sink.write(report(7))
        sink.close()
        assert wandb.run is mine
    mine.finish()
    assert [row["rlk_audit/step"] for row in wandb_rows(tmp_path)] == [7]
    with pytest.raises(ValueError, match="project cannot be set here"):
        WandbSink(mine, project="other")


# --- MLflow -----------------------------------------------------------------------------------------------------------


def test_mlflow_holds_the_numbers_of_the_jsonl(tmp_path: Path, mlflow: Any) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    sink = MlflowSink(tracking_uri=store, artifact_dir=tmp_path / "artifacts", table_interval=2)
    reports = run(CONFIG, [JsonlSink(tmp_path / "audit.jsonl"), sink], STEPS)
    client = mlflow.MlflowClient(store)
    assert mlflow_values(client, sink.run_id) == expected_values(tmp_path / "audit.jsonl")
    assert client.get_run(sink.run_id).info.status == "FINISHED"
    path = client.download_artifacts(sink.run_id, "rlk_audit/worst_tokens.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    assert table["columns"] == worst_table(reports[0])[0]
    rows = [row for place in (0, 2) for row in worst_table(reports[place])[1]]
    # MLflow keeps 10 decimals in a table.
    assert [pytest.approx(row) for row in rows] == table["data"]
    path = client.download_artifacts(sink.run_id, "rlk_audit/findings.json", str(tmp_path))
    told = json.loads(Path(path).read_text())
    rows = [row for audited in reports for row in findings_table(audited)[1]]
    assert (
        rows
        and [[pytest.approx(cell) if isinstance(cell, float) else cell for cell in row] for row in rows] == told["data"]
    )


def test_an_mlflow_run_that_exists_is_used_and_left_open(tmp_path: Path, mlflow: Any) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.create_experiment("mine", (tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    sink = MlflowSink(run_id, tracking_uri=client.tracking_uri)
    sink.write(report(7))
    sink.write(report(7))
    sink.close()
    assert client.get_run(run_id).info.status == "RUNNING"
    assert mlflow_values(client, run_id)[7]["rlk_audit/abs_dlogp_max"] == report(7).metrics["abs_dlogp_max"]
    with pytest.raises(mlflow.exceptions.MlflowException, match="not found"):
        MlflowSink("0" * 32, tracking_uri=client.tracking_uri)


# --- all at once ------------------------------------------------------------------------------------------------------


def test_all_sinks_at_once_by_name(tmp_path: Path, wandb: Any, mlflow: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In one folder, of one run, each with the same numbers, and no sink complains."""
    with caplog.at_level(logging.WARNING, "rlk_audit"):
        sinks = build_sinks(["jsonl", "tensorboard", "wandb", "mlflow"], tmp_path)
        run(CONFIG, sinks, STEPS)
    assert not [record for record in caplog.records if record.name == "rlk_audit.auditor"]
    expected = expected_values(tmp_path / "audit.jsonl")
    assert list(expected) == list(STEPS)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert mlflow_values(client, sinks[3].run_id) == expected
    for row in wandb_rows(tmp_path):
        values = expected[row["rlk_audit/step"]]
        assert {key: row[key] for key in values} == values
    scalars = tensorboard_values(tmp_path / "tensorboard")
    # TensorBoard keeps float32.
    assert scalars == {
        step: {key: np.float32(value) for key, value in values.items()} for step, values in expected.items()
    }


def test_reported_case_b43(tmp_path: Path) -> None:
    """A step with nothing, one at the largest dlogp there is, then a resume: strict lines, plain numbers, own steps."""
    largest = StepReport.from_dict({**report(40).to_dict(), "metrics": {**report(40).metrics, "ratio0_max": math.inf}})
    sinks = build_sinks(["jsonl", "tensorboard"], tmp_path)
    for audited in (report(7, tokens=0), largest, report(5)):
        for sink in sinks:
            sink.write(audited)
    for sink in sinks:
        sink.close()
    lines = lines_of(tmp_path / "audit.jsonl")
    assert [line["step"] for line in lines] == [7, 40, 5]
    assert lines[0]["metrics"]["abs_dlogp_max"] is lines[1]["metrics"]["ratio0_max"] is None
    values = tensorboard_values(tmp_path / "tensorboard")
    assert sorted(values) == [5, 7, 40]
    assert "rlk_audit/ratio0_max" not in values[40]
    assert {type(value) for line in lines for value in line["metrics"].values()} <= {int, float, type(None)}
