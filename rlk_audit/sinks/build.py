"""The sinks that are known by name, set up in one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlk_audit.sinks.base import EveryNth, Sink, load_package
from rlk_audit.sinks.console import ConsoleSink
from rlk_audit.sinks.jsonl import JsonlSink
from rlk_audit.sinks.mlflow import MlflowSink
from rlk_audit.sinks.tensorboard import TensorBoardSink
from rlk_audit.sinks.wandb import WandbSink

SINK_NAMES = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
FILE_SINKS = SINK_NAMES[1:]
"""Those that may write to the output folder."""
SINK_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Sink -> the package that it needs, which the extra of the sink's name installs."""


def build_sinks(
    names: Sequence[str],
    output_dir: str | os.PathLike[str],
    *,
    log_interval: int = 1,
    table_interval: int = 100,
    jsonl_max_bytes: int | None = None,
    tensorboard_writer: Any = None,
    wandb_run: Any = None,
) -> tuple[Sink, ...]:
    """Set up sinks by name, on the rank that writes and on no other.

    Args:
        names: of SINK_NAMES.
        output_dir: folder of ``audit.jsonl``, ``tensorboard/``, ``wandb/`` and, unless MLflow has an active run or a
            tracking URI, ``mlflow.db``.
        log_interval: every so many steps a report is written; a failed one always is.
        table_interval: every so many reports W&B and MLflow get the worst tokens as a table.
        jsonl_max_bytes: size at which ``audit.jsonl`` is moved aside; None never does.
        tensorboard_writer: a SummaryWriter that exists; the sink ``tensorboard`` uses it.
        wandb_run: a W&B run that exists, or the module after its ``init``; the sink ``wandb`` uses it.

    Raises:
        ImportError, OSError, ValueError: a sink cannot be set up.
    """
    folder = Path(output_dir)

    def tensorboard() -> Sink:
        if tensorboard_writer is not None:
            return TensorBoardSink(writer=tensorboard_writer)
        return TensorBoardSink(folder / "tensorboard")

    def wandb() -> Sink:
        if wandb_run is not None:
            return WandbSink(wandb_run, table_interval=table_interval)
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "rlk_audit")
        return WandbSink(dir=str(folder), project=project, table_interval=table_interval)

    def mlflow() -> Sink:
        package = load_package("mlflow", "mlflow")
        if (active := package.active_run()) is not None:
            return MlflowSink(active.info.run_id, table_interval=table_interval)
        if package.is_tracking_uri_set():
            return MlflowSink(table_interval=table_interval)
        folder.mkdir(parents=True, exist_ok=True)
        store = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        return MlflowSink(tracking_uri=store, artifact_dir=folder / "mlflow", table_interval=table_interval)

    makers: dict[str, Callable[[], Sink]] = {
        "console": ConsoleSink,
        "jsonl": lambda: JsonlSink(folder / "audit.jsonl", max_bytes=jsonl_max_bytes),
        "tensorboard": tensorboard,
        "wandb": wandb,
        "mlflow": mlflow,
    }
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise ValueError(f"unknown sinks {', '.join(unknown)}; the sinks are {', '.join(SINK_NAMES)}")
    sinks = [makers[name]() for name in dict.fromkeys(names)]
    return tuple(sinks if log_interval == 1 else (EveryNth(sink, log_interval) for sink in sinks))
