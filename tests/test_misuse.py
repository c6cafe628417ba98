"""What is handed over in the wrong place is refused where it is handed over, with one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_audit import AuditConfig, Auditor, Collector
from rlk_audit.integrations.megatron_bridge import BridgeAudit
from rlk_audit.integrations.megatron_rl import RLAudit
from rlk_audit.integrations.nemo_rl import AuditedLogger, AuditedLoss
from rlk_audit.integrations.slime import SlimeAudit
from rlk_audit.integrations.torchmetrics import DlogpAudit
from rlk_audit.megatron_plugin import MegatronAudit, register
from rlk_audit.megatron_pretrain import PretrainAudit

LOGGER = SimpleNamespace(log_batched_dict_as_jsonl=print, log_metrics=print)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "Auditor": Auditor,
    "Collector": Collector,
    "DlogpAudit": DlogpAudit,
    "register": lambda config: register(config=config),
    "BridgeAudit": lambda config: BridgeAudit(config=config),
    "PretrainAudit": lambda config: PretrainAudit(config=config),
    "RLAudit": RLAudit,
    "SlimeAudit": SlimeAudit,
    "AuditedLoss": lambda config: AuditedLoss(print, config),
    "AuditedLogger": lambda config: AuditedLogger(LOGGER, config),
}


@pytest.mark.parametrize("wrong", ["strict", {}, {"mode": "audit"}, AuditConfig, 0])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_config_of_another_type(maker: str, wrong: Any) -> None:
    sentence = f"config must be an AuditConfig, got {type(wrong).__name__}; see AuditConfig.from_dict"
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        MAKERS[maker](wrong)


@pytest.mark.parametrize("wrong", [None, "model"])
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (AuditedLoss, "loss_fn must be a function, got {}"),
        (AuditedLogger, "expected a logger of NeMo-RL, got {}, which lacks log_batched_dict_as_jsonl, log_metrics"),
        (BridgeAudit().wrap_forward_step, "forward_step_func must be a function, got {}"),
        (MegatronAudit(None).wrap_forward_step, "forward_step_func must be a function, got {}"),
        (MegatronAudit(None).wrap_schedule, "forward_backward_func must be a function, got {}"),
        (SlimeAudit().wrap_tis, "tis_function must be a function, got {}"),
        (PretrainAudit().wrap_pretrain, "expected the pretrain of Megatron-LM, got {}"),
        (RLAudit().wrap, "expected megatron.rl.rl_utils, got {}, which lacks prepare_data_for_update, "
         "align_unpacked_inference_logprobs, compute_packed_inference_logprobs_stats"),
    ],
)  # fmt: skip
def test_a_peer_of_another_kind(call: Callable[[Any], Any], sentence: str, wrong: Any) -> None:
    with pytest.raises(TypeError) as raised:
        call(wrong)
    assert str(raised.value) == sentence.format(type(wrong).__name__)
