"""Measure every group, each in a process of its own, and keep what was measured.

    python -m benchmarks.run docs/benchmarks/results.json [--groups update,stages] [--verl-python PATH]

Groups that are not named keep what the file has of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GROUPS = ("update", "stages", "collective", "scale", "overhead", "offline")


class GroupFailedError(RuntimeError):
    """A group could not be measured."""


def measure(group: str, arguments: list[str]) -> dict[str, Any]:
    """Return what a group's module prints last."""
    command = [sys.executable, "-m", f"benchmarks.{group}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise GroupFailedError(f"{' '.join(command[1:])} ended with status {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def arguments_of(group: str, args: argparse.Namespace, results: dict[str, Any], folder: Path) -> list[str]:
    if group == "update":
        return ["--verl-python", args.verl_python] + (["--sizes", args.sizes] if args.sizes else [])
    if group == "scale" and "collective" in results:
        path = folder / "collective.json"
        path.write_text(json.dumps(results["collective"]))
        return [str(path)]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON file of what was measured")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--sizes", default="", help="tokens of a micro-batch, as 4096,65536,1048576,16777216")
    parser.add_argument("--verl-python", default="", help="interpreter of an environment that has verl")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for group in args.groups.split(","):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            results[group] = measure(group, arguments_of(group, args, results, Path(folder)))
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{group}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
