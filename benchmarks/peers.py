"""What others do with the same tokens: helpers, metrics libraries, sketches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasketches
import numpy as np
import torch
from ddsketch import DDSketch
from ddsketch.pb.proto import DDSketchProto
from fastdigest import TDigest
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric

from benchmarks.data import Batch

QUANTILE = 0.999


def helper(batch: Batch) -> dict[str, float]:
    """The straightforward helper: sample by sample, every figure read at once, sample means averaged."""
    rows = []
    for train, rollout, mask in zip(batch.train, batch.rollout, batch.mask, strict=True):
        d = (train - rollout)[mask]
        ratio = d.exp()
        row = {
            "mean": d.abs().mean().item(),
            "max": d.abs().max().item(),
            "kl": (ratio - 1 - d).mean().item(),
            "chi2": (ratio.square().mean() - 1).item(),
            "clipped": ((ratio < 0.8) | (ratio > 1.2)).float().mean().item(),
            "prob_diff": (train.exp() - rollout.exp())[mask].abs().max().item(),
        }
        for q in (0.5, 0.9, 0.99, 0.999):
            row[f"q{q}"] = torch.quantile(d.abs(), q).item()
        rows.append(row)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


class TorchMetrics:
    """Mean, maximum and minimum by metrics with a state of one number, quantiles by keeping every token."""

    def __init__(self, sync: bool = True) -> None:
        means = ("abs_dlogp", "dlogp", "k3", "ratio_squared", "clipped", "prob_diff")
        self.means: dict[str, Metric] = {name: MeanMetric(sync_on_compute=sync) for name in means}
        self.largest: Metric = MaxMetric(sync_on_compute=sync)
        self.least: Metric = MinMetric(sync_on_compute=sync)
        self.tokens: Metric = CatMetric(sync_on_compute=sync)

    @property
    def metrics(self) -> list[Metric]:
        return [*self.means.values(), self.largest, self.least, self.tokens]

    def update(self, batch: Batch) -> None:
        train, rollout = batch.train[batch.mask], batch.rollout[batch.mask]
        d = train - rollout
        ratio, magnitude = d.exp(), d.abs()
        values = {
            "abs_dlogp": magnitude,
            "dlogp": d,
            "k3": d.expm1() - d,
            "ratio_squared": ratio.square(),
            "clipped": ((ratio < 0.8) | (ratio > 1.2)).float(),
            "prob_diff": (train.exp() - rollout.exp()).abs(),
        }
        for name, metric in self.means.items():
            metric.update(values[name])
        self.largest.update(d)
        self.least.update(d)
        self.tokens.update(magnitude)

    def compute(self) -> dict[str, float]:
        figures = {name: float(metric.compute()) for name, metric in self.means.items()}
        figures |= {"max": float(self.largest.compute()), "min": float(self.least.compute())}
        tokens = self.tokens.compute().reshape(-1).sort().values
        return figures | {f"q{q}": float(tokens[int(q * (len(tokens) - 1))]) for q in (0.5, 0.9, 0.99, 0.999)}

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()


def torchmetrics_step(batch: Batch) -> dict[str, float]:
    """Update and compute, without a process group."""
    metrics = TorchMetrics(sync=False)
    metrics.update(batch)
    return metrics.compute()


Filled = tuple[Callable[[float], float], Callable[[], int]]
"""How a filled sketch answers a quantile, and how many bytes it would send."""


def _ddsketch(values: np.ndarray[Any, Any]) -> Filled:
    sketch = DDSketch(relative_accuracy=0.0078)
    for value in values.tolist():
        sketch.add(value)
    return sketch.get_quantile_value, lambda: len(DDSketchProto.to_proto(sketch).SerializeToString())


def _kll(values: np.ndarray[Any, Any]) -> Filled:
    sketch = datasketches.kll_floats_sketch(200)
    sketch.update(values)
    return sketch.get_quantile, lambda: len(sketch.serialize())


def _req(values: np.ndarray[Any, Any]) -> Filled:
    sketch = datasketches.req_floats_sketch(12)
    sketch.update(values)
    return sketch.get_quantile, lambda: len(sketch.serialize())


def _tdigest(values: np.ndarray[Any, Any]) -> Filled:
    sketch = datasketches.tdigest_float(200)
    sketch.update(values)
    return sketch.get_quantile, lambda: len(sketch.serialize())


def _fastdigest(values: np.ndarray[Any, Any]) -> Filled:
    sketch = TDigest.from_values(values.tolist())
    return sketch.quantile, lambda: 16 * sketch.n_centroids


SKETCHES: dict[str, Callable[[np.ndarray[Any, Any]], Filled]] = {
    "ddsketch (1 value a call)": _ddsketch,
    "datasketches KLL, k=200": _kll,
    "datasketches REQ, k=12": _req,
    "datasketches t-digest, k=200": _tdigest,
    "fastdigest t-digest": _fastdigest,
}
"""Fed with abs(d) alone: they do a small part of what an audit does."""


def fill(name: str, batch: Batch) -> Filled:
    """Fill a sketch with the abs(d) of a batch and ask it once."""
    filled = SKETCHES[name]((batch.train - batch.rollout).abs()[batch.mask].numpy())
    filled[0](QUANTILE)
    return filled
