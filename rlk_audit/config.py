"""What the user sets: one frozen, validated record, the same on every rank of the group."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import pairwise
from types import MappingProxyType
from typing import Any

MODES = ("off", "audit", "strict")
KERNELS = ("auto", "reference", "numba", "triton")
TOKEN_CLASSES = (
    "rejected",
    "rollout_missing",
    "rollout_sentinel",
    "train_sentinel",
    "rollout_nan",
    "rollout_neginf",
    "train_nan",
    "train_neginf",
    "positive",
    "compared",
)
"""The classes of active tokens, in the order in which they are tested."""
DEFAULT_STRICT_CLASSES = ("rollout_nan", "rollout_neginf", "train_nan", "positive")
Bound = float | str
DEFAULT_QUANTILES = ("0.5", "0.9", "0.99", "0.999")
MAX_WORST_K = 64

SETTINGS_OF_STATE = (
    "eps_low",
    "eps_high",
    "grouping_power",
    "worst_k",
    "worst_per_sample",
    "breakdowns",
    "samples_per_step",
    "sentinel_floor",
    "positive_tolerance",
)
"""Settings that give a state its meaning; the others say what is made of it, and may change between two runs."""

CONFIDENCE_EDGES = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
_LAST_POSITION_POWER = 16
POSITION_BUCKETS = (
    "0",
    "1",
    *(f"{1 << power}-{(2 << power) - 1}" for power in range(1, _LAST_POSITION_POWER)),
    f"{1 << _LAST_POSITION_POWER}-up",
)
BUILT_IN_BREAKDOWNS = {
    "position": POSITION_BUCKETS,
    "confidence": tuple(f"{low:g}-{high:g}" for low, high in pairwise((0, *CONFIDENCE_EDGES, 1))),
}
"""Labels that need no codes of the caller -> their buckets: the position in the response, and exp R."""
AUTO = "auto"
"""What stands for a built-in label's buckets in ``AuditConfig.breakdowns``."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_PREFIX = re.compile(r"(?![/ ])[A-Za-z0-9_./ -]*[_./ -]|")


def quantile_text(q: str | float | int | Decimal) -> str:
    """Return the canonical decimal text of a quantile in [0, 1]; a float is read as its shortest decimal form."""
    try:
        value = Decimal(str(q))
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 <= value <= 1:
        raise ValueError(f"a quantile must be a decimal number from 0 to 1, got {q!r}")
    text = format(value, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def quantile_fraction(text: str) -> Fraction:
    """Return the exact rational value of a quantile's decimal text."""
    return Fraction(Decimal(text))


def quantile_suffix(text: str) -> str:
    """Return the metric suffix of a quantile: ``0.5`` is ``p50``, ``0.01`` is ``p01``, ``0.999`` is ``p99_9``."""
    whole, _, part = format(Decimal(text).scaleb(2), "f").partition(".")
    part = part.rstrip("0")
    return f"p{int(whole):02d}" + (f"_{part}" if part else "")


@dataclass(frozen=True)
class AuditConfig:
    """Settings of an audit.

    Attributes:
        mode: ``off`` (build nothing), ``audit`` (measure and report) or ``strict`` (stop on a failed verdict).
        eps_low, eps_high: the clip interval of the ratio is ``[1 - eps_low, 1 + eps_high]``; eps_low in [0, 1).
        quantiles: decimal texts in [0, 1], for abs(dlogp).
        grouping_power: bits of mantissa that make a sketch bin, 5 to 8; 6 gives a relative accuracy of 0.78 %.
        worst_k: worst tokens kept a step, 1 to 64; above 1,024 ranks only the single worst is kept.
        worst_per_sample: ``1`` keeps at most one worst token of a sample; ``None`` sets no bound.
        breakdowns: label name -> names of its codes, or their number; codes index them, -1 is unknown. The labels
            ``position`` and ``confidence`` are built in: ``{"position": "auto"}``.
        samples_per_step: slots of the table of samples, an upper bound of the samples of a step; None keeps no table.
        sentinel_floor: log-probabilities at or below this finite value are placeholders, nats.
        positive_tolerance: log-probabilities above this are not log-probabilities, nats.
        limits: metric's key -> bound (a number, ``"<=0.05"``, ``">=0.9"``, ``"3x_median_50"``), or a list of bounds.
        strict_classes: token classes that must be empty where the audit is strict; by default ``rollout_nan,
            rollout_neginf, train_nan, positive``, and ``train_neginf`` unless ``train_filter``.
        train_filter: declares that the trainer filters (top-p, top-k), so that it may drop a sampled token.
        contract: version of the contract file whose limits were taken over, or None; see ``contracts``.
        lag: 0 reads a step's reduction at its end, 1 at the next step's end.
        expect_identical: declares that train and rollout are meant to be bitwise equal.
        prefix: put before every metric's key by the sinks.
        metadata: free texts copied to every report.
        max_state_bytes: a configuration whose state vector is larger is refused.
        kernel: what does the per-token work; the bits are the same. ``auto`` is ``numba`` on a CPU where it is
            installed (extra ``fast``), else ``reference``; ``triton``, on CUDA, is taken only when asked for.

    Raises:
        ValueError: a value is out of its range; the text names the field, what was expected and what came.
        TypeError: a field has the wrong type.
    """

    mode: str = "audit"
    eps_low: float = 0.2
    eps_high: float = 0.2
    quantiles: tuple[str, ...] = DEFAULT_QUANTILES
    grouping_power: int = 6
    worst_k: int = 4
    worst_per_sample: int | None = None
    breakdowns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    samples_per_step: int | None = None
    limits: Mapping[str, Bound | tuple[Bound, ...]] = field(default_factory=dict)
    strict_classes: tuple[str, ...] | None = None
    train_filter: bool = False
    contract: str | None = None
    lag: int = 0
    sentinel_floor: float = -1000.0
    positive_tolerance: float = 1e-3
    expect_identical: bool = False
    prefix: str = "rlk_audit/"
    metadata: Mapping[str, str] = field(default_factory=dict)
    max_state_bytes: int = 2_000_000
    kernel: str = "auto"

    def __post_init__(self) -> None:
        _require(self.mode in MODES, "mode", "one of off, audit, strict", self.mode)
        _require_number(self.eps_low, "eps_low", 0.0, math.nextafter(1.0, 0.0))
        _require_number(self.eps_high, "eps_high", 0.0, 1e6)
        _require_integer(self.grouping_power, "grouping_power", 5, 8)
        _require_integer(self.worst_k, "worst_k", 1, MAX_WORST_K)
        _require(
            self.worst_per_sample is None or (self.worst_per_sample == 1 and self.worst_per_sample is not True),
            "worst_per_sample",
            "None or 1",
            self.worst_per_sample,
        )
        _require_number(self.sentinel_floor, "sentinel_floor", -1000.0, -1.0)
        _require_number(self.positive_tolerance, "positive_tolerance", 0.0, 1e-3)
        for name in ("eps_low", "eps_high", "sentinel_floor", "positive_tolerance"):
            # An integer would be another text, and so another hash, of the same setting.
            object.__setattr__(self, name, float(getattr(self, name)))
        _require(isinstance(self.expect_identical, bool), "expect_identical", "True or False", self.expect_identical)
        _require(
            isinstance(self.prefix, str) and _PREFIX.fullmatch(self.prefix) is not None,
            "prefix",
            "letters, digits and the signs '_', '.', '-', ' ' and '/', one of which ends it, with no leading slash",
            self.prefix,
        )
        _require_integer(self.max_state_bytes, "max_state_bytes", 1, 2**40)
        _require(self.kernel in KERNELS, "kernel", f"one of {', '.join(KERNELS)}", self.kernel)
        _require_integer(self.lag, "lag", 0, 1)
        if self.mode == "strict" and self.lag:
            raise ValueError("mode strict needs lag=0: a step's verdict must be known before the next step begins")
        _require(isinstance(self.train_filter, bool), "train_filter", "True or False", self.train_filter)
        if self.samples_per_step is not None:
            _require_integer(self.samples_per_step, "samples_per_step", 1, 2**24)
        object.__setattr__(self, "limits", _canonical_limits(self.limits))
        if self.strict_classes is not None:
            object.__setattr__(self, "strict_classes", tuple(self.strict_classes))
            unknown = sorted(set(self.classes_not_allowed) - set(TOKEN_CLASSES[:-1]))
            _require(not unknown, "strict_classes", f"of {', '.join(TOKEN_CLASSES[:-1])}", ", ".join(unknown))
        object.__setattr__(self, "quantiles", _canonical_quantiles(self.quantiles))
        object.__setattr__(self, "breakdowns", _canonical_breakdowns(self.breakdowns))
        object.__setattr__(self, "metadata", _canonical_metadata(self.metadata))

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings cannot be pickled; configurations travel between the processes of a training.
        return AuditConfig.from_dict, (self.to_dict(),)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AuditConfig:
        """Build a configuration from plain values; an unknown name is refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; the settings are {', '.join(sorted(known))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_dict`` gives an equal configuration back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["quantiles"] = list(self.quantiles)
        values["limits"] = {name: list(b) if isinstance(b, tuple) else b for name, b in self.limits.items()}
        values["strict_classes"] = None if self.strict_classes is None else list(self.strict_classes)
        values["breakdowns"] = {name: list(codes) for name, codes in self.breakdowns.items()}
        values["metadata"] = dict(self.metadata)
        return values

    @property
    def classes_not_allowed(self) -> tuple[str, ...]:
        """Token classes that must be empty where the audit is strict."""
        if self.strict_classes is not None:
            return self.strict_classes
        return DEFAULT_STRICT_CLASSES + (() if self.train_filter else ("train_neginf",))

    @property
    def one_worst_per_sample(self) -> bool:
        """Whether at most one of a sample's tokens is among the worst."""
        return self.worst_per_sample == 1

    @property
    def caller_labels(self) -> tuple[str, ...]:
        """Labels whose codes the caller gives."""
        return tuple(name for name in self.breakdowns if name not in BUILT_IN_BREAKDOWNS)

    def agreed_values(self) -> dict[str, str]:
        """Return field name -> canonical text of everything that all ranks must agree on."""
        return dict(self._agreed_values)

    def state_values(self) -> dict[str, str]:
        """Return field name -> canonical text of SETTINGS_OF_STATE: a state is added to one of the same alone."""
        return {name: self._agreed_values[name] for name in SETTINGS_OF_STATE}

    @functools.cached_property
    def _agreed_values(self) -> dict[str, str]:
        """What ``agreed_values`` returns: nothing here changes, and every pack of a state needs it."""
        return {name: json.dumps(value) for name, value in self.to_dict().items() if name not in ("metadata", "kernel")}


def differences(saved: Mapping[str, Any], own: Mapping[str, str]) -> str:
    """Return which values differ, as ``eps_low was 0.2, is 0.1``; empty where none does."""
    other = [name for name in own if saved.get(name) != own[name]]
    return ", ".join(f"{name} was {saved.get(name)}, is {own[name]}" for name in other)


def as_config(config: AuditConfig | None) -> AuditConfig:
    """Return the configuration, the default one for None.

    Raises:
        TypeError: it is something else.
    """
    if config is None:
        return AuditConfig()
    if not isinstance(config, AuditConfig):
        raise TypeError(f"config must be an AuditConfig, got {type(config).__name__}; see AuditConfig.from_dict")
    return config


def refuse_no_function(name: str, value: object) -> None:
    """Refuse what cannot be called, where it is given and not where it is needed.

    Raises:
        TypeError: the text names its type.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}")


def _require(condition: bool, name: str, expected: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _require_number(value: object, name: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    _require(low <= value <= high, name, f"from {low:g} to {high:g}", value)


def _require_integer(value: object, name: str, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    _require(low <= value <= high, name, f"from {low} to {high}", value)


def _canonical_quantiles(quantiles: Sequence[str | float]) -> tuple[str, ...]:
    if isinstance(quantiles, str) or not isinstance(quantiles, Sequence):
        raise TypeError(f"quantiles must be a sequence of decimal texts, got {type(quantiles).__name__}")
    return tuple(dict.fromkeys(quantile_text(q) for q in quantiles))


def _canonical_breakdowns(breakdowns: Mapping[str, Sequence[str] | int]) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(breakdowns, Mapping):
        raise TypeError(f"breakdowns must map label names to code names, got {type(breakdowns).__name__}")
    canonical = {}
    for name, codes in breakdowns.items():
        if name in BUILT_IN_BREAKDOWNS:
            buckets = BUILT_IN_BREAKDOWNS[name]
            chosen = codes == AUTO or (not isinstance(codes, (str, int)) and tuple(codes) == buckets)
            _require(chosen, f"breakdowns[{name!r}]", "'auto', since its buckets are built in", codes)
            canonical[name] = buckets
            continue
        _require(isinstance(name, str) and _NAME.fullmatch(name) is not None, "breakdowns", "named by words", name)
        if isinstance(codes, int) and not isinstance(codes, bool):
            _require(codes >= 1, f"breakdowns[{name!r}]", "at least 1 code", codes)
            codes = [str(code) for code in range(codes)]
        if isinstance(codes, str) or not isinstance(codes, Sequence):
            raise TypeError(f"breakdowns[{name!r}] must be names of codes or their number, got {codes!r}")
        names = tuple(str(code) for code in codes)
        _require(
            len(names) >= 1 and len(set(names)) == len(names) and all(_NAME_OR_NUMBER.fullmatch(n) for n in names),
            f"breakdowns[{name!r}]",
            "different code names of letters, digits, '_', '.', '-'",
            codes,
        )
        _require("unknown" not in names, f"breakdowns[{name!r}]", "free of the reserved name 'unknown'", codes)
        canonical[name] = names
    return MappingProxyType(canonical)


def _canonical_limits(limits: Mapping[str, Any]) -> Mapping[str, Bound | tuple[Bound, ...]]:
    if not isinstance(limits, Mapping):
        raise TypeError(f"limits must map metric keys to bounds, got {type(limits).__name__}")
    return MappingProxyType({str(metric): _canonical_bounds(str(metric), bounds) for metric, bounds in limits.items()})


def _canonical_bounds(metric: str, bounds: Any) -> Bound | tuple[Bound, ...]:
    if isinstance(bounds, (list, tuple)):
        _require(len(bounds) > 0, f"limits[{metric!r}]", "one bound or several", bounds)
        return tuple(_canonical_bound(metric, bound) for bound in bounds)
    return _canonical_bound(metric, bounds)


def _canonical_bound(metric: str, bound: Any) -> Bound:
    """Return a text as it is, and a number of any library as a float or an int."""
    if isinstance(bound, (str, int)) and not isinstance(bound, bool):
        return bound
    try:
        return float(None if isinstance(bound, bool) else bound)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"limits[{metric!r}] must be a number or a text, got {bound!r}") from error


def _canonical_metadata(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping of texts, got {type(metadata).__name__}")
    return MappingProxyType({str(name): str(value) for name, value in metadata.items()})


_NAME_OR_NUMBER = re.compile(r"[A-Za-z0-9_.-]+")
