"""The table of the state vector: no gaps, no overlaps, one row a rank, a fingerprint of all that gives it meaning."""

from __future__ import annotations

from typing import Any

import pytest

from rlk_audit import AuditConfig
from rlk_audit.layout import (
    COUNTERS,
    ONE_WORST_ABOVE,
    ROW_HEADER,
    SUMS,
    TOKEN_CLASSES,
    WORST_TOKEN,
    StateLayout,
    stable_hash,
)
from rlk_audit.sketch import sketch_length

CHANGES: list[dict[str, Any]] = [
    {"eps_low": 0.1}, {"eps_high": 0.1}, {"grouping_power": 7}, {"worst_k": 5}, {"worst_per_sample": 1},
    {"breakdowns": {"engine": 2}}, {"samples_per_step": 4}, {"sentinel_floor": -900.0}, {"positive_tolerance": 0.0},
]  # fmt: skip
OF_NO_STATE: list[dict[str, Any]] = [
    {"mode": "off"}, {"quantiles": ("0.5",)}, {"expect_identical": True}, {"prefix": "x/"}, {"lag": 1},
    {"limits": {"abs_dlogp_p99": 1.0}}, {"strict_classes": ()}, {"contract": "1"}, {"train_filter": True},
    {"metadata": {"host": "a"}}, {"max_state_bytes": 1_000_000}, {"kernel": "reference"},
]  # fmt: skip


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize(
    "config", [AuditConfig(), AuditConfig(worst_k=9, breakdowns={"a": 2, "b": 3}, grouping_power=8)]
)
def test_fields_and_rows_cover_the_vector_once(config: AuditConfig, group_size: int) -> None:
    layout = StateLayout(config, group_size)
    stretches = [field.slice for field in layout.fields.values()]
    stretches += [layout.row_slice(rank) for rank in range(group_size)]
    covered = [place for stretch in stretches for place in range(stretch.start, stretch.stop)]
    assert covered == list(range(layout.length))
    assert layout.fields["counters"].length == len(COUNTERS)
    assert layout.fields["sketch"].length == sketch_length(config.grouping_power)
    assert {name: layout.fields[f"sum_{name}"].length for name in SUMS} == SUMS
    label_count = len(config.breakdowns)
    assert layout.row_length == len(ROW_HEADER) + config.worst_k * (len(WORST_TOKEN) + label_count)
    assert sum(layout.size_table().values()) == 8 * layout.length


def test_every_token_class_has_a_counter() -> None:
    assert set(TOKEN_CLASSES) <= set(COUNTERS)
    assert len(set(COUNTERS)) == len(COUNTERS)


def test_every_setting_is_of_the_state_or_not() -> None:
    changed = [name for change in (*CHANGES, *OF_NO_STATE) for name in change]
    assert sorted(changed) == sorted(AuditConfig().to_dict())


def test_every_setting_of_the_state_changes_the_fingerprint() -> None:
    """Kills: a fingerprint of the lengths alone: ``eps_low`` moves no field and changes what the counts mean."""
    configs = [AuditConfig(), *(AuditConfig(**change) for change in CHANGES)]
    fingerprints = [StateLayout(config).fingerprint for config in configs]
    fingerprints += [StateLayout(AuditConfig(), size).fingerprint for size in (2, 3)]
    assert len(set(fingerprints)) == len(configs) + 2


@pytest.mark.parametrize("change", OF_NO_STATE, ids=lambda change: next(iter(change)))
def test_a_setting_that_gives_no_meaning_does_not_change_the_fingerprint(change: dict[str, Any]) -> None:
    """Kills: a saved state that is refused for a limit."""
    assert StateLayout(AuditConfig(**change)).fingerprint == StateLayout(AuditConfig()).fingerprint


def test_the_hash_is_the_same_in_every_process() -> None:
    """A constant: Python's own hash of a text differs from process to process."""
    assert stable_hash("rlk_audit") == -7744577177217094375
    assert -(2**63) <= stable_hash("") < 2**63
    assert stable_hash("a") != stable_hash("b")


def test_large_groups_keep_one_worst_token_a_rank() -> None:
    config = AuditConfig(worst_k=4)
    small, large = StateLayout(config, ONE_WORST_ABOVE), StateLayout(config, ONE_WORST_ABOVE + 1)
    assert (small.worst_k, large.worst_k) == (4, 1)
    assert large.row_length == len(ROW_HEADER) + len(WORST_TOKEN) < small.row_length
    assert large.length < small.length


def test_the_default_state_is_about_100_kilobytes() -> None:
    assert 90_000 < 8 * StateLayout(AuditConfig()).length < 110_000


def test_a_state_too_large_is_refused_with_its_parts() -> None:
    with pytest.raises(ValueError, match=r"^the state would be ") as caught:
        StateLayout(AuditConfig(max_state_bytes=50_000), 2)
    layout = StateLayout(AuditConfig(), 2)
    parts = ", ".join(f"{name} {size}" for name, size in layout.size_table().items())
    assert str(caught.value) == (
        f"the state would be {8 * layout.length} bytes, more than max_state_bytes=50000: {parts} bytes; "
        "ask for less or raise max_state_bytes"
    )
    assert "rows of 2 ranks" in parts
    exact = AuditConfig(max_state_bytes=8 * layout.length)
    assert StateLayout(exact, 2).length == layout.length, "the limit itself is allowed"


def test_a_group_has_a_rank() -> None:
    with pytest.raises(ValueError, match=r"^group_size must be at least 1, got 0$"):
        StateLayout(AuditConfig(), 0)
