"""Reports, their readers and a full disk, for the tests of sinks."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlk_audit import AuditConfig, Auditor, Collector, StepReport
from rlk_audit.sinks import Sink


def strictly(line: str) -> dict[str, Any]:
    """Parse a line, and refuse the constants that JSON does not have."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [strictly(line) for line in path.read_text(encoding="utf-8").splitlines()]


def steps_of(path: Path) -> list[int | None]:
    return [line["step"] for line in lines_of(path)]


def report(step: int | None = 7, drift: float = 0.5, tokens: int = 8, scope: str = "group") -> StepReport:
    """A step whose dlogp are 0, then shares of ``drift`` of both signs."""
    collector = Collector(AuditConfig())
    add_tokens(collector, drift, tokens)
    return StepReport.from_vector(collector.pack(), collector.config, step=step, scope=scope)


def add_tokens(collector: Collector | Auditor, drift: float, tokens: int) -> None:
    if tokens:
        dlogp = [drift * (-1) ** i * i / tokens for i in range(tokens)]
        collector.update(
            [-2.0 + d for d in dlogp], [-2.0] * tokens, [1] * tokens, sample_index=3, token_position=list(range(tokens))
        )


def run(config: AuditConfig, sinks: Sequence[Sink], steps: dict[int, tuple[float, int]]) -> list[StepReport]:
    """Audit steps of number -> (drift, tokens), close, and return their reports."""
    auditor = Auditor(config, sinks=sinks)
    reports = []
    for step, (drift, tokens) in steps.items():
        add_tokens(auditor, drift, tokens)
        reports.append(auditor.step(step))
    auditor.close()
    return reports


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
