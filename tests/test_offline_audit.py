"""Audits of dumps: the oracle's figures, the same bits from every format, split, order and number of processes."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dump_writers
import numpy as np
import offline_views
import oracle
import pytest
from dump_writers import KEEPS_MISSING, NONFINITE_IS_NULL, WRITERS, Given
from test_dumps_damage import mutated

from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, ReadOptions
from rlk_audit.offline import plan
from rlk_audit.offline import run as run_module
from rlk_audit.offline.audit import Asked, audit_dump
from rlk_audit.run_view import RunView

STEPS = (1, 2, 4)
PICKLES = ReadOptions(allow_pickle=True)


def write(folder: Path, name: str, seed: int = 0, odd: bool = False) -> dict[int, list[Given]]:
    """Write a dump of several steps."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    drawn = {step: dump_writers.draw(rng, 6, odd=odd) for step in STEPS}
    steps = {
        step: samples if odd and name in KEEPS_MISSING else [s.without_missing() for s in samples]
        for step, samples in drawn.items()
    }
    for step, samples in steps.items():
        WRITERS[name][1](folder, step, samples)
    return steps


def rows(steps: dict[int, list[Given]], engine: bool = True) -> list[dict[str, Any]]:
    """Return the samples as lines of the table format."""
    found = []
    for step, samples in steps.items():
        for record, sample in zip(dump_writers.rows(samples, step), samples, strict=True):
            found.append(record | {"labels": {"engine": f"e{sample.index % 3}"}} if engine else record)
    return found


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def everything(view: RunView) -> str:
    density = None if view.density is None else view.density.counts.tolist()
    means = None if view.sample_means is None else [value.hex() for value in view.sample_means.tolist()]
    return json.dumps([view.to_dict() | {"notes": []}, density, means]) + repr(view.excerpts)


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "odd"),
    [*((name, False) for name in WRITERS), *((name, True) for name in WRITERS if name not in NONFINITE_IS_NULL)],
)
def test_every_format_gives_the_oracle_s_figures(name: str, odd: bool, tmp_path: Path) -> None:
    """Prompts, tool tokens, unequal lengths, ranks and CP2; odd is with NaN, infinities and missing values.

    prime-rl writes null for whatever is not finite, so that its odd values are others.
    """
    steps = write(tmp_path, name, odd=odd)
    view = audit_dump([tmp_path], options=PICKLES)
    assert [report.step for report in view.steps] == list(steps)
    assert not view.problems or "missing" in view.problems[0]  # step 3 is not there
    for report, samples in zip(view.steps, steps.values(), strict=True):
        expected = oracle.audit([of_oracle(sample) for sample in samples], worst_k=10)
        ours = report.metrics
        expected.metrics.update(oracle.sample_metrics([of_oracle(sample) for sample in samples], expected))
        alone = ("worst_rank", "worst_microbatch", "worst_rollout_id", "warning", "total_token_count", "mask_coverage")
        compare = {key: value for key, value in expected.metrics.items() if not key.startswith(alone)}
        expected.metrics.clear()
        expected.metrics.update(compare)
        assert oracle.differences(ours, expected, relative=1e-12) == []


def of_oracle(sample: Given) -> oracle.Sample:
    return oracle.Sample(
        sample.train.astype(float).tolist(),
        sample.rollout_list(),
        sample.mask.astype(float).tolist(),
        sample_index=sample.index,
        token_ids=sample.tokens,
        slot=sample.index,
    )


def test_recorded_engines_are_told_apart(tmp_path: Path) -> None:
    """Labels of the dump become breakdowns, and their tokens add up."""
    records = rows(write(tmp_path / "npz", "table npz"))
    write_lines(tmp_path / "dump.jsonl", records)
    view = audit_dump([tmp_path / "dump.jsonl"])
    buckets = {bucket.name: bucket.compared_token_count for bucket in view.whole.breakdowns["engine"]}
    assert sum(buckets.values()) == view.whole.metrics["compared_token_count"]
    assert set(buckets) == {"unknown", "e0", "e1", "e2"}
    alone = audit_dump([tmp_path / "dump.jsonl"], asked=Asked(labels=()))
    assert list(alone.whole.breakdowns) == ["position", "confidence"]
    with pytest.raises(ValueError, match="the dump has no label turn; it has engine"):
        audit_dump([tmp_path / "dump.jsonl"], asked=Asked(labels=("turn",)))


# --- layouts --------------------------------------------------------------------------------------------------------


def test_small_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "dump.jsonl", rows(write(tmp_path / "npz", "table npz"))[::-1])
    whole = everything(audit_dump([tmp_path / "dump.jsonl"]))
    monkeypatch.setattr(run_module, "BATCH_TOKENS", 5)
    assert everything(audit_dump([tmp_path / "dump.jsonl"])) == whole
    monkeypatch.setattr(run_module, "MAX_WAITING_TOKENS", 9)
    assert everything(audit_dump([tmp_path / "dump.jsonl"])) == whole


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_samples_that_were_kept_are_those_of_the_files(
    name: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is read once where there is room for it, and again where there is none; the audit is the same."""
    write(tmp_path, name, odd=True)
    read, reads = files.read, []
    monkeypatch.setattr(files, "read", lambda part, *rest: reads.append(part.paths) or read(part, *rest))

    def looked_at(room: int) -> tuple[str, int]:
        monkeypatch.setattr(plan, "KEPT_BYTES", room)
        reads.clear()
        view = audit_dump([tmp_path], options=PICKLES, asked=Asked(exact=exact))
        return everything(view), len(reads)

    whole, parts = looked_at(1 << 28)
    assert parts == len(set(reads))
    readings = 3 if exact else 2
    assert looked_at(0) == (whole, readings * parts)
    reading = plan.Reading(PICKLES)
    size_of_one = plan.memory_of(next(reading.samples(files.find([tmp_path], tell=reading.tell)[0]))[1])
    some, fewer = looked_at(8 * size_of_one)
    assert some == whole
    assert parts <= fewer <= readings * parts and (parts == 1 or parts < fewer < readings * parts)


@pytest.mark.parametrize("kind", ["none", "texts", "a text a token", "long names"])
def test_no_sample_takes_more_memory_than_is_counted(kind: str, tmp_path: Path) -> None:
    """A bound on what is kept means nothing where a log's labels outgrow it unseen."""
    many = [
        {
            "none": None,
            "texts": {"engine": f"{index}" * 900},
            "a text a token": {"turn": [f"turn {index} {token} {'x' * 90}" for token in range(64)]},
            "long names": {f"{index}" * 900: "a"},
        }[kind]
        for index in range(300)
    ]
    path = offline_views.write(
        tmp_path / "a.jsonl", [offline_views.steady(i, 64, labels=labels) for i, labels in enumerate(many)]
    )
    reading = plan.Reading(PICKLES)
    (part,) = files.find([path], tell=reading.tell)
    sum(1 for _ in reading.samples(part))  # what is made once and stays
    tracemalloc.start()
    try:
        plan.scan(part, reading)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken <= reading.kept_bytes < 3 * taken
    assert len(reading.kept[part]) == 300


# --- what else is looked at -----------------------------------------------------------------------------------------


def test_the_density_counts_every_compared_token(tmp_path: Path) -> None:
    steps = write(tmp_path, "table npz", seed=6)
    view = audit_dump([tmp_path])
    assert view.density is not None
    expected = np.zeros_like(view.density.counts)
    for sample in (sample for samples in steps.values() for sample in samples):
        for train, rollout, active in zip(sample.train, sample.rollout, sample.mask, strict=True):
            if active:
                row, column = (min(int(np.exp(float(side)) * 64), 63) for side in (rollout, train))
                expected[row, column] += 1
    assert np.array_equal(view.density.counts, expected)


def test_means_of_samples(tmp_path: Path) -> None:
    steps = write(tmp_path, "table npz", seed=7)
    view = audit_dump([tmp_path])
    expected = [np.abs(s.train.astype(float) - s.rollout)[s.mask].mean() for samples in steps.values() for s in samples]
    assert view.sample_means is not None
    assert view.sample_means.tolist() == pytest.approx(expected)


def test_a_dump_without_a_train_side_says_so(tmp_path: Path) -> None:
    write_lines(tmp_path / "dump.jsonl", [{"rollout_log_probs": [-1.0], "train_log_probs": None}] * 3)
    with pytest.raises(DumpError):
        audit_dump([tmp_path / "dump.jsonl"])


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_dumps_are_audited_in_part_or_refused(name: str, tmp_path: Path) -> None:
    """Whatever a reader makes of damage, the audit has figures that are strict JSON, or refuses in a sentence."""
    samples = [s.without_missing() for s in dump_writers.draw(np.random.default_rng(0), 4)]
    paths = WRITERS[name][1](tmp_path / "dump", 3, samples)
    whole = [path.read_bytes() for path in paths]
    audited, refusals = 0, []
    for seed in range(40):
        rng = random.Random(seed)
        chosen = rng.randrange(len(paths))
        paths[chosen].write_bytes(mutated(whole[chosen], rng))
        try:
            view = audit_dump([tmp_path / "dump"], options=PICKLES, asked=Asked(exact=seed % 2 == 0))
            json.dumps(view.to_dict(), allow_nan=False)
            audited += 1
        except DumpError as error:
            refusals.append(str(error))
        paths[chosen].write_bytes(whole[chosen])
    assert audited
    assert not any("\n" in refusal for refusal in refusals)
