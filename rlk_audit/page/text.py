"""Numbers and texts as the page shows them."""

from __future__ import annotations

import html
import math
from decimal import Decimal

NOTHING = "\N{EN DASH}"
"""Shown where there is no number."""

LONGEST = 300
"""Characters of one token or label that are shown."""

_PICTURES = {"\n": "↵", "\t": "⇥", "\x7f": "␡"}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(text: str) -> str:
    """Return a text in which every character can be seen: controls, bidi marks and lone surrogates have signs."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _picture(c) for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in _PICTURES or code >= 0x20:
        return _PICTURES.get(character, f"⟨U+{code:04X}⟩")
    return chr(0x2400 + code)


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the text, cut where it is longer."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def chart_text(text: str, longest: int = LONGEST) -> str:
    """Return a text for a chart: plotly reads tags and entities in labels, and here they are letters."""
    return html.escape(shortened(visible(text), longest), quote=False)


def figure(value: float | int | None) -> str:
    """Return a number to four digits; counts are whole."""
    if value is None or math.isnan(value):
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def signed(value: float) -> str:
    """Return a dlogp with its sign, shortly: ``~0`` where it is below 0.0005."""
    if math.isnan(value):
        return NOTHING
    if abs(value) < 0.0005:
        return "~0" if value else "0"
    return f"{value:+.2f}" if abs(value) >= 0.095 else f"{value:+.1g}"


def power_of_ten(exponent: int) -> str:
    """Return a power of ten as a label of an axis."""
    if -3 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def quantile_name(key: str) -> str:
    """Return ``p99.9`` for ``abs_dlogp_p99_9``."""
    return key.removeprefix("abs_dlogp_").replace("_", ".")


def quantile_share(key: str) -> float:
    """Return the share of tokens at or below a quantile: 0.999 for ``abs_dlogp_p99_9``."""
    return float(Decimal(quantile_name(key)[1:]).scaleb(-2))


def step_name(step: int | None) -> str:
    """Return how a step is called."""
    return "step unknown" if step is None else f"step {step}"


def steps_name(first: int | None, last: int | None) -> str:
    """Return how a range of steps is called."""
    return (
        step_name(first) if first == last or last is None else f"steps {NOTHING if first is None else first} to {last}"
    )


def count_of(number: int, noun: str) -> str:
    """Return ``1 step`` or ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
