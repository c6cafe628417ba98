"""The configuration: what is accepted, what is refused and in which words, what ranks must agree on."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from rlk_audit import AuditConfig
from rlk_audit.config import quantile_fraction, quantile_suffix, quantile_text

FULL: dict[str, Any] = {
    "mode": "strict", "eps_low": 0.1, "eps_high": 0.3, "quantiles": ["0.25", 0.75], "grouping_power": 5, "worst_k": 2,
    "worst_per_sample": 1, "breakdowns": {"engine": ["e0", "e1"], "weight_lag": 3}, "limits": {"abs_dlogp_p75": 0.05},
    "sentinel_floor": -500, "positive_tolerance": 0, "expect_identical": True, "prefix": "a/b-1/",
    "metadata": {"run": 7}, "max_state_bytes": 10**6,
}  # fmt: skip


def test_plain_values_make_an_equal_configuration() -> None:
    """Also through JSON, as a run's file keeps it."""
    config = AuditConfig.from_dict(FULL)
    values = json.loads(json.dumps(config.to_dict()))
    assert AuditConfig.from_dict(values) == config != AuditConfig()
    assert set(values) == {f.name for f in dataclasses.fields(AuditConfig)}
    assert config.quantiles == ("0.25", "0.75")
    assert dict(config.breakdowns) == {"engine": ("e0", "e1"), "weight_lag": ("0", "1", "2")}
    assert dict(config.metadata) == {"run": "7"}


def test_a_configuration_does_not_change() -> None:
    labels = {"engine": ["e0"]}
    config = AuditConfig(breakdowns=labels)
    labels["engine"].append("e1")
    labels["other"] = ["x"]
    assert dict(config.breakdowns) == {"engine": ("e0",)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "off"
    with pytest.raises(TypeError):
        config.breakdowns["other"] = ("x",)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"mode": "on"}, "mode must be one of off, audit, strict, got 'on'"),
        ({"eps_low": 1.0}, "eps_low must be from 0 to 1, got 1.0"),
        ({"eps_low": -0.1}, "eps_low must be from 0 to 1, got -0.1"),
        ({"eps_high": float("nan")}, "eps_high must be from 0 to 1e+06, got nan"),
        ({"grouping_power": 4}, "grouping_power must be from 5 to 8, got 4"),
        ({"worst_k": 0}, "worst_k must be from 1 to 64, got 0"),
        ({"worst_k": 65}, "worst_k must be from 1 to 64, got 65"),
        ({"worst_per_sample": 2}, "worst_per_sample must be None or 1, got 2"),
        ({"sentinel_floor": -2000.0}, "sentinel_floor must be from -1000 to -1, got -2000.0"),
        ({"positive_tolerance": 0.1}, "positive_tolerance must be from 0 to 0.001, got 0.1"),
        ({"max_state_bytes": 0}, "max_state_bytes must be from 1 to 1099511627776, got 0"),
        ({"expect_identical": 1}, "expect_identical must be True or False, got 1"),
        (
            {"prefix": "/a"},
            "prefix must be letters, digits and the signs '_', '.', '-', ' ' and '/', one of which ends it, with no "
            "leading slash, got '/a'",
        ),
        ({"quantiles": ["1.5"]}, "a quantile must be a decimal number from 0 to 1, got '1.5'"),
        ({"quantiles": [True]}, "a quantile must be a decimal number from 0 to 1, got True"),
        ({"breakdowns": {"2x": 2}}, "breakdowns must be named by words, got '2x'"),
        ({"breakdowns": {"engine": 0}}, "breakdowns['engine'] must be at least 1 code, got 0"),
        (
            {"breakdowns": {"engine": ["a", "a"]}},
            "breakdowns['engine'] must be different code names of letters, digits, '_', '.', '-', got ['a', 'a']",
        ),
        (
            {"breakdowns": {"engine": ["unknown"]}},
            "breakdowns['engine'] must be free of the reserved name 'unknown', got ['unknown']",
        ),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"must be") as caught:
        AuditConfig(**values)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"eps_low": "0.2"}, "eps_low must be a number, got str"),
        ({"eps_high": True}, "eps_high must be a number, got bool"),
        ({"worst_k": 4.0}, "worst_k must be an integer, got float"),
        ({"grouping_power": True}, "grouping_power must be an integer, got bool"),
        ({"quantiles": "0.5"}, "quantiles must be a sequence of decimal texts, got str"),
        ({"breakdowns": ["engine"]}, "breakdowns must map label names to code names, got list"),
        ({"breakdowns": {"engine": "e0"}}, "breakdowns['engine'] must be names of codes or their number, got 'e0'"),
        ({"metadata": "x"}, "metadata must be a mapping of texts, got str"),
    ],
)
def test_a_wrong_type_is_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        AuditConfig(**values)
    assert str(caught.value) == sentence


def test_an_unknown_setting_is_named_with_the_known_ones() -> None:
    """Kills: `**_`, which swallows a misspelt setting."""
    with pytest.raises(ValueError, match=r"^unknown setting epslow, wurst_k; the settings are breakdowns, ") as caught:
        AuditConfig.from_dict({"wurst_k": 1, "epslow": 0.1, "mode": "audit"})
    assert "worst_per_sample" in str(caught.value)
    assert "unknown setting mode" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text", "suffix"),
    [
        ("0.5", "0.5", "p50"), (0.5, "0.5", "p50"), (".50", "0.5", "p50"), (Decimal("0.90"), "0.9", "p90"),
        ("0.01", "0.01", "p01"), ("1e-2", "0.01", "p01"), (0.999, "0.999", "p99_9"), ("0.0001", "0.0001", "p00_01"),
        (1, "1", "p100"), ("0", "0", "p00"), ("0.000", "0", "p00"),
    ],
)  # fmt: skip
def test_one_quantile_has_one_text(given: Any, text: str, suffix: str) -> None:
    assert quantile_text(given) == text
    assert quantile_suffix(text) == suffix
    assert quantile_fraction(text) == Fraction(text)
    assert AuditConfig(quantiles=(given, text)).quantiles == (text,)


def test_everything_but_free_texts_must_be_agreed_on() -> None:
    """Kills: a setting that is left out of the exchange, so that two ranks may differ in it."""
    agreed = AuditConfig().agreed_values()
    assert set(agreed) == {f.name for f in dataclasses.fields(AuditConfig)} - {"metadata", "kernel"}
    for name, value in FULL.items():
        changed = AuditConfig.from_dict({name: value} | ({"quantiles": FULL["quantiles"]} if name == "limits" else {}))
        differing = {key for key, text in changed.agreed_values().items() if text != agreed[key]}
        assert differing >= {name} - {"metadata", "kernel"}, name
        assert differing <= {name, "quantiles"}, name
