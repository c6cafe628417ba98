"""The audits that are measured: one place that says which."""

from __future__ import annotations

from typing import Any

import torch

from rlk_audit import AuditConfig
from rlk_audit.kernels.choice import measure_for
from rlk_audit.measure import measure

WORST_K = 10
REFERENCE, NUMBA = "rlk_audit reference", "rlk_audit numba"
KERNELS = {REFERENCE: "reference", NUMBA: "numba"}


def audit_variants(**settings: Any) -> dict[str, AuditConfig]:
    """Return name -> settings of every path that computes an audit here, all to the same bits, the reference first."""
    fast = default_kernel() == "numba"
    return {
        name: AuditConfig(**({"worst_k": WORST_K, "kernel": kernel} | settings))
        for name, kernel in KERNELS.items()
        if fast or kernel == "reference"
    }


def default_audit(**settings: Any) -> AuditConfig:
    """Return the settings of an audit that chooses by itself how it computes."""
    return AuditConfig(**({"worst_k": WORST_K} | settings))


def default_kernel() -> str:
    """Return what an audit on a CPU takes here by itself."""
    return "reference" if measure_for("auto", torch.device("cpu")) is measure else "numba"
