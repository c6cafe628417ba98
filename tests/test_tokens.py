"""Each layout's constructor: which sample and position every entry gets, and what it says of data it cannot use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlk_audit import AuditConfig, Collector, StepReport, TokenBatch
from rlk_audit.places import zigzag_spans
from rlk_audit.ragged import to_float_and_missing


def array(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1.0)


def positions(batch: TokenBatch) -> Any:
    return batch.token_position.expand(batch.train_log_probs.shape).tolist()


def report_of(batch: TokenBatch) -> StepReport:
    collector = Collector()
    collector.update(batch)
    return collector.compute()


# --- padded -----------------------------------------------------------------------------------------------------------


def test_padded_positions_count_from_the_response() -> None:
    batch = TokenBatch.from_padded(array(2, 5), array(2, 5), array(2, 5), response_start=[1, 3], sample_index=[8, 9])
    assert positions(batch) == [[-1, 0, 1, 2, 3], [-3, -2, -1, 0, 1]]
    assert batch.sample_index.tolist() == [[8], [9]]
    assert batch.valid is None, "padding is not known, so no total is reported"


def test_padded_next_token_scores() -> None:
    """Entry i holds the log-probability of token i + 1."""
    batch = TokenBatch.from_padded(array(1, 4), array(1, 4), array(1, 4), response_start=[2], index_scores="next_token")
    assert positions(batch) == [[-1, 0, 1, 2]]


def test_padded_without_a_start_has_no_positions() -> None:
    batch = TokenBatch.from_padded(array(1, 4), None, array(1, 4), labels={"engine": [1]}, rollout_id=5)
    assert batch.token_position is None
    assert batch.rollout_id == 5
    assert batch.labels["engine"].tolist() == [[1]]


# --- packed -----------------------------------------------------------------------------------------------------------


def test_packed_positions_start_anew_in_each_sample() -> None:
    """Samples of 3, 0 and 2 tokens, and two entries of padding behind them."""
    batch = TokenBatch.from_packed(array(7), array(7), array(7), cu_seqlens=[0, 3, 3, 5], sample_index=[4, 5, 6])
    assert positions(batch)[:5] == [0, 1, 2, 0, 1]
    assert batch.sample_index.tolist() == [4, 4, 4, 6, 6, -1, -1]
    assert batch.valid.tolist() == [True] * 5 + [False] * 2


def test_packed_next_token_scores_end_before_their_sample() -> None:
    """The last entry of a sequence scores nothing; the prompt is no position of a response."""
    batch = TokenBatch.from_packed(
        array(8), array(8), array(8), cu_seqlens=[0, 4, 8], response_start=[1, 2], index_scores="next_token"
    )
    assert positions(batch) == [0, 1, 2, 3, -1, 0, 1, 2]
    assert batch.valid.tolist() == [True, True, True, False, False, True, True, False]


# --- context parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "cp_rank", "expected"),
    [
        ("zigzag", 0, [0, 1, 6, 7]), ("zigzag", 1, [2, 3, 4, 5]),
        ("contiguous", 0, [0, 1, 2, 3]), ("contiguous", 1, [4, 5, 6, 7]),
    ],
)  # fmt: skip
def test_a_padded_shard_has_global_positions(layout: str, cp_rank: int, expected: list[int]) -> None:
    batch = TokenBatch.from_cp_shard(
        array(2, 4), array(2, 4), array(2, 4), cp_rank=cp_rank, cp_size=2, seq_length=8, layout=layout,
        response_start=[0, 3],
    )  # fmt: skip
    assert positions(batch) == [expected, [place - 3 for place in expected]]


@pytest.mark.parametrize(
    ("cp_rank", "expected_positions", "expected_valid"),
    [(0, [0, 3, 0, 1, 6, 7], [1, 0, 1, 1, 0, 0]), (1, [1, 2, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1])],
)
def test_a_packed_shard_is_cut_sample_by_sample(
    cp_rank: int, expected_positions: list[int], expected_valid: list[int]
) -> None:
    """Sequences of 3 and 6 tokens, padded to 4 and 8, over two ranks: each gets 2 + 4 entries."""
    batch = TokenBatch.from_cp_shard(
        array(6), array(6), array(6), cp_rank=cp_rank, cp_size=2, cu_seqlens_padded=[0, 4, 12], cu_seqlens=[0, 3, 9],
        sample_index=[1, 2],
    )  # fmt: skip
    assert positions(batch) == expected_positions
    assert batch.valid.int().tolist() == expected_valid
    assert batch.sample_index.tolist() == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (
            {"cp_rank": 2, "cp_size": 2, "seq_length": 8},
            "expected 0 <= cp_rank < cp_size and layout 'zigzag' or 'contiguous', "
            "got cp_rank=2, cp_size=2, layout='zigzag'",
        ),
        (
            {"cp_rank": 0, "cp_size": 2, "seq_length": 8, "layout": "striped"},
            "expected 0 <= cp_rank < cp_size and layout 'zigzag' or 'contiguous', "
            "got cp_rank=0, cp_size=2, layout='striped'",
        ),
        (
            {"cp_rank": 0, "cp_size": 2},
            "from_cp_shard needs seq_length (padded arrays) or cu_seqlens_padded (packed ones)",
        ),
        (
            {"cp_rank": 0, "cp_size": 2, "seq_length": 8, "index_scores": "prev"},
            "index_scores must be 'token' or 'next_token', got 'prev'",
        ),
    ],
)
def test_misuse_that_is_the_same_on_every_rank_raises(place: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"must|expected|needs") as caught:
        TokenBatch.from_cp_shard(array(1, 4), array(1, 4), array(1, 4), **place)
    assert str(caught.value) == sentence


# --- data that cannot be used: no exception, one rank would leave the others waiting ----------------------------------


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (
            lambda: TokenBatch.from_padded(array(4), array(4), array(4)),
            "padded arrays must be [batch, length], got the shape (4,)",
        ),
        (
            lambda: TokenBatch.from_cp_shard(array(1, 3), array(1, 3), array(1, 3), cp_rank=0, cp_size=2, seq_length=8),
            "a shard of seq_length 8 over 2 context-parallel ranks must have the shape [batch, 4] with seq_length a "
            "multiple of 4, got (1, 3)",
        ),
        (
            lambda: TokenBatch.from_lists([[-1.0]], [[-1.0], [-2.0]]),
            "rollout_log_probs must have one entry a sample, expected 1, got 2",
        ),
        (
            lambda: TokenBatch.from_lists([[-1.0]], [[-1.0]], labels={"engine": []}),
            "engine must have one entry a sample, expected 1, got 0",
        ),
    ],
)
def test_a_batch_that_cannot_be_used_is_a_failed_update(batch: Any, sentence: str) -> None:
    batch = batch()
    assert batch.fault == sentence
    collector = Collector(AuditConfig(breakdowns={"engine": 2}))
    collector.update(batch)
    assert collector.last_error == f"an update failed and nothing of it was counted: {sentence}"
    assert collector.compute().warnings == {"update_failed": 1, "nothing_compared": 1}


def test_one_sample_of_unequal_lists_is_refused_alone() -> None:
    batch = TokenBatch.from_lists(
        [[-1.0, -2.0], [-1.0, -2.0, -3.0], [-4.0]], [[-1.5, -2.0], [-1.0, -2.0], [-4.0]],
        [[1, 1], [1, 0, 1], [1]], sample_index=[70, 71, 72],
    )  # fmt: skip
    assert batch.refusal == (
        "sample_index 71 is refused: its arrays must have one length, got train_log_probs 3, rollout_log_probs 2, "
        "mask 3; keep the tokens that were sampled"
    )
    report = report_of(batch)
    assert report.warnings == {"length_mismatch": 1}
    assert report.complete
    counts = {name: report.metrics[f"{name}_token_count"] for name in ("total", "active", "compared")}
    assert counts == {"total": 6, "active": 5, "compared": 3}
    assert report.classes["rejected"] == 2


def test_without_an_index_the_place_in_the_batch_is_named() -> None:
    batch = TokenBatch.from_lists([[-1.0], [-1.0]], [[-1.0], [-1.0, -1.0]])
    assert batch.refusal.startswith("sample 1 of the batch is refused: ")


def test_a_pack_of_unequal_arrays_is_refused_whole() -> None:
    """Reported: one slot dropped a pack on one side, one a sample on the other."""
    batch = TokenBatch.from_packed(
        array(11), array(9), torch.ones(12), cu_seqlens=[0, 4, 7, 12], sample_index=[3, 4, 5]
    )
    assert batch.refusal == (
        "a pack of 3 samples (sample_index 3, 4, 5) is refused: its arrays must have one length, got "
        "train_log_probs 11, mask 12, rollout_log_probs 9; score every array with the same shift and pad it alike"
    )
    report = report_of(batch)
    assert report.warnings == {"length_mismatch": 3, "nothing_compared": 1}
    assert report.metrics["active_token_count"] == report.metrics["total_token_count"] == 12


@pytest.mark.parametrize(("samples", "told"), [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7, ...")])
def test_eight_samples_of_a_refused_pack_are_named(samples: int, told: str) -> None:
    batch = TokenBatch.from_packed(
        array(samples), array(1), torch.ones(samples), cu_seqlens=range(samples + 1), sample_index=list(range(samples))
    )
    assert f"(sample_index {told}) is refused" in batch.refusal


def test_a_pack_of_one_row_keeps_its_labels_and_columns() -> None:
    config = AuditConfig(breakdowns={"engine": ("e0", "e1")})
    row, codes = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[0, 1, 1]])
    reports = []
    for train, rollout, mask, labels in (
        (row, row - 0.5, torch.ones(1, 3), codes),
        (row[0], row[0] - 0.5, torch.ones(3), codes[0]),
    ):
        collector = Collector(config)
        collector.update(TokenBatch.from_packed(train, rollout, mask, cu_seqlens=[0, 1, 3], labels={"engine": labels}))
        reports.append(collector.compute().to_dict())
    assert reports[0] == reports[1]
    assert [bucket["compared_token_count"] for bucket in reports[0]["breakdowns"]["engine"]] == [0, 1, 2], (
        "unknown first"
    )


def test_a_position_that_is_no_integer_is_named() -> None:
    collector = Collector(AuditConfig(breakdowns={"position": "auto"}))
    collector.update([-1.0], [-1.0], [1], token_position=torch.tensor([0.5]))
    assert collector.last_error is not None and "token_position must be integers" in collector.last_error


# --- context parallelism by spans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_zigzag_spans_are_where_the_token_in_front_lies(cp_size: int) -> None:
    """One by one: token t is scored at position t - 1, which lies in the chunk of that place."""
    for total in range(1, 14):
        for response in range(total):
            for padded in {total, total + 3}:
                width = -(-padded // (2 * cp_size))
                owned: list[list[int]] = [[] for _ in range(cp_size)]
                for token in range(total - response, total):
                    chunk = (token - 1) // width if cp_size > 1 else 0
                    owned[min(chunk, 2 * cp_size - 1 - chunk)].append(token - (total - response))
                for cp_rank in range(cp_size):
                    early, late = zigzag_spans(total, response, padded, cp_rank, cp_size)
                    assert [*early, *late] == owned[cp_rank]


# --- ragged lists -----------------------------------------------------------------------------------------------------


def test_lists_become_one_flat_batch() -> None:
    batch = TokenBatch.from_lists(
        [[-1.0, -2.0], [], [-3.0]], [[-1.0, None], [], None], sample_index=[5, 6, 7], labels={"engine": [0, 1, -1]},
        updates_since_rollout=2,
    )  # fmt: skip
    assert batch.train_log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert batch.rollout_missing.tolist() == [False, True, True]
    assert batch.token_position.tolist() == [0, 1, 0]
    assert batch.sample_index.tolist() == [5, 5, 7]
    assert batch.labels["engine"].tolist() == [0, 0, -1]
    assert batch.updates_since_rollout.tolist() == [2, 2, 2]
    assert batch.mask.tolist() == [1.0, 1.0, 1.0]
    assert batch.valid.all()


def test_lists_keep_their_precision() -> None:
    """Python floats are float64, tensors stay as given; an empty list widens nothing."""
    third = 1 / 3
    assert TokenBatch.from_lists([[-third], []], [[-third], []]).train_log_probs.dtype == torch.float64
    half = torch.tensor([-0.5], dtype=torch.bfloat16)
    assert TokenBatch.from_lists([half, []], [half, []]).train_log_probs.dtype == torch.bfloat16


@pytest.mark.parametrize("lists", [([], []), ([[]], [[]]), ([[], []], [None, None]), ([], None)])
def test_nothing_at_all_is_a_batch(lists: tuple[Any, Any]) -> None:
    report = report_of(TokenBatch.from_lists(*lists))
    assert report.complete
    assert report.metrics["total_token_count"] == 0
    assert report.warnings == {"nothing_compared": 1}


def test_empty_responses_with_all_their_ids_are_a_batch() -> None:
    """A micro-batch in which every response was aborted before its first token."""
    batch = TokenBatch.from_lists(
        [[], []], [[], []], [[], []], sample_index=[1, 2], token_ids=[[], []], rollout_token_ids=[[], []]
    )
    report = report_of(batch)
    assert report.complete
    assert report.warnings == {"nothing_compared": 1}


@pytest.mark.parametrize(
    ("values", "numbers", "missing"),
    [
        ([-1, -2.5], [-1.0, -2.5], None),
        ([-1.0, None], [-1.0, 0.0], [False, True]),
        ([[None, -2.0], [-3.0, -4.0]], [[0.0, -2.0], [-3.0, -4.0]], [[True, False], [False, False]]),
        (np.array([-1.0, None], dtype=object), [-1.0, 0.0], [False, True]),
        (np.array([-1.0], dtype=np.float16), [-1.0], None),
    ],
)
def test_none_is_told_from_numbers(values: Any, numbers: list[Any], missing: list[Any] | None) -> None:
    tensor, absent = to_float_and_missing(values)
    assert tensor.tolist() == numbers
    assert (None if absent is None else absent.tolist()) == missing


@pytest.mark.parametrize("values", [[[-1.0], [-1.0, -2.0]], [-1.0, "x"], [{"a": 1}]])
def test_what_is_no_number_is_told(values: Any) -> None:
    with pytest.raises(ValueError, match=r"^log-probabilities must be numbers or None in equal rows"):
        to_float_and_missing(values)
