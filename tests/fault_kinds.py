"""What may go wrong in an audited run, a function a kind: fault_job.py runs it on every rank, each asserts for itself.

Where a kind is about data, it is the last rank's, in the second of three steps; the first rank writes.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from oracle import Sample, audit
from sink_reports import files_of_at_most, lines_of
from strategies import apply, as_flat, as_lists, as_padded, assert_reports, random_samples

from rlk_audit import AuditConfig, Auditor, LayoutMismatchError, StepReport, TokenBatch
from rlk_audit.allreduce import own_gloo_group
from rlk_audit.integrations.set_up import make_auditor
from rlk_audit.sinks import JsonlSink
from rlk_audit.version import __version__

MOUNTS = "RLK_FAULT_MOUNTS"
"""Set where mounts are the launch's own and end with it."""
LOG = "audit.jsonl"
FATAL_STEP = 4
WAKE_SECONDS = 20.0
SIGNAL_TIMEOUT = 5.0
"""Of the process group where a rank ends or stands still, in seconds."""

MicroBatches = list[list[Sample]]
Update = dict[str, Any] | TokenBatch


@dataclass(frozen=True)
class Kind:
    """A fault: what is done, in words, and the function that does it and returns what was seen.

    Attributes:
        alone: it ends a rank, so it has a launch of its own, which fails.
        timeout: of the process group, in seconds.
    """

    name: str
    done: str
    act: Callable[[Place], str]
    alone: bool = False
    timeout: float = 30.0


KINDS: dict[str, Kind] = {}


@dataclass
class Place:
    """Where this process stands, the folder that all ranks share, and what it logged."""

    rank: int
    size: int
    folder: Path
    log: list[str]

    @property
    def odd(self) -> int:
        return self.size - 1

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def kind(name: str, done: str, **options: Any) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    def register(act: Callable[[Place], str]) -> Callable[[Place], str]:
        KINDS[name] = Kind(name, done, act, **options)
        return act

    return register


# --- a run beside the oracle ------------------------------------------------------------------------------------------


def load(step: int, rank: int, count: int = 2) -> MicroBatches:
    """What a rank has in a step, the same wherever it is asked for."""
    made = []
    for microbatch in range(count):
        first = 10_000 * step + 1_000 * rank + 100 * microbatch
        group = random_samples(random.Random(first), 4, faulty=False)
        made.append([replace(s, sample_index=first + i, rollout_token_ids=s.token_ids) for i, s in enumerate(group)])
    return made


def give(auditor: Auditor, batches: MicroBatches, first: int = 0) -> None:
    for microbatch, group in enumerate(batches, first):
        auditor.update(as_lists(group, random.Random(0))[0], microbatch=microbatch)


@dataclass
class Odd:
    """The odd rank's step: what the oracle counts of it, what it warns of beside, and how it is given."""

    counted: MicroBatches = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    given: Callable[[Auditor], None] | None = None


class Run:
    """An audited run of some ranks; every report is compared with the oracle, on every one of them."""

    def __init__(
        self,
        place: Place,
        auditor: Auditor,
        ranks: Sequence[int] | None = None,
        loads: Callable[[int, int], MicroBatches] = load,
    ) -> None:
        self.place, self.auditor, self.loads = place, auditor, loads
        self.ranks = range(place.size) if ranks is None else ranks
        self.reports: list[StepReport] = []
        self.samples: list[Sample] = []
        self.warnings: Counter[str] = Counter()
        self.ahead = 0
        """How many steps this rank is ahead of the others."""
        self._begun: list[tuple[list[Sample], dict[str, int]]] = []

    def step(self, number: int, odd: Odd | None = None) -> StepReport | None:
        samples: list[Sample] = []
        for rank in self.ranks:
            own = odd if odd is not None and rank == self.place.odd else Odd(self.loads(number, rank))
            if rank == self.place.rank:
                (own.given or (lambda auditor, own=own: give(auditor, own.counted)))(self.auditor)
            samples += [sample for group in own.counted for sample in group]
        self._begun.append((samples, {} if odd is None else odd.warnings))
        report = self.auditor.step(number + self.ahead)
        if report is not None:
            self._check(report)
        return report

    def _check(self, report: StepReport) -> None:
        samples, warnings = self._begun.pop(0)
        expected = audit(samples)
        expected.warnings.update(warnings)
        assert_reports(report, expected)
        self.reports.append(report)
        self.samples += samples
        self.warnings.update(warnings)

    def check_total(self) -> StepReport:
        """The run's total is that of all its steps."""
        total = self.auditor.run_total()
        assert total is not None
        expected = audit(self.samples)
        expected.warnings.update(self.warnings)
        assert_reports(total, expected)
        return total

    def finish(self, *earlier: StepReport) -> None:
        """Close, and find every report in the log, behind those that are older: whole, in order, none twice."""
        total = self.check_total()
        self.auditor.close()
        dist.barrier()
        reports = [*earlier, *self.reports, total]
        assert lines_of(self.place.folder / LOG) == [report.to_dict() for report in reports]


def logged(place: Place, **options: Any) -> Auditor:
    """An auditor that writes to the folder."""
    sinks = [JsonlSink(place.folder / LOG)] if place.rank == 0 else []
    return Auditor(options.pop("config", AuditConfig()), sinks=sinks, **options)


def seen(report: StepReport | None) -> str:
    assert report is not None
    told = [f"{code} {count}" for code, count in report.warnings.items()] or ["no warning"]
    metrics = report.metrics
    compared = f"{metrics['compared_token_count']} of {metrics['active_token_count']} active tokens are compared"
    return f"{', '.join(told)}; {compared}" + ("" if report.complete else "; the step says that it is incomplete")


def said(place: Place, rank: int) -> str:
    """What a rank's log said of the fault, as every rank tells it."""
    own = [message for message in place.gathered(place.log)[rank] if not message.startswith("step ")]
    return "".join(f'; rank {rank} logs "{message}"' for message in own)


# --- data -------------------------------------------------------------------------------------------------------------


def odd_data(name: str, done: str) -> Callable[[Callable[[MicroBatches], Odd]], None]:
    """Register a kind of data: a function of what the odd rank would have given."""

    def register(change: Callable[[MicroBatches], Odd]) -> None:
        def act(place: Place) -> str:
            run = Run(place, logged(place))
            run.step(1)
            report = run.step(2, change(load(2, place.odd)))
            run.step(3)
            run.finish()
            return seen(report) + said(place, place.odd)

        KINDS[name] = Kind(name, done, act)

    return register


def flat(batches: MicroBatches) -> dict[str, Any]:
    (update,) = as_flat([sample for group in batches for sample in group], random.Random(0))
    return update


def masked(batches: MicroBatches) -> MicroBatches:
    return [[replace(sample, mask=[0] * len(sample)) for sample in group] for group in batches]


def as_given(*updates: Update) -> Callable[[Auditor], None]:
    def given(auditor: Auditor) -> None:
        for update in updates:
            apply(auditor, update)  # type: ignore[arg-type]

    return given


@odd_data("update raises", "the measurement of a rank's second micro-batch raises half-way")
def _(batches: MicroBatches) -> Odd:
    def given(auditor: Auditor) -> None:
        give(auditor, batches[:1])
        measure = auditor.collector._measure_tokens

        def broken(*args: Any) -> None:
            measure(*args)
            raise RuntimeError("the device went away")

        with mock.patch.object(auditor.collector, "_measure_tokens", broken):
            give(auditor, batches[1:], first=1)

    return Odd(batches[:1], {"update_failed": 1}, given)


@odd_data("unequal shapes", "a rank's rollout log-probabilities are one too few")
def _(batches: MicroBatches) -> Odd:
    update = flat(batches)
    short = update["rollout_log_probs"][:-1]
    return Odd([], {"update_failed": 1}, as_given(update | {"rollout_log_probs": short}))


@odd_data("no data", "a rank has no micro-batch in the whole step")
def _(batches: MicroBatches) -> Odd:
    return Odd()


@odd_data("other micro-batch counts", "a rank has five micro-batches, the others have two")
def _(batches: MicroBatches) -> Odd:
    return Odd(load(2, 9, count=5))


@odd_data("NaN storm", "every train log-probability of a rank is NaN in one micro-batch, every rollout's in the other")
def _(batches: MicroBatches) -> Odd:
    nan = float("nan")
    train = [replace(sample, train=[nan] * len(sample)) for sample in batches[0]]
    return Odd([train, [replace(sample, rollout=[nan] * len(sample)) for sample in batches[1]]])


@odd_data("infinities", "a rank's log-probabilities are inf and -inf, of either side in turn")
def _(batches: MicroBatches) -> Odd:
    inf = float("inf")
    train = [replace(s, train=[(-1) ** i * inf for i in range(len(s))]) for s in batches[0]]
    return Odd([train, [replace(s, rollout=[(-1) ** i * inf for i in range(len(s))]) for s in batches[1]]])


@odd_data("subnormal numbers", "a rank's log-probabilities are subnormal, in float32 and in float64")
def _(batches: MicroBatches) -> Odd:
    tiny = [[-(2.0**-149) * i for i in range(40)], [-(2.0**-1074) * i for i in range(40)]]
    samples = [Sample(values, values[::-1], sample_index=25_000 + i) for i, values in enumerate(tiny)]
    updates = [
        {
            "train_log_probs": torch.tensor(sample.train, dtype=dtype),
            "rollout_log_probs": torch.tensor(sample.rollout, dtype=dtype),
            "mask": torch.ones(40),
            "valid": torch.ones(40),
            "sample_index": sample.sample_index,
            "token_position": torch.arange(40),
        }
        for sample, dtype in zip(samples, (torch.float32, torch.float64), strict=True)
    ]
    return Odd([samples], {}, as_given(*updates))


@odd_data("all masked on a rank", "a rank's mask is 0 everywhere")
def _(batches: MicroBatches) -> Odd:
    return Odd(masked(batches))


@odd_data("no rollout log-probabilities", "a rank's engine returns none at all")
def _(batches: MicroBatches) -> Odd:
    missing = [[replace(sample, rollout=[None] * len(sample)) for sample in group] for group in batches]
    update = flat(missing) | {"rollout_log_probs": None}
    return Odd(missing, {"missing_rollout_log_probs": 1}, as_given(update))


for dtype in (torch.int32, torch.bool):

    @odd_data(f"{str(dtype).removeprefix('torch.')} mask", "a rank's mask is of this type")
    def _(batches: MicroBatches, dtype: torch.dtype = dtype) -> Odd:
        update = flat(batches)
        return Odd(batches, {}, as_given(update | {"mask": update["mask"].to(dtype)}))


@odd_data("0-dim tensors", "a rank gives single tokens as tensors without a dimension")
def _(batches: MicroBatches) -> Odd:
    update = flat(batches)
    update.pop("whole_slots")
    count = len(update["mask"])
    return Odd(batches, {}, as_given(*({n: values[i] for n, values in update.items()} for i in range(count))))


@odd_data("non-contiguous tensors", "a rank's tensors are transposed, or every second entry of others")
def _(batches: MicroBatches) -> Odd:
    (padded,) = as_padded(batches[0], random.Random(0))
    columns = {
        n: v.t().contiguous().t() for n, v in vars(padded).items() if isinstance(v, torch.Tensor) and v.dim() > 1
    }
    strided = {name: values.repeat_interleave(2)[::2] for name, values in flat(batches[1:]).items()}
    return Odd(batches, {}, as_given(replace(padded, **columns), strided))


@odd_data("tensors that require grad", "a rank's train log-probabilities are part of a graph, which is used afterwards")
def _(batches: MicroBatches) -> Odd:
    def given(auditor: Auditor) -> None:
        update = flat(batches)
        leaf = update["train_log_probs"].clone().requires_grad_()
        scored = leaf * 1.0
        apply(auditor, update | {"train_log_probs": scored})  # type: ignore[arg-type]
        scored.sum().backward()
        assert torch.equal(leaf.grad, torch.ones_like(leaf))

    return Odd(batches, {}, given)


@odd_data("inference tensors", "a rank's tensors were made in inference mode, where the update is made too")
def _(batches: MicroBatches) -> Odd:
    def given(auditor: Auditor) -> None:
        with torch.inference_mode():
            apply(auditor, {name: values.clone() for name, values in flat(batches).items()})  # type: ignore[arg-type]

    return Odd(batches, {}, given)


@odd_data("tensors on another device", "a rank's tensors are on the meta device, which stands for one out of reach")
def _(batches: MicroBatches) -> Odd:
    update = {name: values.to("meta") for name, values in flat(batches).items()}
    return Odd([], {"update_failed": 1}, as_given(update))


@odd_data("rerun and recompute", "a rank scores both micro-batches again, with other values")
def _(batches: MicroBatches) -> Odd:
    def given(auditor: Auditor) -> None:
        give(auditor, batches)
        give(auditor, load(7, 0))

    return Odd(batches, {"duplicate_microbatch": 2}, given)


@odd_data("failed update given again", "a rank's micro-batch fails and is given again, whole")
def _(batches: MicroBatches) -> Odd:
    def given(auditor: Auditor) -> None:
        auditor.update(torch.zeros(3), torch.zeros(2), torch.ones(3), microbatch=0)
        give(auditor, batches)

    return Odd(batches, {"update_failed": 1}, given)


@kind("a step skipped", "a rank does not end its second step, so from then on it is one ahead of the others")
def _(place: Place) -> str:
    run = Run(place, logged(place))
    run.step(1)
    run.ahead = int(place.rank == place.odd)

    def both(auditor: Auditor) -> None:
        give(auditor, load(2, place.odd))
        give(auditor, load(3, place.odd), first=2)

    apart = {"step_mismatch": 1}
    report = run.step(2, Odd([*load(2, place.odd), *load(3, place.odd)], apart, both))
    run.step(3, Odd(load(4, place.odd), apart))
    run.warnings["step_mismatch"] = 1  # of a run too it is a flag, and no count
    for late in run.reports[1:]:
        late.step -= run.ahead  # in the log it has the number that the writer gave it
    run.finish()
    assert report is not None
    assert [rank.step for rank in report.rank_table] == [2 + (rank == place.odd) for rank in range(place.size)]
    told = [message for message in place.gathered(place.log)[0] if "step_mismatch" in message]
    assert len(told) == 1, "once in some steps"
    return f'{seen(report)}; rank 0 logs "{told[0]}"'


@kind("all masked everywhere", "the mask is 0 on every rank in the second step")
def _(place: Place) -> str:
    def loads(step: int, rank: int) -> MicroBatches:
        return masked(load(step, rank))

    run = Run(place, logged(place))
    run.step(1)
    run.loads = loads
    report = run.step(2)
    run.loads = load
    run.step(3)
    run.finish()
    assert report is not None and report.to_dict()["metrics"]["abs_dlogp_mean"] is None
    return seen(report) + "; every mean, quantile and extreme is null"


# --- settings ---------------------------------------------------------------------------------------------------------


def refused(place: Place, make: Callable[[], Auditor]) -> str:
    """Every rank raises the same sentence, and the group can be used afterwards."""
    begin = time.monotonic()
    try:
        make()
    except LayoutMismatchError as error:
        sentence = str(error)
    else:
        raise AssertionError("the settings were accepted")
    waited = max(place.gathered(time.monotonic() - begin))
    assert place.gathered(sentence) == [sentence] * place.size
    run = Run(place, logged(place))
    for number in (1, 2, 3):
        run.step(number)
    run.finish()
    return f'every rank raises LayoutMismatchError at set-up, {waited:.1f} s later: "{sentence}"'


def other_settings(name: str, done: str, **changes: Any) -> None:
    def act(place: Place) -> str:
        config = AuditConfig(**changes) if place.rank == place.odd else AuditConfig()
        return refused(place, lambda: Auditor(config))

    KINDS[name] = Kind(name, done, act)


other_settings("other configuration", "a rank's eps_low is another", eps_low=0.3)
other_settings("other quantiles", "a rank asks for one quantile, the others for four", quantiles=("0.5",))
other_settings("mode off on a rank", "as where a variable did not reach one node", mode="off")


@kind("other package version", "a rank runs another version of the package")
def _(place: Place) -> str:
    def make() -> Auditor:
        version = "0.0.1" if place.rank == place.odd else __version__
        with mock.patch("rlk_audit.allreduce.__version__", version):
            return Auditor(AuditConfig())

    return refused(place, make)


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[bool]:
    """Mount a small file system of its own in memory, where that ends with the launch; else say that there is none."""
    path.mkdir()
    may = MOUNTS in os.environ
    if may:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield may
    finally:
        if may:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def full(folder: Path, mount: bool) -> Iterator[None]:
    """No room in the folder, and then room again."""
    if not mount:
        with files_of_at_most((folder / LOG).stat().st_size + 100):
            yield
        return
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    yield
    filler.unlink()


@kind("disk full", "the file system of the log is full in the second step")
def _(place: Place) -> str:
    disk = replace(place, folder=place.folder / "disk")
    with mounted(disk.folder, "size=128k") if place.rank == 0 else contextlib.nullcontext(False) as mount:
        dist.barrier()
        run = Run(disk, logged(disk))
        run.step(1)
        with full(disk.folder, mount) if place.rank == 0 else contextlib.nullcontext():
            run.step(2)
        run.step(3)
        total = run.check_total()
        run.auditor.close()
        if place.rank == 0:
            assert lines_of(disk.folder / LOG) == [report.to_dict() for report in (*run.reports, total)]
        way = "a tmpfs of 128 KiB" if place.gathered(mount)[0] else "RLIMIT_FSIZE stands for it"
        return f"({way}) no rank stops; the line of step 2 is written with that of step 3{said(place, 0)}"


class Broken:
    def write(self, report: StepReport) -> None:
        raise ConnectionError("the server is away")

    def close(self) -> None:
        raise ConnectionError("the server is away")


@kind("sink fails", "a sink raises in every write and in its close")
def _(place: Place) -> str:
    sinks = [Broken(), JsonlSink(place.folder / LOG)] if place.rank == 0 else []
    run = Run(place, Auditor(AuditConfig(), sinks=sinks))
    for number in (1, 2, 3):
        run.step(number)
    run.finish()
    return f"no rank stops, and the other sink has every line{said(place, 0)}"


@kind("folder deleted", "the log's folder is deleted after the first step")
def _(place: Place) -> str:
    inner = replace(place, folder=place.folder / "run")
    run = Run(inner, logged(inner))
    run.step(1)
    if place.rank == 0:
        shutil.rmtree(inner.folder)
    run.step(2)
    run.step(3)
    del run.reports[0]
    run.finish()
    return f"the folder is made anew and holds every step from the second on{said(place, 0)}"


@kind("read-only folder", "the writing rank's output folder is read-only at set-up")
def _(place: Place) -> str:
    folder = place.folder / "disk"
    with mounted(folder, "size=64k,ro") if place.rank == 0 else contextlib.nullcontext(False) as mount:
        target = folder if place.gathered(mount)[0] else Path("/proc/1")
        names = {"RLK_AUDIT_SINKS": "jsonl", "RLK_AUDIT_OUTPUT_DIR": str(target), "RLK_AUDIT_MODE": "audit"}
        with mock.patch.dict(os.environ, names):
            told = refused(place, make_auditor)
    return ("(a read-only tmpfs) " if place.gathered(mount)[0] else "(/proc stands for it) ") + told


@kind("half a line left behind", "the run before was ended while it wrote a line")
def _(place: Place) -> str:
    first = Run(place, logged(place))
    first.step(1)
    first.step(2)
    dist.barrier()  # every rank has what it expects to find
    path = place.folder / LOG
    if place.rank == 0:
        path.write_bytes(path.read_bytes()[:-100])
    second = Run(place, logged(place))
    second.step(2)
    second.step(3)
    second.finish(first.reports[0])
    return "the half line is cut off, the whole ones before it stay, and the run goes on behind them"


@kind("two runs in one folder", "two runs write 40 steps each to one log at once")
def _(place: Place) -> str:
    group = [dist.new_group([rank]) for rank in range(place.size)][place.rank]
    runs, steps = range(2), range(1, 41)
    if place.rank in runs:
        config = AuditConfig(metadata={"run": str(place.rank)})
        run = Run(place, Auditor(config, group, [JsonlSink(place.folder / LOG)]), ranks=[place.rank])
        for number in steps:
            run.step(number)
        run.check_total()
        run.auditor.close()
    dist.barrier()
    lines = lines_of(place.folder / LOG)
    for rank in runs:
        assert [line["step"] for line in lines if line["metadata"] == {"run": str(rank)}] == [*steps, None]
    assert len(lines) == 2 * (len(steps) + 1)
    return f"all {len(lines)} lines are there and whole; `metadata` tells the runs apart"


# --- steps and groups -------------------------------------------------------------------------------------------------


@kind("clock stepping back", "the wall clock of every rank goes back an hour at each look")
def _(place: Place) -> str:
    looks = range(2_000_000_000, 0, -3600)
    with mock.patch("time.time", side_effect=map(float, looks)), mock.patch("time.time_ns", side_effect=looks):
        run = Run(place, logged(place))
        for number in (1, 2, 3):
            run.step(number)
        run.finish()
    return "nothing changes: no report holds a time, and what waits goes by the monotonic clock"


@kind("step number that repeats", "a step number comes twice, as after a rollback")
def _(place: Place) -> str:
    run = Run(place, logged(place))
    for number in (1, 2, 2, 3):
        run.step(number)
    run.finish()
    return "both steps are in the log, in their order, and in the run's total"


@kind("resume with another world size", "a run of all ranks but one is saved, and taken up by all")
def _(place: Place) -> str:
    fewer = list(range(place.size - 1))
    group = dist.new_group(fewer)
    saved, earlier = place.folder / "state.pt", []
    if place.rank in fewer:
        first = Run(place, logged(place, group=group), ranks=fewer)
        first.step(1)
        first.step(2)
        earlier, samples = first.reports, first.samples
        if place.rank == 0:
            torch.save(first.auditor.state_dict(), saved)
            earlier.append(first.check_total())
        first.auditor.close()
    earlier, samples = place.gathered((list(map(StepReport.to_dict, earlier)), locals().get("samples")))[0]
    second = Run(place, logged(place))
    second.auditor.load_state_dict(torch.load(saved, weights_only=True))
    second.samples += samples
    second.step(3)
    second.step(4)
    second.finish(*map(StepReport.from_dict, earlier))
    return "the log goes on, and the run's total is that of all four steps"


@kind("process group made anew", "the process group is destroyed and made again, between two steps of one auditor")
def _(place: Place) -> str:
    run = Run(place, logged(place))
    run.step(1)
    place.gathered(None)  # nobody leaves while another still reduces
    backend = dist.get_backend()
    dist.destroy_process_group()
    # A store of its own: keys of the first group's rendezvous are still in torchrun's.
    store = dist.FileStore(str(place.folder / "store"), place.size)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
    run.step(2)
    run.step(3)
    run.finish()
    return "the ranks agree anew with the next reduction, and no step is lost"


# --- a rank that ends or stands still ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signalled:
    """A rank gets a signal while the others wait for it in the reduction."""

    sent: signal.Signals
    victim: int
    lag: int = 0
    side: bool = False

    @property
    def ends(self) -> bool:
        return self.sent != signal.SIGSTOP

    def __call__(self, place: Place) -> str:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if place.rank == self.victim else signal.SIG_IGN)
        victim = place.gathered(os.getpid())[self.victim]
        config, group = AuditConfig(lag=self.lag), own_gloo_group(None) if self.side else None
        run = Run(place, logged(place, config=config, group=group, side_group=self.side))
        for number in range(1, FATAL_STEP):
            run.step(number)
            dist.barrier()  # the training's own
        if place.rank == self.victim:
            give(run.auditor, load(FATAL_STEP, place.rank))
            time.sleep(0.5)
            os.kill(os.getpid(), self.sent)
        told = self._go_on(run)
        self._find_in_log(run)
        if not self.ends and place.rank != self.victim:
            os.kill(victim, signal.SIGCONT)
            _wait_for(place.folder / f"rank{self.victim}.json")  # torchrun ends it as soon as this rank ends
        return told

    def _go_on(self, run: Run) -> str:
        """Go on until the audit or the training stops this rank; say which of them did, how, and after how long."""
        begin, number = time.monotonic(), FATAL_STEP
        told = 'the training goes on; after {waited:.1f} s the log says "{sentence}"'
        try:
            for number in range(FATAL_STEP, FATAL_STEP + 1 + self.lag):
                run.step(number)
            assert self.side and run.auditor.collector is None, "a step was reduced without a rank"
            (sentence,) = run.place.log
        except RuntimeError as error:
            assert not self.side
            told, sentence = 'step {number} raises after {waited:.1f} s: "{sentence}"', str(error)
        waited = time.monotonic() - begin
        assert waited < 3 * SIGNAL_TIMEOUT and "has a rank of its group ended, or does one stand still?" in sentence
        return told.format(number=number, waited=waited, sentence=sentence)

    def _find_in_log(self, run: Run) -> None:
        """Every step that was reported before is in the log, and whole."""
        assert len(run.reports) == FATAL_STEP - 1
        total = run.check_total()
        run.auditor.close()
        if run.place.rank == 0:
            reports = [*run.reports, total]
            assert lines_of(run.place.folder / LOG) == [report.to_dict() for report in reports]


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAKE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


for signalled, done in (
    (Signalled(signal.SIGKILL, 0), "the writing rank is killed"),
    (Signalled(signal.SIGKILL, 1), "another rank is killed"),
    (Signalled(signal.SIGKILL, 2, lag=1, side=True), "a rank is killed; `lag=1` and a group of the audit's own"),
    (Signalled(signal.SIGTERM, 1), "a rank is told to end"),
    (Signalled(signal.SIGSTOP, 1), "a rank stands still, and goes on when the others have stopped waiting"),
    (Signalled(signal.SIGSTOP, 1, side=True), "a rank stands still; the audit has a group of its own"),
):
    name = f"{signalled.sent.name} of rank {signalled.victim}" + (", side group" if signalled.side else "")
    KINDS[name] = Kind(name, done, signalled, alone=True, timeout=SIGNAL_TIMEOUT)
