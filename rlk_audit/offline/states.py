"""States of many steps at a time: few as collectors, the others put by as sparse vectors."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig
from rlk_audit.offline.plan import Step

MAX_OPEN = 8


class StepStates:
    """A collector a step, of which the MAX_OPEN used last are kept as such."""

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._open: OrderedDict[Step, Collector] = OrderedDict()
        self._put_by: dict[Step, Tensor] = {}

    def collector(self, step: Step) -> Collector:
        """Return a step's collector; do not keep it."""
        if step not in self._open:
            self._open[step] = self._make(step)
            if len(self._open) > MAX_OPEN:
                oldest, collector = self._open.popitem(last=False)
                self._put_by[oldest] = collector.pack(rank=-1).to_sparse()
        self._open.move_to_end(step)
        return self._open[step]

    def take(self, step: Step) -> Collector:
        """Return a step's collector, an empty one if it had no token, and forget the step."""
        return self._open.pop(step, None) or self._make(step)

    def _make(self, step: Step) -> Collector:
        collector = Collector(self._config)
        if step in self._put_by:
            collector.merge_vector(self._put_by.pop(step).to_dense())
        return collector
