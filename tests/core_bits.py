"""What the core says of given tokens, for integrations to be compared with bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import oracle
import torch

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch

PARTS = ("metrics", "classes", "warnings", "worst_tokens", "breakdowns", "samples", "histogram")


def core_report(samples: Sequence[oracle.Sample], config: AuditConfig) -> StepReport:
    """The report of whole samples, which are numbered as they come."""
    collector = Collector(config)
    columns = [[torch.tensor(getattr(sample, side)) for sample in samples] for side in ("train", "rollout", "mask")]
    index = list(range(len(samples)))
    ids = [sample.token_ids for sample in samples]
    collector.update(TokenBatch.from_lists(*columns, sample_index=index, sample_slot=index, token_ids=ids))
    return collector.compute()


def assert_same_bits(report: StepReport | None, expected: StepReport) -> None:
    assert report is not None
    ours, theirs = report.to_dict(), expected.to_dict()
    for part in PARTS:
        assert ours[part] == theirs[part], part
