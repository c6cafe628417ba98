"""What SECURITY.md claims: each claim names its tests, and nothing reaches out."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REACHING_OUT = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen", "os.exec")

WATCHED = f"""
import sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, str(arguments))) if event in {REACHING_OUT!r} else None)
"""

LIVE_AUDIT = """
import torch
from rlk_audit import AuditConfig, Auditor
from rlk_audit.sinks import JsonlSink
auditor = Auditor(AuditConfig(limits={"abs_dlogp_max": 1.0}, lag=1), sinks=[JsonlSink("audit.jsonl")])
for step in range(3):
    auditor.update(torch.full((2, 4), -1.0), torch.full((2, 4), -1.5), torch.ones(2, 4))
    auditor.step(step)
auditor.close()
print(seen)
"""

COMMANDS = """
from rlk_audit.cli.app import app
for command in (
    ["report", "dump.jsonl", "--html", "page.html", "--json", "all.json", "--exact"],
    ["check", "dump.jsonl", "--limit", "abs_dlogp_p99=5"],
    ["compare", "dump.jsonl", "dump.jsonl"],
    ["diagnose", "dump.jsonl"],
):
    app(command, standalone_mode=False)
print(seen)
"""


def watched(script: str, folder: Path) -> str:
    """Run a script that ends by printing what reached out, with no proxy or hub to be asked by name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED + script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_the_watch_sees_what_reaches_out(tmp_path: Path) -> None:
    script = "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('127.0.0.1', 9))\nprint(seen)"
    assert "socket.connect" in watched(script, tmp_path)


def test_a_live_audit_opens_no_connection_and_starts_no_process(tmp_path: Path) -> None:
    assert watched(LIVE_AUDIT, tmp_path) == "[]"
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 4


def test_the_command_line_opens_no_connection_and_starts_no_process(tmp_path: Path) -> None:
    row = {"train_log_probs": [-1.0, -2.0, -0.5], "rollout_log_probs": [-1.1, -2.0, -0.4]}
    (tmp_path / "dump.jsonl").write_text("".join(json.dumps(row | {"sample_index": n}) + "\n" for n in range(20)))
    assert watched(COMMANDS, tmp_path) == "[]"
    assert (tmp_path / "page.html").exists()


def test_names_of_files_are_no_options_and_no_commands(tmp_path: Path) -> None:
    """A pattern that untrusted names may match goes behind ``--``, as with any command."""
    names = ("--help", "-x.jsonl", "$(touch made)", "a;touch made", "a\nb")
    for name in names:
        (tmp_path / name).write_text(json.dumps({"train_log_probs": [-1.0], "rollout_log_probs": [-1.5]}) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlk_audit", "report", "--json", "out.json", "--", *names]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (step,) = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert step["metrics"]["compared_token_count"] == len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted((*names, "out.json"))


def test_every_claim_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(test_\w+)::(test_\w+)`", row)
        assert named, row
        for module, name in named:
            tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (module, name)
