"""Auditor: a collector, its reduction, its limits and its sinks behind ``update`` and ``step``."""

from __future__ import annotations

import atexit
import logging
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlk_audit.allreduce import (
    Group,
    Pending,
    agree_on_layout,
    all_reduce,
    as_group,
    global_rank,
    group_place,
    mark_agreed,
    refuse_another_groups_shards,
)
from rlk_audit.collector import Collector
from rlk_audit.config import AuditConfig, as_config
from rlk_audit.diagnose import diagnose
from rlk_audit.evidence import EvidenceBuffer
from rlk_audit.layout import StateLayout
from rlk_audit.limits import ConsistencyError, Judge, failure_message
from rlk_audit.report import LayoutMismatchError, StepReport
from rlk_audit.run_total import RunTotal
from rlk_audit.sinks import Sink
from rlk_audit.warning_log import WarningLog

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECONDS = 10.0
DIAGNOSIS_INTERVAL = 100
"""Steps between diagnoses of steps that passed."""


def close_all(sinks: Sequence[Sink]) -> None:
    """Close sinks, each whatever another does: a log must not end the program."""
    for sink in sinks:
        _close(sink)


def set_up_failure(config: AuditConfig | None, group: Group = None, sinks: Sequence[Sink] = ()) -> Exception | None:
    """Return why an auditor cannot be made of these settings and sinks in this group, or None."""
    try:
        config = as_config(config)
        _refuse_odd_sinks(sinks)
        if config.mode == "off":
            return None
        Judge(config)
        layout = StateLayout(config, group_place(group)[1])
    except (TypeError, ValueError) as error:
        return error
    logger.info("the audit reduces %s bytes a step: %s", 8 * layout.length, layout.size_table())
    return None


def _refuse_odd_sinks(sinks: Sequence[Sink]) -> None:
    for sink in sinks:
        methods = (getattr(sink, name, None) for name in ("write", "close"))
        if isinstance(sink, type) or not all(map(callable, methods)):
            raise TypeError(
                f"a sink must have write(report) and close(), got {sink!r}; build_sinks makes sinks of names"
            )


def integer(name: str, value: Any) -> int:
    """Return a step's number as a plain integer: one of numpy or torch is none that JSON could hold.

    Raises:
        TypeError: it is none; the text does not show it, since a rollout's whole data may stand in its place.
    """
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from error


def _close(sink: Sink) -> None:
    try:
        sink.close()
    except Exception as error:
        logger.warning("%s could not be closed: %s", type(sink).__name__, error)


class Auditor:
    """Collective: every rank of ``group`` must construct one, with the same configuration.

    Args:
        config: the audit's settings; with mode ``off`` nothing is built after the agreement.
        group: data-parallel x context-parallel group, or a DeviceMesh of one dimension; the default group, or this
            process alone, if None.
        sinks: where reports go; every rank may pass them, those that do not write close theirs at once.
        device: where the collector's state lives.
        writer: whether this rank writes to the sinks; the group's first rank if None.
        agreed: the caller has already agreed on the configuration with every rank of the group: what
            ``agree_on_layout`` returned.
        side_group: ``group`` is the audit's own, not one that the training needs: then a failed reduction ends the
            audit with one error line, and the training goes on.
        evidence: keeps the step's batches on this rank and writes the worst samples whole when a verdict fails.

    Raises:
        LayoutMismatchError: the configurations differ over the ranks.
        TypeError: ``config`` or ``group`` is of another type.
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
        agreed: Mapping[int, str] | None = None,
        side_group: bool = False,
        evidence: EvidenceBuffer | None = None,
    ) -> None:
        group = as_group(group)
        hosts = agreed
        if hosts is None:
            failure = set_up_failure(config, group, sinks)
            hosts = agree_on_layout(config if failure is None else None, group, failure=failure)
        self.config = as_config(config)
        self.group = group
        self._judge = Judge(self.config)
        self.collector = None if self.config.mode == "off" else Collector(self.config, device)
        self._made_alone = writer is None and group_place(group)[1] == 1
        writes = group_place(group)[0] == 0 if writer is None else writer
        if self.collector is not None:
            mark_agreed(self.collector, group, hosts)
        self._sinks: tuple[Sink, ...] = ()
        self._warnings = WarningLog() if writes else None
        if writes and self.collector is not None:
            self._sinks = tuple(sinks)
        else:
            close_all(sinks)
        if self._sinks:
            # A program that ends without `close`, or by an exception, still writes what is there.
            atexit.register(self.close)
        self._side_group = side_group
        self._evidence = evidence
        self._failing: set[int] = set()
        self._in_flight: tuple[int, Pending] | None = None
        self._total = RunTotal(self.config)
        self._carried: dict[str, Any] | None = None
        self._closing = threading.Lock()
        self._closed = False

    def update(self, *args: Any, microbatch: int | None = None, **fields: Any) -> None:
        """Add one micro-batch; the arguments are those of ``Collector.update``. No communication.

        Raises:
            TypeError: as ``Collector.update``.
            ValueError: the train log-probabilities are a DTensor of another group than the auditor's.
        """
        if self.collector is None:
            return
        given = args[0] if args else fields.get("train_log_probs")
        refuse_another_groups_shards(getattr(given, "train_log_probs", given), self.group)
        batch = self.collector.as_batch(*args, **fields)
        self.collector.update(batch, microbatch=microbatch)
        if self._evidence is not None:
            self._evidence.keep(batch, microbatch)

    def step(self, step: int, *, expected_active_tokens: int | None = None) -> StepReport | None:
        """Collective: every rank of the group must call this at the end of a step, whatever it collected.

        Reduces, judges, writes to the sinks and starts the next step.

        Args:
            step: the step's number.
            expected_active_tokens: the training's own count of the step's active tokens over all ranks; the report
                warns if it counted another number, as with a wrong group or tokens that were given twice.

        Returns:
            The group's report; with ``lag=1`` that of the step before, None at first; None when the mode is ``off``.

        Raises:
            ConsistencyError: the mode is ``strict`` and the step failed its verdict; every rank of the group raises it.
        """
        report = self.end_step(step, expected_active_tokens=expected_active_tokens)
        if report is not None and (message := self.failure(report)) is not None:
            raise ConsistencyError(message)
        return report

    def end_step(self, step: int, *, expected_active_tokens: int | None = None) -> StepReport | None:
        """Collective: as ``step``, but a failed verdict is left to the caller, who asks ``failure``."""
        if self.collector is None:
            return None
        step = integer("step", step)
        if self._closed:
            self._closed = False
            logger.warning("step %s and later ones are not written: the audit was closed", step)
        if expected_active_tokens is not None:
            self.collector.expect_active(expected_active_tokens)
        lost = [f"step {number}" for number in (*(self._in_flight or ())[:1], step)]
        try:
            return self._reduce(self.collector, step)
        except RuntimeError as error:
            # A strict audit that ended in silence would pass for one that passes.
            if not self._side_group or self.config.mode == "strict" or isinstance(error, LayoutMismatchError):
                raise
            logger.error(
                "the audit ends without the figures of %s, the training goes on: %s", " and ".join(lost), error
            )
            self.collector = self._in_flight = None
            if self._evidence is not None:
                self._evidence.clear()
            return None

    def failure(self, report: StepReport) -> str | None:
        """Return why a ``strict`` audit must stop at this report, or None."""
        return failure_message(report) if self.config.mode == "strict" and report.failures else None

    def close(self) -> None:
        """Finish a step in flight, write the run's total and close the sinks. Starts no communication.

        A step in flight is waited for at most 10 seconds, then it is lost.
        """
        atexit.unregister(self.close)
        if self.collector is not None and self.collector.updates:
            logger.warning("%s micro-batches are lost: no step ended after them", self.collector.updates)
        with self._closing:  # an exit handler may come while the program closes
            if self._in_flight is not None:
                (step, pending), self._in_flight = self._in_flight, None
                self._finish_in_flight(step, pending)
            total = self.run_total() if self._sinks else None
            if total is not None:
                self._write(total)
            self._closed = self._closed or bool(self._sinks)
            sinks, self._sinks = self._sinks, ()
            close_all(sinks)

    def __enter__(self) -> Auditor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run_total(self) -> StepReport | None:
        """Return the figures of all tokens of the run so far (``kind == "run"``); None before the first step."""
        return self._total.report()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors on the CPU and plain values. A step in flight is not in it.

        With mode ``off`` it is what was loaded, so that a run may be resumed once without its audit.
        """
        if self._carried is not None:
            return self._carried
        return {"total": self._total.state_dict(), "history": self._judge.state_dict()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take up a run where ``state_dict`` left it; the group may have another size.

        Raises:
            ValueError: the run was made with other settings.
        """
        if self.collector is None:
            self._carried = dict(values)
            return
        self._total.load_state_dict(values["total"])
        self._judge.load_state_dict(values["history"])

    def _reduce(self, collector: Collector, step: int) -> StepReport | None:
        if self._made_alone and group_place(self.group)[1] > 1:
            raise RuntimeError(
                "the auditor was made before the process group, so every rank would write: make it after "
                "init_process_group"
            )
        if self._evidence is not None:
            self._evidence.seal(step)
        started = (step, all_reduce(collector, self.group, async_op=True, step=step))
        collector.reset()
        if self.config.lag == 0:
            return self._finish(*started)
        earlier, self._in_flight = self._in_flight, started
        return None if earlier is None else self._finish(*earlier)

    def _finish_in_flight(self, step: int, pending: Pending) -> None:
        try:
            if pending.wait_at_most(CLOSE_TIMEOUT_SECONDS) is None:
                logger.warning("step %s is lost: its reduction did not end within %s s", step, CLOSE_TIMEOUT_SECONDS)
            else:
                self._finish(step, pending)
        except RuntimeError as error:  # closing must come to its end
            logger.warning("step %s is lost: %s", step, error)

    def _finish(self, step: int, pending: Pending) -> StepReport:
        report = pending.wait()
        report.verdict = self._judge.judge(report)
        self._diagnose(report, step)
        self._keep_evidence(report)
        self._total.add(pending.vector, pending.group_size)
        self._warn(report, step)
        self._write(report)
        return report

    def _warn(self, report: StepReport, step: int) -> None:
        if self._warnings is None:
            return
        try:
            self._warnings.tell(step, report)
        except Exception as error:  # here the report's figures are made, which must not end one rank alone
            logger.warning("step %s has no figures: %s", step, error)

    def _diagnose(self, report: StepReport, step: int) -> None:
        """Look for the cause of a failed step, on every rank; where it is written, now and then of one that passed."""
        if not report.failures and (not self._sinks or step % DIAGNOSIS_INTERVAL):
            return
        try:
            report.findings = diagnose(report)
        except Exception as error:  # a diagnosis is never worth a training step
            logger.warning("step %s could not be diagnosed: %s", step, error)

    def _keep_evidence(self, report: StepReport) -> None:
        """Write the worst samples of a failed step, and let go of the step's batches."""
        if self._evidence is None or report.step is None:
            return
        if report.failures:
            self._evidence.write(report.step, report, global_rank())
        self._evidence.clear(report.step)

    def _write(self, report: StepReport) -> None:
        for place, sink in enumerate(self._sinks):
            self._write_to(place, sink, report)

    def _write_to(self, place: int, sink: Sink, report: StepReport) -> None:
        """Write, and never let a sink stop the training: its first failure is told, later ones are silent."""
        try:
            sink.write(report)
            self._failing.discard(place)
        except Exception as error:
            if place not in self._failing:
                logger.warning("%s could not write step %s: %s", type(sink).__name__, report.step, error)
            self._failing.add(place)
