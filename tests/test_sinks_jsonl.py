"""The JSONL record where files misbehave: full disks, deleted folders, half lines, rotation."""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import shutil
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from sink_reports import files_of_at_most, lines_of, report, run, steps_of

from rlk_audit import AuditConfig
from rlk_audit.sinks import JsonlSink
from rlk_audit.sinks.jsonl import LOCK_SECONDS, MAX_HELD_LINES


def test_a_full_disk_raises_and_loses_nothing(tmp_path: Path) -> None:
    """Kills: half a line left in the middle of the file; a line that failed and is never written."""
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path)
    sink.write(report(1))
    with files_of_at_most(path.stat().st_size + 100):
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                sink.write(report(step))
        assert path.stat().st_size > 0
    sink.write(report(4))
    assert steps_of(path) == [1, 2, 3, 4]
    sink.close()


def test_lines_that_are_held_are_bounded_and_written_at_the_close(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path)
    path.unlink()
    path.symlink_to("/dev/full")
    for step in range(MAX_HELD_LINES + 3):
        with pytest.raises(OSError, match="No space left"):
            sink.write(report(step, tokens=0))
    path.unlink()
    sink.close()
    assert steps_of(path) == list(range(3, MAX_HELD_LINES + 3))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_file_stays_open(tmp_path: Path) -> None:
    """After a close, a rotation, a failed write and a failed close."""
    before = open_files()
    sink = JsonlSink(tmp_path / "fine.jsonl", max_bytes=1)
    for step in range(3):
        sink.write(report(step))
    sink.close()
    assert open_files() == before
    path = tmp_path / "audit.jsonl"
    path.symlink_to("/dev/full")
    sink = JsonlSink(path)
    for act in (lambda: sink.write(report()), sink.close):
        with pytest.raises(OSError, match="No space left"):
            act()
    assert open_files() == before


def test_a_full_disk_warns_once_and_the_audit_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path)
    path.unlink()
    path.symlink_to("/dev/full")
    kept = JsonlSink(tmp_path / "kept.jsonl")
    original_close, sink.close = sink.close, lambda: None
    with caplog.at_level(logging.WARNING, "rlk_audit"):
        run(AuditConfig(), [sink, kept], {step: (0.1, 4) for step in (1, 2, 3)})
    assert [record.getMessage() for record in caplog.records] == [
        "JsonlSink could not write step 1: [Errno 28] No space left on device"
    ]
    assert steps_of(tmp_path / "kept.jsonl") == [1, 2, 3, None]
    path.unlink()
    original_close()
    assert steps_of(path) == [1, 2, 3, None]


@pytest.mark.parametrize("deleted", ["folder", "file"])
def test_what_was_deleted_is_made_anew(tmp_path: Path, deleted: str) -> None:
    """Kills: writing on into a file that has no name any more."""
    path = tmp_path / "run" / "audit.jsonl"
    sink = JsonlSink(path)
    sink.write(report(1))
    if deleted == "folder":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
    sink.write(report(2))
    sink.close()
    assert steps_of(path) == [2]


def test_a_file_moved_aside_by_others_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path)
    sink.write(report(1))
    path.rename(tmp_path / "old.jsonl")
    sink.write(report(2))
    sink.close()
    assert (steps_of(tmp_path / "old.jsonl"), steps_of(path)) == ([1], [2])


def test_it_rotates_on_request_and_never_by_itself(tmp_path: Path) -> None:
    """Kills: a line split over two files; a rotation that overwrites an older one, also after a restart."""
    path = tmp_path / "audit.jsonl"
    line = len(report(0).to_json()) + 1
    for begin in (0, 4):
        sink = JsonlSink(path, max_bytes=2 * line + 10)
        for step in range(begin, begin + 4):
            sink.write(report(step))
        sink.close()
    assert [steps_of(tmp_path / f"audit.{n}.jsonl") for n in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert steps_of(path) == [6, 7]
    assert len(list(tmp_path.iterdir())) == 4

    sink = JsonlSink(path, max_bytes=1)
    sink.write(report(8))
    sink.close()
    assert (steps_of(tmp_path / "audit.4.jsonl"), steps_of(path)) == ([6, 7], [8])


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    sink = JsonlSink(path)
    sink.write(report(3))
    sink.close()
    assert steps_of(path) == [1, 2, 3]


@pytest.mark.parametrize("length", [0, 1, 1 << 16, 70_000])
def test_a_partial_line_of_any_length_is_cut_off(tmp_path: Path, length: int) -> None:
    """Kills: a search for the line's beginning that looks at one block alone."""
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b'{"step": "'[:length] + b"x" * max(length - 10, 0))
    sink = JsonlSink(path)
    sink.write(report(2))
    sink.close()
    assert steps_of(path) == [1, 2]


def test_another_kind_of_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my thesis, without a line's end")
    with pytest.raises(ValueError, match=r"notes\.txt holds something else than lines of JSON objects"):
        JsonlSink(path)
    assert path.read_text() == "my thesis, without a line's end"


def test_a_run_resumed_at_an_earlier_step_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for steps in ((5, 6, 7), (5, 6)):
        sink = JsonlSink(path)
        for step in steps:
            sink.write(report(step))
        sink.close()
    assert steps_of(path) == [5, 6, 7, 5, 6]
    assert all(line["metrics"] for line in lines_of(path))


@dataclass
class Long:
    """A report whose line takes a while to write."""

    step: int
    scope: str = "group"

    def to_json(self) -> str:
        return json.dumps({"step": self.step, "text": "x" * 100_000})


def write_steps(path: Path, first: int, count: int, max_bytes: int | None, both: Barrier) -> None:
    """Write so many steps, as a run that ends and is resumed after every second; begin when both can."""
    both.wait()
    for begin in range(first, first + count, 2):
        sink = JsonlSink(path, max_bytes=max_bytes)
        for step in (begin, begin + 1):
            sink.write(Long(step))
        sink.close()


@pytest.mark.parametrize("max_bytes", [None, 300_000])
def test_two_runs_in_one_file_lose_nothing(max_bytes: int | None, tmp_path: Path) -> None:
    """Kills: a line of the other cut off as partial at a set-up; a file moved onto another that was moved aside."""
    path, count = tmp_path / "audit.jsonl", 200
    spawn = multiprocessing.get_context("spawn")
    both = spawn.Barrier(2)
    runs = [spawn.Process(target=write_steps, args=(path, 1000 * run, count, max_bytes, both)) for run in range(2)]
    for process in runs:
        process.start()
    for process in runs:
        process.join()
    assert [process.exitcode for process in runs] == [0, 0]
    found = [step for file in tmp_path.glob("audit*.jsonl") for step in steps_of(file)]
    assert sorted(found) == [*range(count), *range(1000, 1000 + count)]


def test_a_file_that_another_process_holds_is_waited_for_a_moment(tmp_path: Path) -> None:
    """As one that was stopped while it wrote. Kills: a wait without an end; a line that is given up."""
    path = tmp_path / "audit.jsonl"
    sink = JsonlSink(path)
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process holds .*audit\.jsonl"):
            sink.write(report(1))
        assert LOCK_SECONDS <= time.monotonic() - begin < LOCK_SECONDS + 5
    sink.write(report(2))
    sink.close()
    assert steps_of(path) == [1, 2]


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    sink = JsonlSink(tmp_path / "audit.jsonl")
    sink.write(report(1))
    sink.close()
    assert steps_of(tmp_path / "audit.jsonl") == [1]
