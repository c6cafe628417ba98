"""Where reports go. A sink fails at set-up; in a step, the auditor keeps its failure from stopping anything."""

from rlk_audit.sinks.base import EveryNth as EveryNth
from rlk_audit.sinks.base import Sink as Sink
from rlk_audit.sinks.base import logged_values as logged_values
from rlk_audit.sinks.build import build_sinks as build_sinks
from rlk_audit.sinks.console import ConsoleSink as ConsoleSink
from rlk_audit.sinks.console import summary_line as summary_line
from rlk_audit.sinks.jsonl import JsonlSink as JsonlSink
from rlk_audit.sinks.mlflow import MlflowSink as MlflowSink
from rlk_audit.sinks.tensorboard import TensorBoardSink as TensorBoardSink
from rlk_audit.sinks.wandb import WandbSink as WandbSink
