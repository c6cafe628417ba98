"""What is handed over in the wrong place is refused where it is handed over, with one sentence."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlk_audit import AuditConfig, Auditor, Collector
from rlk_audit.integrations.megatron_bridge import BridgeAudit
from rlk_audit.integrations.megatron_rl import RLAudit
from rlk_audit.integrations.nemo_rl import AuditedLogger, AuditedLoss
from rlk_audit.integrations.set_up import make_auditor
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


class Mesh:
    """What a DeviceMesh has, without processes."""

    mesh_dim_names = None

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def get_group(self) -> None:
        return None


@pytest.mark.parametrize("make", [Auditor, make_auditor])
def test_a_mesh_in_place_of_a_group(make: Any) -> None:
    assert make(AuditConfig(), group=Mesh(1)).group is None
    with pytest.raises(TypeError, match=r"got a mesh of 2 dimensions; give one of them, as in mesh\['dp'\].get_group"):
        make(AuditConfig(), group=Mesh(2))
    with pytest.raises(TypeError, match="group must be a process group or a mesh of one dimension, got str"):
        make(AuditConfig(), group="dp")


def test_verls_plugin_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    for name in ("verl", "verl_plugin"):
        monkeypatch.delitem(sys.modules, f"rlk_audit.integrations.{name}", raising=False)
        with pytest.raises(ImportError, match=r"the audit of verl cannot be used .*pip install 'rlk_audit\[verl\]'"):
            importlib.import_module(f"rlk_audit.integrations.{name}")
