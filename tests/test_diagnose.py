"""Every signature on a small input made by hand, laws, and a few held-out recordings of planted faults."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch
from rlk_audit.diagnose import Finding, TokenTable, diagnose
from rlk_audit.signatures.shape import BREAKS_LAW, _breaks_law

STUDY = Path(__file__).parent.parent / "benchmarks" / "diagnosis"


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in findings]


def of_lists(train, rollout, **columns) -> tuple[Finding, ...]:
    return diagnose(None, TokenTable.from_lists(train, rollout, **columns))


def samples(seed: int = 0, count: int = 24, length: int = 24, noise: float = 0.005):
    """Log-probs like those of a trained model, and an engine's that differ by precision noise."""
    random = np.random.default_rng(seed)
    train = [-random.gamma(0.7, 1.8, length) - 1e-4 for _ in range(count)]
    rollout = [np.minimum(t + noise * (1 - np.exp(t)) * random.standard_normal(length), -1e-6) for t in train]
    return train, rollout


def listed(columns) -> list[list[float]]:
    return [column.tolist() for column in columns]


# --- reported cases -------------------------------------------------------------------------------------------------

B01_TRAIN = [-0.11, -2.40, -0.03, -1.70, -0.52, -3.10, -0.24, -0.95]
B01_GOOD = [t + e for t, e in zip(B01_TRAIN, [0.002, -0.001, 0.003, 0, -0.002, 0.001, 0, 0.002], strict=True)]


def test_b01_a_lag_of_one_explains_the_bad_pair_and_is_not_claimed_of_the_good_one() -> None:
    bad = of_lists([B01_TRAIN], [[0.0, *B01_GOOD[:-1]]])
    assert codes(bad)[0] == "shift"
    assert bad[0].evidence["lag"] == 1
    assert bad[0].evidence["rollout"] == "late"
    assert bad[0].evidence["abs_dlogp_mean_before"] == pytest.approx(1.721625)
    assert bad[0].evidence["abs_dlogp_mean_after"] == pytest.approx(0.0012857, rel=1e-3)
    assert codes(of_lists([B01_TRAIN], [B01_GOOD])) == ["healthy"]


B07_RAW = [-0.44019, -0.44019, -1.44019, -0.44019, -2.44019, -0.44019]
B07_SCALED = [-0.20806, -0.20806, -1.87473, -0.20806, -3.54139, -0.20806]


def test_b07_the_two_temperature_signatures_are_told_apart() -> None:
    raw = of_lists([B07_SCALED], [B07_RAW])[0]
    assert (raw.code, raw.evidence["kind"]) == ("temperature", "other temperature")
    assert raw.evidence["temperature_ratio_least"] == pytest.approx(1 / 0.6, rel=1e-3)
    assert raw.evidence["temperature_ratio_most"] == pytest.approx(1 / 0.6, rel=1e-3)
    divided = of_lists([B07_SCALED], [[value / 0.6 for value in B07_RAW]])[0]
    assert (divided.code, divided.evidence["kind"]) == ("temperature", "log-probs divided, train scaled")
    exact = of_lists([B07_RAW], [[value / 0.6 for value in B07_RAW]])[0]
    assert (exact.code, exact.evidence["kind"]) == ("temperature", "log-probs divided")
    assert exact.evidence["slope"] == pytest.approx(1 / 0.6)


def test_b08_renormalised_rollout_is_named_with_its_top_p() -> None:
    ids = [0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    train, rollout = ([math.log(p[i]) for i in ids] for p in ((0.5, 0.3), (0.625, 0.375)))
    found = of_lists([train], [rollout])[0]
    assert found.code == "renormalised"
    assert found.evidence["side"] == "rollout"
    assert found.evidence["implied_top_p"] == pytest.approx(0.8)


def test_b13_tool_tokens_in_the_mask_are_named_and_masked_ones_are_not() -> None:
    train, rollout = [-0.50, -0.20, -4, -6, -5, -0.90], [-0.52, -0.19, 0, 0, 0, -0.88]
    found = of_lists([train], [rollout])[0]
    assert (found.code, found.evidence["tokens"], found.evidence["stretches"]) == ("zero_fill", 3, 1)
    assert "zero_fill" not in codes(of_lists([train], [rollout], mask=[[1, 1, 0, 0, 0, 1]]))
    rubbish = [-0.52, -0.19, 1.0, math.nan, None, -0.88]
    assert of_lists([train], [rubbish], mask=[[1, 1, 0, 0, 0, 1]]) == of_lists(
        [train], [rollout], mask=[[1, 1, 0, 0, 0, 1]]
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_b18_the_stale_engine_is_named(sign: int) -> None:
    sizes, drifts = (100, 100, 10, 190), (0.010, 0.012, 0.900, 0.011)
    train = [[-2.0 - 0.01 * i for i in range(size)] for size in sizes]
    rollout = [[t - sign * d for t in values] for values, d in zip(train, drifts, strict=True)]
    found = of_lists(train, rollout, labels={"engine": ["e0", "e1", "e2", "e3"]})[0]
    assert (found.code, found.evidence["where"]) == ("stale_weights", "engine=e2")
    assert found.evidence["abs_dlogp_mean"] == pytest.approx(0.9)


# --- one signature each ---------------------------------------------------------------------------------------------


def test_precision_noise_is_healthy() -> None:
    train, rollout = samples()
    found = of_lists(listed(train), listed(rollout))
    assert codes(found) == ["healthy"]
    assert found[0].evidence["noise_at_half"] == pytest.approx(0.005 * 0.6745 / 2, rel=0.2)


@pytest.mark.parametrize("lag", [1, -1, 2, -3])
def test_a_shift_tells_its_lag_and_its_samples(lag: int) -> None:
    train, rollout = samples()
    moved = [np.roll(column, lag) if i % 2 else column for i, column in enumerate(rollout)]
    found = of_lists(listed(train), listed(moved), labels={"engine": [i % 2 for i in range(len(train))]})
    assert codes(found) == ["shift"]
    assert (found[0].evidence["lag"], found[0].evidence["samples_affected"]) == (lag, 12)
    assert found[0].evidence["where"] == "engine=1"


@pytest.mark.parametrize("order", [[0, 3, 1, 2], [1, 0], [0, 7, 1, 6, 2, 5, 3, 4]])
@pytest.mark.parametrize("prompt", [0, 40])
def test_blocks_of_context_parallelism_in_another_order(order: list[int], prompt: int) -> None:
    train, rollout = samples(length=90)
    size = -(-(90 + prompt) // len(order))
    moved = []
    for column in rollout:
        padded = np.zeros(size * len(order))
        padded[prompt : prompt + 90] = column
        moved.append(padded.reshape(len(order), size)[order].reshape(-1)[prompt : prompt + 90])
    found = of_lists(listed(train), listed(moved), prompt_length=[prompt] * len(train))
    assert codes(found)[0] == "cp_order"
    assert found[0].evidence["blocks"] == len(order)


def test_rows_in_another_order_are_paired_again() -> None:
    train, rollout = samples()
    found = of_lists(listed(train), listed(rollout[1:] + rollout[:1]))
    assert codes(found) == ["row_order"]
    assert found[0].evidence["samples_affected"] == 24
    # Without the partners: uncorrelated values of the same distribution.
    strangers = samples(seed=1)[1]
    found = of_lists(listed(train), listed(strangers))
    assert (codes(found), found[0].evidence["partner"]) == (["row_order"], "not found")


def test_other_weights_everywhere_and_on_one_rank() -> None:
    train, rollout = samples(noise=0.3)
    assert codes(of_lists(listed(train), listed(rollout))) == ["stale_weights"]
    quiet = samples()
    mixed = (
        [(train if i % 4 == 2 else quiet[0])[i] for i in range(24)],
        [(rollout if i % 4 == 2 else quiet[1])[i] for i in range(24)],
    )
    found = of_lists(*map(listed, mixed), rank=[i % 4 + 8 for i in range(24)])
    assert (codes(found), found[0].evidence["where"]) == (["rank_local"], "rank=10")


def test_dropped_tokens_and_rounded_and_identical_values() -> None:
    train, rollout = samples()
    dropped = listed(train)
    dropped[3][4] = dropped[5][6] = -math.inf
    found = of_lists(dropped, listed(rollout))
    assert (codes(found), found[0].evidence["tokens"]) == (["train_filter"], 2)
    found = of_lists(listed(train), [column.astype(np.float16).tolist() for column in rollout])
    assert (codes(found), found[0].evidence["dtype"]) == (["rounded"], "float16")
    assert found[0].evidence["harmless"] == 1
    assert codes(of_lists(listed(train), listed(train))) == ["self_comparison"]


def test_ends_that_nobody_sampled() -> None:
    train, rollout = samples()
    for i in range(0, 24, 2):
        train[i][-1], rollout[i][-1] = -6.0, 0.0
    found = of_lists(listed(train), listed(rollout))
    assert (codes(found), found[0].evidence["ends"]) == (["synthetic_end"], 12)


def test_another_tokens_value_and_a_heavy_tail() -> None:
    random = np.random.default_rng(2)
    train, rollout = samples(length=60)
    likeliest = [
        np.where(random.random(60) < 0.5, np.maximum(t, np.log(np.maximum(0.5, -np.expm1(t) / 2))), t) for t in train
    ]
    found = of_lists(listed(train), listed(likeliest))
    assert codes(found)[0] == "wrong_token"
    flipped = [
        np.where(random.random(60) < 0.03, np.minimum(r + 0.8 * random.standard_normal(60), -1e-6), r) for r in rollout
    ]
    assert codes(of_lists(listed(train), listed(flipped))) == ["routing_tail"]


# --- distributions --------------------------------------------------------------------------------------------------


def contexts(seed: int = 0, count: int = 1200, vocabulary: int = 400):
    """Log-probs of sharp and flat next-token distributions [count, vocabulary]."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((count, vocabulary)) * random.uniform(0.2, 2.0, (count, 1))
    logits[:, 0] += np.where(random.random(count) < 0.5, random.uniform(4.0, 9.0, count), 0.0)
    return normalised(logits)


def normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def of_sampled(train, rollout, drawn_from=None, noise=0.003, **columns) -> tuple[Finding, ...]:
    """Findings for tokens drawn from the rollout's distributions, 30 a sample; `noise` of the logits, one a sample."""
    random = np.random.default_rng(0)
    drawn = [
        random.choice(len(row), p=np.exp(row) / np.exp(row).sum())
        for row in (rollout if drawn_from is None else drawn_from)
    ]
    places = np.arange(len(drawn))
    t, r = (side[places, drawn] for side in (train, rollout))
    noises = np.repeat(np.broadcast_to(noise, len(t) // 30), 30)
    t = np.minimum(t + noises * (1 - np.exp(t)) * random.standard_normal(len(t)), -1e-9)
    return of_lists(listed(np.split(t, len(t) // 30)), listed(np.split(r, len(r) // 30)), **columns)


def top_k(log_probs: np.ndarray, k: int) -> np.ndarray:
    floor = np.sort(log_probs, axis=1)[:, -k, None]
    return normalised(np.where(log_probs < floor, -50.0, log_probs))


def flat_contexts() -> np.ndarray:
    """A few likely tokens over a flat tail: a filter cuts mass everywhere, as a missing normaliser does."""
    random = np.random.default_rng(1)
    tail = normalised(0.3 * random.standard_normal((1200, 2000)))
    head = normalised(-0.7 * np.arange(5.0)[None])
    likely = random.choice([0.01, 0.9, 0.95], (1200, 1))
    return np.concatenate([np.log(likely) + head, tail + np.log1p(-likely)], axis=1)


def test_top_k_over_a_flat_vocabulary_is_not_called_divided() -> None:
    raw = flat_contexts()
    filtered = top_k(raw, 20)
    for train, rollout, side in ((raw, filtered, "rollout"), (filtered, raw, "train")):
        found = of_sampled(train, rollout, drawn_from=filtered)[0]
        assert (found.code, found.evidence["side"]) == ("renormalised", side)


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_log_probs_divided_over_a_flat_vocabulary_are_not_called_filtered(temperature: float) -> None:
    raw = flat_contexts()
    scaled = normalised(raw / temperature)
    found = of_sampled(scaled, raw / temperature, drawn_from=scaled)[0]
    assert (found.code, found.evidence.get("kind")) == ("temperature", "log-probs divided, train scaled")


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_temperature_obeys_one_ratio_and_moved_weights_do_not(temperature: float) -> None:
    raw = contexts()
    found = of_sampled(raw, normalised(raw / temperature))[0]
    assert (found.code, found.evidence["kind"]) == ("temperature", "other temperature")
    least, most = (found.evidence[f"temperature_ratio_{bound}"] for bound in ("least", "most"))
    assert least <= temperature <= most < 3 * least
    assert f"temperature were {least:.2f} to {most:.2f} times the trainer's" in found.summary


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_one_odd_token_does_not_hide_a_temperature(temperature: float) -> None:
    train, rollout = contexts(), normalised(contexts() / temperature)
    drawn = np.array([np.random.default_rng(i).choice(400, p=np.exp(row)) for i, row in enumerate(rollout)])
    t, r = (side[np.arange(len(drawn)), drawn] for side in (train, rollout))
    odd = int(np.argmin(np.abs(t + 1.5)))
    sharp, flat = (r, t) if temperature < 1 else (t, r)
    sharp[odd] = flat[odd] - 3.0
    assert of_lists(listed(np.split(t, 40)), listed(np.split(r, 40)))[0].code == "temperature"


@pytest.mark.parametrize("sharper", [1, -1])
def test_log_odds_beyond_any_ratio_of_temperatures_break_the_law(sharper: int) -> None:
    """A ratio of 1.5 fits all but one token in twenty, whose log-odds fall behind it by a nat."""
    random = np.random.default_rng(0)
    flat = random.uniform(-6.0, 3.0, 600)
    entropy = random.uniform(0.0, 6.0, 600)

    def broken(behind: float) -> float:
        sharp = 1.5 * flat + 0.5 * entropy * (np.arange(600) % 3 > 0)
        sharp[::20] = 1.5 * flat[::20] - behind
        sides = [(-np.log1p(np.exp(-odds)))[None].tolist() for odds in (sharp, flat)][::sharper]
        return _breaks_law(TokenTable.from_lists(*sides), sharper)

    assert broken(0.0) < BREAKS_LAW < broken(1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_rank_that_scatters_about_a_temperature_is_named_beside_it(temperature: float) -> None:
    raw = contexts()
    ranks = [i % 4 for i in range(40)]
    noise = np.where(np.array(ranks) == 2, 0.6, 0.003)
    found = of_sampled(raw, normalised(raw / temperature), noise=noise, rank=ranks)
    assert set(codes(found)) == {"temperature", "rank_local"}
    assert next(f for f in found if f.code == "rank_local").evidence["where"] == "rank=2"
    assert codes(of_sampled(raw, normalised(raw / temperature), rank=ranks)) == ["temperature"]


def test_several_ranks_may_scatter_and_ranks_are_only_named_beside_a_relation() -> None:
    raw = contexts()
    ranks = [i % 5 + 3 for i in range(40)]
    noise = np.where(np.isin(ranks, [4, 6]), 0.8, 0.003)
    found = of_sampled(raw, normalised(raw / 0.7), noise=noise, rank=ranks)
    assert next(f for f in found if f.code == "rank_local").evidence["where"] == "rank=4, 6"
    noise = np.where(np.array(ranks) == 4, 0.6, 0.25)  # noise everywhere, more of it on one
    assert "rank_local" not in codes(of_sampled(raw, raw, noise=noise, rank=ranks))


def test_two_far_tokens_are_a_tail_and_one_is_not() -> None:
    train, rollout = samples()
    rollout[3][5] -= 0.3
    assert codes(of_lists(listed(train), listed(rollout))) == ["healthy"]
    rollout[7][2] -= 0.3
    assert codes(of_lists(listed(train), listed(rollout))) == ["routing_tail"]


def test_a_small_lean_of_likely_tokens_is_moved_weights_and_as_much_noise_is_not() -> None:
    random = np.random.default_rng(0)
    for noise, lean, expected in ((0.006, 0.006, "stale_weights"), (0.009, 0.0, "healthy"), (0.002, 0.001, "healthy")):
        train = [-random.gamma(0.7, 1.8, 24) - 1e-4 for _ in range(24)]
        moved = [lean * np.where(t > math.log(0.4), 1.5, -1.0) + noise * random.standard_normal(24) for t in train]
        rollout = [np.minimum(t - (1 - np.exp(t)) * m, -1e-6) for t, m in zip(train, moved, strict=True)]
        assert codes(of_lists(listed(train), listed(rollout))) == [expected]


def leaning(noise: float, lean: float, count: int = 48):
    """Samples whose likely tokens lean to one side by `lean` and the others to the other, over a noise of a logit."""
    random = np.random.default_rng(0)
    train = [-random.gamma(0.7, 1.8, 24) - 1e-4 for _ in range(count)]
    moved = [lean * np.where(t > math.log(0.5), 1.0, -1.0) + noise * random.standard_normal(24) for t in train]
    rollout = [np.minimum(t - (1 - np.exp(t)) * m, -1e-6) for t, m in zip(train, moved, strict=True)]
    return listed(train), listed(rollout)


def test_a_lean_well_within_the_noise_of_its_run_is_healthy_however_many_tokens_confirm_it() -> None:
    assert codes(of_lists(*leaning(noise=0.01, lean=0.008))) == ["stale_weights"]
    assert codes(of_lists(*leaning(noise=0.01, lean=0.003, count=400))) == ["healthy"]


@pytest.mark.parametrize(("label", "code"), [("engine", "temperature"), ("weight_version", "stale_weights")])
def test_what_one_version_of_the_weights_does_is_the_weights_and_an_engine_may_have_a_temperature(
    label: str, code: str
) -> None:
    raw = contexts()
    odd = np.repeat(np.arange(40) % 4 == 1, 30)[:, None]
    labels = {label: [i % 4 for i in range(40)]}
    found = of_sampled(raw, np.where(odd, normalised(raw / 0.7), raw), labels=labels)[0]
    assert (found.code, found.evidence["where"]) == (code, f"{label}=1")


@pytest.mark.parametrize("temperature", [0.6, 0.7])
def test_a_shift_is_found_beside_a_temperature(temperature: float) -> None:
    raw = contexts()
    scaled = normalised(raw / temperature)
    random = np.random.default_rng(0)
    drawn = [random.choice(400, p=np.exp(row)) for row in scaled]
    train, rollout = (np.split(side[np.arange(1200), drawn], 40) for side in (raw, scaled))
    found = of_lists(listed(train), [np.roll(column, 1).tolist() for column in rollout])
    assert set(codes(found)) == {"shift", "temperature"}


def test_samples_that_stale_weights_moved_far_follow_the_order_of_blocks_that_the_others_have() -> None:
    train, rollout = samples(length=80)
    random = np.random.default_rng(1)
    stale = [i % 4 == 1 for i in range(len(train))]
    moved = [
        np.minimum(r + 3 * random.standard_normal(80), -1e-6) if bad else r
        for r, bad in zip(rollout, stale, strict=True)
    ]
    ordered = [column.reshape(4, 20)[[0, 2, 3, 1]].reshape(-1) for column in moved]
    found = of_lists(listed(train), listed(ordered), labels={"engine": [i % 4 for i in range(24)]})
    assert codes(found) == ["cp_order", "stale_weights"]
    assert (found[0].evidence["samples_affected"], found[1].evidence["where"]) == (24, "engine=1")


# --- laws -----------------------------------------------------------------------------------------------------------


def test_the_order_of_samples_changes_nothing() -> None:
    train, rollout = samples()
    moved = [np.roll(column, 1) if i % 3 else column for i, column in enumerate(rollout)]
    rows = [
        {
            "train_log_probs": t.tolist(),
            "rollout_log_probs": r.tolist(),
            "sample_index": i,
            "labels": {"engine": f"e{i % 2}"},
        }
        for i, (t, r) in enumerate(zip(train, moved, strict=True))
    ]
    expected = [finding.to_dict() for finding in diagnose(None, TokenTable.from_rows(rows))]
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    found = [finding.to_dict() for finding in diagnose(None, TokenTable.from_rows(shuffled))]
    assert json.dumps(found) == json.dumps(expected)


def test_parts_of_a_sample_are_joined_by_index_and_position() -> None:
    train, rollout = samples(count=4)
    whole = TokenTable.from_lists(listed(train), listed(rollout), sample_index=[7, 5, 3, 1])
    parts = [
        {
            "train_log_probs": t[half].tolist(),
            "rollout_log_probs": r[half].tolist(),
            "token_position": np.arange(24)[half].tolist(),
            "sample_index": index,
        }
        for half in (slice(12, 24), slice(0, 12))
        for index, t, r in zip([7, 5, 3, 1], train, rollout, strict=True)
    ]
    joined = TokenTable.from_rows(parts)
    for name in ("train", "rollout", "sample", "position"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))


def test_nothing_compared_is_never_healthy() -> None:
    assert codes(diagnose(None)) == ["nothing_compared"]
    assert codes(diagnose(None, TokenTable.from_lists([], []))) == ["nothing_compared"]
    assert codes(of_lists([[-1.0, math.nan]], [[None, -1.0]])) == ["nothing_compared"]
    assert codes(of_lists([[-1.0] * 9], [[-1.0] * 9], mask=[[0] * 9])) == ["nothing_compared"]
    assert codes(of_lists([[-math.inf] * 9], [[-1.0] * 9])) == ["nothing_compared", "train_filter"]
    assert codes(of_lists([[-1.0] * 9], [[-1.0] * 8])) == ["nothing_compared"]


VALUES = st.one_of(
    st.floats(-30, 0), st.sampled_from([0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, -9999.0, 5.0, -1e-300, 1e300])
)


@given(
    st.lists(st.lists(st.tuples(VALUES, st.one_of(st.none(), VALUES)), max_size=12), max_size=5),
    st.sampled_from([None, 3, 0]),
)
def test_no_value_crashes_it(rows: list[list[tuple[float, float | None]]], prompt: int | None) -> None:
    train, rollout = [[t for t, _ in row] for row in rows], [[r for _, r in row] for row in rows]
    labels = {"engine": [f"e{i % 2}" for i in range(len(rows))]}
    found = of_lists(
        train, rollout, labels=labels, rank=[i % 3 for i in range(len(rows))], prompt_length=[prompt] * len(rows)
    )
    assert found
    assert all(0 <= finding.strength <= 1 for finding in found)
    for finding in found:
        again = Finding.from_dict(json.loads(json.dumps(finding.to_dict(), allow_nan=False)))
        assert again.to_dict() == finding.to_dict()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_handful_of_tokens_says_nothing(count: int) -> None:
    random = np.random.default_rng(count)
    for _ in range(50):
        train, rollout = -random.gamma(1.0, 1.0, (2, count)) - 0.01
        assert codes(of_lists([train.tolist()], [rollout.tolist()])) == ["too_few_tokens"]


# --- reports --------------------------------------------------------------------------------------------------------


def report_of(train, rollout, engines: list[int] | None = None) -> StepReport:
    config = AuditConfig(breakdowns={"engine": ("e0", "e1", "e2", "e3")} if engines else {})
    collector = Collector(config)
    labels = {"engine": engines} if engines else None
    collector.update(TokenBatch.from_lists(train, rollout, [[1] * len(t) for t in train], labels=labels))
    return collector.compute()


def test_a_report_alone_tells_what_it_can() -> None:
    train, rollout = samples()
    assert codes(diagnose(report_of(listed(train), listed(rollout)))) == ["healthy"]
    assert codes(diagnose(report_of(listed(train), listed(train)))) == ["self_comparison"]
    dropped = listed(train)
    dropped[0][0] = -math.inf
    assert codes(diagnose(report_of(dropped, listed(rollout)))) == ["train_filter"]
    stale = samples(noise=0.4)
    mixed = train[:12] + stale[0][12:], rollout[:12] + stale[1][12:]
    report = report_of(*map(listed, mixed), engines=[0] * 12 + [2] * 12)
    found = diagnose(report)
    assert (codes(found), found[0].evidence["where"]) == (["stale_weights"], "engine=e2")
    assert codes(diagnose(StepReport.from_dict(report.to_dict()))) == ["stale_weights"]
    assert found[0].summary.endswith("(by the step's figures alone; a diagnosis of its tokens says more)")
    strangers = samples(seed=1)[1]
    assert codes(diagnose(report_of(listed(train), listed(strangers)))) == ["misaligned"]
    assert codes(diagnose(Collector(AuditConfig()).compute())) == ["nothing_compared"]


# --- recordings -----------------------------------------------------------------------------------------------------


RECORDINGS = (
    "s21",
    "s25",
    "vllm31_processed",
    "s4",
    "s13",
    "s15",
    "s24",
    "vllm32_processed",
    "s45",
    "s46",
    "vllm34_processed",
    "s51",
    "s54",
    "vllm52_processed",
)
"""Tuning recordings: tests run while thresholds are changed, which must see no held-out one."""


@pytest.fixture(scope="module")
def study():
    sys.path.insert(0, str(STUDY))
    import faults
    import recordings

    yield faults, {name: recordings.read(STUDY / "pairs" / "tune" / f"{name}.npz") for name in RECORDINGS}
    sys.path.remove(str(STUDY))


def test_a_tuning_process_cannot_open_held_out_recordings() -> None:
    script = "import recordings; recordings.forbid_held_out(); recordings.recordings('held_out')"
    result = subprocess.run([sys.executable, "-c", script], cwd=STUDY, capture_output=True, text=True, timeout=120)
    assert "PermissionError: thresholds are tuned without held-out recordings" in result.stderr


def test_planted_faults_of_recordings_come_first(study) -> None:
    """One run of each kind and recording; the study's many runs are in docs/diagnosis.md."""
    faults, recordings = study
    runs = right = 0
    for kind in (*faults.SINGLE, *faults.HEALTHY):
        for recording in list(recordings.values())[:3]:
            run = faults.make(kind, recording, 0)
            if run is not None:
                found = diagnose(None, faults.table(run))
                runs += 1
                right += found[0].code == (kind.codes or ("healthy",))[0]
    assert runs > 80
    assert right >= 0.95 * runs


HARD = (
    ("s25", "rollout top_k_20", 0),
    ("s25", "trainer top_k_20", 0),
    ("vllm32_processed", "one weight version stale", 4),
    ("s24", "one engine stale, large move", 2),
    ("s15", "one engine stale, large move", 9),
    ("s15", "trainer at 0.7", 0),
    ("s13", "rollout at 1.3", 1),
    ("s25", "stale, tiny move", 0),
    ("s4", "stale, tiny move", 4),
    ("s46", "trainer at 0.7", 6),
    ("vllm52_processed", "stale, large move", 1),
    ("s15", "one engine stale, large move", 1),
    ("s54", "one engine stale, large move", 0),
    ("s51", "rollout top_k_20", 0),
    ("s51", "trainer top_k_20", 0),
)
"""Runs that were missed once."""


@pytest.mark.parametrize(("recording", "kind", "number"), HARD)
def test_hard_runs_of_recordings(study, recording: str, kind: str, number: int) -> None:
    faults, found = study
    planted = next(k for k in faults.SINGLE if k.name == kind)
    assert codes(diagnose(None, faults.table(faults.make(planted, found[recording], number))))[0] == planted.codes[0]


@pytest.mark.parametrize(("recording", "number"), [("s45", 2), ("s21", 0)])
def test_a_filter_is_found_beside_rows_whose_partners_are_mostly_missing(study, recording: str, number: int) -> None:
    faults, found = study
    pair = next(kind for kind in faults.PAIRS if kind.name == "top-p + row order")
    named = codes(diagnose(None, faults.table(faults.make(pair, found[recording], number))))
    assert set(pair.codes) <= set(named[:3])


def test_a_planted_tail_below_the_noise_of_its_run_is_no_fault_to_count(study) -> None:
    faults, _ = study
    quiet = {"train": np.full(20, -1.0), "rollout": np.full(20, -1.0)}
    loud = {"train": np.full(20, -1.0), "rollout": np.full(20, -99.0)}
    faults.routing_tail(np.random.default_rng(0), [{**quiet} for _ in range(20)])
    with pytest.raises(faults.BelowNoiseError):
        faults.routing_tail(np.random.default_rng(0), [{**quiet} for _ in range(20)] + [loud])


def test_a_tiny_move_below_the_noise_of_its_recording_is_no_fault_to_count(study) -> None:
    faults, recordings = study
    tiny = next(kind for kind in faults.SINGLE if kind.name == "stale, tiny move")
    assert faults.make(tiny, recordings["s21"], 0)
    with pytest.raises(faults.BelowNoiseError):
        faults.make(tiny, recordings["vllm34_processed"], 0)
