"""The group's side: one agreement at set-up, one SUM all-reduce a step. No other module starts a collective."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from rlk_audit.collector import Collector
from rlk_audit.config import MODES, AuditConfig
from rlk_audit.layout import StateLayout, stable_hash
from rlk_audit.report import LayoutMismatchError, StepReport
from rlk_audit.version import __version__

Group = dist.ProcessGroup | None
Result = TypeVar("Result")

_AGREEMENT_LENGTH = 64
"""int64 that every rank sends to agree; fixed for all versions, so that ranks of different ones can talk."""
_FAILED = -1
"""In the place of the mode: the rank could not be set up."""
_HOST_WORDS = 4
"""The last of them: the name of the rank's host."""


def is_distributed() -> bool:
    """Return whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def group_place(group: Group = None) -> tuple[int, int]:
    """Return (rank in the group, size of the group); (0, 1) without a process group."""
    if not is_distributed():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def global_rank() -> int:
    """Return the process's global rank; 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def as_group(group: Any) -> Group:
    """Return the process group of a mesh of one dimension, and a group as it is.

    Raises:
        TypeError: it is neither; of a mesh of several dimensions the text says which call gives a group.
    """
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise TypeError(
                f"group must be a process group, got a mesh of {group.ndim} dimensions; give one of them, as in "
                "mesh['dp'].get_group()"
            )
        found: Group = group.get_group()
        return found
    outside = is_distributed() and group is dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a process group or a mesh of one dimension, got {type(group).__name__}")
    member: Group = group
    return member


def refuse_another_groups_shards(values: Any, group: Group = None) -> None:
    """Refuse a DTensor whose tokens the group would count not at all or several times. No communication.

    Raises:
        ValueError: it is sharded over a mesh dimension whose ranks are not all in the group, or replicated over one of
            which several are.
    """
    if getattr(values, "placements", None) is None:
        return
    mesh = values.device_mesh
    members = set(dist.get_process_group_ranks(group))
    for dimension, placement in enumerate(values.placements):
        name = (mesh.mesh_dim_names or range(mesh.ndim))[dimension]
        peers = set(dist.get_process_group_ranks(mesh.get_group(dimension))) - {global_rank()}
        if placement.is_shard() and not peers <= members:
            raise ValueError(f"log-probs are sharded over {name!r}, so its ranks must be in the auditor's group")
        if placement.is_replicate() and peers & members:
            raise ValueError(
                f"log-probs are replicated over {name!r}, so the auditor's group would count each token several times; "
                "give it the group of the mesh dimensions that they are sharded over"
            )


@overload
def all_reduce(
    collector: Collector, group: Group = None, async_op: Literal[False] = False, *, step: int | None = None
) -> StepReport: ...


@overload
def all_reduce(
    collector: Collector, group: Group = None, *, async_op: Literal[True], step: int | None = None
) -> Pending: ...


def all_reduce(
    collector: Collector, group: Group = None, async_op: bool = False, *, step: int | None = None
) -> StepReport | Pending:
    """Collective: every rank of ``group`` must call this, whatever it collected. One SUM of one int64 vector.

    The first call with a collector, and the first after the group was made anew, also agrees on the settings: vectors
    of different length would end the process. So collectors are made and used alike on every rank.

    Args:
        collector: this rank's step; it is read when the call is made, and may be reset at once.
        group: data-parallel x context-parallel group; the default group if None; without any process group, or in a
            group of one rank, nothing is communicated.
        async_op: return a Pending at once, while the reduction goes on.
        step: the step's number, for the report, which warns of ranks that gave different ones.

    Raises:
        LayoutMismatchError: ranks packed with different settings (every rank raises).
        ValueError: this process is not in the group.
        RuntimeError: the reduction failed, as where a rank has ended; the backend's own failure is its cause.
    """
    group_rank, group_size = group_place(group)
    if group_rank < 0:
        raise ValueError("this process is not a rank of the group; only the group's ranks may reduce over it")
    if group_size > 1 and collector.agreed_group is not _identity(group):
        mark_agreed(collector, group, agree_on_layout(collector.config, group))
    vector = collector.pack(group_rank, group_size, global_rank(), step)
    work = None
    if group_size > 1:
        vector = vector.to(buffer_device(group, collector.device))
        work = dist.all_reduce(vector, op=dist.ReduceOp.SUM, group=group, async_op=True)
    pending = Pending(vector, work, collector.config, group_size, collector.hosts, step)
    return pending if async_op else pending.wait()


class Pending:
    """A reduction under way; ``wait`` gives its report."""

    def __init__(
        self,
        vector: Tensor,
        work: dist.Work | None,
        config: AuditConfig,
        group_size: int,
        hosts: Mapping[int, str] | None = None,
        step: int | None = None,
    ) -> None:
        self._vector = vector
        self._work = work
        self._config = config
        self.group_size = group_size
        self._hosts = hosts
        self.step = step
        self._report: StepReport | None = None
        self._host_copy = _PinnedCopy(vector, work) if vector.is_cuda else None

    @property
    def vector(self) -> Tensor:
        """The state vector: this rank's until ``wait``, then the group's sum."""
        return self._vector

    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""
        reduced = self._work is None or self._work.is_completed()
        return reduced and (self._host_copy is None or self._host_copy.done())

    def wait_at_most(self, seconds: float) -> StepReport | None:
        """Return the report if the reduction ends within a time, else None; raises what ``wait`` raises."""
        deadline = time.monotonic() + seconds
        while not self.done() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.wait() if self.done() else None

    def wait(self) -> StepReport:
        """Wait for the reduction and return the group's report, the same one each time."""
        if self._report is None:
            if self._work is not None:
                self._wait_for(self._work, "" if self.step is None else f" of step {self.step}")
            read = None if self._host_copy is None else self._host_copy.wait
            self._report = StepReport.from_vector(
                self._vector, self._config, self.group_size, step=self.step, read=read, hosts=self._hosts
            )
        return self._report

    @staticmethod
    def _wait_for(work: dist.Work, of_step: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"the audit's reduction{of_step} failed; has a rank of its group ended, or does one stand still? "
                f"({error})"
            ) from error


class _PinnedCopy:
    """A reduced vector on its way from CUDA to pinned memory, behind the reduction on a stream of its own.

    So a report that is read a step later waits for nothing that the training has queued since.
    """

    def __init__(self, vector: Tensor, work: dist.Work | None) -> None:
        stream = torch.cuda.Stream(vector.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(vector.device))
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()  # the stream waits, not the host
            self._host = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(stream)
        vector.record_stream(stream)

    def done(self) -> bool:
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        self._copied.synchronize()
        return self._host


def buffer_device(group: Group, device: torch.device) -> torch.device:
    """Return where the group's backend needs a buffer: on the collector's device if it can be reduced there.

    Raises:
        RuntimeError: the backend reduces neither CPU nor CUDA tensors.
    """
    backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))
    if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    if "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    raise RuntimeError(
        f"the group's backend {backends} reduces neither CPU nor CUDA tensors; pass a gloo or NCCL group"
    )


def replicas_that_differ(collector: Collector | None, group: Group) -> list[int]:
    """Collective: every rank of ``group`` must call this. One MAX all-reduce of two int64, more on a difference.

    Args:
        collector: this rank's step; the ranks of the group are meant to have measured the same tokens. None where the
            audit has ended: such a rank differs, and still takes part.
        group: the tensor-parallel group.

    Returns:
        The global ranks that measured something else than the first rank of the group; empty where all agree.
    """
    _, group_size = group_place(group)
    if group_size == 1:
        return []
    digest = torch.tensor(0, device="cpu") if collector is None else collector.digest()
    # Where the audit has ended there is no collector, and every rank must choose the same backend.
    digest = digest.to(buffer_device(group, torch.device("cpu")))
    spread = torch.stack([digest, -digest])
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=group)
    if int(spread.sum()) == 0:
        return []
    # Every rank sees the same difference and so comes here.
    told = torch.stack([digest, torch.full_like(digest, global_rank())])
    rows = [torch.zeros_like(told) for _ in range(group_size)]
    dist.all_gather(rows, told, group=group)
    table = torch.stack(rows).tolist()
    return [rank for value, rank in table if value != table[0][0]]


@contextmanager
def launched_group() -> Iterator[Group]:
    """Collective: every process that torchrun launched must enter this. A gloo group of them, or None without any."""
    if is_distributed() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gather_objects(value: Any, group: Group = None) -> list[Any]:
    """Collective: every rank of ``group`` must call this. Return every rank's value, in group order.

    Values are pickled: between the processes of one program only.
    """
    size = group_place(group)[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def on_first_rank(work: Callable[[], Result], group: Group = None) -> Result:
    """Collective: every rank of ``group`` must call this. Work on the first rank alone; every rank returns its result.

    Raises:
        ValueError, OSError: the first rank's own, on every rank.
    """
    told: Any = None
    if group_place(group)[0] == 0:
        try:
            told = work()
        except (ValueError, OSError) as error:
            told = error
    told = gather_objects(told, group)[0]
    if isinstance(told, Exception):
        raise told
    result: Result = told
    return result


def world_group() -> Group:
    """Return the group of all processes; None without a process group."""
    return dist.group.WORLD if is_distributed() else None


def own_gloo_group(group: Group = None) -> Group:
    """Collective: every rank of ``group`` must call this. Return a new gloo group of the same ranks and timeout."""
    if not is_distributed():
        return None
    own = group if group is not None else dist.group.WORLD
    ranks, timeout = dist.get_process_group_ranks(own), _timeout(own)
    created: Group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return created


def _timeout(group: Any) -> timedelta | None:
    """Return how long a group's collectives may take; None, which stands for the default, where it does not say."""
    try:
        found: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None
    return found


def share_failure(message: str | None, group: Group = None) -> str | None:
    """Collective: every rank of ``group`` must call this. One MAX all-reduce of (failed, origin).

    Args:
        message: why this rank's step failed; None where it passed or where this rank holds no verdict.
        group: the model-parallel group (tensor x pipeline parallel).

    Returns:
        The message of the highest-ranked rank that failed, the same on every rank, or None.
    """
    _, group_size = group_place(group)
    if group_size == 1:
        return message
    origin = -1 if message is None else global_rank()
    verdict = torch.tensor([message is not None, origin], dtype=torch.int64, device="cpu")
    verdict = verdict.to(buffer_device(group, torch.device("cpu")))
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
    failed, origin = verdict.tolist()
    if not failed:
        return None
    # Only now, when every rank knows that the run ends, is the text itself sent.
    texts = [message]
    dist.broadcast_object_list(texts, src=origin, group=group)
    return texts[0]


def mark_agreed(collector: Collector, group: Group = None, hosts: Mapping[int, str] | None = None) -> None:
    """Note that every rank of the group agreed on the collector's settings, and their hosts. No communication."""
    collector.agreed_group = _identity(group)
    collector.hosts = hosts or {}


def _identity(group: Group) -> object:
    """Return an object that is the group's own; the default group is another one once it is made anew."""
    return group if group is not None or not is_distributed() else dist.group.WORLD


def agree_on_layout(
    config: AuditConfig | None,
    group: Group = None,
    *,
    failure: Exception | None = None,
    further: Mapping[str, Any] | None = None,
) -> dict[int, str]:
    """Collective: every rank of ``group`` must call this once, also where its mode is ``off`` or its set-up failed.

    Exchanges a hash of each setting, of a fixed size, so that ranks never reduce vectors of different length.

    Args:
        config: this rank's settings; None where they could not be read.
        group: whose ranks agree; the default group if None.
        failure: why this rank could not be set up; then no rank is, and none waits for another.
        further: name -> value of other settings that decide which collectives are started.

    Returns:
        Global rank -> name of its host, at most 32 bytes of it.

    Raises:
        LayoutMismatchError: settings differ, unless every rank is ``off``, or some ranks failed. Every rank raises the
            same text.
        Exception: ``failure`` itself where every rank failed.
    """
    _, group_size = group_place(group)
    if group_size == 1:
        if failure is not None:
            raise failure
        return {global_rank(): _text(_host_words())}
    config = config or AuditConfig()
    values = config.agreed_values() | {name: str(value) for name, value in (further or {}).items()}
    values |= {"version": __version__, "group_size": str(group_size)}
    device = buffer_device(group, torch.device("cpu"))
    mine = _agreement_row(values, _FAILED if failure is not None else MODES.index(config.mode)).to(device)
    rows = [torch.zeros_like(mine) for _ in range(group_size)]
    dist.all_gather(rows, mine, group=group)
    table = torch.stack(rows).cpu()
    ranks, modes, hashes = table[:, 0].tolist(), table[:, 1], table[:, 2:-_HOST_WORDS]
    if bool((modes == _FAILED).any()):
        _raise_failures(failure, ranks, group)
    if bool((modes == MODES.index("off")).all()) or bool((hashes == hashes[0]).all()):
        return dict(zip(ranks, map(_text, table[:, -_HOST_WORDS:]), strict=True))
    # Every rank sees the same table and so comes here; now the values themselves can be told.
    texts: list[dict[str, str]] = [{} for _ in range(group_size)]
    dist.all_gather_object(texts, values, group=group)
    raise LayoutMismatchError(_difference(texts, ranks))


def _raise_failures(failure: Exception | None, ranks: list[int], group: Group) -> NoReturn:
    """Collective: every rank of ``group`` must call this; each raises the failures of all, or its own if all failed."""
    texts: list[str | None] = [None] * len(ranks)
    dist.all_gather_object(texts, None if failure is None else str(failure), group=group)
    if failure is not None and None not in texts:
        raise failure
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            holders[text].append(rank)
    told = "; ".join(f"{text} (on {_ranks(held)})" for text, held in holders.items())
    raise LayoutMismatchError(f"the audit is set up on no rank, since it failed on some: {told}") from failure


def _agreement_row(values: dict[str, str], mode: int) -> Tensor:
    hashes = [stable_hash(f"{name}={values[name]}") for name in sorted(values)]
    row = torch.zeros(_AGREEMENT_LENGTH, dtype=torch.int64, device="cpu")
    row[: 2 + len(hashes)] = torch.tensor([global_rank(), mode, *hashes], device="cpu")
    row[-_HOST_WORDS:] = _host_words()
    return row


def _host_words() -> Tensor:
    name = socket.gethostname().encode()[: 8 * _HOST_WORDS]
    return torch.frombuffer(bytearray(name.ljust(8 * _HOST_WORDS, b"\0")), dtype=torch.int64).clone()


def _text(words: Tensor) -> str:
    return words.contiguous().numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _difference(texts: list[dict[str, str]], ranks: list[int]) -> str:
    """Name the settings that differ, their values and on which ranks, most common value first."""
    parts = []
    for name in sorted({name for text in texts for name in text}):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(ranks, texts, strict=True):
            holders[text.get(name, "not known")].append(rank)
        if len(holders) > 1:
            shares = sorted(holders.items(), key=lambda share: (-len(share[1]), share[1]))
            parts.append(f"{name} is " + ", ".join(f"{value} on {_ranks(held)}" for value, held in shares))
    return (
        f"the audit's settings differ over the ranks: {'; '.join(parts)}; give every rank the same settings "
        "and version (an environment variable that did not reach one node is the common cause)"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown


def state_bytes(config: AuditConfig, group: Group = None) -> dict[str, int]:
    """Return the bytes of each part of the vector that a group of this size reduces."""
    return StateLayout(config, group_place(group)[1]).size_table()
