"""An auditor and collectors that stand for the other ranks of its group, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from rlk_audit import Collector
from rlk_audit.allreduce import Pending


def reducing_with(others: Sequence[Collector]) -> AbstractContextManager[Any]:
    """While this lasts, an auditor's reduction is that of its collector and the others: their sum, as it would be."""

    def all_reduce(collector: Collector, *_: Any, step: int, **__: Any) -> Pending:
        ranks = [collector, *others]
        vectors = [one.pack(rank, len(ranks), step=step) for rank, one in enumerate(ranks)]
        for other in others:
            other.reset()
        return Pending(torch.stack(vectors).sum(0), None, collector.config, len(ranks), step=step)

    return mock.patch("rlk_audit.auditor.all_reduce", all_reduce)
