"""Contract files: limits that another project wrote down, taken over before anything is built.

A contract gives thresholds by execution dtype, a clip interval and what must fail outright. It is consumed, not copied:
its names are mapped by CONTRACT_METRICS, and whatever is not known is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlk_audit.config import TOKEN_CLASSES, AuditConfig

KNOWN_VERSIONS = ("example-1",)

CONTRACT_METRICS = {
    "max_abs_dlogp": "abs_dlogp_max",
    "mean_abs_dlogp": "abs_dlogp_mean",
    "p99_abs_dlogp": "abs_dlogp_p99",
    "approx_kl0": "approx_kl0",
    "clipfrac0": "clipfrac0",
    "ratio0_max": "ratio0_max",
    "ratio0_min": "ratio0_min",
}
"""A contract's name of a metric -> ours."""

_RELATIONS = {"value <= threshold": "<=", "value >= threshold": ">="}
_RULES = (
    "compute_dtype",
    "require_all",
    "nan_inf_policy",
    "empty_active_token_set",
    "dlogp_definition",
    "clip_interval_field",
    "default_clip_interval",
    "metrics",
)
"""What a contract may say. ``compute_dtype`` and ``clip_interval_field`` speak of its own program: ours is float64."""
_DEFINITION = "comparison_lhs_logp - comparison_rhs_logp"
_DEFAULT_CLIP = (0.2, 0.2)


class ContractError(ValueError):
    """A contract cannot be taken over; the text says which part."""


def apply_contract(config: AuditConfig, path: str | os.PathLike[str], dtype: str) -> AuditConfig:
    """Return the configuration with a contract's limits for an execution dtype and its clip interval.

    Args:
        config: its own limits stay, beside the contract's.
        path: the JSON file.
        dtype: execution dtype, such as ``bfloat16``; a key of the contract's thresholds.

    Raises:
        ContractError: the file cannot be read; a version, name, rule or dtype is not known; or the configuration
            sets another clip interval.
    """
    contract = _read(Path(path))
    version = contract.get("version")
    if version not in KNOWN_VERSIONS:
        raise ContractError(f"{path}: version {version!r} is not known; known are {', '.join(KNOWN_VERSIONS)}")
    _refuse_unknown(contract, ("version", "chain_logprob_aggregates"), "the contract", path)
    rules = _part(contract, "chain_logprob_aggregates", path)
    _refuse_unknown(rules, _RULES, "chain_logprob_aggregates", path)
    if rules.get("require_all", True) is not True:
        raise ContractError(f"{path}: require_all must be true, got {rules.get('require_all')!r}")
    if rules.get("dlogp_definition") != _DEFINITION:
        raise ContractError(f"{path}: dlogp_definition must be {_DEFINITION!r}, got {rules.get('dlogp_definition')!r}")
    limits = {**config.limits}
    metrics = _part(rules, "metrics", path)
    if not metrics:
        raise ContractError(f"{path}: metrics must name at least one metric")
    for name, rule in metrics.items():
        metric, bound = _limit(name, rule, dtype, path)
        ours = limits.get(metric, ())
        limits[metric] = (*(ours if isinstance(ours, tuple) else (ours,)), bound)
    eps_low, eps_high = _clip_interval(config, rules, path)
    try:
        return replace(
            config,
            limits=limits,
            eps_low=eps_low,
            eps_high=eps_high,
            contract=version,
            strict_classes=_classes_not_allowed(config, rules, path),
        )
    except ValueError as error:
        raise error if isinstance(error, ContractError) else ContractError(f"{path}: {error}") from error


def _read(path: Path) -> Mapping[str, Any]:
    try:
        contract = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except OSError as error:
        raise ContractError(f"the contract {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ContractError(f"the contract {path} is no JSON: {error}") from error
    if not isinstance(contract, dict):
        raise ContractError(f"the contract {path} must be a JSON object, got {type(contract).__name__}")
    return contract


def _refuse_unknown(values: Mapping[str, Any], known: tuple[str, ...], where: str, path: object) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ContractError(
            f"{path}: {where} holds {', '.join(unknown)}, which is not known; known are {', '.join(known)}"
        )


def _part(values: Mapping[str, Any], name: str, path: object) -> Mapping[str, Any]:
    part = values.get(name)
    if not isinstance(part, dict):
        raise ContractError(f"{path}: {name} must be an object, got {part!r}")
    return part


def _limit(name: str, rule: Any, dtype: str, path: object) -> tuple[str, str]:
    if name not in CONTRACT_METRICS:
        raise ContractError(f"{path}: the metric {name!r} is not known; known are {', '.join(CONTRACT_METRICS)}")
    relation = _RELATIONS.get(str(rule.get("pass_rule"))) if isinstance(rule, dict) else None
    if relation is None:
        raise ContractError(f"{path}: pass_rule of {name} must be one of {', '.join(map(repr, _RELATIONS))}")
    _refuse_unknown(rule, ("pass_rule", "by_execution_dtype"), name, path)
    thresholds = _part(rule, "by_execution_dtype", path)
    if dtype not in thresholds:
        raise ContractError(f"{path}: {name} has no threshold for dtype {dtype!r}; it has {', '.join(thresholds)}")
    _refuse_unknown(_part(thresholds, dtype, path), ("threshold",), f"{name} for {dtype}", path)
    threshold = thresholds[dtype].get("threshold")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, Decimal)):
        raise ContractError(f"{path}: the threshold of {name} for {dtype} must be a number, got {threshold!r}")
    return CONTRACT_METRICS[name], f"{relation}{threshold}"


def _clip_interval(config: AuditConfig, rules: Mapping[str, Any], path: object) -> tuple[float, float]:
    interval = rules.get("default_clip_interval")
    ours = (config.eps_low, config.eps_high)
    if interval is None:
        return ours
    pair = (
        isinstance(interval, list)
        and [isinstance(bound, (int, Decimal)) and not isinstance(bound, bool) for bound in interval] == [True] * 2
    )
    if not pair:
        raise ContractError(f"{path}: default_clip_interval must be two numbers, got {interval!r}")
    # Decimal arithmetic, so that [0.8, 1.2] is eps 0.2 and not 0.19999999999999996.
    theirs = (float(1 - Decimal(interval[0])), float(Decimal(interval[1]) - 1))
    if ours not in (theirs, _DEFAULT_CLIP):
        raise ContractError(
            f"{path}: its clip interval is eps {theirs}, the configuration sets {ours}; set one of them"
        )
    return theirs


def _classes_not_allowed(config: AuditConfig, rules: Mapping[str, Any], path: object) -> tuple[str, ...]:
    for name in ("nan_inf_policy", "empty_active_token_set"):
        if rules.get(name) != "hard_fail":
            raise ContractError(f"{path}: {name} must be 'hard_fail', got {rules.get(name)!r}")
    nonfinite = ("rollout_nan", "rollout_neginf", "train_nan", "train_neginf", "positive")
    return tuple(name for name in TOKEN_CLASSES if name in {*config.classes_not_allowed, *nonfinite})
