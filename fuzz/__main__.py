"""Fuzz one target for some seconds: ``python -m fuzz dump 60``.

An input that ends in a defect is left in fuzz/found; it becomes a test by moving it to tests/fuzz_inputs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

FOUND = Path(__file__).with_name("found")

with atheris.instrument_imports(include=["rlk_audit"]):
    from fuzz import seeds
    from fuzz.targets import TARGETS


def main() -> None:
    target, seconds = sys.argv[1], int(sys.argv[2])
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds.of(target)):
            Path(corpus, str(number)).write_bytes(data)
        limits = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=20", "-max_len=20000"]
        atheris.Setup(
            [sys.argv[0], *limits, f"-artifact_prefix={FOUND}/{target}-", corpus],
            TARGETS[target],
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
