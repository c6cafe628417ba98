"""Settle the one-time agreement of a collector, so that what is counted afterwards is a step's."""

import torch.distributed as dist

from rlk_audit import Collector
from rlk_audit.allreduce import agree_on_layout, mark_agreed


def agreed(collector: Collector, group: dist.ProcessGroup | None = None) -> Collector:
    """Collective: every rank of the group must call this."""
    mark_agreed(collector, group, agree_on_layout(collector.config, group))
    return collector
