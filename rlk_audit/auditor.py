"""Auditor: a collector, its reduction and its sinks behind ``update`` and ``step``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlk_audit.allreduce import Group, agree_on_layout, all_reduce, group_place
from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig
from rlk_audit.report import StepReport
from rlk_audit.sinks import Sink

logger = logging.getLogger(__name__)


class Auditor:
    """Collective: every rank of ``group`` must construct one, with the same configuration.

    Args:
        config: the audit's settings; with mode ``off`` nothing is built after the agreement.
        group: data-parallel x context-parallel group; the default group, or this process alone, if None.
        sinks: where reports go; used on the writing rank only, so that every rank may pass them.
        device: where the collector's state lives.
        writer: whether this rank writes to the sinks; the group's first rank if None.
        agreed: the caller has already agreed on the configuration with every rank of the group.

    Raises:
        LayoutMismatchError: the configurations differ over the ranks.
    """

    def __init__(
        self,
        config: AuditConfig | None = None,
        group: Group = None,
        sinks: Sequence[Sink] = (),
        device: str | torch.device = "cpu",
        *,
        writer: bool | None = None,
        agreed: bool = False,
    ) -> None:
        self.config = config or AuditConfig()
        self.group = group
        if not agreed:
            agree_on_layout(self.config, group)
        self.collector = None if self.config.mode == "off" else Collector(self.config, device)
        writes = group_place(group)[0] == 0 if writer is None else writer
        self._sinks = tuple(sinks) if writes and self.collector is not None else ()
        self._failing: set[int] = set()

    def update(self, *args: Any, **fields: Any) -> None:
        """Add one micro-batch; the arguments are those of ``Collector.update``. No communication."""
        if self.collector is not None:
            self.collector.update(*args, **fields)

    def step(self, step: int) -> StepReport | None:
        """Collective: every rank of the group must call this at the end of a step, whatever it collected.

        Reduces, writes to the sinks and starts the next step.

        Returns:
            The group's report; None when the mode is ``off``.
        """
        if self.collector is None:
            return None
        report = all_reduce(self.collector, self.group)
        report.step = step
        self.collector.reset()
        for place, sink in enumerate(self._sinks):
            self._write(place, sink, report)
        return report

    def close(self) -> None:
        """Close the sinks. No communication."""
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def _write(self, place: int, sink: Sink, report: StepReport) -> None:
        """Write, and never let a sink stop the training: its first failure is told, later ones are silent."""
        try:
            sink.write(report)
            self._failing.discard(place)
        except Exception as error:
            if place not in self._failing:
                logger.warning("%s could not write step %s: %s", type(sink).__name__, report.step, error)
            self._failing.add(place)
