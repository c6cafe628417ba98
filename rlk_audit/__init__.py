"""Audit of train-versus-rollout log-probability drift in reinforcement learning of language models."""

from rlk_audit.allreduce import Pending as Pending
from rlk_audit.allreduce import all_reduce as all_reduce
from rlk_audit.auditor import Auditor as Auditor
from rlk_audit.collector import Collector as Collector
from rlk_audit.config import AuditConfig as AuditConfig
from rlk_audit.limits import ConsistencyError as ConsistencyError
from rlk_audit.report import LayoutMismatchError as LayoutMismatchError
from rlk_audit.report import StepReport as StepReport
from rlk_audit.sketch import LogHistogram as LogHistogram
from rlk_audit.tokens import TokenBatch as TokenBatch
from rlk_audit.version import __version__ as __version__
