"""Settings: one table, four sources in order, one truth for the mode, one clear sentence for each mistake."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlk_audit import AuditConfig
from rlk_audit.limits import parse_limits
from rlk_audit.settings import SETTINGS, Settings, add_rlk_args, resolve_settings, validate_rlk_args
from rlk_audit.sinks import ConsoleSink, EveryNth, JsonlSink

DOCS = Path(__file__).parent.parent / "docs" / "settings.md"


def arguments(*texts: str) -> argparse.Namespace:
    return add_rlk_args(argparse.ArgumentParser(allow_abbrev=False)).parse_args(texts)


def resolved(*texts: str, environ: Mapping[str, str] | None = None, config: AuditConfig | None = None) -> Settings:
    return resolve_settings(arguments(*texts), config, environ or {})


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "audit.yaml"
    path.write_text(text)
    return str(path)


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_field_has_a_setting_and_every_setting_a_field() -> None:
    fields = {field.name for record in (AuditConfig, Settings) for field in dataclasses.fields(record)}
    assert {setting.name for setting in SETTINGS} - fields == {"execution_dtype"}
    assert fields - {setting.name for setting in SETTINGS} == set()


def test_names_options_and_destinations_are_unique_and_alike() -> None:
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.destination for setting in SETTINGS}) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.destination.startswith("rlk_")
        assert setting.options[0].startswith("--rlk-")
        assert setting.variable == f"RLK_AUDIT_{setting.name}".upper()


def test_defaults_are_told_as_they_are() -> None:
    """Kills: a help text that a changed default left behind."""
    settings, checked = resolved(), 0
    for setting in SETTINGS:
        told = re.search(r"\(default: ([^()]*)\)$", setting.help)
        if setting.name in ("config", "contract", "execution_dtype", "sinks", "strict_classes"):
            continue
        value = value_of(settings, setting.name)
        assert told is not None, setting.name
        if isinstance(value, bool):
            assert told[1] == ("yes" if value else "no"), setting.name
        elif value is None or value == {}:
            assert told[1].startswith(("no", "never")), setting.name
        else:
            assert setting.read(told[1]) == value, setting.name
        checked += 1
    assert checked == len(SETTINGS) - 5


def table() -> list[str]:
    rows = ["| option | variable | file | meaning |", "|---|---|---|---|"]
    for setting in SETTINGS:
        options = ", ".join(f"`{option}`" for option in setting.options)
        meaning = setting.help.replace("|", "\\|")
        key = "" if setting.name == "config" else f"`{setting.name}`"
        rows.append(f"| {options} | `{setting.variable}` | {key} | {meaning} |")
    return rows


def test_the_documented_table_is_the_code_s() -> None:
    """The table between the lines that mark it; what pytest shows as missing is to be put there."""
    text = DOCS.read_text(encoding="utf-8")
    documented = text.split("<!-- settings -->\n")[1].splitlines()
    assert documented == table()


def test_the_help_names_every_option() -> None:
    text = add_rlk_args(argparse.ArgumentParser(prog="train")).format_help()
    assert all(option in text for setting in SETTINGS for option in setting.options)
    assert "--no-rlk-cp-sharded" in text


# --- reading ----------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, tuple[tuple[str, ...], str, str, Any]] = {
    "mode": (("--rlk-consistency-mode", "audit"), "audit", "mode: audit", "audit"),
    "limits": (
        ("--rlk-limit", "abs_dlogp_p99=0.05", "--rlk-limit", "ess0>=0.9", "--rlk-limit", "ess0<=1"),
        "abs_dlogp_p99=0.05; ess0>=0.9;ess0<=1",
        "limits: {abs_dlogp_p99: 0.05, ess0: ['>=0.9', <=1]}",
        {"abs_dlogp_p99": ("<=0.05",), "ess0": (">=0.9", "<=1.0")},
    ),
    "strict_classes": (("--rlk-strict-classes", "none"), "none", "strict_classes: []", ()),
    "train_filter": (("--rlk-train-filter",), "1", "train_filter: yes", True),
    "expect_identical": (("--rlk-expect-identical",), "true", "expect_identical: true", True),
    "eps_low": (("--rlk-eps-low", "0.1"), "0.1", "eps_low: 0.1", 0.1),
    "eps_high": (("--rlk-eps-high", "1e-3"), "1e-3", "eps_high: 1e-3", 0.001),
    "quantiles": (("--rlk-quantiles", "0.5,0.9"), "0.50, 0.9", "quantiles: [0.5, 0.9]", ("0.5", "0.9")),
    "grouping_power": (("--rlk-grouping-power", "7"), "7", "grouping_power: 7", 7),
    "worst_k": (("--rlk-worst-k", "8"), "8", "worst_k: 8", 8),
    "worst_per_sample": (("--rlk-worst-per-sample", "1"), "1", "worst_per_sample: 1", 1),
    "breakdowns": (
        ("--rlk-breakdown", "engine=e0,e1", "--rlk-breakdown", "turn=3"),
        "engine=e0, e1; turn=3",
        "breakdowns: {engine: [e0, e1], turn: 3}",
        {"engine": ("e0", "e1"), "turn": ("0", "1", "2")},
    ),
    "sentinel_floor": (("--rlk-sentinel-floor", "-500"), "-500", "sentinel_floor: -500", -500.0),
    "positive_tolerance": (("--rlk-positive-tolerance", "0"), "0.0", "positive_tolerance: 0", 0.0),
    "lag": (("--rlk-lag", "1"), "1", "lag: 1", 1),
    "samples_per_step": (("--rlk-samples-per-step", "128"), "128", "samples_per_step: 128", 128),
    "max_state_bytes": (("--rlk-max-state-bytes", "3000000"), "3000000", "max_state_bytes: 3000000", 3_000_000),
    "prefix": (("--rlk-prefix", "drift/"), "drift/", "prefix: drift/", "drift/"),
    "metadata": (
        ("--rlk-metadata", "note=a=b, c", "--rlk-metadata", "seed=1"),
        "note=a=b, c;seed=1",
        "metadata: {note: 'a=b, c', seed: 1}",
        {"note": "a=b, c", "seed": "1"},
    ),
    "sinks": (("--rlk-sinks", "console,jsonl"), "console, jsonl", "sinks: [console, jsonl]", ("console", "jsonl")),
    "output_dir": (("--rlk-output-dir", "runs/1"), "runs/1", "output_dir: runs/1", Path("runs/1")),
    "log_interval": (("--rlk-log-interval", "10"), "10", "log_interval: 10", 10),
    "table_interval": (("--rlk-table-interval", "5"), "5", "table_interval: 5", 5),
    "jsonl_max_bytes": (("--rlk-jsonl-max-bytes", "1000"), "1000", "jsonl_max_bytes: 1000", 1000),
    "reduction_group": (("--rlk-reduction-group", "gloo"), "gloo", "reduction_group: gloo", "gloo"),
    "cp_sharded": (("--no-rlk-cp-sharded",), "off", "cp_sharded: no", False),
    "tp_agreement_interval": (("--rlk-tp-agreement-interval", "4"), "4", "tp_agreement_interval: 4", 4),
    "dump_on_fail": (("--rlk-dump-on-fail", "dumps"), "dumps", "dump_on_fail: dumps", Path("dumps")),
    "dump_max_bytes": (("--rlk-dump-max-bytes", "7"), "7", "dump_max_bytes: 7", 7),
    "kernel": (("--rlk-kernel", "reference"), "reference", "kernel: reference", "reference"),
}
"""Setting -> arguments, variable's text, file's line, and the value that all three mean."""


def value_of(settings: Settings, name: str) -> Any:
    value = getattr(settings if hasattr(settings, name) else settings.config, name)
    return dict(value) if isinstance(value, Mapping) else value


def test_every_setting_has_an_example() -> None:
    assert {setting.name for setting in SETTINGS} - EXAMPLES.keys() == {"config", "contract", "execution_dtype"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_three_sources_mean_the_same(name: str, tmp_path: Path) -> None:
    texts, variable, line, expected = EXAMPLES[name]
    file = yaml_file(tmp_path, line)
    assert value_of(resolved(), name) != expected, "an example that is the default shows nothing"
    assert value_of(resolved(*texts), name) == expected
    assert value_of(resolved(environ={f"RLK_AUDIT_{name.upper()}": variable}), name) == expected
    assert value_of(resolved("--rlk-config", file), name) == expected
    assert value_of(resolved(environ={"RLK_AUDIT_CONFIG": file}), name) == expected


def test_limits_keep_every_digit_and_are_read_back() -> None:
    settings = resolved("--rlk-limit", "abs_dlogp_p99=0.1234567890123", "--rlk-limit", "abs_dlogp_max=3x_median_50")
    (first, second) = parse_limits(settings.config.limits)
    assert first.value == 0.1234567890123
    assert (second.value, second.window) == (3.0, 50)


def test_arguments_are_none_where_they_are_not_given() -> None:
    assert set(vars(arguments()).values()) == {None}
    assert vars(arguments("--rlk-lag", "1"))["rlk_lag"] == 1


def test_the_alias_of_the_mode() -> None:
    assert resolved("--rl-kernel-consistency-mode", "strict").config.mode == "strict"
    assert arguments("--rl-kernel-consistency-mode", "strict").rlk_consistency_mode == "strict"


def test_arguments_of_a_parser_that_knows_nothing_of_the_audit() -> None:
    assert resolve_settings(argparse.Namespace(lr=1.0), None, {}) == resolved()
    assert resolve_settings(None, None, {}) == resolved()


# --- precedence -------------------------------------------------------------------------------------------------------


def test_each_source_goes_before_the_next(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "worst_k: 3\neps_low: 0.3\nlog_interval: 3\nlimits: {ess0: 0.3}\nquantiles: [0.3]\n")
    environ = {"RLK_AUDIT_CONFIG": file, "RLK_AUDIT_WORST_K": "2", "RLK_AUDIT_LIMITS": "ess0=0.2", "RLK_AUDIT_MODE": ""}
    config = AuditConfig(worst_k=9, eps_low=0.4, eps_high=0.4, quantiles=("0.4",), mode="strict")
    settings = resolved("--rlk-worst-k", "1", environ=environ, config=config)
    assert settings.config.worst_k == 1
    assert dict(settings.config.limits) == {"ess0": (">=0.2",)}
    assert (settings.config.eps_low, settings.log_interval, settings.config.quantiles) == (0.3, 3, ("0.3",))
    assert settings.config.eps_high == 0.4
    assert settings.config.mode == "strict"
    assert settings.config.sentinel_floor == -1000.0


def test_an_option_goes_before_the_variable_of_the_file(tmp_path: Path) -> None:
    environ = {"RLK_AUDIT_CONFIG": str(tmp_path / "not_there.yaml")}
    assert resolved("--rlk-config", yaml_file(tmp_path, "worst_k: 3"), environ=environ).config.worst_k == 3


def test_what_code_says_of_the_run_comes_before_the_defaults_alone() -> None:
    in_code = {"cp_sharded": False, "reduction_group": "gloo"}
    settings = resolve_settings(arguments("--rlk-cp-sharded"), None, {}, **in_code)
    assert (settings.cp_sharded, settings.reduction_group) == (True, "gloo")
    settings = validate_rlk_args(None, None, {"RLK_AUDIT_REDUCTION_GROUP": "training"}, **in_code)
    assert (settings.cp_sharded, settings.reduction_group) == (False, "training")


def test_a_yes_can_be_taken_back(tmp_path: Path) -> None:
    environ = {"RLK_AUDIT_TRAIN_FILTER": "yes"}
    assert resolved(environ=environ).config.train_filter
    assert not resolved("--no-rlk-train-filter", environ=environ).config.train_filter


@pytest.mark.parametrize(
    ("texts", "variable", "line", "config", "mode"),
    [
        ((), None, "", None, "off"),
        ((), None, "", AuditConfig(), "audit"),
        ((), None, "mode: off", AuditConfig(), "off"),
        ((), "strict", "mode: off", AuditConfig(), "strict"),
        (("--rlk-consistency-mode", "audit"), "strict", "mode: off", AuditConfig(mode="off"), "audit"),
        (("--rlk-consistency-mode", "off"), "strict", "mode: audit", AuditConfig(), "off"),
    ],
)
def test_there_is_one_truth_for_the_mode(
    texts: tuple[str, ...], variable: str | None, line: str, config: AuditConfig | None, mode: str, tmp_path: Path
) -> None:
    environ = {"RLK_AUDIT_CONFIG": yaml_file(tmp_path, line)} | ({"RLK_AUDIT_MODE": variable} if variable else {})
    assert resolved(*texts, environ=environ, config=config).config.mode == mode


def test_the_process_s_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_AUDIT_WORST_K", "5")
    assert resolve_settings().config.worst_k == 5


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (("--rlk-eps-low", "x"), "argument --rlk-eps-low: expected a number, got 'x'"),
        (("--rlk-consistency-mode", "on"), "expected one of off, audit, strict, got 'on'"),
        (("--rlk-limit", "ess0"), "argument --rlk-limit: expected METRIC=BOUND, METRIC<=BOUND or METRIC>=BOUND, got"),
        (
            ("--rlk-sinks", "csv"),
            "argument --rlk-sinks: expected one of console, jsonl, tensorboard, wandb, mlflow, got",
        ),
        (("--rlk-log-interval", "0"), "argument --rlk-log-interval: expected an integer of at least 1, got '0'"),
        (("--rlk-metadata", "note"), "argument --rlk-metadata: expected NAME=VALUE, got 'note'"),
    ],
)
def test_a_bad_argument_ends_the_command(
    texts: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(*texts)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "environ", "line", "sentence"),
    [
        (("--rlk-eps-low", "2"), {}, "", r"^--rlk-eps-low: eps_low must be from 0 to 1, got 2\.0$"),
        (("--rlk-prefix", "/x"), {}, "", r"^--rlk-prefix: prefix must be letters.*no leading slash, got '/x'$"),
        ((), {"RLK_AUDIT_LAG": "2"}, "", "^RLK_AUDIT_LAG: lag must be from 0 to 1, got 2$"),
        ((), {"RLK_AUDIT_WORST_K": "4.5"}, "", r"^RLK_AUDIT_WORST_K: expected an integer, got '4\.5'$"),
        (
            (),
            {"RLK_AUDIT_LIMIT": "ess0=1"},
            "",
            "^the variable RLK_AUDIT_LIMIT: there is no such setting; did you mean",
        ),
        (
            (),
            {"RLK_AUDIT_XYZ": "1"},
            "",
            "^the variable RLK_AUDIT_XYZ: there is no such setting; the settings are brea",
        ),
        ((), {}, "worst: 1", r"audit\.yaml, worst: there is no such setting; did you mean worst_k\?$"),
        ((), {}, "config: a.yaml", r"audit\.yaml, config: there is no such setting"),
        ((), {}, "eps_low: high", r"audit\.yaml, eps_low: expected a number, got 'high'$"),
        ((), {}, "eps_low: yes", r"audit\.yaml, eps_low: expected a number, got True$"),
        ((), {}, "breakdowns: [1]", r"audit\.yaml, breakdowns: expected texts NAME=VALUE, got \[1\]$"),
        ((), {}, "sinks: 1", r"audit\.yaml, sinks: expected a list, got 1$"),
        ((), {}, "prefix: 1", r"audit\.yaml, prefix: expected a text, got 1$"),
        ((), {}, "output_dir: 1", r"audit\.yaml, output_dir: expected a path, got 1$"),
        ((), {}, "cp_sharded: perhaps", r"audit\.yaml, cp_sharded: expected yes or no, got 'perhaps'$"),
        ((), {}, "- mode", r"audit\.yaml: expected settings, one a line, got list$"),
        ((), {}, "mode: [", r"^RLK_AUDIT_CONFIG: .*audit\.yaml is no YAML: while parsing"),
        ((), {}, "a: !!python/object/apply:os.getcwd []", "is no YAML: could not determine a constructor"),
        (("--rlk-config", "/not/there"), {}, "", "^--rlk-config: /not/there cannot be read: No such file"),
        (
            ("--rlk-consistency-mode", "strict"),
            {},
            "lag: 1",
            r"^--rlk-consistency-mode, .*yaml, lag: mode strict needs la",
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_names_its_source(
    texts: tuple[str, ...], environ: dict[str, str], line: str, sentence: str, tmp_path: Path
) -> None:
    environ = {"RLK_AUDIT_CONFIG": yaml_file(tmp_path, line), **environ}
    with pytest.raises(ValueError, match=sentence) as raised:
        resolved(*texts, environ=environ)
    assert "\n" not in str(raised.value)


def test_strict_goes_with_a_lag_that_is_taken_back() -> None:
    config = AuditConfig(lag=1)
    assert resolved("--rlk-consistency-mode", "strict", "--rlk-lag", "0", config=config).config.mode == "strict"
    with pytest.raises(ValueError, match=r"^--rlk-consistency-mode: mode strict needs lag=0"):
        resolved("--rlk-consistency-mode", "strict", config=config)


def test_a_missing_yaml_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"yaml cannot be imported .*: pip install rlk_audit\[yaml\]$"):
        resolved("--rlk-config", yaml_file(tmp_path, "mode: off"))
    assert resolved(environ={"RLK_AUDIT_MODE": "audit"}).config.mode == "audit"


# --- contracts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def contract(tmp_path: Path) -> str:
    rules = {
        "dlogp_definition": "comparison_lhs_logp - comparison_rhs_logp",
        "nan_inf_policy": "hard_fail",
        "empty_active_token_set": "hard_fail",
        "default_clip_interval": [0.9, 1.3],
        "metrics": {
            "max_abs_dlogp": {
                "pass_rule": "value <= threshold",
                "by_execution_dtype": {"bfloat16": {"threshold": 0.06}},
            }
        },
    }
    path = tmp_path / "contract.json"
    path.write_text(json.dumps({"version": "example-1", "chain_logprob_aggregates": rules}))
    return str(path)


AUDIT = ("--rlk-consistency-mode", "audit")


def test_a_contract_sets_limits_and_the_clip_interval(contract: str) -> None:
    texts = (*AUDIT, "--rlk-contract", contract, "--rlk-execution-dtype", "bfloat16", "--rlk-limit", "ess0=0.9")
    config = resolved(*texts).config
    assert dict(config.limits) == {"ess0": (">=0.9",), "abs_dlogp_max": ("<=0.06",)}
    assert (config.eps_low, config.eps_high, config.contract) == (0.1, 0.3, "example-1")
    assert resolved(*texts, "--rlk-eps-low", "0.1", "--rlk-eps-high", "0.3").config == config


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (
            ("--rlk-execution-dtype", "bfloat16", "--rlk-eps-low", "0.2"),
            "^--rlk-eps-low: eps_low is 0.2, the contract .* 0.1$",
        ),
        (("--rlk-execution-dtype", "float8"), "max_abs_dlogp has no threshold for dtype 'float8'; it has bfloat16"),
        ((), "^--rlk-contract: it needs --rlk-execution-dtype too$"),
    ],
)
def test_a_contract_that_does_not_fit_is_refused(texts: tuple[str, ...], sentence: str, contract: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        resolved(*AUDIT, "--rlk-contract", contract, *texts)


def test_a_dtype_alone_is_refused_and_with_mode_off_no_contract_is_read() -> None:
    with pytest.raises(ValueError, match=r"^RLK_AUDIT_EXECUTION_DTYPE: it needs --rlk-contract too$"):
        resolved(*AUDIT, environ={"RLK_AUDIT_EXECUTION_DTYPE": "bfloat16"})
    assert resolved("--rlk-contract", "/not/there").config.contract is None


# --- before the processes know of each other --------------------------------------------------------------------------


def validated(*texts: str, **environ: str) -> Settings:
    return validate_rlk_args(arguments(*AUDIT, *texts), environ=environ)


def test_valid_arguments_give_the_settings(tmp_path: Path) -> None:
    texts = ("--rlk-limit", "abs_dlogp_p75=0.1", "--rlk-quantiles", "0.75", "--rlk-sinks", "jsonl")
    texts = (*texts, "--rlk-output-dir", str(tmp_path / "new" / "folder"))
    assert validated(*texts) == resolved(*AUDIT, *texts)
    assert not (tmp_path / "new").exists()


def test_a_limit_on_no_metric_is_found_early() -> None:
    with pytest.raises(ValueError, match=r"'abs_dlogp_p75', which is not computed; did you mean abs_dlogp_p\d"):
        validated("--rlk-limit", "abs_dlogp_p75=0.1")
    with pytest.raises(ValueError, match="more than max_state_bytes=1000"):
        validated("--rlk-max-state-bytes", "1000")


def test_an_output_folder_that_cannot_be_made_is_found_on_the_rank_that_writes(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    texts = ("--rlk-sinks", "jsonl", "--rlk-output-dir", str(tmp_path / "file" / "runs"))
    with pytest.raises(OSError, match=r"cannot be made or written to: see .*/file$"):
        validated(*texts)
    with pytest.raises(OSError, match="cannot be made"):
        validated(*texts, RANK="3", WORLD_SIZE="4")
    assert validated(*texts, RANK="2", WORLD_SIZE="4").sinks == ("jsonl",)
    assert validated("--rlk-sinks", "console", *texts[2:]).sinks == ("console",)


def test_a_sink_without_its_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"the sink mlflow needs mlflow.*: pip install rlk_audit\[mlflow\]$"):
        validated("--rlk-sinks", "mlflow")


def test_with_mode_off_nothing_is_checked() -> None:
    args = arguments("--rlk-limit", "no_metric=1", "--rlk-sinks", "jsonl", "--rlk-output-dir", "/dev/null/x")
    assert validate_rlk_args(args, environ={}).config.mode == "off"


# --- sinks ------------------------------------------------------------------------------------------------------------


def test_the_console_is_the_sink_where_there_is_no_other(tmp_path: Path) -> None:
    own = ConsoleSink()
    assert [type(sink) for sink in resolved().build_sinks()] == [ConsoleSink]
    assert resolved().build_sinks([own]) == (own,)
    first, chosen = resolved("--rlk-sinks", "jsonl", "--rlk-output-dir", str(tmp_path)).build_sinks([own])
    assert first is own
    assert isinstance(chosen, JsonlSink)
    chosen.close()
    assert (tmp_path / "audit.jsonl").exists()
    assert resolved("--rlk-sinks", "none").build_sinks() == ()


def test_intervals_reach_the_sinks(tmp_path: Path) -> None:
    texts = ("--rlk-sinks", "jsonl", "--rlk-output-dir", str(tmp_path), "--rlk-log-interval", "7")
    (sink,) = resolved(*texts).build_sinks()
    assert isinstance(sink, EveryNth)
    assert sink.n == 7
    sink.close()
