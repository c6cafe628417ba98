"""Audits of dumps: the oracle's figures, the same bits from every format, split, order and number of processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dump_writers
import numpy as np
import oracle
import pytest
import torch
from dump_writers import KEEPS_MISSING, NONFINITE_IS_NULL, WRITERS, Given
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dumps_damage import mutated

from rlk_audit import AuditConfig, Collector
from rlk_audit.config import quantile_suffix
from rlk_audit.dumps.sample import DumpError, DumpSample, ReadOptions
from rlk_audit.offline import audit as audit_module
from rlk_audit.offline import run as run_module
from rlk_audit.offline.audit import Asked, audit_dump
from rlk_audit.offline.exact import BinValues
from rlk_audit.offline.labels import MAX_NAMES, LabelCounts, choose_labels
from rlk_audit.offline.states import MAX_OPEN, StepStates
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


def contents(view: RunView) -> list[dict[str, Any]]:
    """All that must not depend on how the samples came."""
    reports = [report.to_dict() for report in (*view.steps, view.whole)]
    return [report | {"findings": [f["code"] for f in report["findings"]]} for report in reports]


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


def test_every_format_gives_the_same_bits(tmp_path: Path) -> None:
    """All but the order of samples in files, and ids that a format does not keep."""
    alone = {}
    for name in WRITERS:
        write(tmp_path / name, name)
        found = contents(audit_dump([tmp_path / name], options=PICKLES, asked=Asked(labels=())))
        for report in found:
            for sample in report["samples"]:
                del sample["sample_slot"]
            for token in report["worst_tokens"]:
                del token["rollout_id"]
            del report["metrics"]["worst_rollout_id"]
        alone[name] = json.dumps(found)
    assert [name for name in WRITERS if alone[name] != alone["table jsonl"]] == []


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


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), files=st.integers(1, 5))
def test_how_samples_lie_in_files_changes_nothing(seed: int, files: int, tmp_path_factory: Any) -> None:
    """Steps mixed in a file, and cut over files: figures, tables and findings are the same."""
    folder = tmp_path_factory.mktemp("dump")
    records = rows(write(folder / "npz", "table npz"))
    write_lines(folder / "whole.jsonl", records)
    shuffled = records.copy()
    random.Random(seed).shuffle(shuffled)
    (folder / "cut").mkdir()
    for number in range(files):
        if shuffled[number::files]:
            write_lines(folder / "cut" / f"part{number}.jsonl", shuffled[number::files])
    whole, cut = (contents(audit_dump([folder / name])) for name in ("whole.jsonl", "cut"))
    for report in (*whole, *cut):
        for sample in report["samples"]:
            del sample["sample_slot"]  # counts in the order of files
    assert whole == cut


def test_more_steps_than_are_held_open(tmp_path: Path) -> None:
    """Kills: a state that is put by loses something, or is taken up twice."""
    rng = np.random.default_rng(3)
    steps = {step: [s.without_missing() for s in dump_writers.draw(rng, 3)] for step in range(3 * MAX_OPEN)}
    records = rows(steps)
    write_lines(tmp_path / "in_order.jsonl", records)
    write_lines(tmp_path / "mixed.jsonl", [r for i in range(3) for r in records[i::3]])
    in_order, mixed = (audit_dump([tmp_path / f"{name}.jsonl"]) for name in ("in_order", "mixed"))
    assert contents(mixed) == contents(in_order)


def test_small_batches_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "dump.jsonl", rows(write(tmp_path / "npz", "table npz"))[::-1])
    whole = everything(audit_dump([tmp_path / "dump.jsonl"]))
    monkeypatch.setattr(run_module, "BATCH_TOKENS", 5)
    assert everything(audit_dump([tmp_path / "dump.jsonl"])) == whole
    monkeypatch.setattr(run_module, "MAX_WAITING_TOKENS", 9)
    assert everything(audit_dump([tmp_path / "dump.jsonl"])) == whole


FEW_TOKENS = 30
"""Of a step, to be diagnosed: so few that it matters which are taken."""
JOB = """
import hashlib, sys
from pathlib import Path
from rlk_audit.allreduce import global_rank, launched_group
from rlk_audit.offline import run
from rlk_audit.offline.audit import Asked, audit_dump
from test_offline_audit import FEW_TOKENS, everything
run.DIAGNOSED_TOKENS = run.LEAST_DIAGNOSED_TOKENS = FEW_TOKENS
with launched_group() as group:
    try:
        view = audit_dump([Path(sys.argv[1])], asked=Asked(exact=True), group=group)
        told = everything(view)
    except ValueError as error:
        told = f"error: {error}"
    rank = global_rank()
Path(sys.argv[2], f"rank{rank}").write_text(told)
"""


def under_torchrun(dump: Path, ranks: int, out: Path) -> list[str]:
    """Audit a dump in several processes; return what each rank said."""
    out.mkdir()
    (out / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, str(out / "job.py"), str(dump), str(out)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(out / f"rank{rank}").read_text() for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_the_files_say_the_same(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps mixed over files, of which one is damaged in the middle."""
    for name in ("DIAGNOSED_TOKENS", "LEAST_DIAGNOSED_TOKENS"):
        monkeypatch.setattr(run_module, name, FEW_TOKENS)
    records = rows(write(tmp_path / "npz", "table npz"))
    random.Random(1).shuffle(records)
    dump = tmp_path / "dump"
    dump.mkdir()
    for number in range(3):
        write_lines(dump / f"part{number}.jsonl", records[number::3])
    with (dump / "part1.jsonl").open("a") as file:
        file.write('{"train_log_probs": [0.5')
    alone = everything(audit_dump([dump], asked=Asked(exact=True)))
    assert "part1.jsonl" in alone
    told = under_torchrun(dump, ranks, tmp_path / "out")
    assert told[0] == alone
    metrics = [
        [report["metrics"] for report in json.loads(text.split("]")[0] + "]")] if False else None for text in told
    ]
    assert len(metrics) == ranks


def test_a_dump_without_samples_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "a.jsonl").write_text('{"train_log_probs": 3}\n')
    told = under_torchrun(tmp_path / "dump", 2, tmp_path / "out")
    assert told[0] == told[1]
    assert told[0].startswith("error: ")


# --- what else is looked at -----------------------------------------------------------------------------------------


def test_excerpts_are_of_the_worst_tokens(tmp_path: Path) -> None:
    steps = write(tmp_path, "table npz", seed=5)
    view = audit_dump([tmp_path])
    assert len(view.excerpts) == len(view.whole.worst_tokens) == 10
    for excerpt, worst in zip(view.excerpts, view.whole.worst_tokens, strict=True):
        assert excerpt.worst == worst
        sample = next(s for s in steps[excerpt.step] if s.index == worst.sample_index)
        place = excerpt.positions.index(worst.token_position)
        assert excerpt.texts[place] == str(worst.token_id) == str(sample.tokens[worst.token_position])
        start = excerpt.positions[0]
        cut = slice(start, start + len(excerpt.positions))
        assert list(excerpt.train_logp) == pytest.approx(sample.train[cut].tolist(), nan_ok=True)
        assert list(excerpt.active) == sample.mask[cut].tolist()


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


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1e-12, 0.25, 0.2501, 0.25 + 2**-40, 3.0]) | st.floats(0, 12), min_size=1),
    seed=st.integers(0, 99),
)
def test_exact_quantiles_are_those_of_sorted_values(values: list[float], seed: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("exact")
    records = []
    for step in range(2):
        drift = np.random.default_rng(seed + step).permutation(values)
        records.append({"step": step, "train_log_probs": (-drift).tolist(), "rollout_log_probs": [0.0] * len(drift)})
    write_lines(folder / "dump.jsonl", records)
    view = audit_dump([folder / "dump.jsonl"], asked=Asked(exact=True))
    for report, count in ((view.steps[0], 1), (view.whole, 2)):
        for q in AuditConfig().quantiles:
            assert report.metrics[f"abs_dlogp_{quantile_suffix(q)}"] == oracle.exact_quantile(values * count, q)


def test_values_of_a_bin_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_audit.offline.exact.COMPRESS_AT", 10)
    values = BinValues()
    for _ in range(30):
        values.add(np.array([0.5, 0.25, 0.5]))
    assert values._held <= 10
    assert [values.at(order) for order in (0, 29, 30, 89)] == [0.25, 0.25, 0.5, 0.5]


def test_nothing_compared_has_no_exact_quantile(tmp_path: Path) -> None:
    write_lines(tmp_path / "dump.jsonl", [{"train_log_probs": [-1.0], "rollout_log_probs": [None]}])
    view = audit_dump([tmp_path / "dump.jsonl"], asked=Asked(exact=True))
    assert np.isnan(view.whole.metrics["abs_dlogp_p50"])
    assert view.whole.classes["rollout_missing"] == 1
    assert [finding.code for causes in view.causes for finding in causes.findings] == ["nothing_compared"]


def test_samples_of_unequal_arrays_are_refused_and_counted(tmp_path: Path) -> None:
    good = {"train_log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.5]}
    write_lines(tmp_path / "dump.jsonl", [good, {"train_log_probs": [-1.0], "rollout_log_probs": [-1.0, -2.0]}, good])
    view = audit_dump([tmp_path / "dump.jsonl"])
    report = view.whole
    assert view.total is None  # the only step has figures of samples, which a total has not
    assert report.warnings["length_mismatch"] == 1
    assert (report.metrics["compared_token_count"], report.metrics["sample_count"]) == (4, 3)


@pytest.mark.parametrize(
    ("rest", "told"),
    [(slice(-2), "2 samples are gone, 0 are new"), (slice(None), "0 samples are gone, 1 are new and left out")],
)
def test_a_file_that_changes_between_readings_is_told(
    rest: slice, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = rows(write(tmp_path / "npz", "table npz"))
    path = tmp_path / "dump.jsonl"
    write_lines(path, records)
    plan = audit_module.Plan.of

    def change(*given: Any) -> Any:
        write_lines(path, [*records[rest], *records[-1:]] if rest == slice(None) else records[rest])
        return plan(*given)

    monkeypatch.setattr(audit_module.Plan, "of", change)
    view = audit_dump([path])
    assert any(f"it changed while it was read: {told}" in problem for problem in view.problems)
    assert view.whole.metrics["compared_token_count"] > 0


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


# --- pieces ---------------------------------------------------------------------------------------------------------


def test_a_packed_state_is_taken_up_again() -> None:
    config = AuditConfig(worst_k=3, breakdowns={"position": "auto"})
    whole, first, second = Collector(config), Collector(config), Collector(config)
    for number, part in enumerate((first, second)):
        drift = torch.linspace(0, 1 + number, 9)
        for collector in (whole, part):
            collector.update(-drift, torch.zeros(9), torch.ones(9), sample_index=number, token_position=torch.arange(9))
    second.merge_vector(first.pack(rank=0))
    assert torch.equal(second.pack(), whole.pack())
    with pytest.raises(ValueError, match="packed with other settings"):
        Collector(AuditConfig(worst_k=3, eps_low=0.1, breakdowns={"position": "auto"})).merge_vector(first.pack())
    with pytest.raises(ValueError, match="expected an int64 vector"):
        second.merge_vector(torch.zeros(3, dtype=torch.int64))


def test_states_that_are_put_by_come_back() -> None:
    config = AuditConfig()
    states = StepStates(config)
    expected = {step: Collector(config) for step in range(2 * MAX_OPEN)}
    for turn in range(3):
        for step, collector in expected.items():
            drift = torch.full((4,), 0.1 * step + turn)
            for target in (collector, states.collector(step)):
                target.update(-drift, torch.zeros(4), torch.ones(4))
    for step, collector in expected.items():
        assert (
            states.take(step).compute().to_dict()["metrics"] | {"worst_rank": 0}
            == collector.compute().to_dict()["metrics"]
        )
    assert states.take(0).compute().metrics["compared_token_count"] == 0


@settings(max_examples=200)
@given(st.dictionaries(st.text(), st.integers(1, 9), min_size=2, max_size=90), st.text())
def test_any_label_can_be_broken_down(counts: dict[str, int], key: str) -> None:
    """Whatever a dump calls a label and its codes, the names are valid and differ, and every token has its code."""
    found = LabelCounts()
    for text, tokens in counts.items():
        found.add(DumpSample(np.zeros(tokens), None, np.ones(tokens, bool), labels={key: text}))
    (label,), _ = choose_labels(found, None)
    AuditConfig(breakdowns={label.name: label.names})
    assert len(label.names) == min(len(counts), MAX_NAMES)
    assert {int(label.code(text, 1)[0]) for text in counts} == set(range(len(label.names)))
    assert label.code(None, 2).tolist() == [-1, -1]
    assert label.code([None, *counts], 1 + len(counts)).tolist()[1:] == [label.codes[text] for text in counts]


def test_names_beyond_the_most_share_a_code() -> None:
    found = LabelCounts()
    for number in range(MAX_NAMES + 6):
        found.add(DumpSample(np.zeros(number + 1), None, np.ones(number + 1, bool), labels={"env": f"n{number}"}))
    (label,), _ = choose_labels(found, None)
    assert len(label.names) == MAX_NAMES
    assert label.names[-1] == "other"
    assert label.names[:2] == ("n7", "n8")
    assert {label.codes[f"n{number}"] for number in range(7)} == {MAX_NAMES - 1}


def test_names_are_in_the_order_of_their_numbers() -> None:
    found = LabelCounts()
    for name in ("e10", "e9", "e1", "e 1", "unknown"):
        found.add(DumpSample(np.zeros(1), None, np.ones(1, bool), labels={"engine": name}))
    (label,), _ = choose_labels(found, None)
    assert label.names == ("e1", "e9", "e10", "e_1", "unknown_2")
