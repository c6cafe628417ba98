"""Audits of dumps: the oracle's numbers, and the same bits whatever files the tokens lie in."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_writers import WRITERS, Given, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from offline_views import assert_same_view, everything, forget, given_rows, oracle_sample, plain, record, steady, write
from oracle import audit, confidence_bucket, exact_quantile, parts, position_bucket, sample_metrics
from strategies import assert_reports, bits

from rlk_audit import AuditConfig, Collector, StepReport
from rlk_audit.dumps import files
from rlk_audit.dumps.sample import DumpError, DumpSample, ReadOptions
from rlk_audit.offline import exact, labels, plan, run, states
from rlk_audit.offline.audit import Asked, audit_dump
from rlk_audit.offline.labels import LabelCounts, LabelNames, choose_labels
from rlk_audit.offline.texts import TokenTexts
from rlk_audit.offline.tokens import Tokens
from rlk_audit.page.causes import cause_groups
from rlk_audit.run_view import RunView

PICKLES = ReadOptions(allow_pickle=True)


def view_of(*paths: Path, **asked: Any) -> RunView:
    return audit_dump(paths, options=PICKLES, asked=Asked(**asked))


def drawn(seed: int, count: int = 6) -> list[Given]:
    return draw(np.random.default_rng(seed), count)


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_reports_are_the_oracles(seed: int, tmp_path: Path) -> None:
    steps = {step: drawn(10 * seed + step) for step in range(3)}
    for step, samples in steps.items():
        write(tmp_path / f"step_{step}.jsonl", given_rows(samples, step))
    view = view_of(tmp_path)
    assert [report.step for report in view.steps] == [0, 1, 2]
    for report in view.steps:
        samples = [oracle_sample(one, slot) for slot, one in enumerate(steps[report.step])]
        expected = audit(samples, worst_k=10)
        assert_reports(report, expected)
        for name, value in sample_metrics(samples, expected).items():
            assert report.metrics[name] == pytest.approx(value, rel=1e-12), name
        engines = {sample.sample_index: f"e{sample.sample_index % 2}" for sample in samples}
        for label, bucket in {
            "position": lambda worst: position_bucket(worst.token_position),
            "confidence": lambda worst: confidence_bucket(worst.rollout_logp),
            "engine": lambda worst, engines=engines: engines[worst.sample_index],
        }.items():
            made = {part.name: part for part in report.breakdowns[label] if part.compared_token_count}
            wanted = parts(expected, bucket)
            assert set(made) == set(wanted)
            for name, part in wanted.items():
                assert made[name].compared_token_count == part.compared_token_count
                assert made[name].abs_dlogp_mean == pytest.approx(part.abs_dlogp_mean, rel=1e-12)
    whole = [oracle_sample(one, slot) for samples in steps.values() for slot, one in enumerate(samples)]
    assert_reports(view.whole, audit(whole, worst_k=10))
    assert view.whole.kind == "run"


def test_what_is_compared_is_one_question(tmp_path: Path) -> None:
    """Of other thresholds than the default ones: figures, density, means, exact quantiles are of the same tokens."""
    config = AuditConfig(sentinel_floor=-2.0)
    path = write(tmp_path / "a.jsonl", [record([-1.0, -3.0, -1.0], [-1.25, -1.0, -1.5]), record([-1.0], [-2.5])])
    for asked in (Asked(), Asked(exact=True)):
        view = audit_dump([path], config=config, asked=asked)
        assert view.whole.metrics["compared_token_count"] == view.density.counts.sum() == 2
        assert view.sample_means.tolist() == [0.375]
        assert view.whole.metrics["abs_dlogp_p99"] == pytest.approx(0.5, rel=0.01)
        assert view.excerpts == () or [e.worst.abs_dlogp for e in view.excerpts] == [0.5, 0.25]


def test_a_page_shows_each_cause_once(tmp_path: Path) -> None:
    rows = [steady(i, 40, step=1 + i % 2) for i in range(8)]
    rows = [row | {"rollout_log_probs": [0.8 * value for value in row["rollout_log_probs"]]} for row in rows]
    view = view_of(write(tmp_path / "a.jsonl", rows))
    groups, more = cause_groups(view)
    assert view.causes and not more
    assert [(group.source, group.findings) for group in groups] == [
        ("diagnosed from tokens", causes.findings) for causes in view.causes
    ]


@pytest.mark.parametrize("seed", range(3))
def test_exact_quantiles_means_and_density(seed: int, tmp_path: Path) -> None:
    steps = {step: drawn(20 * seed + step, 9) for step in range(2)}
    for step, samples in steps.items():
        write(tmp_path / f"step_{step}.jsonl", given_rows(samples, step))
    sketched, view = view_of(tmp_path), view_of(tmp_path, exact=True)
    expected = [audit([oracle_sample(one, 0) for one in samples], worst_k=10) for samples in steps.values()]
    for report, told in zip(view.steps, expected, strict=True):
        for name, value in told.metrics.items():
            if name.startswith("abs_dlogp_p"):
                assert report.metrics[name] == value, name
    everyone = [token.worst.abs_dlogp for told in expected for token in told.tokens]
    for q, name in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99"), ("0.999", "p99_9")):
        assert view.whole.metrics[f"abs_dlogp_{name}"] == exact_quantile(everyone, q)
    # All else is as without.
    for ours, theirs in zip((*view.steps, view.whole), (*sketched.steps, sketched.whole), strict=True):
        a, b = ours.to_dict(), theirs.to_dict()
        for values in (a, b):
            values["metrics"] = {k: v for k, v in values["metrics"].items() if not k.startswith("abs_dlogp_p")}
        assert bits(a) == bits(b)
    assert view.density is not None and view.density.counts.sum() == len(everyone)
    assert view.sample_means is not None
    means = []
    for told in expected:
        by_sample: dict[int, list[float]] = {}
        for token in told.tokens:
            by_sample.setdefault(token.worst.sample_index, []).append(token.worst.abs_dlogp)
        means += [math.fsum(by_sample[index]) / len(by_sample[index]) for index in sorted(by_sample)]
    assert view.sample_means.tolist() == pytest.approx(means, rel=1e-12)


def test_the_density_counts_rollout_by_train(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [record([math.log(0.9)], [math.log(0.1)]), record([0.0], [0.0])])
    density = view_of(tmp_path).density
    assert density is not None and len(density.edges) == 65
    assert {(r, t): n for (r, t), n in np.ndenumerate(density.counts) if n} == {(6, 57): 1, (63, 63): 1}


@given(st.lists(st.sampled_from([0.0, 1e-12, 0.25, 0.25, 0.2500001, 3.0]) | st.floats(0, 900), min_size=1, max_size=60))
def test_an_exact_quantile_is_that_of_the_sorted_list(values: list[float]) -> None:
    """Ties, all equal, zero, below and in the sketch's range."""
    config = AuditConfig(quantiles=("0", "0.5", "0.9", "0.99", "1"))
    collector = Collector(config)
    rollout = -np.array(values)
    collector.update(torch.zeros(len(values), dtype=torch.float64), torch.from_numpy(rollout), torch.ones(len(values)))
    report = collector.compute()
    samples = [
        (None, slot, DumpSample(np.zeros(len(part)), part, np.ones(len(part), dtype=bool)))
        for slot, part in enumerate(np.array_split(rollout, 3))
    ]
    halves = [
        exact.collect(samples[:1], [report, report], config),
        exact.collect(samples[1:], [report, report], config),
    ]
    for want, other in zip(*halves, strict=True):
        want.merge(other)
        told = want.answers(report).metrics
        for q, name in zip(config.quantiles, ("p00", "p50", "p90", "p99", "p100"), strict=True):
            assert told[f"abs_dlogp_{name}"] == exact_quantile(values, q)


def test_values_of_a_bin_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values take no memory, nor do values that come one by one."""
    monkeypatch.setattr(exact, "COMPRESS_AT", 1000)
    held = exact.BinValues()
    for _ in range(500):
        held.add(np.full(10, 0.5))
        held.add(np.array([0.25]))
        held.add(np.zeros(0))
    assert len(held._values) < 40
    assert (held.at(499), held.at(500), held.at(5499)) == (0.25, 0.5, 0.5)
    with pytest.raises(DumpError, match="changed"):
        held.at(5500)


def test_distinct_values_of_a_bin_are_put_together_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "COMPRESS_AT", 100)
    counted = Counter()
    compress = exact.BinValues._compress
    monkeypatch.setattr(exact.BinValues, "_compress", lambda self: (counted.update(["done"]), compress(self))[1])
    held = exact.BinValues()
    for start in range(400):
        held.add(np.arange(100) + 100.0 * start)
    assert counted["done"] < 20
    assert held.at(31_337) == 31_337


# --- the same bits --------------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_bits(tmp_path: Path) -> None:
    samples = [[plain(one) for one in drawn(step, 5)] for step in range(2)]
    views = {}
    for name, (_, writer) in WRITERS.items():
        for step, one in enumerate(samples):
            writer(tmp_path / name, step, one)
        views[name] = view_of(tmp_path / name, labels=(), exact=True)
    first = views.pop("table jsonl")
    assert first.whole.metrics["compared_token_count"] > 20
    for name, view in views.items():
        assert not view.problems, name
        assert_same_view(view, first, ids=False)


def table_view(path: Path, records: list[dict[str, Any]], cuts: list[int], **asked: Any) -> RunView:
    """The view of records cut into files at places, in order."""
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(records)], strict=True)):
        if start < end:
            write(path / f"part{number}.jsonl", records[start:end])
    return view_of(path, **asked)


def several(steps: int, each: int, known: bool = True) -> list[dict[str, Any]]:
    records = []
    for step in range(steps):
        for index in range(each):
            length = 1 + index % 7
            named = {"engine": f"e{index % 3}", "turn": [str(place % 2) for place in range(length)]}
            records.append(steady(index, length, step, labels=named) | ({"step": step} if known else {}))
    return records


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.booleans(), st.lists(st.integers(0, 48), max_size=5).map(sorted))
def test_order_and_files_do_not_matter(tmp_path_factory: Any, seed: int, known: bool, cuts: list[int]) -> None:
    """Interleaved steps, unknown steps, empty files between them; only the numbers of samples follow the order."""
    records = several(4, 12, known)
    one = table_view(tmp_path_factory.mktemp("one"), records, [], exact=True)
    mixed = records[:]
    random.Random(seed).shuffle(mixed)
    other = table_view(tmp_path_factory.mktemp("other"), mixed, cuts, exact=True)
    ours, theirs = everything(one, ids=False), everything(other, ids=False)
    for values in (ours, theirs):
        values.pop("causes")  # a diagnosis adds up floats in the order of the samples
        forget(values, {"findings"})
        if not known:
            values.pop("excerpts")  # of four samples of one index any may be first
    assert ours == theirs
    together = table_view(tmp_path_factory.mktemp("together"), mixed, [], exact=True)
    assert_same_view(other, together)


def test_more_steps_than_stay_open_and_little_that_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [steady(index, 5, step, step=step) for index in range(6) for step in range(3 * states.MAX_OPEN)]
    path = write(tmp_path / "a.jsonl", records)
    plainly = view_of(path)
    monkeypatch.setattr(run, "MAX_WAITING_TOKENS", 40)
    monkeypatch.setattr(run, "BATCH_TOKENS", 12)
    monkeypatch.setattr(states, "MAX_OPEN", 2)
    assert_same_view(view_of(path), plainly)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40) | st.permutations(range(20)))
def test_states_put_by_and_taken_up_are_the_same(order: list[int]) -> None:
    config = AuditConfig(samples_per_step=64, worst_k=3)
    kept = states.StepStates(config)
    plainly = {step: Collector(config) for step in order}
    for slot, step in enumerate(order):
        tokens = Tokens.join([(slot, DumpSample(-np.ones(3), -np.arange(3.0) * slot, np.ones(3, dtype=bool)))])
        kept.collector(step).update(tokens.batch())
        plainly[step].update(tokens.batch())
    for step, collector in plainly.items():
        assert torch.equal(kept.take(step).pack(rank=-1), collector.pack(rank=-1))
    assert torch.equal(kept.take(99).pack(), Collector(config).pack())


@given(st.lists(st.lists(st.floats(-5, 0), max_size=5), min_size=2, max_size=6))
def test_merging_a_vector_is_merging_its_collector(pieces: list[list[float]]) -> None:
    def made(piece: list[float]) -> Collector:
        collector = Collector(AuditConfig())
        collector.update(
            torch.tensor(piece, dtype=torch.float64), torch.full((len(piece),), -1.0), torch.ones(len(piece))
        )
        return collector

    one, other = made(pieces[0]), made(pieces[0])
    for piece in pieces[1:]:
        one.merge(made(piece))
        other.merge_vector(made(piece).pack(rank=-1))
    a, b = one.compute().to_dict(), other.compute().to_dict()
    assert bits(a["metrics"]) == bits(b["metrics"])


def test_a_vector_of_other_settings_is_refused() -> None:
    collector = Collector(AuditConfig())
    with pytest.raises(ValueError, match="other settings"):
        collector.merge_vector(Collector(AuditConfig(eps_low=0.1)).pack())
    with pytest.raises(ValueError, match="entries"):
        collector.merge_vector(torch.zeros(3, dtype=torch.int64))


# --- worst tokens and causes ----------------------------------------------------------------------------------------


def test_excerpts_show_the_worst_tokens_with_their_neighbours(tmp_path: Path) -> None:
    records = [steady(index, 60, step=step) for step in (1, 2) for index in range(5)]
    for place, (row, at) in enumerate([(3, 0), (7, 59), (8, 30)]):
        records[row]["rollout_log_probs"][at] = -20.0 - place
        records[row]["train_log_probs"][at] = -0.5
    view = view_of(write(tmp_path / "a.jsonl", records))
    assert [(e.step, e.worst.sample_index, e.worst.token_position) for e in view.excerpts[:3]] == [
        (2, 3, 30), (2, 2, 59), (1, 3, 0),
    ]  # fmt: skip
    assert [e.positions for e in view.excerpts[:3]] == [tuple(range(18, 43)), tuple(range(47, 60)), tuple(range(13))]
    first = view.excerpts[0]
    assert first.texts == tuple(map(str, records[8]["token_ids"][18:43]))
    assert first.rollout_logp == tuple(records[8]["rollout_log_probs"][18:43])
    assert [e.worst for e in view.excerpts] == list(view.whole.worst_tokens)


@pytest.mark.parametrize("known", [True, False])
def test_ties_take_the_lower_sample_and_position(known: bool, tmp_path: Path) -> None:
    """A constant offset: every token ties, and without indices the number in the step stands in."""
    tie = [-1.0] * 4, [-1.5] * 4
    order = (1, 0, 2, 4, 3, 5)
    records = [
        record(*tie, step=step, **({"sample_index": index} if known else {})) for step in (0, 1) for index in order
    ]
    view = view_of(write(tmp_path / "a.jsonl", records))
    tokens = [(token.sample_index, token.token_position) for token in view.whole.worst_tokens]
    assert tokens == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2), (0, 3), (0, 3), (1, 0), (1, 0)]
    assert [e.step for e in view.excerpts] == [0, 1] * 5
    assert [e.worst for e in view.excerpts] == list(view.whole.worst_tokens)


def test_a_cause_is_named_over_its_steps(tmp_path: Path) -> None:
    for step in range(4):
        records = [steady(index, 200, step, step=step) for index in range(12)]
        if step >= 2:
            for one in records:
                one["train_log_probs"] = one["rollout_log_probs"]
        write(tmp_path / f"step_{step}.jsonl", records)
    causes = view_of(tmp_path).causes
    assert [(c.first_step, c.last_step) for c in causes] == [(0, 1), (2, 3)]
    assert causes[0].findings[0].evidence["tokens"] == 12 * 200
    assert causes[1].findings[0].code == "self_comparison"


def test_many_steps_are_diagnosed_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_DIAGNOSED_STEPS", 3)
    path = write(tmp_path / "a.jsonl", [steady(0, 5, step, step=step) for step in range(7)])
    view = view_of(path)
    assert [bool(report.findings) for report in view.steps] == [True, False, False, True, False, False, True]
    assert "3 of 7 steps were diagnosed, evenly spaced" in view.notes


def test_tokens_that_were_not_diagnosed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", [steady(index, 200, step=index % 2) for index in range(24)])
    assert not any("diagnosed" in note for note in view_of(path).notes)
    monkeypatch.setattr(run, "DIAGNOSED_TOKENS", 1500)
    view = view_of(path)
    assert "of a step, about 1,500 tokens were diagnosed at most" in view.notes
    assert view.steps[0].findings[0].evidence["tokens"] == 1600


# --- labels ---------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=6), st.integers(1, 9), max_size=90), st.text(max_size=8))
def test_names_of_labels_are_valid_and_distinct(texts: dict[str, int], key: str) -> None:
    counts = LabelCounts()
    for text, length in texts.items():
        counts.add(
            DumpSample(
                np.zeros(length),
                None,
                np.ones(length, dtype=bool),
                labels={key: text, f"{key} ": text, f"{key}_": text},
            )
        )
    made, _ = choose_labels(counts, None)
    config = AuditConfig(breakdowns={one.name: one.names for one in made}, max_state_bytes=2**30)  # raises if invalid
    assert len(config.breakdowns) == len(made) == (3 if len(texts) > 1 else 0)
    for one in made:
        assert len(one.names) == min(len(texts), labels.MAX_NAMES)
        codes = {text: int(one.code(text, 1)[0]) for text in texts}
        assert set(codes.values()) == set(range(len(one.names)))
        assert one.code(None, 2).tolist() == [-1, -1]


def test_names_are_in_natural_order_and_the_rare_share_one() -> None:
    few = LabelNames.of("engine", "engine", Counter({"e10": 1, "e9": 5, "e1": 2, "E 1": 1, "other": 1, "unknown": 1}))
    assert few.names == ("E_1", "e1", "e9", "e10", "other", "unknown_2")
    many = LabelNames.of("engine", "engine", Counter({f"e{n}": n for n in range(1, 101)} | {"other": 500}))
    assert many.names == (*(f"e{n}" for n in range(39, 101)), "other_2", "other")
    assert many.code(["e38", "e39", None, "never seen", "other"], 6).tolist() == [63, 0, -1, 63, 62, -1]


@pytest.mark.parametrize("count", [100_000])
def test_a_label_of_very_many_names(count: int) -> None:
    counts = LabelCounts()
    for number in range(count):
        counts.add(DumpSample(np.zeros(1), None, np.ones(1, dtype=bool), labels={"uid": f"u{number}"}))
    assert len(counts.tokens["uid"]) == labels.MAX_COUNTED + 1
    assert counts.tokens["uid"].total() == count
    made, _ = choose_labels(counts, None)
    assert len(made[0].names) == labels.MAX_NAMES and made[0].names[-1] == "other"


def test_labels_of_odd_names(tmp_path: Path) -> None:
    names = ["rank", "position", "confidence", "unknown", "", "x" * 300, "é\x1b[31m", "a b", "a_b", "7"]
    path = write(tmp_path / "a.jsonl", [steady(i, 3, labels={name: f"{i}" for name in names}) for i in range(2)])
    view = view_of(path)
    for label in ("rank", "label_position", "label_confidence", "a_b", "a_b_2", "label_7", "x" * 64):
        assert [bucket.compared_token_count for bucket in view.whole.breakdowns[label]] == [0, 3, 3], label
    assert len(view.whole.breakdowns) == len(names) + 2


def test_asked_labels(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [steady(i, 3, labels={"engine": f"e{i}", "my env": "a", "turn": "0"}) for i in range(2)]
    )
    view = view_of(path)
    assert set(view.whole.breakdowns) == {"position", "confidence", "engine"}
    assert {"turn is 0 wherever it is known", "my_env is a wherever it is known"} <= set(view.notes)
    asked = view_of(path, labels=["turn", "my env", "turn", "position"])
    assert set(asked.whole.breakdowns) == {"position", "confidence", "turn", "my_env"}
    with pytest.raises(ValueError, match="no label nothing; it has engine, turn, my_env"):
        view_of(path, labels=["nothing"])


# --- what is odd ----------------------------------------------------------------------------------------------------


def test_steps_of_any_size(tmp_path: Path) -> None:
    steps = [None, 2**63 - 1, -3, 0, -(2**63)]
    path = write(
        tmp_path / "a.jsonl", [steady(i, 2, i, **({} if s is None else {"step": s})) for i, s in enumerate(steps)]
    )
    assert [report.step for report in view_of(path, exact=True).steps] == [None, -(2**63), -3, 0, 2**63 - 1]


def test_samples_of_no_tokens_and_of_unequal_arrays(tmp_path: Path) -> None:
    records = [
        record([], [], sample_index=0), steady(1, 4), record([-1.0, -2.0], [-1.0], sample_index=2), record([], []),
        record([-1.0], [-1.0], mask=[1, 1, 1], sample_index=4), steady(5, 1),
    ]  # fmt: skip
    view = view_of(write(tmp_path / "a.jsonl", records), exact=True)
    assert view.whole.metrics["compared_token_count"] == 5
    assert view.whole.warnings["length_mismatch"] == 2
    assert view.whole.metrics["active_token_count"] == 5 + 2 + 3
    assert view.steps[0].metrics["sample_count"] == 6
    assert view.sample_means is not None and len(view.sample_means) == 2
    (told,) = (note for note in view.notes if "refused" in note)
    assert told.startswith("refused samples, whose arrays differ in length: 2, the first is sample 3 of ")
    assert told.endswith("a.jsonl (sample_index 2): train_log_probs 2, rollout_log_probs 1, mask 2")


def test_nothing_compared(tmp_path: Path) -> None:
    records = [record([None, None], [-1.0, -1.0]), record([-1.0], [-1.0], mask=[0]), record([], [])]
    view = view_of(write(tmp_path / "a.jsonl", records), exact=True)
    assert math.isnan(view.whole.metrics["abs_dlogp_p50"]) and view.whole.warnings["nothing_compared"]
    assert view.causes[0].findings[0].code == "nothing_compared"
    assert not view.excerpts and view.sample_means is not None and not len(view.sample_means)
    json.dumps(view.to_dict(), allow_nan=False)


def test_a_path_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", several(1, 4))
    assert_same_view(view_of(path, tmp_path, tmp_path / "." / "a.jsonl"), view_of(path))


def test_samples_that_are_bad_are_told_and_the_others_count(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [steady(0, 3), steady(1, 3, step="soon"), steady(2**64, 3), steady(3, 3)])
    view = view_of(path)
    assert view.whole.metrics["compared_token_count"] == 6
    assert [problem.partition("line ")[2][:13] for problem in view.problems] == ["2 is left out", "3 is left out"]


def test_nothing_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [steady(0, 3, step="soon")])
    with pytest.raises(DumpError, match=r"nothing could be read; .*a\.jsonl: line 1 is left out"):
        view_of(path)


@pytest.mark.parametrize("exact_too", [False, True])
@pytest.mark.parametrize("change", ["shorter", "longer", "other steps", "gone", "cut"])
def test_files_that_change_between_readings_are_told(
    change: str, exact_too: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """And no step waits for what is gone."""
    monkeypatch.setattr(plan, "KEPT_BYTES", 0)
    records = several(3, 4)
    first, last = (write(tmp_path / name, records) for name in ("a.jsonl", "b.jsonl"))

    def act() -> None:
        if change == "gone":
            first.unlink()
        elif change == "cut":
            first.write_text(first.read_text()[:-30])
        else:
            odd = [one | {"step": 77} for one in records]
            write(first, {"shorter": records[:5], "longer": records + records[:2], "other steps": odd}[change])

    reading = files.read
    calls = Counter()

    def read(part: Any, *rest: Any) -> Any:
        calls[part.paths[0]] += 1
        if part.paths[0] == first and calls[first] == 2:
            act()
        return reading(part, *rest)

    monkeypatch.setattr(files, "read", read)
    view = view_of(tmp_path, exact=exact_too)
    assert [report.step for report in view.steps] == [0, 1, 2]
    assert any("a.jsonl: it changed while it was read" in problem for problem in view.problems)
    counts = {"shorter": 12 + 5, "longer": 24, "other steps": 12, "gone": 12, "cut": 23}
    assert sum(report.metrics["sample_count"] for report in view.steps) == counts[change]
    assert last.exists()


def test_kept_samples_pin_no_file(tmp_path: Path) -> None:
    """Views of a file's arrays would keep all of it in memory."""
    array = np.zeros(1000, dtype=np.float32)
    from rlk_audit.offline.tokens import owned

    sample = owned(DumpSample(array[:2], array[2:4], np.ones(8, dtype=bool)[::4], token_ids=np.arange(9)[:2]))
    for values in (sample.train_log_probs, sample.rollout_log_probs, sample.mask, sample.token_ids):
        assert values is not None and values.base is None and len(values) == 2


def test_larger_steps_have_no_figures_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlk_audit.offline.plan.MAX_SAMPLES", 3)
    view = view_of(write(tmp_path / "a.jsonl", several(1, 4)))
    assert "sample_count" not in view.steps[0].metrics
    assert "without figures of samples: a step has 4, more than 3" in view.notes


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    for number in range(3):
        write(tmp_path / f"{number}.jsonl", several(1, 4))
    audit_dump([tmp_path], progress=lambda *what: told.append(what))
    assert told[:3] == [("scanning", n, 3) for n in (1, 2, 3)]
    assert told[-1] == ("auditing", 3 * (1 + 2 + 3 + 4), 3 * (1 + 2 + 3 + 4))


# --- texts ----------------------------------------------------------------------------------------------------------


def test_texts_of_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"hello": 0, "\x1b[2J": 1, "[UNK]": 2}, unk_token="[UNK]")
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(file))
    for path in (file, tmp_path):
        assert TokenTexts(path).of(np.array([0, 1, -1, 999])) == ("hello", "\x1b[2J", "?", "999")
    assert TokenTexts().of(np.array([5, -1])) == ("5", "?")
    assert TokenTexts().of(None) == ()
    with pytest.raises(ValueError, match=r"expected a tokenizer\.json"):
        TokenTexts(tmp_path / "none.json")


def test_reports_survive_json(tmp_path: Path) -> None:
    view = view_of(write(tmp_path / "a.jsonl", several(2, 4)))
    for report in (*view.steps, view.whole):
        assert bits(StepReport.from_dict(json.loads(json.dumps(report.to_dict()))).to_dict()) == bits(report.to_dict())
