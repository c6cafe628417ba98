"""The audit of a training with vime, under the switch and the names of the audit mode that vime once had built in.

    --rollout-data-postprocess-path rlk_audit.integrations.vime.rollout_data_postprocess

or ``begin_rollout`` there and ``tis``, as in ``rlk_audit.integrations.slime``. Unlike there the mode is ``off`` unless
something sets it: the audit's own settings, or the attributes and variables of vime. Dashboards of
``train/rlk_audit_dlogp_abs_mean`` and its like go on; the figures are now those of the whole rollout over all ranks,
and one that does not exist is left out where it was 0 before.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

from rlk_audit.config import MODES
from rlk_audit.integrations.slime import Dialect, SlimeAudit, TisResult
from rlk_audit.report import StepReport

SWITCHES = ("rlk_consistency_mode", "rlk_consistency", "rl_kernel_consistency_mode", "rl_kernel_consistency")
"""Attributes of vime's arguments; in capitals behind ``VIME_`` its variables. The first that is set decides."""
ALIASES = {"0": "off", "false": "off", "no": "off", "none": "off", "1": "audit", "true": "audit", "yes": "audit"}
ALIASES |= {"audit-only": "audit"}
RENAMED = {f"dlogp_abs_{figure}": f"abs_dlogp_{figure}" for figure in ("mean", "max", "p50", "p90", "p99")}
SAME_NAME = (
    "ratio0_mean", "clipfrac0", "approx_kl0", "active_token_count", "mask_coverage", "zero_active_sample_count",
    "warning_count", "worst_abs_dlogp", "worst_dlogp", "worst_sample_index", "worst_rollout_id",
    "worst_token_position", "worst_rank",
)  # fmt: skip
NAMES = RENAMED | {name: name for name in SAME_NAME}
"""vime's name of a metric, behind its prefix -> the report's key."""
PREFIX = "train/rlk_audit_"


def vime_mode(args: Any, environ: Mapping[str, str] | None = None) -> str:
    """Return the mode that vime's own switches ask for, ``off`` if none of them is set.

    Raises:
        ValueError: a switch holds no mode; the text names it.
    """
    environ = os.environ if environ is None else environ
    variables = ((f"VIME_{name.upper()}", environ.get(f"VIME_{name.upper()}")) for name in SWITCHES)
    attributes = ((name, getattr(args, name, None)) for name in SWITCHES)
    for name, value in (*attributes, *variables):
        if value is not None:
            text = str(value).strip().lower().replace("_", "-")
            mode = ALIASES.get(text, text)
            if mode not in MODES:
                raise ValueError(f"{name}: expected one of {', '.join(MODES)}, got {value!r}")
            return mode
    return "off"


def vime_values(report: StepReport) -> dict[str, float]:
    """Return the report's figures under vime's names; what is null, or not measured, is left out."""
    values = {name: report.metrics.get(key, math.nan) for name, key in NAMES.items()}
    return {PREFIX + name: float(value) for name, value in values.items() if math.isfinite(value)}


VIME = Dialect(vime_mode, vime_values, "train/step")


@functools.cache
def _process_audit() -> SlimeAudit:
    return SlimeAudit(dialect=VIME)


def rollout_data_postprocess(args: Any, rollout_id: int, rollout_data: Mapping[str, Any] | None) -> None:
    """Collective: every rank of the training must call this; see ``SlimeAudit.rollout_data_postprocess``."""
    _process_audit().rollout_data_postprocess(args, rollout_id, rollout_data)


def begin_rollout(args: Any, rollout_id: int | None = None, rollout_data: Mapping[str, Any] | None = None) -> None:
    """Collective: every rank of the training must call this; see ``SlimeAudit.begin_rollout``."""
    _process_audit().begin_rollout(args, rollout_id, rollout_data)


def tis(args: Any, **given: Any) -> TisResult:
    """Audit one micro-batch of the policy loss and return it untouched; see ``SlimeAudit.tis``."""
    return _process_audit().tis(args, **given)
