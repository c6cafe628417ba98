"""The audits that are measured: one place that says which."""

from __future__ import annotations

from typing import Any

from rlk_audit import AuditConfig

WORST_K = 10


def audit_variants(**settings: Any) -> dict[str, AuditConfig]:
    """Return name -> settings of every way in which an audit can be computed."""
    return {"rlk_audit": AuditConfig(**({"worst_k": WORST_K} | settings))}
