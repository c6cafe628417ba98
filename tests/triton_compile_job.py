"""Compiles the Triton kernels for a GPU that need not be there, and prints what the machine code holds as JSON.

A process of its own: in the tests' process Triton interprets.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rlk_audit import AuditConfig
from rlk_audit.kernels import triton_cuda as kernels
from rlk_audit.layout import StateLayout

H100 = GPUTarget("cuda", 90, 32)
DOUBLES = {"train_out", "rollout_out", "dlogp_out", "magnitude_out", "extremes"}
FLAGS = {"active_in", "missing_in", "mismatch_in", "compared_in", "compared_out"}
THRESHOLDS = {"floor", "tolerance", "clip_low", "clip_high"}


def type_of(name: str, side: str) -> str:
    """Return the type of a kernel's argument."""
    if name in ("train_in", "rollout_in"):
        return f"*{side}"
    if name in DOUBLES:
        return "*fp64"
    if name in FLAGS:
        return "*i1"
    if name == "tables":
        return "*i64"
    if name.endswith("_in"):
        return "*fp32"
    return "fp64" if name in THRESHOLDS else "i32"


def ptx(kernel: Any, constants: dict[str, Any], side: str = "fp32") -> str:
    signature = {n: "constexpr" if n in constants else type_of(n, side) for n in kernel.arg_names}
    text: str = triton.compile(ASTSource(kernel, signature, constants), target=H100).asm["ptx"]
    return text


def bits(value: float) -> str:
    return struct.pack(">d", value).hex().upper()


def main() -> None:
    layout = StateLayout(AuditConfig())
    classify = [
        ptx(kernels._classify, kernels._CLASSIFY_CONSTANTS | {"HAS_MISSING": has, "HAS_MISMATCH": has}, side)
        for side in ("fp32", "fp64")
        for has in (False, True)
    ]
    places = {"SKETCH": layout.fields["sketch"].offset, "SUMS_AT": layout.fields["sum_dlogp"].offset}
    accumulate = ptx(kernels._accumulate, kernels._ACCUMULATE_CONSTANTS | places | {"GROUPING_POWER": 6})
    found = {
        "kernels": len(classify) + 1,
        "thresholds": [text.count(".param .f64") for text in classify],
        "ln2": [bits(kernels.LN2) in text.upper() for text in classify],
        "fused multiply-adds": sum(text.count("fma.") for text in (*classify, accumulate)),
        "integer additions": ["atom.global" in text and ".add.u64" in text for text in (*classify, accumulate)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
