"""However many processes share the files of a dump, the view is the same bit for bit, and none waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from offline_views import record, steady, write

JOB = Path(__file__).with_name("offline_job.py")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    for step in range(5):
        labels = [{"engine": f"e{index % 3}", "turn": ["0", "1"] * 4} for index in range(9)]
        write(folder / "plain" / f"step_{step}.jsonl", [steady(i, 8, step, labels=labels[i]) for i in range(9)])
        mixed = [steady(10 * step + i, 8, 1, step=i % 3) for i in range(9)]
        write(folder / "interleaved" / f"part{step}.jsonl", mixed)
        # Of unknown steps and samples, many of which tie.
        write(folder / "unknown" / f"part{step}.jsonl", [record([-1.0] * (1 + step), [-1.5] * (1 + step))] * 4)
        for name in ("fails", "a", "b", "c", "d")[step : step + 1]:
            write(folder / "broken" / f"{name}.jsonl", [steady(i, 4, step, step=i % 2) for i in range(6)])
    write(folder / "one part" / "all.jsonl", [steady(i, 300, step=i % 2) for i in range(40)])
    write(folder / "nothing" / "a.jsonl", [steady(0, 3, step="soon")])
    (folder / "empty").mkdir()
    (folder / "broken" / "damaged.npz").write_bytes(b"PK\x03\x04 train_log_probs.npy")
    return folder


def run(dumps: Path, out: Path, size: int) -> None:
    command = [sys.executable, str(JOB), str(dumps), str(out)]
    if size > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command[1:1] = launcher
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(JOB.parents[1]), str(JOB.parent)])}
    result = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]


def command_line(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[1])}
    command = [*launcher, "-m", "rlk_audit", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=200)


def test_a_comparison_is_told_once(dumps: Path) -> None:
    told = command_line("compare", dumps / "plain", dumps / "one part")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("permutation test p =") == 1


def test_a_place_that_the_first_process_cannot_write_ends_all(dumps: Path, tmp_path: Path) -> None:
    """Only the first one writes, and the folder may be there for it alone: another machine's word counts nothing."""
    told = command_line("report", dumps / "plain", "--json", tmp_path / "none" / "a.json")
    assert told.returncode != 0
    assert told.stdout == ""
    assert f"there is no folder {tmp_path / 'none'}; make it" in told.stderr


def test_one_two_and_four_processes_say_the_same(dumps: Path, tmp_path: Path) -> None:
    for size in (1, 2, 4):
        run(dumps, tmp_path, size)
    for dump in sorted(path.name for path in dumps.iterdir()):
        alone = (tmp_path / f"{dump}.1").read_text()
        for size in (2, 4):
            assert (tmp_path / f"{dump}.{size}").read_text() == alone, (dump, size)
            for rank in range(size):  # every rank judges the same figures
                shared = (tmp_path / f"{dump}.{size}.rank{rank}").read_text()
                assert shared == (tmp_path / f"{dump}.1.rank0").read_text(), (dump, size, rank)
    assert "DumpError: nothing could be read" in (tmp_path / "nothing.4").read_text()
    assert "DumpError: no dump of a known format" in (tmp_path / "empty.4").read_text()
    assert "4 samples are gone, 0 are new" in (tmp_path / "broken.4").read_text().splitlines()[-1]
