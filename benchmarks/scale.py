"""A latency-bandwidth model of the one all-reduce of a step, from 8 to 16,384 ranks, and how it fits what was measured.

    python -m benchmarks.scale [results of collective as JSON]

The time of an all-reduce of n bytes over p ranks is taken as a latency for each step in sequence, and n bytes at a
bandwidth. Steps, latencies and efficiencies of protocols are those by which NCCL itself chooses an algorithm.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.variants import default_audit
from rlk_audit import AuditConfig
from rlk_audit.layout import StateLayout

FITTED = (2, 4)
Sweep = Mapping[str, Mapping[str, Mapping[str, float]]]
GROUPS = (8, 64, 256, 1024, 2048, 4096, 8192, 16384)
RANKS_A_NODE = 8
GB = 1e9
SOURCES = {
    "latencies, steps and protocols": "https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc",
    "bandwidths": "https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
}
NVLINK_BANDWIDTH = 450 * GB
"""One direction of an H100's 900 GB/s."""
LL_BETWEEN_NODES = 1.8
"""By which NCCL takes a step over NVLink to be slower in protocol LL where a group has several nodes."""
INFINIBAND_BANDWIDTH = 50 * GB
"""One port of 400 Gb/s: what one rank has of the network."""


@dataclass(frozen=True)
class Protocol:
    """Seconds of NCCL's table, and the part of the bandwidth that a protocol uses."""

    base: float
    nvlink: float
    infiniband: float
    efficiency: float

    @classmethod
    def of_microseconds(cls, base: float, nvlink: float, infiniband: float, efficiency: float) -> Protocol:
        return cls(base * 1e-6, nvlink * 1e-6, infiniband * 1e-6, efficiency)


PROTOCOLS = {
    "ring": {
        "LL": Protocol.of_microseconds(3.6, 0.47, 2.7, 1 / 4),
        "LL128": Protocol.of_microseconds(10.0, 1.9, 4.0, 0.92),
        "Simple": Protocol.of_microseconds(8.4, 3.4, 9.6, 1.0),
    },
    "tree": {
        "LL": Protocol.of_microseconds(4.4, 0.52, 5.0, 0.9 / 3.8),
        "LL128": Protocol.of_microseconds(4.4, 1.2, 8.5, 0.9 * 0.915),
        "Simple": Protocol.of_microseconds(0.0, 28.0, 50.0, 0.9),
    },
}


def state_bytes(config: AuditConfig, ranks: int) -> int:
    return 8 * StateLayout(config, ranks).length


def seconds(algorithm: str, protocol: Protocol, ranks: int, size: int) -> float:
    """Return the modelled time of an all-reduce on nodes of RANKS_A_NODE ranks."""
    nodes = math.ceil(ranks / RANKS_A_NODE)
    nvlink = protocol.nvlink * (LL_BETWEEN_NODES if nodes > 1 and protocol is PROTOCOLS[algorithm]["LL"] else 1.0)
    if algorithm == "ring":
        between = 2 * (nodes - 1)
        within = 2 * (ranks - 1) - between
        sent = 2 * (ranks - 1) / ranks * size
    else:
        between = 2 * math.ceil(math.log2(nodes))
        within = 2 * (min(ranks, RANKS_A_NODE) - 1)
        sent = 2 * size
    bandwidth = (NVLINK_BANDWIDTH if nodes == 1 else INFINIBAND_BANDWIDTH) * protocol.efficiency
    return protocol.base + within * nvlink + between * protocol.infiniband + sent / bandwidth


def best(algorithm: str, ranks: int, size: int) -> tuple[float, str]:
    """Return the time of the fastest protocol, which NCCL would take, and its name."""
    return min((seconds(algorithm, p, ranks, size), name) for name, p in PROTOCOLS[algorithm].items())


def predictions() -> list[dict[str, Any]]:
    """Return a row for each size of the group."""
    settings = {"max_state_bytes": 1 << 40}
    plain = default_audit(worst_k=4, **settings)
    asked = {"breakdowns": {"engine": 8, "position": "auto", "confidence": "auto"}, "samples_per_step": 4096}
    whole = default_audit(worst_k=4, **settings, **asked)
    rows = []
    for ranks in GROUPS:
        row: dict[str, Any] = {"ranks": ranks}
        for name, config in (("plain", plain), ("all", whole)):
            size = state_bytes(config, ranks)
            times = {algorithm: best(algorithm, ranks, size) for algorithm in PROTOCOLS}
            row[name] = {"bytes": size} | {a: {"seconds": s, "protocol": p} for a, (s, p) in times.items()}
        rows.append(row)
    return rows


def ring_terms(ranks: int, size: int, cores: int) -> tuple[float, float]:
    """Return what latency and seconds a byte are multiplied by: gloo's all-reduce is a ring.

    Processes that outnumber the cores run by turns.
    """
    turns = max(1.0, ranks / cores)
    return turns * 2 * (ranks - 1), turns * 2 * (ranks - 1) / ranks * size


def fit(points: Mapping[tuple[int, int], float], cores: int) -> tuple[float, float]:
    """Return latency and seconds a byte, neither negative, that are closest to the measured times in proportion."""
    terms = np.array([ring_terms(ranks, size, cores) for ranks, size in points])
    measured = np.array(list(points.values()))
    weighted, ones = terms / measured[:, None], np.ones(len(measured))
    alpha, beta = np.linalg.lstsq(weighted, ones, rcond=None)[0].tolist()
    if beta < 0:
        alpha, beta = float(weighted[:, 0] @ ones / (weighted[:, 0] @ weighted[:, 0])), 0.0
    return alpha, beta


def validation(sweep: Sweep, cores: int) -> dict[str, Any]:
    """Fit to the measured groups of 2 and 4, and predict those of 8."""
    measured = {(int(r), int(n)): t["median"] for r, sizes in sweep.items() for n, t in sizes.items()}
    alpha, beta = fit({place: time for place, time in measured.items() if place[0] in FITTED}, cores)
    rows = []
    for (ranks, size), time in measured.items():
        latency, sent = ring_terms(ranks, size, cores)
        told = alpha * latency + beta * sent
        rows.append({"ranks": ranks, "bytes": size, "measured": time, "model": told, "fitted": ranks in FITTED})
    return {"alpha": alpha, "beta": beta, "cores": cores, "rows": rows}


def result(collective: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the group's results, given those of `collective`, if there are any, to test the model on."""
    told = None if collective is None else validation(collective["sweep"], collective["machine"]["cores"])
    return timing.made() | {"rows": predictions(), "validation": told}


if __name__ == "__main__":
    print(json.dumps(result(json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else None)))
