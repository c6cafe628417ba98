"""Laws of the state and the report, as properties over virtual ranks. Each names the mutant that it kills."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import CLASSES, Sample, audit
from strategies import (
    CUT_FORMS,
    RUBBISH,
    WHOLE_FORMS,
    apply,
    as_flat,
    as_lists,
    as_padded,
    assert_reports,
    bits,
    collect,
    cut,
    random_samples,
    reduce,
    samples,
    split,
    without_layout,
)

from rlk_audit import AuditConfig, Collector, LayoutMismatchError, StepReport

CONFIG = AuditConfig()
seeds = st.integers(0, 2**32 - 1)


def collector_of(group: list[Sample]) -> Collector:
    return collect(*as_lists(group, random.Random(0)))


def state(collector: Collector) -> list[int]:
    return collector.pack().tolist()


def figures(group: list[Sample]) -> object:
    return bits(without_layout(reduce([collector_of(group)], CONFIG)))


# --- what is reported -----------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(samples())
def test_every_figure_is_that_of_the_oracle(group: list[Sample]) -> None:
    """Every metric, warning and worst token by its definition.

    Kills: two fields swapped in unpack only; a class filed in another's place; zero filed for NaN.
    """
    assert_reports(reduce([collector_of(group)], CONFIG), audit(group))


@pytest.mark.parametrize("form", WHOLE_FORMS, ids=lambda form: form.__name__)
@given(samples(), seeds)
def test_every_whole_form_gives_the_figures_of_the_oracle(form, group: list[Sample], seed: int) -> None:
    """Lists, flat arrays, padded arrays and packs name the same tokens.

    Kills: a position that counts from the prompt or from the array, not from the response; padding that is counted.
    """
    collector = collect(*form(group, random.Random(seed)))
    assert_reports(reduce([collector], CONFIG), audit(group))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("form", CUT_FORMS, ids=lambda form: form.__name__)
@given(samples(max_samples=4), seeds, st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=30)
def test_every_token_is_counted_by_one_cp_rank(form, layout: str, group: list[Sample], seed: int, cp_size: int) -> None:
    """A sequence cut over context-parallel ranks counts once, at its global positions.

    Kills: tokens counted from the full mask on each CP rank; the second zigzag chunk placed as the first; a position
    local to the shard.
    """
    pieces = form(group, random.Random(seed), cp_size, layout)
    assert_reports(reduce([collect(piece) for piece in pieces], CONFIG), audit(group))


@given(samples())
def test_token_classes_add_up_to_the_active_tokens(group: list[Sample]) -> None:
    """M7: active = compared + all other classes, on every step.

    Kills: a token filed in two classes, or in none.
    """
    report = reduce([collector_of(group)], CONFIG)
    others = sum(report.warnings.get(name, 0) for name in (*CLASSES, "token_mismatch"))
    assert report.metrics["active_token_count"] == report.metrics["compared_token_count"] + others


@given(st.permutations([math.nan, math.inf, -math.inf, -9999.0, 0.5, -0.5, None]), st.integers(0, 6))
def test_what_is_no_log_prob_is_counted_apart(values: list[float | None], places: int) -> None:
    """Not-a-number, infinities, sentinels and gaps reach no sum, bin or extreme.

    Kills: NaN filed as zero; infinity filed in the top bin; a sentinel folded into the mean.
    """
    group = [Sample([-0.25] * 7, values, sample_index=places)]
    report = reduce([collector_of(group)], CONFIG)
    assert report.metrics["compared_token_count"] == 1
    assert report.metrics["abs_dlogp_max"] == report.metrics["abs_dlogp_p50"] == 0.25
    codes = ("rollout_missing", "rollout_sentinel", "rollout_nan", "rollout_neginf")
    assert report.warnings == dict.fromkeys(codes, 1) | {"positive": 2}


# --- M1 to M8 -------------------------------------------------------------------------------------------------------


@given(samples(), seeds)
def test_m1_rubbish_in_masked_slots_changes_nothing(group: list[Sample], seed: int) -> None:
    """M1: whatever stands where the mask is 0, the report is the same to the byte.

    Kills: `d * mask` (NaN times 0); the fault classes counted before the mask is applied.
    """
    rng = random.Random(seed)
    soiled = [
        replace(
            sample,
            train=[t if m else rng.choice(RUBBISH) for t, m in zip(sample.train, sample.mask, strict=True)],
            rollout=[
                r if m else rng.choice((*RUBBISH, None)) for r, m in zip(sample.rollout, sample.mask, strict=True)
            ],
        )
        for sample in group
    ]
    assert figures(soiled) == figures(group)
    for form in WHOLE_FORMS:
        reports = [reduce([collect(*form(some, random.Random(1)))], CONFIG) for some in (group, soiled)]
        assert bits(without_layout(reports[0])) == bits(without_layout(reports[1]))


@given(samples(max_samples=8), seeds, st.integers(1, 64))
@settings(max_examples=40)
def test_m2_tokens_split_in_any_way_give_the_same_bytes(group: list[Sample], seed: int, ranks: int) -> None:
    """M2: single tokens dealt to 1..64 ranks and several micro-batches, some empty.

    Kills: mean of per-rank means; average of per-rank quantiles; an empty rank's zero taken as an extreme.
    """
    rng = random.Random(seed)
    flat = as_flat(group, rng)[0]
    del flat["whole_slots"]  # of samples, not of tokens
    count = flat["train_log_probs"].numel()
    collectors = []
    for places in split(range(count), ranks, rng):
        collector = Collector(CONFIG)
        for some in split(places, rng.randint(1, 3), rng):
            chosen = torch.tensor(some, dtype=torch.int64)
            apply(collector, {name: values[chosen] for name, values in flat.items()})
        collectors.append(collector)
    assert bits(without_layout(reduce(collectors, CONFIG))) == figures(group)


@given(samples(), seeds, st.integers(0, 3), st.integers(0, 5))
def test_m3_padding_changes_nothing(group: list[Sample], seed: int, rows: int, columns: int) -> None:
    """M3: rows and columns of padding, with `valid` given, and with it left out.

    Kills: `mask.numel()` as the total; a figure divided by the size of the array.
    """
    empty = Sample([], [], [], token_ids=[], rollout_token_ids=[], updates_since_rollout=0)
    tight = as_padded(group, random.Random(seed), 0)[0]
    wide = as_padded([*group, *[empty] * rows], random.Random(seed), columns)[0]
    assert bits(without_layout(reduce([collect(wide)], CONFIG))) == bits(
        without_layout(reduce([collect(tight)], CONFIG))
    )
    unknown = [reduce([collect(replace(batch, valid=None))], CONFIG) for batch in (tight, wide)]
    if tight.train_log_probs.numel():
        assert bits(without_layout(unknown[0])) == bits(without_layout(unknown[1]))
        assert math.isnan(unknown[0].metrics["total_token_count"])
        assert math.isnan(unknown[0].metrics["mask_coverage"])


@given(samples(faulty=False))
def test_m4_identical_sides_give_zeros(group: list[Sample]) -> None:
    """M4: T equal to R gives zeros over a positive count, and says so in a note, not in a warning.

    Kills: emptiness decided by a sum that is zero; a `self_comparison` that fails a healthy aligned stack.
    """
    same = [replace(sample, rollout=sample.train, rollout_token_ids=None) for sample in group]
    report = reduce([collector_of(same)], CONFIG)
    count = report.metrics["compared_token_count"]
    assert count == sum(sum(sample.mask) for sample in group)
    assert report.warnings == ({} if count else {"nothing_compared": 1})
    if not count:
        assert report.notes == ()
        return
    assert "self_comparison" in " ".join(report.notes)
    for name in ("abs_dlogp_mean", "abs_dlogp_max", "dlogp_mean", "dlogp_std", "abs_dlogp_p99", "approx_kl0", "kl0_k2"):
        assert report.metrics[name] == 0.0
    assert report.metrics["identical_frac"] == report.metrics["ratio0_mean"] == report.metrics["ess0"] == 1.0


@given(samples(faulty=False))
def test_m5_swapping_the_sides_flips_the_sign_alone(group: list[Sample]) -> None:
    """M5: every figure of abs(d) stays, every figure of d changes its sign.

    Kills: `R - T` for `T - R`; a signed quantile that rounds its rank to the other side; a sketch with unequal halves.
    """
    swapped = [replace(sample, train=sample.rollout, rollout=sample.train) for sample in group]
    here, there = (reduce([collector_of(some)], CONFIG).metrics for some in (group, swapped))
    same = ("abs_dlogp_mean", "abs_dlogp_max", "abs_dlogp_p50", "abs_dlogp_p90", "abs_dlogp_p99", "abs_dlogp_p99_9",
            "dlogp_std", "kl0_k2", "mult_prob_error", "prob_diff_mean", "prob_diff_max", "prob_pearson",
            "tail_frac_ln2", "identical_frac", "compared_token_count", "compared_coverage")  # fmt: skip
    assert bits([here[name] for name in same]) == bits([there[name] for name in same])
    for name in ("dlogp_mean", "kl0_k1", "log_ppl_diff"):
        assert here[name] == -there[name] or math.isnan(here[name])
    assert here["dlogp_min"] == -there["dlogp_max"] or math.isnan(here["dlogp_min"])
    assert here["train_nll"] == pytest.approx(there["rollout_nll"], rel=1e-6, abs=1e-30, nan_ok=True)


@given(samples(faulty=False), seeds)
def test_m6_quantiles_are_ordered(group: list[Sample], seed: int) -> None:
    """M6: min <= p50 <= p90 <= p99 <= p99.9 <= max, also after merging.

    Kills: a quantile not clamped to the extremes; extremes averaged over ranks.
    """
    ranks = cut(group, random.Random(seed), 3, 1, CONFIG)
    merged = Collector(CONFIG)
    for rank in ranks:
        merged.merge(rank)
    for report in (reduce(ranks, CONFIG), merged.compute()):
        metrics = report.metrics
        if not metrics["compared_token_count"]:
            continue
        absolute = [metrics[f"abs_dlogp_{name}"] for name in ("p50", "p90", "p99", "p99_9", "max")]
        signed = [metrics[f"dlogp_{name}"] for name in ("min", "p01", "p50", "p99", "max")]
        assert absolute == sorted(absolute) and signed == sorted(signed)
        assert metrics["worst_abs_dlogp"] == metrics["abs_dlogp_max"] == max(-signed[0], signed[-1])


@given(samples(max_samples=5), seeds)
def test_m8_permuting_ranks_changes_only_the_rank_named(group: list[Sample], seed: int) -> None:
    """M8: the ranks of a group in any order.

    Kills: a row read at the wrong offset; ties broken by rank.
    """
    rng = random.Random(seed)
    ranks = cut(group, rng, 4, 1, CONFIG)
    report = reduce(ranks, CONFIG)
    order = rng.sample(range(4), 4)
    permuted = reduce([ranks[i] for i in order], CONFIG)
    assert bits(without_layout(permuted)) == bits(without_layout(report))
    if report.worst_tokens:
        assert order[permuted.worst_tokens[0].rank] == report.worst_tokens[0].rank
    assert sum(row.compared_token_count for row in report.ranks) == report.metrics["compared_token_count"]


@given(st.integers(0, 7), st.integers(1, 8))
def test_the_worst_rank_is_the_one_that_held_it(holder: int, extra: int) -> None:
    """The token with the largest abs(d) names its rank and micro-batch.

    Kills: the rank of the first row, whoever held the token.
    """
    size = max(holder + 1, extra)
    ranks = [collect(*as_lists([Sample([-1.0], [-1.1], sample_index=rank)], random.Random(0))) for rank in range(size)]
    batch = as_lists([Sample([-1.0], [-3.0], sample_index=99)], random.Random(0))[0]
    ranks[holder].update(batch, microbatch=5)
    report = reduce(ranks, CONFIG)
    worst = report.worst_tokens[0]
    assert (worst.rank, worst.microbatch, worst.sample_index) == (holder, 5, 99)
    assert (report.metrics["worst_rank"], report.metrics["worst_microbatch"]) == (holder, 5)
    assert {row.rank: row.abs_dlogp_max for row in report.ranks}.get(holder) == 2.0


# --- the monoid -----------------------------------------------------------------------------------------------------


@given(samples())
def test_merging_with_an_empty_state_changes_nothing(group: list[Sample]) -> None:
    """merge(x, empty) == x, on both sides, and the two share nothing afterwards.

    Kills: returning `other` when self is empty, which aliases its tensors.
    """
    full = collector_of(group)
    before = state(full)
    left, right = Collector(CONFIG), collector_of(group)
    left.merge(full)
    right.merge(Collector(CONFIG))
    assert state(left) == state(right) == before
    left.update(*pair([-1.0], [-31.0]))
    assert state(full) == before and state(left) != before


@given(st.tuples(samples(), samples(), samples()))
@settings(max_examples=40)
def test_merge_commutes_and_associates_and_leaves_its_argument_alone(groups) -> None:
    """Every order and every tree gives the same bytes.

    Kills: `+=` on the argument; a worst list that keeps the first of equals; float sums.
    """
    groups = [[replace(s, sample_index=10 * i + s.sample_index) for s in group] for i, group in enumerate(groups)]
    before = [state(collector_of(group)) for group in groups]
    outcomes = []
    for order in itertools.permutations(range(3)):
        parts = [collector_of(group) for group in groups]
        left = Collector(CONFIG)
        for i in order:
            left.merge(parts[i])
        right = parts[order[1]]
        right.merge(parts[order[2]])
        tree = parts[order[0]]
        tree.merge(right)
        outcomes += [state(left), state(tree)]
        untouched = [i for i in range(3) if i not in order[:2]]
        assert [state(parts[i]) for i in untouched] == [before[i] for i in untouched]
    assert all(outcome == outcomes[0] for outcome in outcomes)


@given(samples(max_samples=8), seeds)
def test_the_state_of_a_whole_is_the_merge_of_its_parts(group: list[Sample], seed: int) -> None:
    """state(a ++ b) == merge(state(a), state(b)) for any split of the samples, updates counted aside.

    Kills: samples counted where tokens are meant; a maximum that is added.
    """
    parts = split(group, 3, random.Random(seed))
    merged, together = Collector(CONFIG), Collector(CONFIG)
    for part in parts:
        merged.merge(collector_of(part))
        together.update(*as_lists(part, random.Random(0)))
    assert state(merged) == state(together)
    assert bits(without_layout(merged.compute())) == bits(without_layout(collector_of(group).compute()))


@given(samples())
def test_reading_a_packed_state_gives_what_was_packed(group: list[Sample]) -> None:
    """compute() and from_vector(pack()) say the same; reading twice changes nothing.

    Kills: two offset tables; a second reading that doubles the counts.
    """
    collector = collector_of(group)
    first, packed, again = collector.compute(), reduce([collector], CONFIG), collector.compute()
    assert bits(without_layout(first)) == bits(without_layout(packed)) == bits(without_layout(again))
    assert (first.scope, packed.scope) == ("rank", "group")


@given(samples())
def test_a_report_survives_its_dictionary(group: list[Sample]) -> None:
    """from_dict(to_dict()) compares equal as a dict. Kills: a null read back as 0."""
    report = reduce([collector_of(group)], CONFIG)
    assert StepReport.from_dict(report.to_dict()).to_dict() == report.to_dict()


@given(samples(), samples())
@settings(max_examples=30)
def test_a_reset_collector_is_a_new_one(first: list[Sample], second: list[Sample]) -> None:
    """Nothing of a step remains in the next. Kills: extremes that survive; one buffer seen by two reports."""
    collector = collector_of(first)
    report = collector.compute()
    before = bits(report.to_dict())
    collector.reset()
    assert state(collector) == state(Collector(CONFIG))
    collector.update(*as_lists(second, random.Random(0)))
    assert state(collector) == state(collector_of(second))
    assert bits(report.to_dict()) == before


def test_an_empty_state_has_nulls_and_no_zeros() -> None:
    """Empty gives NaN with count 0, never 0.0. Kills: `divide_no_nan`; extremes that start at 0."""
    report = reduce([Collector(CONFIG) for _ in range(3)], CONFIG)
    assert_reports(report, audit([]))
    assert report.metrics["abs_dlogp_mean"] != report.metrics["abs_dlogp_mean"]
    assert report.to_dict()["metrics"]["abs_dlogp_p50"] is None


@pytest.mark.parametrize(
    "other",
    [
        AuditConfig(grouping_power=7), AuditConfig(worst_k=5), AuditConfig(eps_high=0.3),
        AuditConfig(sentinel_floor=-500.0), AuditConfig(breakdowns={"engine": ("e0",)}),
    ],
    ids=["grouping_power", "worst_k", "eps_high", "sentinel_floor", "breakdowns"],
)  # fmt: skip
def test_states_of_different_configurations_do_not_mix(other: AuditConfig) -> None:
    """A merge, and a vector read with another configuration, are refused. Kills: comparing the length alone."""
    mine, theirs = Collector(CONFIG), Collector(other)
    with pytest.raises(ValueError, match="different settings"):
        mine.merge(theirs)
    with pytest.raises((ValueError, LayoutMismatchError)):
        StepReport.from_vector(theirs.pack(), CONFIG, group_size=1)


@given(samples(), st.integers(1, 9))
@settings(max_examples=20)
def test_the_length_of_the_vector_depends_on_no_data(group: list[Sample], size: int) -> None:
    """Kills: list states that grow with the data."""
    full, empty = collector_of(group).pack(0, size), Collector(CONFIG).pack(size - 1, size)
    assert full.shape == empty.shape and full.dtype == empty.dtype == torch.int64


def test_only_the_own_row_is_written() -> None:
    """A rank leaves the rows of the others at zero, so that a sum gathers them. Kills: a row written at offset 0."""
    ranks = [collector_of(random_samples(random.Random(rank), 9, faulty=False)) for rank in range(5)]
    report, lone = reduce(ranks, CONFIG), [rank.compute() for rank in ranks]
    rows = {row.rank: row for row in report.ranks}
    for rank, own in enumerate(lone):
        assert rows[rank].compared_token_count == own.metrics["compared_token_count"]
        assert rows[rank].abs_dlogp_max == own.metrics["abs_dlogp_max"]
        assert rows[rank].dlogp_min == own.metrics["dlogp_min"]
        assert rows[rank].dlogp_max == own.metrics["dlogp_max"]
        assert rows[rank].abs_dlogp_mean == pytest.approx(own.metrics["abs_dlogp_mean"], rel=1e-12)


@given(st.permutations([0.0, -0.0, 0.0, -0.0, -0.0]), st.integers(1, 5))
def test_a_zero_has_one_sign_whatever_came_first(zeros: list[float], ranks: int) -> None:
    """d is -0.0 where T is -0.0 and R is 0.0, and 0.0 elsewhere; no figure may show which of them was seen first.

    Kills: an extreme that keeps the sign of whichever zero came first.
    """
    group = [Sample([zero], [0.0], sample_index=7) for zero in zeros]
    whole = bits(without_layout(reduce([collector_of([Sample([-0.0, 0.0], [0.0, 0.0], sample_index=7)])], CONFIG)))
    report = bits(without_layout(reduce([collector_of(group[rank::ranks]) for rank in range(ranks)], CONFIG)))
    names = (
        "dlogp_min",
        "dlogp_max",
        "dlogp_p01",
        "dlogp_p50",
        "dlogp_mean",
        "kl0_k1",
        "log_ppl_diff",
        "abs_dlogp_max",
    )
    assert [report["metrics"][name] for name in names] == [whole["metrics"][name] for name in names]


# --- worst tokens ---------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=40)
def test_ties_go_to_the_lower_sample_and_then_the_lower_position(seed: int, worst_k: int, ranks: int) -> None:
    """A constant offset makes every token tie; the choice never depends on the order of arrival.

    Kills: `topk` alone, which picks among ties arbitrarily; position compared before sample index.
    """
    rng = random.Random(seed)
    config = AuditConfig(worst_k=worst_k)
    group = [
        Sample([-1.0] * n, [-1.5 if rng.random() < 0.9 else -1.25] * n, sample_index=rng.randrange(10**12) + i)
        for i, n in enumerate(rng.randrange(6) for _ in range(9))
    ]
    group = [replace(s, token_ids=list(range(len(s)))) for s in group]
    assert_reports(reduce(cut(group, rng, ranks, 1, config), config), audit(group, worst_k=worst_k))


@given(seeds, st.integers(1, 6))
@settings(max_examples=30)
def test_at_most_one_worst_token_of_a_sample(seed: int, worst_k: int) -> None:
    """`worst_per_sample=1`: the worst of each sample's worst tokens. Kills: cutting to K before the samples."""
    rng = random.Random(seed)
    config = AuditConfig(worst_k=worst_k, worst_per_sample=1)
    group = random_samples(rng, 8, faulty=False)
    report = reduce(cut(group, rng, 3, 1, config), config)
    tokens = audit(group, worst_k=10**6).worst
    best = list({token.sample_index: token for token in reversed(tokens)}.values())
    best.sort(key=lambda token: (-token.abs_dlogp, token.sample_index))
    got = [(token.abs_dlogp, token.sample_index, token.token_position) for token in report.worst_tokens]
    assert got == [(token.abs_dlogp, token.sample_index, token.token_position) for token in best[:worst_k]]


def pair(train: list[float], rollout: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(train), torch.tensor(rollout), torch.ones(len(train))


# --- the training does not notice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_keeps_no_graph_and_writes_no_input(dtype: torch.dtype) -> None:
    """Kills: a missing `no_grad`; `masked_fill_` on the caller's tensor; a kept reference to the input.

    What is float64 already needs no conversion, and so might be worked on as it is.
    """
    train = (-torch.arange(15.0, dtype=dtype).reshape(3, 5)).requires_grad_()
    scaled = train * 1.0
    rollout, mask = scaled.detach() - 0.1, (torch.arange(15).reshape(3, 5) % 4 != 1)
    rollout[0, 0] = math.nan
    fields = {"token_ids": torch.arange(15).reshape(3, 5), "sample_index": torch.arange(3)[:, None]}
    given = {"train_log_probs": scaled, "rollout_log_probs": rollout, "mask": mask, **fields}
    copies, versions = {n: v.detach().clone() for n, v in given.items()}, {n: v._version for n, v in given.items()}
    collector = collect(given)
    assert collector.compute().complete and collector.compute().metrics["compared_token_count"] > 5
    assert {name: value._version for name, value in given.items()} == versions
    assert all(torch.equal(given[n].detach().nan_to_num(), copies[n].nan_to_num()) for n in given)
    assert not collector.pack().requires_grad
    scaled.sum().backward()
    assert torch.equal(train.grad, torch.ones(3, 5, dtype=dtype))
    before = state(collector)
    with torch.no_grad():
        rollout.fill_(-7.0), mask.fill_(True), fields["token_ids"].fill_(0)
    assert state(collector) == before


def test_update_starts_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a stray barrier or reduction in `update`, `pack` or `compute`."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective was started")

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    collector = collector_of(random_samples(random.Random(0), 4))
    assert collector.compute().metrics["compared_token_count"] > 0
