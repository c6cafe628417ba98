"""Worst tokens in their text: what each token of an excerpt shows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlk_audit.page.text import figure, shortened, signed, step_name
from rlk_audit.run_view import Excerpt

STRENGTHS = (0.01, 0.1, math.log(2), 2.0)
"""abs(dlogp) from which a token has a stronger colour, nats."""
EXCERPTS = 24
_LONGEST_TEXT = 80


@dataclass(frozen=True)
class ShownToken:
    """A token of an excerpt: its text, its dlogp as text, its colour's class and all its numbers."""

    text: str
    number: str
    colour: str
    numbers: str
    is_worst: bool


def worst_first(excerpts: Sequence[Excerpt]) -> list[Excerpt]:
    """Return the excerpts that are shown, those of largest abs(dlogp)."""
    return sorted(excerpts, key=lambda excerpt: -excerpt.worst.abs_dlogp)[:EXCERPTS]


def excerpt_title(excerpt: Excerpt) -> str:
    """Return which token an excerpt is about."""
    worst = excerpt.worst
    told = [step_name(excerpt.step)]
    places = {"sample": worst.sample_index, "position": worst.token_position}
    told += [f"{name} {value}" for name, value in places.items() if value >= 0]
    return f"{', '.join(told)}: dlogp {worst.dlogp:+.4g}"


def shown_tokens(excerpt: Excerpt) -> Iterator[ShownToken]:
    """Yield what is shown of each token; where texts are unknown, its position stands for it."""
    for i, position in enumerate(excerpt.positions):
        train, rollout = excerpt.train_logp[i], excerpt.rollout_logp[i]
        dlogp = train - rollout if math.isfinite(train) and math.isfinite(rollout) else math.nan
        active = excerpt.active[i]
        text = excerpt.texts[i] if i < len(excerpt.texts) else f"#{position}"
        numbers = f"position {position}: train {figure(train)}, rollout {figure(rollout)}, dlogp {figure(dlogp)} nats"
        yield ShownToken(
            shortened(text, _LONGEST_TEXT) or "∅",
            signed(dlogp) if active else "masked",
            _colour(dlogp) if active else "masked",
            numbers if active else f"{numbers}; masked, does not count",
            position == excerpt.worst.token_position,
        )


def _colour(dlogp: float) -> str:
    if math.isnan(dlogp):
        return "unknown"
    strength = bisect.bisect_right(STRENGTHS, abs(dlogp))
    return f"{'up' if dlogp > 0 else 'down'}-{strength}" if strength else "plain"


def legend() -> list[tuple[str, str]]:
    """Return the colours' classes with what they mean, from the most negative to the most positive."""
    edges = [f"{edge:.2g}" for edge in STRENGTHS]
    down = [(f"down-{i + 1}", f"≤ -{edge}") for i, edge in enumerate(edges)]
    up = [(f"up-{i + 1}", f"≥ +{edge}") for i, edge in enumerate(edges)]
    return [*reversed(down), ("plain", f"within ±{edges[0]}"), *up]
