"""Megatron-LM's reinforcement learning on ranks, on a HARNESS: whole sequences on every context-parallel rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from layouts import LAYOUTS, name_of, parallel_state, place_of
from slime_harness import make_samples

from rlk_audit.integrations.megatron_rl import RLAudit

SAMPLES = make_samples(9, seed=2)
LENGTH = 64


@pytest.mark.parametrize("sizes", LAYOUTS, ids=name_of)
def test_each_token_counts_once_on_every_rank(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a reduction over context-parallel replicas too."""
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel_state(sizes))
    place = place_of(sizes)
    own = SAMPLES[place.dp_rank :: place.dp_size]
    old, engine, mask = (torch.zeros(len(own), LENGTH) for _ in range(3))
    for row, sample in enumerate(own):
        sides = ((old, sample.train), (engine, sample.rollout), (mask, sample.mask))
        for target, values in sides:
            target[row, 5 : 5 + len(sample)] = torch.tensor(values, dtype=torch.float32)
    rl_utils = SimpleNamespace(
        align_unpacked_inference_logprobs=lambda *args: None,
        compute_packed_inference_logprobs_stats=lambda *args: None,
    )

    def prepare(model: Any) -> None:
        rl_utils.compute_packed_inference_logprobs_stats(old[:, 1:], engine[:, 1:], mask, None)

    rl_utils.prepare_data_for_update = prepare
    audit = RLAudit()
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    if not place.last_stage:
        assert audit.report is None
        return
    assert audit.report is not None
    expected = oracle.audit([oracle.Sample(s.train, s.rollout, s.mask) for s in SAMPLES], total_known=False)
    expected.metrics["worst_token_position"] = -1
    assert oracle.differences(audit.report.metrics, expected) == []
