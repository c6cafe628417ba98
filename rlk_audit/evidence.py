"""Keep a step's micro-batches until its verdict is known, and write the worst samples whole when it failed.

A rank copies each micro-batch to host memory, up to a bound, and forgets the step at its end. What is written is the
``table`` format: JSON lines, one sample a line, arrays in the order of ``token_position``:

    step, rank, microbatch      where the sample was seen
    sample_index, rollout_id, updates_since_rollout, labels      one value, or a list where the tokens differ
    train_log_probs, rollout_log_probs, mask, token_position, token_ids, rollout_token_ids      one entry a token
    train_log_probs_dtype, rollout_log_probs_dtype      what they were

What is not known is null, or left out where nothing is known of any token. JSON is strict. null in
``rollout_log_probs`` is a value that the engine did not give; NaN and infinities are null too, and ``train_nonfinite``
and ``rollout_nonfinite`` tell them apart: ``{"NaN": [3, 7], "-Infinity": [9]}`` holds places in the array.
``restore_nonfinite`` puts them back. Every value of any float dtype is written exactly.
"""

from __future__ import annotations

import gzip
import logging
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from rlk_audit.config import AuditConfig, as_config
from rlk_audit.evidence_table import KeptBatch, Sample, samples_of
from rlk_audit.nonfinite import restore_nonfinite as restore_nonfinite
from rlk_audit.report import StepReport
from rlk_audit.tokens import TokenBatch

logger = logging.getLogger(__name__)


class EvidenceBuffer:
    """One rank's store of a step's micro-batches. No method raises in a step, and none communicates.

    Args:
        directory: where files go, ``evidence_step<step>_rank<rank>.jsonl``; made when needed. Two audits of one run
            need two directories.
        max_bytes: host memory for the copies. Where a step needs more, the micro-batches of least drift are let go.
        config: the audit's settings; they name label codes, and tell which classes must be empty.
        samples: how many samples a file holds at most.
        min_steps: a file is written at most every so many steps.
        max_disk_bytes: nothing is written that would make this rank's files in the directory larger together.
        compress: write ``.jsonl.gz``.

    The copy is made because a training may change its tensors in place (Megatron's schedule and cross entropy do);
    for tensors on another device it waits for that device, once a micro-batch.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int = 256 * 2**20,
        config: AuditConfig | None = None,
        *,
        samples: int = 8,
        min_steps: int = 100,
        max_disk_bytes: int = 2**30,
        compress: bool = False,
    ) -> None:
        bounds = {"max_bytes": max_bytes, "samples": samples, "min_steps": min_steps, "max_disk_bytes": max_disk_bytes}
        for name, bound in bounds.items():
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {bound!r}")
        self.directory = Path(directory)
        self.config = as_config(config)
        self._max_bytes = max_bytes
        self._samples = samples
        self._min_steps = min_steps
        self._max_disk_bytes = max_disk_bytes
        self._suffix = ".jsonl.gz" if compress else ".jsonl"
        self._open: list[KeptBatch] = []
        self._microbatches: set[int] = set()
        self._sealed: dict[int, list[KeptBatch]] = {}
        self._last_attempt: int | None = None
        self._told: set[str] = set()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copies that are held now, at most ``max_bytes``."""
        return sum(batch.nbytes for batches in self._steps() for batch in batches)

    def keep(self, batch: TokenBatch, microbatch: int | None = None) -> None:
        """Copy a micro-batch of the open step; a number that came before is left out, as the collector does it."""
        if batch.fault is not None or microbatch in self._microbatches:
            return
        try:
            with torch.inference_mode(False), torch.no_grad():
                new = KeptBatch.of(batch, microbatch, self.config)
                if new.shape.numel() and self._make_room(new):
                    self._open.append(new.copy())
        except Exception as error:  # evidence is never worth a training step
            self._tell("keep", f"a micro-batch could not be kept as evidence: {error}")
            return
        if microbatch is not None:
            self._microbatches.add(microbatch)

    def seal(self, step: int) -> None:
        """End the open step under its number; for an audit with ``lag=1``, whose verdict comes one step later.

        The step sealed before is held too, older ones are forgotten.
        """
        step = operator.index(step)
        self._sealed = {**dict(list(self._sealed.items())[-1:]), step: self._open}
        self._begin()

    def write(self, step: int, report: StepReport | None = None, rank: int = 0, *, force: bool = False) -> Path | None:
        """Write this rank's worst samples of the step sealed under that number, else of the open one.

        First come the samples of the report's worst tokens, in its order, then those of largest abs(dlogp). If tokens
        are of a class that must be empty, up to half of the places go to their samples. Where context parallelism cuts
        a sample, each rank writes its own part; ``sample_index`` and ``token_position`` join them.

        Args:
            step: the step's number.
            report: the group's report; without it a rank goes by what it holds.
            rank: global rank of this process.
            force: write also if the last attempt is less than ``min_steps`` ago.

        Returns:
            The file; None if there was nothing to write, it was too soon, or it could not be written.
        """
        step = operator.index(step)
        if not force and self._last_attempt is not None and 0 <= step - self._last_attempt < self._min_steps:
            return None
        self._last_attempt = step  # a failed one too: a full disk must not cost every step the work
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._write(step, report, rank)
        except Exception as error:
            self._tell("write", f"the evidence of step {step} could not be written to {self.directory}: {error}")
            return None

    def clear(self, step: int | None = None) -> None:
        """Forget a sealed step, or everything if no step is given."""
        if step is not None:
            self._sealed.pop(step, None)
            return
        self._sealed = {}
        self._begin()

    def _begin(self) -> None:
        self._open = []
        self._microbatches = set()

    def _steps(self) -> list[list[KeptBatch]]:
        return [*self._sealed.values(), self._open]

    def _make_room(self, new: KeptBatch) -> bool:
        """Let go of micro-batches that drift less than a new one until it fits; tell whether it does."""
        excess = self.kept_bytes + new.nbytes - self._max_bytes
        if excess <= 0:
            return True
        self._tell("bound", f"evidence is bounded to {self._max_bytes} bytes: micro-batches of least drift are let go")
        held = [(batches, batch) for batches in self._steps() for batch in batches if batch.drift < new.drift]
        drops = []
        for batches, batch in sorted(held, key=lambda place: place[1].drift):
            if excess <= 0:
                break
            drops.append((batches, batch))
            excess -= batch.nbytes
        if excess > 0:
            return False
        for batches, batch in drops:
            batches.remove(batch)
        return True

    def _write(self, step: int, report: StepReport | None, rank: int) -> Path | None:
        named = [] if report is None else [t.sample_index for t in report.worst_tokens if t.sample_index >= 0]
        samples = [sample for batch in self._sealed.get(step, self._open) for sample in samples_of(batch)]
        chosen = choose(samples, named, self._samples)
        if not chosen:
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"evidence_step{step:08d}_rank{rank:05d}{self._suffix}"
        others = (file for file in self.directory.glob(f"evidence_step*_rank{rank:05d}.jsonl*") if file != path)
        room = self._max_disk_bytes - sum(file.stat().st_size for file in others)
        lines = list(_fitting((sample.line(step, rank) for sample in chosen), room))
        if len(lines) < len(chosen):
            self._tell("disk", f"evidence in {self.directory} is bounded to {self._max_disk_bytes} bytes a rank")
        if not lines:
            return None
        _write_atomically(path, "".join(lines).encode("ascii"))
        return path

    def _tell(self, kind: str, sentence: str) -> None:
        """Log the first sentence of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s", sentence)


def choose(samples: Iterable[Sample], named: Sequence[int], count: int) -> list[Sample]:
    """Return at most ``count`` samples, worst first: those named, in that order, then by largest abs(dlogp).

    Samples with tokens of a class that must be empty are sure of half of the places, those with most of them first.
    """
    place = {index: place for place, index in enumerate(dict.fromkeys(named))}

    def by_drift(sample: Sample) -> tuple[int, float, int]:
        return (place.get(sample.sample_index, len(place)), -sample.abs_dlogp, sample.sample_index)

    drifting = sorted(samples, key=by_drift)
    faulty = sorted((sample for sample in drifting if sample.faulty), key=lambda sample: -sample.faulty)
    sure = {id(sample) for sample in faulty[: (count + 1) // 2]}
    rest = [sample for sample in drifting if id(sample) not in sure]
    taken = sure | {id(sample) for sample in rest[: count - len(sure)]}
    return [sample for sample in drifting if id(sample) in taken]


def _fitting(lines: Iterable[str], room: int) -> Iterator[str]:
    """Yield the lines that fit into so many bytes, each after those before it."""
    for line in lines:
        if len(line) <= room:  # a line is ASCII, and compression makes it shorter
            room -= len(line)
            yield line


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
