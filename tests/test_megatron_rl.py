"""The audit of Megatron-LM's reinforcement learning, on a HARNESS of `rl_utils`: `megatron.rl` ships with no wheel.

Rebuilt from reading Megatron-LM d98e8a6 are the three functions' arguments and their order, and where a log-probability
stands: column i scores token i + 1; the engine gives one value a generated token, or fewer.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from slime_harness import make_samples

from rlk_audit import AuditConfig
from rlk_audit.integrations.megatron_rl import RLAudit, packed_batch, unpacked_batch

SAMPLES = make_samples(7, seed=8)
LENGTH = 64


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr("atexit.unregister", lambda call: None)


def rows(samples: list[oracle.Sample]) -> dict[str, Any]:
    """Rows of whole sequences; the mask of generated tokens is that of active ones, in several turns."""
    old = torch.full((len(samples), LENGTH - 1), -5.0)
    generated = torch.zeros(len(samples), LENGTH, dtype=torch.bool)
    engine = []
    for row, sample in enumerate(samples):
        first = sample.prompt_length
        old[row, first - 1 : first - 1 + len(sample)] = torch.tensor(sample.train)
        generated[row, first : first + len(sample)] = torch.tensor(sample.mask) != 0
        engine.append(torch.tensor([r for r, m in zip(sample.rollout, sample.mask, strict=True) if m]))
    return {"inference_logprobs": engine, "old_logprobs_for_data": old, "generation_masks": generated}


def packed(samples: list[oracle.Sample]) -> dict[str, Any]:
    given = rows(samples)
    old, generated = given["old_logprobs_for_data"], given["generation_masks"]
    engine = torch.zeros(old.shape)
    engine[generated[:, 1:]] = torch.cat(given["inference_logprobs"])
    return {"old_logprobs": old, "packed_inference_logprobs": engine, "packed_loss_mask": generated.int()}


def module(kind: str, samples: list[oracle.Sample], **changed: Any) -> SimpleNamespace:
    """HARNESS of megatron.rl.rl_utils: prepares a batch and calls the function of its layout by its global name."""
    given = (rows if kind == "unpacked" else packed)(samples) | changed
    made = SimpleNamespace(
        align_unpacked_inference_logprobs=lambda *args, **kwargs: ("aligned", args, kwargs),
        compute_packed_inference_logprobs_stats=lambda *args, **kwargs: None,
    )

    def prepare_data_for_update(model: Any) -> Any:
        if kind == "unpacked":
            return made.align_unpacked_inference_logprobs(**given, group_stats="stats")
        return made.compute_packed_inference_logprobs_stats(**given, group_stats="stats")

    made.prepare_data_for_update, made.given = prepare_data_for_update, given
    return made


def unnamed(samples: list[oracle.Sample]) -> oracle.Expected:
    """What a batch without ids must report."""
    plain = [oracle.Sample(s.train, s.rollout, s.mask) for s in samples]
    return oracle.audit(plain, total_known=False)


@pytest.mark.parametrize("kind", ["unpacked", "packed"])
def test_each_batch_of_rollouts_is_a_step(kind: str) -> None:
    rl_utils = module(kind, SAMPLES)
    audit = RLAudit()
    audit.wrap(rl_utils)
    for number in range(2):
        result = rl_utils.prepare_data_for_update("model")
        if kind == "unpacked":
            assert result == ("aligned", (), rl_utils.given | {"group_stats": "stats"})
        report = audit.report
        assert report is not None
        assert report.step == number
        expected = unnamed(SAMPLES)
        if kind == "unpacked":
            expected.metrics.pop("worst_token_position")
        else:
            expected.metrics["worst_token_position"] = -1
        assert oracle.differences(report.metrics, expected) == []


def test_positions_count_from_the_first_generated_token() -> None:
    sample = oracle.Sample([-1.0, -2.0, -1.0], [-1.0, -1.0, -1.0], [1, 1, 1], prompt_length=5)
    rl_utils = module("unpacked", [sample])
    audit = RLAudit()
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    assert audit.report is not None
    assert audit.report.worst_tokens[0].token_position == 1


@pytest.mark.parametrize("kind", ["unpacked", "packed"])
def test_a_token_that_the_engine_never_scored_is_missing(kind: str) -> None:
    """Megatron-LM counts it as equal in rows: it fills the place with the trainer's own value."""
    shortened = copy.deepcopy(SAMPLES)
    last = max(place for place, active in enumerate(shortened[3].mask) if active)
    shortened[3].rollout[last] = None
    if kind == "unpacked":
        given = rows(SAMPLES)["inference_logprobs"]
        rl_utils = module(kind, SAMPLES, inference_logprobs=[v[:-1] if i == 3 else v for i, v in enumerate(given)])
    else:
        filled = rows(SAMPLES)["generation_masks"][:, 1:].clone()
        filled[3, int(filled[3].nonzero()[-1])] = False
        rl_utils = module(kind, SAMPLES, filled_mask=filled)
    audit = RLAudit()
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    assert audit.report is not None
    assert audit.report.metrics["warning/rollout_missing"] == 1
    expected = unnamed(shortened)
    expected.metrics.pop("worst_token_position")
    assert oracle.differences(audit.report.metrics, expected) == []


def test_odd_data_is_counted_and_never_raised() -> None:
    rl_utils = module("unpacked", SAMPLES, old_logprobs_for_data=None)
    audit = RLAudit()
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    assert audit.report is not None
    assert audit.report.metrics["warning/update_failed"] == 1


def test_another_module_is_refused() -> None:
    with pytest.raises(TypeError, match="lacks prepare_data_for_update, align_unpacked"):
        RLAudit().wrap(SimpleNamespace())


def test_inputs_are_left_alone() -> None:
    given = packed(SAMPLES)
    before = copy.deepcopy(given)
    packed_batch(**given)
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_off_costs_nothing() -> None:
    rl_utils = module("packed", SAMPLES)
    audit = RLAudit(AuditConfig(mode="off"))
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    assert audit.report is None


def test_the_options_reach_the_registration_which_happens_once() -> None:
    rl_utils = module("packed", SAMPLES)
    audit = RLAudit(args=SimpleNamespace(rlk_consistency_mode="off"))
    audit.wrap(rl_utils)
    rl_utils.prepare_data_for_update("model")
    assert audit.report is None
    registered = audit.audit
    rl_utils.prepare_data_for_update("model")
    assert audit.audit is registered


def test_a_call_before_the_first_batch_is_handed_on() -> None:
    rl_utils = module("unpacked", SAMPLES)
    RLAudit().wrap(rl_utils)
    assert rl_utils.align_unpacked_inference_logprobs(**rl_utils.given) == ("aligned", (), rl_utils.given)


def test_values_of_tokens_without_a_column_are_left_out() -> None:
    """The first token has no log-probability, and a mask may be wider than the data; the engine scored both ends."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    given = unpacked_batch([torch.tensor([-9.0, -1.0, -2.0, -3.0, -9.0])], torch.full((1, 3), -1.5), mask)
    assert torch.as_tensor(given.rollout_log_probs).tolist() == [[-1.0, -2.0, -3.0]]
    assert torch.as_tensor(given.mask).tolist() == [[1, 1, 1]]
    assert not torch.as_tensor(given.rollout_missing).any()


def test_values_beyond_the_generated_tokens_are_left_out() -> None:
    given = unpacked_batch([torch.tensor([[-1.0, -2.0, -9.0]])], torch.full((1, 3), -1.5), torch.tensor([[0, 1, 1, 0]]))
    assert torch.as_tensor(given.rollout_log_probs).tolist() == [[-1.0, -2.0, 0.0]]
