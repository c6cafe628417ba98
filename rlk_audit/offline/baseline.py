"""A run that was accepted, as the measure of others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlk_audit.run_view import RunView

METRICS = (
    "abs_dlogp_mean", "abs_dlogp_p50", "abs_dlogp_p90", "abs_dlogp_p99", "abs_dlogp_p99_9", "approx_kl0", "clipfrac0",
    "tail_frac_ln2", "prob_diff_mean",
)  # fmt: skip
"""Figures of which more is worse and that do not grow with the number of tokens, as a maximum does."""


def read(path: Path) -> dict[str, float]:
    """Read the figures of what ``report --json`` wrote.

    Raises:
        ValueError: it cannot be read or is no such file.
    """
    expected = "expected what `rlk-audit report --json FILE` writes"
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        (whole,) = [values["total"]] if values["total"] else values["steps"]
        metrics = {name: whole["metrics"][name] for name in METRICS if whole["metrics"].get(name) is not None}
        found = {name: float(value) for name, value in metrics.items()}
        if not all(map(math.isfinite, found.values())):
            raise ValueError("a figure is no number")
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no baseline: {expected}") from error
    if not found:
        raise ValueError(f"the baseline {path} compared nothing; {expected} of a run with tokens")
    return found


def check_ratio(ratio: float) -> None:
    """Refuse a tolerated ratio that is no positive number.

    Raises:
        ValueError: it is none.
    """
    if not 0 < ratio < math.inf:
        raise ValueError(f"the tolerated ratio must be a positive number, got {ratio}")


def crossed(view: RunView, bounds: Mapping[str, float], ratio: float) -> Iterator[str]:
    """Yield a sentence on each figure of a run that is more than ``ratio`` times the baseline's.

    Raises:
        ValueError: the run has several steps and no total.
    """
    if bounds and view.total is None and len(view.steps) > 1:
        raise ValueError("a baseline needs the run's total, which a log has once its auditor was closed")
    for name, accepted in bounds.items():
        value = view.whole.metrics.get(name, math.nan)
        if math.isnan(value):
            yield f"{name} has no value, the baseline's is {accepted:.4g}"
        elif value > ratio * accepted:
            times = f"{value / accepted:.3g} times the baseline's {accepted:.4g}" if accepted else "the baseline's is 0"
            yield f"{name} is {value:.4g}, {times}; tolerated are {ratio:g} times"
