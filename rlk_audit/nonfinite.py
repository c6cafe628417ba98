"""NaN and infinities in the log-probabilities of a JSON record: null in the array, told beside it by their places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Names of the values that JSON has no number for."""
LOG_PROBS = ("train_log_probs", "rollout_log_probs")


def nonfinite_key(name: str) -> str:
    """Return the entry that tells an array's NaN and infinities, name of the value -> places."""
    return name.removesuffix("_log_probs") + "_nonfinite"


def restore_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with NaN and infinities in their places, and without the entries that told them."""
    restored = dict(record)
    for name in LOG_PROBS:
        told = restored.pop(nonfinite_key(name), None)
        if told and restored.get(name) is not None:
            values = list(restored[name])
            for text, places in told.items():
                for place in places:
                    values[place] = NONFINITE[text]
            restored[name] = values
    return restored
