"""What fuzzing begins with: small files of every format and a report, made anew by the writers that the tests have."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlk_audit import AuditConfig, Collector
from rlk_audit.config import AUTO
from rlk_audit.finding import Finding
from rlk_audit.verdict import FAIL, LimitResult, Verdict

TESTS = Path(__file__).parents[1] / "tests"


@functools.cache
def files(writer: str) -> dict[str, bytes]:
    """Return the files of a dump of two samples by name."""
    sys.path.insert(0, str(TESTS))
    from dump_writers import WRITERS, draw

    with tempfile.TemporaryDirectory() as folder:
        samples = [given.without_missing() for given in draw(np.random.default_rng(0), 2, odd=False)]
        return {path.name: path.read_bytes() for path in WRITERS[writer][1](Path(folder), 1, samples)}


def first(writer: str) -> bytes:
    return next(iter(files(writer).values()))


def entry(archive: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as given:
        (found,) = [each for each in given.namelist() if each == name or each.endswith("/" + name)]
        return given.read(found)


def report() -> bytes:
    collector = Collector(
        AuditConfig(samples_per_step=2, breakdowns={"engine": 2, "position": AUTO}, metadata={"a": "b"})
    )
    sides = [[-1.0, -2.0], [-0.5, -3.0]], [[-1.0, -2.5], [-0.5, -3.0]], [[1, 1], [1, 0]]
    collector.update(*sides, sample_slot=0, labels={"engine": 0})
    made = collector.compute()
    made.verdict = Verdict((LimitResult("abs_dlogp_p99", "<=", 0.1, 0.5, FAIL),), ("missing tokens",))
    made.findings = (Finding("offset", 0.5, {"shift": -0.5, "fits": 1}, "the temperature", "One value is low."),)
    return made.to_json().encode()


def of(target: str) -> Iterator[bytes]:
    """Yield the inputs that a target begins with."""
    from fuzz.targets import KINDS

    if target == "dump":
        for number, kind in enumerate(KINDS):
            whole = first(kind.writer)
            yield bytes([number]) + (whole if kind.entry is None else entry(whole, kind.entry))
    elif target == "pickled":
        yield from (pickle.dumps({"a": [1, 2.5, "x", b"y", Path]}, protocol) for protocol in range(6))
        yield entry(first("slime"), "data.pkl")
    elif target == "report":
        yield report()
    else:
        yield report() + b"\n" + report().replace(b'"kind": "step"', b'"kind": "run"') + b"\n"
