"""The process groups of a megatron training that matter to an audit, and what is agreed over them."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from rlk_audit.allreduce import Group, group_place, replicas_that_differ, share_failure
from rlk_audit.collector import Collector
from rlk_audit.limits import ConsistencyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelGroups:
    """The process groups that matter to an audit; None where the caller's parallelism has no such group."""

    dp: Group = None
    dp_cp: Group = None
    cp: Group = None
    tp: Group = None
    pp: Group = None
    mp: Group = None

    @property
    def on_last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the loss."""
        if self.pp is None:
            return True
        rank, size = group_place(self.pp)
        return rank == size - 1


def resolve_groups(model: Any = None, pg_collection: Any = None) -> ParallelGroups:
    """Find the groups: an explicit collection, else the model's own, else ``parallel_state``; None for those not found.

    A collection that lacks a group is completed from ``parallel_state`` where that is initialised. Data groups are
    always the full ones, never the partial group of one optimizer instance.
    """
    collection = pg_collection if pg_collection is not None else _collection_of(model)
    # Several modules each have a collection (megatron-core 0.19); the policy is the language model.
    if hasattr(collection, "get_language_model_collection"):
        collection = collection.get_language_model_collection()
    found = {name: getattr(collection, name, None) for name in ("dp", "dp_cp", "cp", "tp", "pp", "mp")}
    # With weights re-materialised over peers that hold other data (0.19), this is the group of all of it.
    found["dp_cp"] = getattr(collection, "dp_cp_gtp_remat", None) or found["dp_cp"]
    for name, group in _parallel_state_groups().items():
        if found[name] is None:
            found[name] = group
    return ParallelGroups(**found)


def _collection_of(model: Any) -> Any:
    module = model[0] if isinstance(model, (list, tuple)) and model else model
    while module is not None and not isinstance(module, (list, tuple)):
        collection = vars(module).get("pg_collection")
        if collection is not None:
            return collection
        module = getattr(module, "module", None)
    return None


def _parallel_state_groups() -> dict[str, Group]:
    # Where it was never imported it is not initialised, and importing it takes seconds.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "dp": parallel_state.get_data_parallel_group(),
        "dp_cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "cp": parallel_state.get_context_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "mp": parallel_state.get_model_parallel_group(),
    }


@dataclass(frozen=True)
class StrictGroup:
    """The ranks that must stop together: tensor x pipeline parallel; None is this process alone."""

    group: Group

    def stop_if_failed(self, message: str | None) -> None:
        """Collective: every rank of the group must call this; all raise if one failed."""
        shared = message if self.group is None else share_failure(message, self.group)
        if shared is not None:
            raise ConsistencyError(shared)


@dataclass(frozen=True)
class Replicas:
    """The tensor-parallel ranks, which must measure the same, and every how many steps they are compared (0: never)."""

    group: Group = None
    interval: int = 0

    def compare(self, collector: Collector | None, steps: int) -> None:
        """Collective: every rank of the group must call this, with the same ``steps``."""
        if self.group is None or self.interval == 0 or steps % self.interval:
            return
        different = replicas_that_differ(collector, self.group)
        if different and collector is not None:
            collector.flag("tp_disagreement")
            logger.warning("tensor-parallel ranks %s measured other log-probabilities than the first", different)
