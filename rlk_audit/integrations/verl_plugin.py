"""What verl loads: importing it switches the audit on where RLK_AUDIT_MODE says so, and does nothing elsewhere."""

from __future__ import annotations

import logging

from rlk_audit.integrations.verl import VerlAudit  # first: it says what is missing where verl is
from rlk_audit.settings import validate_rlk_args

try:
    from verl.trainer.ppo import rollout_corr_helper
    from verl.utils.debug import metrics as debug_metrics
except ImportError as error:
    raise ImportError(f"the audit of verl cannot be used ({error}): pip install 'rlk_audit[verl]'") from error

logger = logging.getLogger(__name__)


def switch_on() -> None:
    """Wrap verl's functions, unless the mode is ``off``; what is wrong with a setting is logged, since verl hides it.

    Raises:
        ValueError, ImportError, OSError: as ``validate_rlk_args``.
    """
    try:
        settings = validate_rlk_args()
    except Exception as error:
        logger.error("the audit is not switched on: %s", error)
        raise
    if settings.config.mode != "off":
        audit = VerlAudit()
        debug_metrics.calculate_debug_metrics = audit.wrap_debug_metrics(debug_metrics.calculate_debug_metrics)
        rollout_corr_helper.apply_bypass_mode = audit.wrap_bypass(rollout_corr_helper.apply_bypass_mode)


switch_on()
