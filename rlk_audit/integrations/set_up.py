"""An auditor for a training that another program runs: settings from the environment, sinks on the rank that writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlk_audit.allreduce import Group, agree_on_layout, as_group, group_place
from rlk_audit.auditor import Auditor, close_all, set_up_failure
from rlk_audit.config import AuditConfig, as_config
from rlk_audit.settings import resolve_settings
from rlk_audit.sinks import Sink


def make_auditor(
    config: AuditConfig | None = None,
    group: Group = None,
    sinks: Sequence[Sink] = (),
    device: str | torch.device = "cpu",
) -> Auditor:
    """Collective: every rank of ``group`` must call this, also where the audit is off or a setting is wrong.

    Args:
        config: the audit's settings as given in code; ``RLK_AUDIT_*`` variables go before it. With neither, it is off.
        group: whose ranks hold the tokens of a step, each its own; the default group, or this process alone, if None.
        sinks: where reports go, beside those that ``RLK_AUDIT_SINKS`` names.
        device: where the state lives.

    Raises:
        LayoutMismatchError: settings differ over the ranks, or the set-up failed on some; every rank raises the same.
        ValueError, ImportError, OSError: a setting is wrong, or a sink cannot be set up, on every rank.
    """
    group = as_group(group)
    try:
        settings = resolve_settings(None, config)
        failure = set_up_failure(settings.config, group, sinks)
        if failure is not None:
            raise failure
        built = tuple(sinks)
        if settings.sinks and settings.config.mode != "off" and group_place(group)[0] == 0:
            built = settings.build_sinks(sinks)
    except Exception as error:  # the other ranks must not wait for this one
        close_all(sinks)
        agree_on_layout(None, group, failure=error)
        raise
    try:
        agreed = agree_on_layout(settings.config, group)
    except Exception:
        close_all(built)
        raise
    return Auditor(settings.config, group, built, device, agreed=agreed)


def driver_auditor(config: AuditConfig | None, sinks: Sequence[Sink]) -> Auditor:
    """Return an auditor for the one process of a training that holds whole batches; reports go to a console at least.

    Args:
        config: the audit's settings as given in code, ``AuditConfig()`` if None; the environment and a YAML file go
            before it.
        sinks: where reports go, beside those that the settings name.

    Raises:
        ValueError, ImportError, OSError: a setting is wrong, or a sink cannot be set up.
    """
    settings = resolve_settings(None, as_config(config))
    off = settings.config.mode == "off"
    return Auditor(settings.config, sinks=sinks if off else settings.build_sinks(sinks))


def needed(data: Mapping[str, Any], *names: str) -> list[Any]:
    """Return these columns of a batch.

    Raises:
        ValueError: some are absent or None; the text names them.
    """
    absent = [name for name in names if data.get(name) is None]
    if absent:
        raise ValueError(f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing")
    return [data[name] for name in names]
