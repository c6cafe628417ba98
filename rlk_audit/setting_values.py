"""How values of settings are read, from texts (arguments, variables) and from what YAML makes of a file.

Every reader raises ValueError with what was expected and what came, and takes its own results unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk_audit.config import AUTO
from rlk_audit.limits import Limit

Reader = Callable[[Any], Any]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ASSIGNMENT = re.compile(r"\s*([^=\s][^=]*?)\s*=(.*)", re.DOTALL)


def text(value: Any) -> str:
    """Read a text."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {value!r}")
    return value


def path(value: Any) -> Path:
    """Read a path; ``~`` is the home folder."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError(f"expected a path, got {value!r}")
    return Path(value).expanduser()


def number(value: Any) -> float:
    """Read a number."""
    try:
        # YAML takes 1e-3 for a text, and a bool is a number to Python.
        return float("no" if isinstance(value, bool) else value)
    except (ValueError, TypeError):
        raise ValueError(f"expected a number, got {value!r}") from None


def integer(value: Any, at_least: int | None = None) -> int:
    """Read an integer."""
    try:
        read = int(str(value))
    except ValueError:
        read = None
    if read is None or (at_least is not None and read < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise ValueError(f"expected an integer{bound}, got {value!r}")
    return read


def flag(value: Any) -> bool:
    """Read yes or no."""
    word = str(value).lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"expected yes or no, got {value!r}")
    return word in _TRUE


def one_of(allowed: Sequence[str]) -> Reader:
    """Return a reader of one of some names."""

    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}, got {value!r}")
        return str(value)

    return read


def mode_of(modes: Sequence[str]) -> Reader:
    """Return a reader of a mode."""
    read = one_of(modes)
    # A bare `off` is a bool to YAML.
    return lambda value: read("off" if value is False else value)


def names(value: Any) -> tuple[str, ...]:
    """Read a list, or a text with commas; ``none`` is an empty one."""
    if isinstance(value, str):
        value = [] if value == "none" else value.split(",")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list, got {value!r}")
    if any(isinstance(part, bool) for part in value):
        raise ValueError(f"expected names, got {value!r}; put yes, no, on and off in quotes")
    return tuple(str(part).strip() for part in value)


def names_of(allowed: Sequence[str]) -> Reader:
    """Return a reader of a list of some names."""
    read_one = one_of(allowed)
    return lambda value: tuple(read_one(name) for name in names(value))


def assignments(value: Any) -> dict[str, str]:
    """Read ``NAME=TEXT`` texts, or a mapping."""
    return {name: str(part) for name, part in _pairs(value)}


def breakdowns(value: Any) -> dict[str, Any]:
    """Read labels with the names of their codes, or the number of these."""
    return {name: _codes(codes) for name, codes in _pairs(value)}


def limits(value: Any) -> dict[str, tuple[str, ...]]:
    """Read limits on metrics; a metric may have several."""
    if isinstance(value, Mapping):
        bounds = ((str(metric), bound) for metric, given in value.items() for bound in _several(given))
        parsed = [Limit.parse(metric, bound) for metric, bound in bounds]
    else:
        parsed = [Limit.parse_assignment(item) for item in _items(value)]
    read: dict[str, tuple[str, ...]] = {}
    for limit in parsed:
        median = "" if limit.window is None else f"x_median_{limit.window}"
        read[limit.metric] = (*read.get(limit.metric, ()), f"{limit.relation}{limit.value!r}{median}")
    return read


def _several(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)) and not value:
        raise ValueError("expected a bound or several, got an empty list")
    return value if isinstance(value, (list, tuple)) else (value,)


def _items(value: Any) -> list[str]:
    """Return the parts of a list, or of a text with semicolons."""
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"expected texts NAME=VALUE, got {value!r}")
    return [part for part in parts if part.strip()]


def _pairs(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(name), part) for name, part in value.items()]
    pairs = []
    for item in _items(value):
        match = _ASSIGNMENT.fullmatch(item)
        if match is None:
            raise ValueError(f"expected NAME=VALUE, got {item!r}")
        pairs.append((match[1], match[2].strip()))
    twice = sorted({name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return pairs


def _codes(value: Any) -> int | str | tuple[str, ...]:
    if value == AUTO:
        return AUTO
    if not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, str) and value.isdecimal())):
        return int(value)
    return names(value)
