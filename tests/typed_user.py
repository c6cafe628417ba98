"""A user's program, which mypy --strict accepts against the installed package; test_packaging.py checks and runs it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlk_audit import (
    AuditConfig,
    Auditor,
    Collector,
    ConsistencyError,
    LogHistogram,
    Pending,
    StepReport,
    TokenBatch,
    all_reduce,
)
from rlk_audit.diagnose import Finding, TokenTable, diagnose
from rlk_audit.sinks import ConsoleSink, Sink

TRAIN = [[-0.5, -1.25], [-2.0, -0.1, -0.7]]
ROLLOUT: list[list[float | None]] = [[-0.5, None], [-2.0, -0.1, -0.9]]


class Largest:
    """A sink of the user's own."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def write(self, report: StepReport) -> None:
        if report.step is not None:
            self.seen[report.step] = float(report.metrics["abs_dlogp_max"])

    def close(self) -> None:
        return None


def of_a_step(config: AuditConfig, sinks: list[Sink]) -> StepReport:
    auditor = Auditor(config, sinks=sinks)
    auditor.update(TokenBatch.from_lists(TRAIN, ROLLOUT, sample_index=[3, 4], labels={"engine": [0, 1]}))
    report = auditor.step(1)
    auditor.close()
    if report is None:
        raise RuntimeError("without lag a step has its report")
    return report


def of_a_rank(config: AuditConfig) -> Mapping[str, float | int]:
    collector = Collector(config, device="cpu")
    collector.update(torch.tensor([-0.5]), torch.tensor([-0.75]), torch.ones(1), microbatch=0)
    reduced = all_reduce(collector)
    report: StepReport = reduced.wait() if isinstance(reduced, Pending) else reduced
    return report.metrics


def causes(report: StepReport) -> list[str]:
    findings: tuple[Finding, ...] = diagnose(report, TokenTable.from_lists(TRAIN, ROLLOUT))
    return [finding.code for finding in findings]


def main() -> None:
    largest = Largest()
    config = AuditConfig(breakdowns={"engine": ("e0", "e1")}, limits={"abs_dlogp_p99": 1.0})
    try:
        report = of_a_step(config, [largest, ConsoleSink()])
    except ConsistencyError as error:
        raise SystemExit(str(error)) from error
    worst = report.worst_tokens[0]
    shown: str = f"{worst.labels['engine']} {worst.sample_index} {worst.dlogp:+.2f} {report.warnings}"
    histogram = LogHistogram(grouping_power=7)
    histogram.update([0.5, 0.25])
    passed: bool = report.verdict is not None and report.verdict.passed
    print(shown, round(largest.seen[1], 2), passed, histogram.max, of_a_rank(AuditConfig())["compared_token_count"])
    print(causes(StepReport.from_dict(report.to_dict())))


if __name__ == "__main__":
    main()
