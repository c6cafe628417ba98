"""The audit in NeMo-RL, on a HARNESS of its loss interface, its packing wrapper, its sums and its logger.

NeMo-RL cannot be installed here. Rebuilt from reading NeMo-RL 7ea279a are how a loss function is called and asked for
its attributes, how metrics are summed over micro-batches and workers, and what the logger is handed.
"""

from __future__ import annotations

import copy
import enum
import logging
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from core_bits import assert_same_bits, core_report
from slime_harness import make_samples

from rlk_audit import AuditConfig, ConsistencyError
from rlk_audit.integrations.nemo_rl import COUNTS, SUMS, AuditedLogger, AuditedLoss, step_means

SAMPLES = make_samples(10, seed=9)
LENGTH = 64
TWO_OFF = (3, 7)
"""Samples that the training leaves out by their mask."""


class Normalizer(enum.Enum):
    TOKENS = "tokens"
    NONE = "none"


class Loss:
    """HARNESS of ClippedPGLossFn: a token-level loss, with the attributes that its callers ask for."""

    loss_type = "token_level"
    input_type = "logprob"
    use_fused_linear_logprobs = False
    reference_policy_kl_penalty = 0.0

    def __init__(self, force_on_policy_ratio: bool = False) -> None:
        self.force_on_policy_ratio = force_on_policy_ratio
        self.metric_normalizations = {
            "loss": Normalizer.TOKENS, "token_mult_prob_error": Normalizer.TOKENS, "num_valid_samples": Normalizer.NONE,
        }  # fmt: skip

    def __call__(
        self, next_token_logprobs: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        old = next_token_logprobs.detach() if self.force_on_policy_ratio else data["prev_logprobs"][:, 1:]
        loss = (-(next_token_logprobs - old).exp() * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atexit.register", lambda call: None)
    monkeypatch.setattr("atexit.unregister", lambda call: None)
    interfaces = SimpleNamespace(MetricNormalizer=Normalizer)
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)


def data_of(samples: list[oracle.Sample]) -> dict[str, torch.Tensor]:
    """Whole sequences, padded on the right: entry t is of token t."""
    shape = (len(samples), LENGTH)
    data = {name: torch.zeros(shape) for name in ("prev_logprobs", "generation_logprobs", "token_mask")}
    data["input_ids"] = torch.zeros(shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        place = slice(sample.prompt_length, sample.prompt_length + len(sample))
        sides = {"prev_logprobs": sample.train, "generation_logprobs": sample.rollout, "token_mask": sample.mask}
        for name, values in {**sides, "input_ids": sample.token_ids}.items():
            data[name][row, place] = torch.tensor(values).to(data[name])
    data["input_lengths"] = torch.tensor([sample.prompt_length + len(sample) for sample in samples])
    data["sample_mask"] = torch.tensor([float(SAMPLES.index(sample) not in TWO_OFF) for sample in samples])
    return data


def expected_samples() -> list[oracle.Sample]:
    """As NeMo-RL knows them: by their row; a response begins at its first token that is trained on."""
    known = []
    for row, sample in enumerate(SAMPLES):
        mask = [0] * len(sample) if row in TWO_OFF else sample.mask
        first = sample.mask.index(1) if 1 in sample.mask else len(sample)
        cut = {name: getattr(sample, name)[first:] for name in ("train", "rollout", "token_ids")}
        known.append(oracle.Sample(**cut, mask=mask[first:], sample_index=row, slot=row))
    return known


def work(loss_fn: Any, force: bool = False) -> tuple[list[float], torch.Tensor, dict[str, float]]:
    """Two workers of two micro-batches each: losses, the gradient, and metrics as NeMo-RL's driver sums them."""
    weight = torch.zeros((), requires_grad=True)
    tokens = torch.tensor(sum(float(sum(s.mask)) for row, s in enumerate(SAMPLES) if row not in TWO_OFF))
    losses, sums = [], {}
    for part in (SAMPLES[:3], SAMPLES[3:5], SAMPLES[5:9], SAMPLES[9:]):
        data = data_of(part)
        old = data["prev_logprobs"][:, 1:]
        current = old + weight * old.cos()
        if force:
            del data["prev_logprobs"]
        before = copy.deepcopy(data)
        given = {"data": data, "global_valid_seqs": torch.tensor(10.0), "global_valid_toks": tokens}
        loss, metrics = loss_fn(**given, next_token_logprobs=current)
        assert all(torch.equal(data[name], before[name]) for name in before)
        loss.backward()
        losses.append(loss.item())
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + value
    assert weight.grad is not None
    return losses, weight.grad, sums


@pytest.mark.parametrize("force", [False, True])
def test_the_loss_stays_and_its_figures_add_up(force: bool) -> None:
    """Sums over micro-batches and workers are the figures of all tokens; theirs are untouched."""
    audited, plain = work(AuditedLoss(Loss(force)), force), work(Loss(force), force)
    assert audited[0] == plain[0]
    assert torch.equal(audited[1], plain[1])
    assert {name: value for name, value in audited[2].items() if not name.startswith("rlk_audit/")} == plain[2]
    expected = oracle.audit(expected_samples()).metrics
    found = step_means(audited[2])
    for name in (*SUMS.values(), *COUNTS):
        assert found["rlk_audit/" + name] == pytest.approx(expected.get(name, 0), rel=1e-6), name
    assert not [name for name in found if name.removeprefix("rlk_audit/") in SUMS]


def test_it_passes_for_the_loss_that_it_wraps() -> None:
    loss = Loss()
    audited = AuditedLoss(loss)
    for name in ("loss_type", "input_type", "use_fused_linear_logprobs", "reference_policy_kl_penalty"):
        assert getattr(audited, name) == getattr(loss, name)
    assert not hasattr(audited, "zero_outside_topk")
    normalizations = audited.metric_normalizations
    assert isinstance(normalizations, dict)
    assert normalizations.items() >= loss.metric_normalizations.items()
    assert {normalizations["rlk_audit/" + name] for name in (*SUMS, *COUNTS)} == {Normalizer.NONE}
    assert len(normalizations) == len(loss.metric_normalizations) + len(SUMS) + len(COUNTS)
    assert "rlk_audit/abs_dlogp_sum" not in loss.metric_normalizations


@pytest.mark.parametrize("theirs", [{"loss": Normalizer.TOKENS}, {}, None])
def test_figures_are_named_whatever_the_loss_names(theirs: dict[str, Normalizer] | None) -> None:
    """Kills: figures that NeMo-RL divides by its tokens, since nothing says what they were divided by."""
    loss = Loss()
    loss.metric_normalizations = theirs
    named = AuditedLoss(loss).metric_normalizations
    assert {named["rlk_audit/" + name] for name in (*SUMS, *COUNTS)} == {Normalizer.NONE}


def test_a_nemo_rl_without_normalizations_gets_the_losss_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for interfaces in (SimpleNamespace(), None):
        monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)
        assert AuditedLoss(Loss()).metric_normalizations == Loss().metric_normalizations
        assert AuditedLoss(lambda **given: None).metric_normalizations == {}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_it_travels_to_the_workers(again: Any) -> None:
    sent = again(AuditedLoss(Loss(), AuditConfig(eps_low=0.1)))
    assert sent.config.eps_low == 0.1
    assert sent.metric_normalizations["loss"] is Normalizer.TOKENS
    assert work(again(sent))[0] == work(sent)[0] == work(Loss())[0], "also once it has measured"


def test_odd_data_never_reaches_the_training() -> None:
    data = data_of(SAMPLES)
    data["generation_logprobs"] = data["generation_logprobs"][:, :-1]
    _, metrics = AuditedLoss(Loss())(
        data=data,
        global_valid_seqs=1,
        global_valid_toks=torch.tensor(1.0),
        next_token_logprobs=data["prev_logprobs"][:, 1:],
    )
    assert metrics["rlk_audit/warning/update_failed"] == 1
    assert metrics["rlk_audit/compared_token_count"] == 0


class Logger:
    """HARNESS of NeMo-RL's Logger."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.metrics: list[tuple[dict[str, float], int]] = []

    def log_batched_dict_as_jsonl(self, to_log: Any, filename: str) -> None:
        self.files.append(filename)

    def log_metrics(self, metrics: dict[str, float], step: int, prefix: str = "") -> None:
        self.metrics.append((metrics, step))

    def log_hyperparams(self, params: Any) -> str:
        return f"kept {params}"


def logged(samples: list[oracle.Sample]) -> dict[str, Any]:
    """What grpo_train hands to the logger."""
    data = data_of(samples)
    names = {"token_mask": "token_loss_mask", "sample_mask": "sample_loss_mask", "input_ids": "token_ids"}
    return {names.get(name, name): value for name, value in data.items()} | {"content": ["text"] * len(samples)}


def test_the_logger_gives_the_bits_of_the_core() -> None:
    config = AuditConfig(samples_per_step=16, breakdowns={"position": "auto"})
    inner = Logger()
    audited = AuditedLogger(inner, config)
    audited.log_batched_dict_as_jsonl(logged(SAMPLES), "train_data_step12.jsonl")
    audited.log_batched_dict_as_jsonl({"content": ["x"]}, "val_data_step12.jsonl")
    assert inner.files == ["train_data_step12.jsonl", "val_data_step12.jsonl"]
    assert audited.log_hyperparams(3) == "kept 3"
    report = audited.report
    assert report is not None
    assert report.step == 12
    samples = expected_samples()
    assert oracle.differences(report.metrics, oracle.audit(samples)) == []
    assert_same_bits(report, core_report(samples, config))
    ((values, step),) = inner.metrics
    assert step == 12
    assert values["rlk_audit/abs_dlogp_max"] == report.metrics["abs_dlogp_max"]


def test_a_step_without_recomputed_log_probs_compared_nothing() -> None:
    batch = logged(SAMPLES)
    del batch["prev_logprobs"]
    audited = AuditedLogger(Logger())
    audited.log_batched_dict_as_jsonl(batch, "train_data_step1.jsonl")
    assert audited.report is not None
    assert audited.report.warnings == {"nothing_compared": 1}


def test_strict_stops_the_training() -> None:
    audited = AuditedLogger(Logger(), AuditConfig(mode="strict", limits={"abs_dlogp_max": 1e-6}))
    with pytest.raises(ConsistencyError, match="abs_dlogp_max"):
        audited.log_batched_dict_as_jsonl(logged(SAMPLES), "train_data_step1.jsonl")


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_AUDIT_MODE", "off")
    audited = AuditedLogger(Logger())
    audited.log_batched_dict_as_jsonl(logged(SAMPLES), "train_data_step1.jsonl")
    assert audited.report is None
    assert work(AuditedLoss(Loss()))[2].keys() == {"loss", "num_valid_samples"}


def test_a_batch_without_the_engines_side_is_counted() -> None:
    """As a loss function of another kind would give."""
    data = data_of(SAMPLES)
    del data["generation_logprobs"]
    _, metrics = AuditedLoss(Loss())(
        data["prev_logprobs"][:, 1:], data=data, global_valid_seqs=1, global_valid_toks=torch.tensor(1.0)
    )
    assert metrics["rlk_audit/active_token_count"] == sum(sum(s.mask) for s in expected_samples())
    assert metrics["rlk_audit/compared_token_count"] == metrics["rlk_audit/warning/update_failed"] == 0


def figures_of(audited: AuditedLoss, data: dict[str, Any], tokens: float = 1.0) -> dict[str, float]:
    """The loss function is called with its log-probabilities as the first argument."""
    current = data["generation_logprobs"][:, 1:]
    return audited(current, data=data, global_valid_seqs=1, global_valid_toks=torch.tensor(tokens))[1]


def test_the_loss_takes_its_settings() -> None:
    metrics = figures_of(AuditedLoss(Loss(True), AuditConfig(prefix="drift/")), data_of(SAMPLES))
    assert metrics["drift/abs_dlogp_sum"] == 0.0, "positional log-probabilities are those of the engine here"
    assert metrics["drift/compared_token_count"] > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "strict"}, "mode strict"),
        ({"limits": {"abs_dlogp_p99": 0.1}}, "limits"),
        ({"contract": "1", "expect_identical": True}, "a contract, expect_identical"),
    ],
)
def test_what_needs_a_verdict_is_refused(settings: dict[str, Any], named: str) -> None:
    """Kills: limits that nobody judges."""
    with pytest.raises(ValueError, match=f"does not heed {named}; give them to an AuditedLogger"):
        AuditedLoss(Loss(), AuditConfig(**settings))


def test_what_the_environment_says_of_verdicts_is_for_the_logger(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLK_AUDIT_MODE", "strict")
    with caplog.at_level(logging.WARNING):
        assert work(AuditedLoss(Loss()))[0] == work(Loss())[0]
    assert [line for line in caplog.messages if "does not heed mode strict; an AuditedLogger does" in line]


@pytest.mark.parametrize("places", range(5))
@pytest.mark.parametrize("force", [False, True])
def test_arguments_come_by_place_and_by_name(places: int, force: bool) -> None:
    data = data_of(SAMPLES)
    named = {"next_token_logprobs": data["generation_logprobs"][:, 1:], "data": data}
    named |= {"global_valid_seqs": torch.tensor(10.0), "global_valid_toks": torch.tensor(4.0)}
    by_place = list(named.values())[:places]
    by_name = dict(list(named.items())[places:])
    audited, plain = AuditedLoss(Loss(force)), Loss(force)
    assert audited(*by_place, **by_name)[0] == plain(*by_place, **by_name)[0]
    found = step_means(audited(*by_place, **by_name)[1])
    expected = 0.0 if force else oracle.audit(expected_samples()).metrics["abs_dlogp_mean"]
    assert found["rlk_audit/abs_dlogp_mean"] == pytest.approx(expected, rel=1e-6)


def test_a_wrong_call_is_the_losss_own_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'data'"):
        AuditedLoss(Loss())(torch.zeros(1), global_valid_seqs=1, global_valid_toks=1)
    assert any("data is missing" in line for line in caplog.messages)


def test_a_mean_is_over_the_compared_tokens() -> None:
    """Kills: a mean over all tokens, which halves where half of them have no value."""
    data, known = data_of(SAMPLES), copy.deepcopy(expected_samples())
    for row, sample in enumerate(known):
        for place in range(0, len(sample), 2):
            column = SAMPLES[row].prompt_length + len(SAMPLES[row]) - len(sample) + place
            data["generation_logprobs"][row, column] = torch.nan
            sample.rollout[place] = float("nan")
    expected = oracle.audit(known)
    found = step_means(figures_of(AuditedLoss(Loss()), data))
    assert found["rlk_audit/warning/rollout_nan"] == expected.warnings["rollout_nan"] > 0
    for name in (*SUMS.values(), *COUNTS[:2]):
        assert found["rlk_audit/" + name] == pytest.approx(expected.metrics[name], rel=1e-6), name


@pytest.mark.parametrize("missing", ["column", "nan", "masked"])
def test_nothing_compared_is_no_mean_of_zero(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    data = data_of(SAMPLES)
    if missing == "column":
        del data["generation_logprobs"]
    elif missing == "nan":
        data["generation_logprobs"] += torch.nan
    else:
        data["sample_mask"] *= 0
    audited = AuditedLoss(Loss(), AuditConfig(prefix="drift/"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            summed = audited(data["prev_logprobs"][:, 1:], data=data, global_valid_seqs=1, global_valid_toks=1)[1]
    found = step_means(summed)
    assert {name.removeprefix("drift/") for name in found}.isdisjoint({*SUMS, *SUMS.values()})
    assert found["drift/warning/nothing_compared"] == 1
    code = {"column": "rollout_missing", "nan": "rollout_nan", "masked": None}[missing]
    told = [line for line in caplog.messages if code and f"{code}=" in line]
    assert len(told) == len([line for line in caplog.messages if "nothing_compared" in line]) == int(code is not None)
    assert {name: value for name, value in found.items() if "rollout" in name and value} == (
        {f"drift/warning/{code}": found["drift/active_token_count"]} if code else {}
    )


def test_a_micro_batch_in_which_nothing_is_compared_adds_zero() -> None:
    data = data_of(SAMPLES)
    data["sample_mask"] = torch.zeros(len(SAMPLES))
    assert set(figures_of(AuditedLoss(Loss()), data).values()) - {"loss"} == {0.0}


def test_the_logger_makes_means_of_the_added_sums() -> None:
    """Whatever NeMo-RL divides both by, as several optimizer steps a batch make it do."""
    inner = Logger()
    summed = {name: value / 4 for name, value in work(AuditedLoss(Loss()))[2].items()}
    before = dict(summed)
    AuditedLogger(inner).log_metrics(summed, 3, prefix="train")
    assert summed == before
    ((logged_metrics, step),) = inner.metrics
    assert step == 3
    assert logged_metrics["loss"] == summed["loss"]
    expected = oracle.audit(expected_samples()).metrics
    for name in SUMS.values():
        assert logged_metrics["rlk_audit/" + name] == pytest.approx(expected[name], rel=1e-6)


def test_metrics_without_an_audit_stay_as_they_are() -> None:
    report = {"rlk_audit/compared_token_count": 0.0, "rlk_audit/abs_dlogp_mean": 1.0, "loss": [1, 2]}
    assert step_means(report) == report


def test_the_logger_takes_lists_and_writes_to_sinks() -> None:
    steps: list[int] = []
    sink = SimpleNamespace(write=lambda report: steps.append(report.step), close=lambda: None)
    batch = {name: value.tolist() for name, value in logged(SAMPLES).items() if name != "content"}
    audited = AuditedLogger(Logger(), sinks=[sink])
    audited.log_batched_dict_as_jsonl(batch, "run/train_data_step3.jsonl")
    assert steps == [3]
    assert audited.report is not None
    assert oracle.differences(audited.report.metrics, oracle.audit(expected_samples())) == []


def test_odd_data_of_the_logger_is_counted_and_never_raised() -> None:
    audited = AuditedLogger(Logger())
    audited.log_batched_dict_as_jsonl({"prev_logprobs": 5}, "train_data_step1.jsonl")
    assert audited.report is not None
    assert audited.report.metrics["warning/update_failed"] == 1
