"""Views of runs for the tests of the page: real log-probabilities, recorded, through real collectors."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlk_audit import AuditConfig, Auditor, Collector, StepReport, TokenBatch
from rlk_audit.diagnose import diagnose
from rlk_audit.finding import Finding
from rlk_audit.report import WorstToken
from rlk_audit.run_total import RunTotal
from rlk_audit.run_view import Causes, Density, Excerpt, RunView

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "diagnosis"))

import faults
import recordings

RECORDING = recordings.PAIRS / "tune" / "s1.npz"
CONFIG = AuditConfig(
    limits={"abs_dlogp_p99": 0.15},
    samples_per_step=80,
    breakdowns={"engine": 4, "weight_lag": 3, "position": "auto", "confidence": "auto"},
)
HEALTHY = next(kind for kind in faults.HEALTHY if kind.name == "bf16 engine")
STALE_ENGINE = next(kind for kind in faults.SINGLE if kind.name == "one engine stale, large move")
WORDS = (
    "Let",
    " x",
    " =",
    " 12",
    ".",
    " Then",
    "\n",
    " we",
    " add",
    " (",
    "a",
    "+",
    "b",
    ")",
    " to",
    " get",
    "\t",
    "é",
)


def recorded_view(kinds: list[faults.Kind], title: str = "recorded run", config: AuditConfig = CONFIG) -> RunView:
    """One step for each kind, with everything that a view can hold."""
    recording = recordings.read(RECORDING)
    total, steps, causes, excerpts = RunTotal(config), [], [], []
    counts = np.zeros((50, 50), dtype=np.int64)
    with Auditor(config, sinks=[]) as auditor:
        for number, kind in enumerate(kinds, start=1):
            run = faults.make(kind, recording, number)
            collector = Collector(config)
            for audit in (auditor, collector):
                audit.update(_batch(run))
            total.add(collector.pack(0, 1), 1)
            report = auditor.step(number)
            steps.append(report)
            causes.append(Causes(number, number, diagnose(report, faults.table(run))))
            excerpts += [_excerpt(number, token, run) for token in report.worst_tokens[:2]]
            for sample in run:
                pair = np.exp(sample["rollout"]), np.exp(sample["train"])
                counts += np.histogram2d(*pair, bins=50, range=[[0, 1], [0, 1]])[0].astype(np.int64)
    density = Density(tuple(np.linspace(0, 1, 51).tolist()), counts)
    return RunView(
        title, tuple(steps), total.report(), tuple(causes), density, tuple(excerpts), notes=("format: recordings",)
    )


def _batch(run: faults.Run) -> TokenBatch:
    train, rollout = ([sample[side].tolist() for sample in run] for side in ("train", "rollout"))
    mask = [[1] * len(values) for values in train]
    numbers = list(range(len(run)))
    engines = [sample["engine"] for sample in run]
    labels = {"engine": engines, "weight_lag": [min(engine, 2) for engine in engines]}
    return TokenBatch.from_lists(train, rollout, mask, sample_index=numbers, sample_slot=numbers, labels=labels)


def _excerpt(step: int, worst: WorstToken, run: faults.Run) -> Excerpt:
    sample = run[worst.sample_index]
    first = max(0, worst.token_position - 14)
    places = range(first, min(len(sample["train"]), worst.token_position + 15))
    texts = tuple(WORDS[(place * 7 + step) % len(WORDS)] for place in places)
    columns = (tuple(float(sample[side][place]) for place in places) for side in ("train", "rollout"))
    return Excerpt(step, worst, tuple(places), texts, *columns, (True,) * len(places))


def small_report(step: int | None, drift: float, config: AuditConfig | None = None) -> StepReport:
    """A step of 32 tokens, the last of which drifts by so much."""
    auditor = Auditor(config or AuditConfig(), sinks=[])
    dlogp = np.full(32, 0.01)
    dlogp[-1] = drift
    auditor.update(TokenBatch.from_lists([(dlogp - 20.0).tolist()], [[-20.0] * 32], [[1] * 32], sample_index=[5]))
    report = auditor.step(0 if step is None else step)
    auditor.close()
    report.step = step
    return report


def empty_report(step: int | None, config: AuditConfig | None = None) -> StepReport:
    """A step in which nothing was compared."""
    auditor = Auditor(config or AuditConfig(), sinks=[])
    report = auditor.step(0 if step is None else step)
    auditor.close()
    report.step = step
    return report


def long_view(count: int, spikes: dict[int, float], gaps: tuple[int, ...] = ()) -> RunView:
    """Many steps made of a few real reports; those of ``spikes`` drift by so much, those of ``gaps`` have no token."""
    calm = [small_report(1, 0.02 + 0.001 * i).to_dict() for i in range(7)]
    other = {step: small_report(step, drift).to_dict() for step, drift in spikes.items()}
    other |= {step: empty_report(step).to_dict() for step in gaps}
    values = (other.get(step, calm[step % 7]) | {"step": step} for step in range(1, count + 1))
    return RunView(f"{count} steps", tuple(map(StepReport.from_dict, values)))


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)></script><!--",
    "<a href='javascript:alert(3)'>click</a><b>bold</b><br>%{x}&lt;i&gt;$x^2$",
    "{{ 7 * 7 }}{% include 'x' %}' onmouseover='alert(4)' \"",
    "\u202egnp.exe\u2028\u2029\x00\x1b[31m\u200b\ud800",
    "<b>b</b>&lt;i",
)


def hostile_view(view: RunView) -> RunView:
    """The view with hostile texts wherever a text can come from outside."""
    steps = tuple(StepReport.from_dict(_poisoned(report.to_dict())) for report in view.steps)
    total = StepReport.from_dict(_poisoned(view.total.to_dict()))
    finding = Finding(HOSTILE[0], 0.5, {HOSTILE[1]: HOSTILE[2]}, HOSTILE[3], HOSTILE[0])
    excerpts = tuple(replace(e, texts=(HOSTILE * 20)[: len(e.texts)]) for e in view.excerpts)
    return RunView(
        HOSTILE[0], steps, total, (Causes(1, 2, (finding,)),), view.density, excerpts, HOSTILE, HOSTILE[::-1]
    )


def _poisoned(values: dict[str, Any]) -> dict[str, Any]:
    labels = dict(zip(HOSTILE, reversed(HOSTILE), strict=True))
    for token in values["worst_tokens"]:
        token["labels"] = labels
    for buckets in values["breakdowns"].values():
        for i, bucket in enumerate(buckets):
            bucket["name"] = HOSTILE[i % len(HOSTILE)]
    values["breakdowns"] |= {text: values["breakdowns"]["engine"] for text in HOSTILE}
    for rank in values["ranks"]:
        rank["host"] = HOSTILE[1]
    values["notes"] = list(HOSTILE)
    values["warnings"][HOSTILE[0]] = 3
    values["classes"][HOSTILE[1]] = 4
    values["verdict"] = {"limits": [], "violations": list(HOSTILE)}
    return values
