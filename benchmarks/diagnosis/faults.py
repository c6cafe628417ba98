"""Runs with planted faults, made from recorded log-probabilities with random parameters.

A run is a list of samples; `rollout` and `train` are what a comparison would be given. Faults that need a model (stale
weights, temperature, filters, likeliest tokens) were recorded; all others change a recording as the fault would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from recordings import Recording, Sample

from rlk_audit.diagnose import TokenTable

SIDES = ("train", "rollout")
CERTAIN = 0.95
"""Above this probability drift is near zero whatever the cause."""
Random = np.random.Generator
Run = list[Sample]
Source = Callable[[Random, Recording], Run | None]
Change = Callable[[Random, Run], None]


class BelowNoiseError(Exception):
    """What was planted is smaller than the noise of the run it was planted in: nobody could name it."""


# --- where the values come from -------------------------------------------------------------------------------------


def choose(random: Random, samples: list[Sample], train: str, rollout: str) -> Run:
    """Take some samples, cut short in a quarter of the runs, on some engines and ranks."""
    count = min(len(samples), int(random.integers(16, 73)))
    longest = int(random.integers(8, 17)) if random.random() < 0.25 else 1 << 20
    if longest < 1 << 20:
        count = min(len(samples), max(count, 40))
    engines, ranks = int(random.integers(2, 5)), int(random.choice([2, 4, 8]))
    run = []
    for number, i in enumerate(random.choice(len(samples), count, replace=False).tolist()):
        part = {name: column[:longest] for name, column in samples[i].items() if np.ndim(column)}
        run.append(
            {
                "train": part[train].astype(np.float64),
                "rollout": part[rollout].astype(np.float64),
                "likeliest": part.get("likeliest"),
                "prompt": samples[i]["prompt"],
                "engine": number % engines,
                "rank": int(random.integers(ranks)),
            }
        )
    return run


def recorded(condition: str, train: str = "train", rollout: str = "rollout") -> Source:
    def source(random: Random, recording: Recording) -> Run | None:
        samples = recording.conditions.get(condition)
        if samples is None or not {train, rollout} <= samples[0].keys():
            return None
        return choose(random, samples, train, rollout)

    return source


def healthy(random: Random, recording: Recording) -> Run:
    conditions = [name for name in recording.conditions if name.startswith(("healthy", "bf16"))]
    return choose(random, recording.conditions[str(random.choice(conditions))], "train", "rollout")


def temperature_one(random: Random, recording: Recording) -> Run | None:
    """A healthy run of which the likeliest tokens were recorded too."""
    condition = "healthy_t1" if recording.from_vllm else "bf16"
    samples = recording.conditions.get(condition)
    return recorded(condition)(random, recording) if samples and "likeliest" in samples[0] else None


def stale_engine(size: str, label: str = "engine") -> Source:
    """Samples of one engine come from weights that the trainer has left, the others' from its own."""

    def source(random: Random, recording: Recording) -> Run | None:
        stale = recorded(f"stale_{size}")(random, recording)
        run = temperature_one(random, recording)
        if stale is None or run is None:
            return None
        codes = sorted({sample["engine"] for sample in run})
        bad = codes[int(random.integers(len(codes)))]
        replaced = iter(stale)
        mixed = []
        for sample in run:
            other = next(replaced, None) if sample["engine"] == bad else sample
            if other is not None:
                mixed.append({**other, "engine": sample["engine"], "rank": sample["rank"]})
        run[:] = mixed
        if label != "engine":
            for sample in run:
                sample[label] = 3 if sample["engine"] == bad else 4
                sample["engine"] = int(random.integers(2))
        return run

    return source


def stale_above_noise(size: str) -> Source:
    """Stale weights, of which the recording itself says whether they can be told from no fault.

    Weights that moved add to the noise of the engine. Where they add less variance than it has, nobody can name them.
    """
    stale = recorded(f"stale_{size}")

    def source(random: Random, recording: Recording) -> Run | None:
        run = stale(random, recording)
        unmoved = recording.conditions.get("healthy_t1" if recording.from_vllm else "bf16")
        if run is None or unmoved is None:
            return None
        if logit_variance(recording.conditions[f"stale_{size}"]) < 2 * logit_variance(unmoved):
            raise BelowNoiseError
        return run

    return source


def logit_variance(samples: list[Sample]) -> float:
    """Return the mean square of d / (1 - p) over uncertain tokens, each counted as 1 nat at most."""
    train, rollout = (np.concatenate([sample[side] for sample in samples]).astype(float) for side in SIDES)
    p = np.exp(np.minimum((train + rollout) / 2, 0.0))
    noise = ((train - rollout) / (1 - np.minimum(p, CERTAIN)))[p < CERTAIN]
    return float((np.minimum(np.abs(noise), 1.0) ** 2).mean())


def vllm_stale_engine(size: str) -> Source:
    """vLLM's engine e1 kept its weights; the labels are those of the recording."""

    def source(random: Random, recording: Recording) -> Run | None:
        samples = recording.conditions.get(f"stale_e1_{size}")
        if samples is None:
            return None
        count = int(random.integers(20, len(samples) + 1))
        chosen = [samples[i] for i in random.choice(len(samples), count, replace=False)]
        return [
            {
                **{name: s[name].astype(np.float64) for name in ("train", "rollout")},
                **{name: s[name] for name in ("prompt", "engine")},
                "likeliest": None,
                "rank": int(random.integers(4)),
            }
            for s in chosen
        ]

    return source


# --- what is changed ------------------------------------------------------------------------------------------------


def either_side(random: Random) -> str:
    return str(random.choice(["train", "rollout"]))


def affected(random: Random, run: Run, least: float) -> np.ndarray:
    return random.random(len(run)) < random.uniform(least, 1.0)


def shift(lags: tuple[int, ...], half: bool = False) -> Change:
    def change(random: Random, run: Run) -> None:
        lag, side, fill = int(random.choice(lags)), either_side(random), float(random.choice([0.0, -1.0]))
        for i, sample in enumerate(run):
            if half and i % 2:
                continue
            moved = np.roll(sample[side], lag)
            if lag > 0:
                moved[:lag] = fill
            else:
                moved[lag:] = fill
            sample[side] = moved

    return change


def zero_fill(random: Random, run: Run) -> None:
    part = random.uniform(0.1, 0.4)
    for sample in run:
        n = len(sample["rollout"])
        length = max(2, int(part * n))
        start = int(random.integers(0, max(1, n - length)))
        sample["rollout"][start : start + length] = 0.0


def unlikely(random: Random, count: int) -> np.ndarray:
    """Train log-probs of tokens that no engine chose."""
    return -random.gamma(3.0, 1.8, count) - 0.2


def tool_tokens(random: Random, run: Run) -> None:
    """A tool's answer in the mask: R = 0, and the trainer finds many of its tokens unlikely."""
    for sample in run:
        n = len(sample["rollout"])
        length = max(2, int(random.uniform(0.1, 0.4) * n))
        start = int(random.integers(0, max(1, n - length)))
        sample["rollout"][start : start + length] = 0.0
        sample["train"][start : start + length] = unlikely(random, len(sample["train"][start : start + length]))


def synthetic_end(random: Random, run: Run) -> None:
    chosen, fill = affected(random, run, 0.4), float(random.choice([0.0, -0.01]))
    for sample, bad in zip(run, chosen, strict=True):
        if bad:
            sample["rollout"][-1] = fill
            sample["train"][-1] = unlikely(random, 1)[0]


def rounded(dtype: str) -> Change:
    def change(random: Random, run: Run) -> None:
        side = either_side(random)
        for sample in run:
            values = sample[side].astype(np.float32)
            if dtype == "float16":
                sample[side] = values.astype(np.float16).astype(np.float64)
            else:  # to the nearest, ties to even
                bits = values.view(np.uint32)
                bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
                sample[side] = bits.astype(np.uint32).view(np.float32).astype(np.float64)

    return change


def wrong_token(random: Random, run: Run) -> None:
    part = random.uniform(0.15, 1.0)
    for sample in run:
        chosen = random.random(len(sample["rollout"])) < part
        sample["rollout"] = np.where(chosen, sample["likeliest"], sample["rollout"])


def row_order(random: Random, run: Run) -> None:
    """Another sample's values, cut or repeated to the length."""
    kind = random.integers(3)
    order = np.arange(len(run))
    if kind == 0:
        order = random.permutation(len(run))
    elif kind == 1:
        order = np.roll(order, int(random.integers(1, len(run))))
    else:  # the samples were sorted by length on one side
        order = np.argsort([len(sample["rollout"]) for sample in run], kind="stable")
    if (order == np.arange(len(run))).all():  # all of one length
        order = np.roll(order, 1)
    columns = [run[i]["rollout"] for i in order]
    for sample, column in zip(run, columns, strict=True):
        sample["rollout"] = np.resize(column, len(sample["rollout"])).copy()


def cp_order(random: Random, run: Run) -> None:
    """Shards of a gathered sequence in the wrong order: zigzag not undone, undone twice, or ranks mixed up."""
    # A sequence is padded to a multiple of 2 cp, so few tokens mean a small cp.
    longest = max(len(sample["train"]) for sample in run)
    cp, kind = int(random.choice([2, 4])) if longest > 32 else 2, random.integers(3)
    blocks = 2 * cp if kind < 2 else cp
    zigzag = [block for rank in range(cp) for block in (rank, 2 * cp - 1 - rank)]
    if kind == 0:
        order = zigzag
    elif kind == 1:
        order = [zigzag.index(block) for block in range(blocks)]
    else:
        order = np.roll(np.arange(cp), int(random.integers(1, cp))).tolist()
    # Where the prompt is most of the sequence, the response's values are gone rather than misplaced.
    side, with_prompt = either_side(random), bool(random.random() < 0.5) and longest > 2 * run[0]["prompt"]
    for sample in run:
        prompt = int(sample["prompt"]) if with_prompt else 0
        values = np.concatenate([np.zeros(prompt), sample[side]])
        size = -(-len(values) // blocks)
        padded = np.concatenate([values, np.zeros(size * blocks - len(values))]).reshape(blocks, size)
        sample[side] = padded[order].reshape(-1)[prompt : len(values)].copy()


def rank_local(random: Random, run: Run) -> None:
    """Some ranks compute badly."""
    ranks = sorted({sample["rank"] for sample in run})
    bad = random.choice(ranks, max(1, len(ranks) // 4), replace=False)
    size = random.uniform(0.1, 0.6)
    for sample in run:
        if sample["rank"] in bad:
            p = np.exp(sample["train"])
            sample["train"] = np.minimum(sample["train"] + size * (1 - p) * random.standard_normal(len(p)), 0.0)


def train_filter(random: Random, run: Run) -> None:
    part = random.uniform(0.005, 0.08)
    dropped = 0
    for sample in run:
        unlikely_here = sample["train"] <= np.quantile(sample["train"], 3 * part)
        drop = unlikely_here & (random.random(len(unlikely_here)) < 0.5)
        sample["train"] = np.where(drop, -np.inf, sample["train"])
        dropped += int(drop.sum())
    if not dropped:
        run[0]["train"][0] = -np.inf


def routing_tail(random: Random, run: Run) -> None:
    """Other experts on a few tokens: heavy-tailed drift in their logits, everywhere alike.

    Raises:
        BelowNoiseError: fewer than two tokens move by more than the largest noise of the run; one could be a stray.
    """
    part, size = random.uniform(0.01, 0.06), random.uniform(0.3, 1.0)
    noise = max(float(np.abs(sample["train"] - sample["rollout"]).max()) for sample in run)
    seen = 0
    for sample in run:
        n = len(sample["train"])
        flipped = random.random(n) < part
        moved = size * random.standard_t(3, n) * (1 - np.exp(sample["train"]))
        before = sample["train"]
        sample["train"] = np.where(flipped, np.minimum(before + moved, 0.0), before)
        seen += int((np.abs(sample["train"] - before) > noise).sum())
    if seen < 2:
        raise BelowNoiseError


def self_comparison(random: Random, run: Run) -> None:
    for sample in run:
        sample["rollout"] = sample["train"].copy()


def divide(by: float) -> Change:
    def change(random: Random, run: Run) -> None:
        for sample in run:
            sample["rollout"] = sample["rollout"] / by

    return change


def swap_sides(random: Random, run: Run) -> None:
    for sample in run:
        sample["train"], sample["rollout"] = sample["rollout"], sample["train"]


# --- kinds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What is planted: the source of values, changes in order, and the codes that must be named."""

    name: str
    codes: tuple[str, ...]
    source: Source
    changes: tuple[Change, ...] = ()
    where: str = ""


HEALTHY = (
    Kind("bf16 engine", (), recorded("bf16")),
    Kind("bf16 engine and trainer, other batch shapes", (), recorded("bf16", "train_bf16")),
    Kind("fp16 engine", (), recorded("fp16")),
    Kind("sampled at 0.7, raw", (), recorded("temperature_0.7")),
    Kind("sampled at 1.3, raw", (), recorded("temperature_1.3")),
    Kind("sampled at top-p 0.8, raw", (), recorded("top_p_0.8")),
    Kind("sampled at top-p 0.95, raw", (), recorded("top_p_0.95")),
    Kind("sampled at top-k 20, raw", (), recorded("top_k_20")),
    Kind("vLLM, temperature 1", (), recorded("healthy_t1")),
    Kind("vLLM, temperature 0.7, raw", (), recorded("healthy_t0.7")),
    Kind("vLLM, top-p 0.9, raw", (), recorded("healthy_topp.9")),
)

TEMPERATURES = ("0.7", "1.3")
SINGLE = (
    Kind("shift by 1", ("shift",), healthy, (shift((1, -1)),)),
    Kind("shift by 2", ("shift",), healthy, (shift((2, -2)),)),
    Kind("shift by 1, half the samples", ("shift",), healthy, (shift((1, -1), half=True),)),
    *(
        Kind(f"rollout at {t}", ("temperature",), recorded(f"temperature_{t}", rollout="processed"))
        for t in TEMPERATURES
    ),
    *(Kind(f"vLLM at {t}", ("temperature",), recorded(f"vllm_temperature_{t}")) for t in TEMPERATURES),
    *(Kind(f"trainer at {t}", ("temperature",), recorded(f"temperature_{t}", "train_scaled")) for t in TEMPERATURES),
    *(
        Kind(f"log-probs divided by {t}", ("temperature",), recorded(f"temperature_{t}"), (divide(float(t)),))
        for t in TEMPERATURES
    ),
    *(
        Kind(
            f"log-probs divided by {t}, trainer's logits",
            ("temperature",),
            recorded(f"temperature_{t}", "train_scaled"),
            (divide(float(t)),),
        )
        for t in TEMPERATURES
    ),
    *(
        Kind(f"rollout {name}", ("renormalised",), recorded(name, rollout="processed"))
        for name in ("top_p_0.8", "top_p_0.95", "top_k_20")
    ),
    *(
        Kind(f"vLLM {name}", ("renormalised",), recorded(f"vllm_{name}"))
        for name in ("top_p_0.8", "top_p_0.95", "top_k_20")
    ),
    *(
        Kind(f"trainer {name}", ("renormalised",), recorded(name, rollout="processed"), (swap_sides,))
        for name in ("top_p_0.8", "top_p_0.95", "top_k_20")
    ),
    Kind("trainer drops tokens", ("train_filter",), healthy, (train_filter,)),
    Kind("stale, tiny move", ("stale_weights",), stale_above_noise("tiny")),
    *(Kind(f"stale, {size} move", ("stale_weights",), recorded(f"stale_{size}")) for size in ("small", "large")),
    Kind("stale, vLLM", ("stale_weights",), recorded("stale_all_0.1")),
    *(
        Kind(f"one engine stale, {size} move", ("stale_weights",), stale_engine(size), where="engine=")
        for size in ("small", "large")
    ),
    *(
        Kind(f"one engine stale, vLLM {size}", ("stale_weights",), vllm_stale_engine(size), where="engine=1")
        for size in ("0.03", "0.1")
    ),
    Kind(
        "one weight version stale",
        ("stale_weights",),
        stale_engine("large", "weight_version"),
        where="weight_version=3",
    ),
    Kind("some ranks off", ("rank_local",), healthy, (rank_local,), where="rank="),
    Kind("tool tokens in the mask", ("zero_fill",), healthy, (tool_tokens,)),
    Kind("sampled tokens filled with zeros", ("zero_fill",), healthy, (zero_fill,)),
    Kind("end tokens never sampled", ("synthetic_end",), healthy, (synthetic_end,)),
    Kind("rounded to bfloat16", ("rounded",), healthy, (rounded("bfloat16"),)),
    Kind("rounded to float16", ("rounded",), healthy, (rounded("float16"),)),
    Kind("likeliest token's log-prob", ("wrong_token",), temperature_one, (wrong_token,)),
    Kind("likeliest token's log-prob, vLLM", ("wrong_token",), recorded("wrong_token")),
    Kind("rows in another order", ("row_order",), healthy, (row_order,)),
    Kind("cp shards in another order", ("cp_order",), healthy, (cp_order,)),
    Kind("expert routing flips", ("routing_tail",), healthy, (routing_tail,)),
    Kind("rollout compared with itself", ("self_comparison",), healthy, (self_comparison,)),
)

_T7 = recorded("temperature_0.7", rollout="processed")
_TOP_P = recorded("top_p_0.8", rollout="processed")
PAIRS = (
    Kind("stale engine + shift on half", ("stale_weights", "shift"), stale_engine("large"), (shift((1, -1), True),)),
    Kind("stale engine + tool tokens", ("stale_weights", "zero_fill"), stale_engine("large"), (tool_tokens,)),
    Kind("stale engine + bfloat16", ("stale_weights", "rounded"), stale_engine("large"), (rounded("bfloat16"),)),
    Kind("stale engine + cp order", ("stale_weights", "cp_order"), stale_engine("large"), (cp_order,)),
    Kind("stale + tool tokens", ("stale_weights", "zero_fill"), recorded("stale_large"), (tool_tokens,)),
    Kind("stale + shift", ("stale_weights", "shift"), recorded("stale_small"), (shift((1, -1)),)),
    Kind("stale + end tokens", ("stale_weights", "synthetic_end"), recorded("stale_large"), (synthetic_end,)),
    Kind("stale + trainer drops", ("stale_weights", "train_filter"), recorded("stale_large"), (train_filter,)),
    Kind("temperature + tool tokens", ("temperature", "zero_fill"), _T7, (tool_tokens,)),
    Kind("temperature + shift", ("temperature", "shift"), _T7, (shift((1, -1)),)),
    Kind("temperature + float16", ("temperature", "rounded"), _T7, (rounded("float16"),)),
    Kind("temperature + some ranks off", ("temperature", "rank_local"), _T7, (rank_local,)),
    Kind("top-p + end tokens", ("renormalised", "synthetic_end"), _TOP_P, (synthetic_end,)),
    Kind("top-p + trainer drops", ("renormalised", "train_filter"), _TOP_P, (train_filter,)),
    Kind("top-p + row order", ("renormalised", "row_order"), _TOP_P, (row_order,)),
    Kind("wrong token + tool tokens", ("wrong_token", "zero_fill"), temperature_one, (wrong_token, tool_tokens)),
    Kind("row order + trainer drops", ("row_order", "train_filter"), healthy, (row_order, train_filter)),
    Kind("cp order + bfloat16", ("cp_order", "rounded"), healthy, (cp_order, rounded("bfloat16"))),
    Kind("some ranks off + end tokens", ("rank_local", "synthetic_end"), healthy, (rank_local, synthetic_end)),
    Kind("routing flips + tool tokens", ("routing_tail", "zero_fill"), healthy, (routing_tail, tool_tokens)),
    Kind("routing flips + float16", ("routing_tail", "rounded"), healthy, (routing_tail, rounded("float16"))),
    Kind("shift + tool tokens", ("shift", "zero_fill"), healthy, (tool_tokens, shift((1, -1)))),
)


def make(kind: Kind, recording: Recording, number: int) -> Run | None:
    """Return run `number` of a kind from a recording, the same on every call; None where it cannot be made.

    Raises:
        BelowNoiseError: it was made, and cannot be told from the recording.
    """
    name = f"{kind.name} {recording.name} {number}"
    random = np.random.default_rng(list(name.encode()))
    run = kind.source(random, recording)
    if run is not None:
        for change in kind.changes:
            change(random, run)
    return run


def possible(kind: Kind, recording: Recording) -> bool:
    """Whether the recording has what the kind is made of."""
    try:
        return make(kind, recording, 0) is not None
    except BelowNoiseError:
        return True


def table(run: Run) -> TokenTable:
    labels = {name: [sample[name] for sample in run] for name in ("engine", "weight_version") if run and name in run[0]}
    return TokenTable.from_lists(
        [sample["train"].tolist() for sample in run],
        [sample["rollout"].tolist() for sample in run],
        prompt_length=[int(sample["prompt"]) for sample in run],
        rank=[sample["rank"] for sample in run],
        labels=labels,
    )
