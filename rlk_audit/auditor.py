"""Auditor: a collector, its reduction, its limits and its sinks behind ``update`` and ``step``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlk_audit.allreduce import Group, Pending, agree_on_layout, all_reduce, group_place
from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig
from rlk_audit.limits import ConsistencyError, Judge, failure_message
from rlk_audit.report import StepReport
from rlk_audit.sinks import Sink

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 10.0


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
        ValueError: a limit names no metric of this configuration.
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
        self._judge = Judge(self.config)
        if not agreed:
            agree_on_layout(self.config, group)
        self.collector = None if self.config.mode == "off" else Collector(self.config, device)
        writes = group_place(group)[0] == 0 if writer is None else writer
        self._sinks = tuple(sinks) if writes and self.collector is not None else ()
        self._failing: set[int] = set()
        self._in_flight: tuple[int, Pending] | None = None

    def update(self, *args: Any, **fields: Any) -> None:
        """Add one micro-batch; the arguments are those of ``Collector.update``. No communication."""
        if self.collector is not None:
            self.collector.update(*args, **fields)

    def step(self, step: int) -> StepReport | None:
        """Collective: every rank of the group must call this at the end of a step, whatever it collected.

        Reduces, judges, writes to the sinks and starts the next step.

        Returns:
            The group's report; with ``lag=1`` that of the step before, None at first; None when the mode is ``off``.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict; every rank of the group raises it.
        """
        report = self.end_step(step)
        if report is not None and (message := self.failure(report)) is not None:
            raise ConsistencyError(message)
        return report

    def end_step(self, step: int) -> StepReport | None:
        """Collective: as ``step``, but a failed verdict is left to the caller, who asks ``failure``."""
        if self.collector is None:
            return None
        if self.config.lag == 0:
            report = all_reduce(self.collector, self.group)
            self.collector.reset()
            return self._finish(step, report)
        earlier, self._in_flight = self._in_flight, (step, all_reduce(self.collector, self.group, async_op=True))
        self.collector.reset()
        return None if earlier is None else self._finish(earlier[0], earlier[1].wait())

    def failure(self, report: StepReport) -> str | None:
        """Return why a ``strict`` audit must stop at this report, or None."""
        if self.config.mode != "strict" or report.verdict is None or report.verdict.passed:
            return None
        return failure_message(report)

    def close(self) -> None:
        """Finish a step in flight, if it comes within 10 seconds, and close the sinks. Starts no communication."""
        if self._in_flight is not None:
            (step, pending), self._in_flight = self._in_flight, None
            report = pending.wait_at_most(CLOSE_TIMEOUT_SECONDS)
            if report is None:
                logger.warning("step %s is lost: its reduction did not end within %s s", step, CLOSE_TIMEOUT_SECONDS)
            else:
                self._finish(step, report)
        for sink in self._sinks:
            sink.close()
        self._sinks = ()

    def _finish(self, step: int, report: StepReport) -> StepReport:
        report.step = step
        report.verdict = self._judge.judge(report)
        for place, sink in enumerate(self._sinks):
            self._write(place, sink, report)
        return report

    def _write(self, place: int, sink: Sink, report: StepReport) -> None:
        """Write, and never let a sink stop the training: its first failure is told, later ones are silent."""
        try:
            sink.write(report)
            self._failing.discard(place)
        except Exception as error:
            if place not in self._failing:
                logger.warning("%s could not write step %s: %s", type(sink).__name__, report.step, error)
            self._failing.add(place)
