"""Writes dumps as each framework lays them out, from samples of known values."""

from __future__ import annotations

import json
import math
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from safetensors.torch import save_file

PAD = 0


@dataclass(frozen=True, eq=False)
class Given:
    """A sample: float32 log-probabilities of the response, `missing` where the engine gave none."""

    index: int
    prompt: list[int]
    tokens: list[int]
    train: np.ndarray
    rollout: np.ndarray
    mask: np.ndarray
    missing: np.ndarray
    labels: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def rollout_list(self) -> list[float | None]:
        return [None if m else float(v) for v, m in zip(self.rollout, self.missing, strict=True)]

    def without_missing(self) -> Given:
        return replace(self, missing=np.zeros(len(self), dtype=bool))


def draw(rng: np.random.Generator, count: int = 5, odd: bool = True) -> list[Given]:
    """Samples of unequal length with tool tokens (mask 0, rollout 0.0) and, if `odd`, NaN, infinities and None."""
    samples = []
    for index in range(count):
        length, prompt = int(rng.integers(1, 14)), int(rng.integers(1, 9))
        train = -rng.exponential(1.0, length).astype(np.float32)
        rollout = (train + rng.normal(0, 0.01, length)).astype(np.float32)
        mask = rng.random(length) < 0.8
        mask[0] = True
        rollout[~mask] = 0.0
        missing = np.zeros(length, dtype=bool)
        if odd:
            for values, value in ((train, math.nan), (rollout, math.nan), (train, -math.inf), (rollout, math.inf)):
                if rng.random() < 0.3:
                    values[rng.integers(length)] = value
            missing = rng.random(length) < 0.1
            rollout[missing] = 0.0
        ids = rng.integers(1, 9000, prompt + length).tolist()
        samples.append(Given(index, ids[:prompt], ids[prompt:], train, rollout, mask, missing))
    return samples


# --- slime and miles ------------------------------------------------------------------------------------------------


def slime(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    payload = {
        "format_version": 2,
        "rollout_id": step,
        "rank": 0,
        "samples": [
            {
                "data_parallel_rank": place % 2,
                "sample_index": given.index,
                "rollout_position": place,
                "tokens": torch.tensor(given.prompt + given.tokens),
                "loss_masks": torch.tensor(given.mask, dtype=torch.int32),
                "rollout_log_probs": torch.from_numpy(given.rollout),
                "log_probs": torch.from_numpy(given.train),
                "total_lengths": len(given.prompt) + len(given),
                "response_lengths": len(given),
                "rewards": 1.0,
            }
            for place, given in enumerate(samples)
        ],
        "dp_shards": [{"data_parallel_rank": 0}],
        "raw_reward": [1.0] * len(samples),
    }
    return [_save(payload, folder / "train_data" / f"{step}.pt")]


def chunks(total: int, response: int, padded: int, cp_rank: int, cp_size: int) -> list[int]:
    """Response tokens of a rank, one by one: token t is scored where the token in front of it lies."""
    if cp_size == 1:
        return list(range(response))
    width = math.ceil(padded / (2 * cp_size))
    owner = [min(at // width, 2 * cp_size - 1 - at // width) for at in range(2 * cp_size * width)]
    prompt = total - response
    return [t - prompt for t in range(prompt, total) if owner[t - 1] == cp_rank]


def ranks(
    folder: Path,
    step: int,
    samples: Sequence[Given],
    *,
    tp: int = 1,
    cp: int = 2,
    dp: int = 1,
    pp: int = 1,
    tells_cp: bool = True,
    padded: int | None = None,
    drop: Sequence[int] = (),
) -> list[Path]:
    """One file a rank in Megatron's order tp, cp, dp, pp; log-probabilities on the last stage only."""
    paths = []
    for rank in range(tp * cp * dp * pp):
        cp_rank, dp_rank, stage = rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp)
        own = list(samples[dp_rank::dp])

        def cut(values: np.ndarray, given: Given, cp_rank: int = cp_rank) -> torch.Tensor:
            total = len(given.prompt) + len(given)
            at = chunks(total, len(given), padded or total, cp_rank, cp)
            return torch.from_numpy(values)[torch.tensor(at, dtype=torch.long)]

        data: dict[str, Any] = {
            "tokens": [torch.tensor(given.prompt + given.tokens) for given in own],
            "loss_masks": [torch.tensor(given.mask, dtype=torch.int32) for given in own],
            "total_lengths": [len(given.prompt) + len(given) for given in own],
            "response_lengths": [len(given) for given in own],
            "sample_indices": [given.index for given in own],
            "raw_reward": [1.0] * len(samples),
            "rollout_log_probs": [cut(given.rollout, given) for given in own],
        }
        if padded:
            data["max_seq_lens"] = [padded] * len(own)
        if stage == pp - 1:
            data["log_probs"] = [cut(given.train, given) for given in own]
        payload: dict[str, Any] = {"rollout_id": step, "rank": rank, "rollout_data": data}
        if tells_cp:
            payload |= {"cp_rank": cp_rank, "cp_size": cp, "qkv_format": "bshd" if padded else "thd"}
        if rank not in drop:
            paths.append(_save(payload, folder / "train_data" / f"{step}_{rank}.pt"))
    return paths


def miles(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    return ranks(folder, step, samples, tp=2, cp=2)


def slime_per_rank(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    return ranks(folder, step, samples, tp=1, cp=2, tells_cp=False)


def _save(payload: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(payload, path)
    return path


# --- JSONL ----------------------------------------------------------------------------------------------------------


def nemo_rl(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    width = max(len(given.prompt) + len(given) for given in samples)
    records = []
    for given in samples:
        total = len(given.prompt) + len(given)

        def over(response: list[Any], given: Given = given, total: int = total) -> list[Any]:
            return [0.0] * len(given.prompt) + response + [0.0] * (width - total)

        records.append(
            {
                "content": 'said "[[{" and \\',
                "rewards": 1.0,
                "input_lengths": total,
                "token_ids": given.prompt + given.tokens + [PAD] * (width - total),
                "token_loss_mask": over(given.mask.astype(int).tolist()),
                "sample_loss_mask": 1.0,
                "advantages": [0.5] * width,
                "generation_logprobs": over(given.rollout_list()),
                "prev_logprobs": over(given.train.tolist()),
                "idx": given.index,
            }
        )
    return [_lines(records, folder / f"train_data_step{step}.jsonl")]


def prime_rl(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    paths = []
    for rank in range(2):
        records = []
        for given in samples[rank::2]:
            zeros = [0.0] * len(given.prompt)
            length = len(zeros) + len(given)
            records.append(
                {
                    "schema_version": 1,
                    "step": step,
                    "rank": rank,
                    "export_sequence_idx": given.index,
                    "env_name": "math",
                    "token_ids": given.prompt + given.tokens,
                    "loss_mask": [False] * len(zeros) + given.mask.tolist(),
                    "inference_logprobs": zeros + [_finite(value) for value in given.rollout_list()],
                    "trainer_logprobs": [-11.5, *zeros[1:]] + [_finite(value) for value in given.train.tolist()],
                    "rl_weights": [None] * length,
                    "ref_kl_weights": [None] * length,
                }
            )
        paths.append(_lines(records, folder / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl"))
    (paths[0].parent / "STABLE").touch()
    return paths


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def table_jsonl(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    return [_lines(rows(samples, step), folder / f"step_{step}.jsonl")]


def rows(samples: Sequence[Given], step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "sample_index": given.index,
            "rollout_id": given.index // 2,
            "prompt_length": len(given.prompt),
            "train_log_probs": given.train.tolist(),
            "rollout_log_probs": given.rollout_list(),
            "mask": given.mask.astype(int).tolist(),
            "token_ids": given.tokens,
            "labels": {"engine": f"e{given.index % 2}", "turn": ["0"] * len(given)},
        }
        for given in samples
    ]


def _lines(records: Sequence[dict[str, Any]], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# --- other tables ---------------------------------------------------------------------------------------------------


def table_parquet(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    float_list = pa.list_(pa.float32())
    columns: dict[str, Any] = {name: [row[name] for row in rows(samples, step)] for name in rows(samples, step)[0]}
    columns["train_log_probs"] = pa.array([given.train.tolist() for given in samples], type=float_list)
    columns["rollout_log_probs"] = pa.array([given.rollout_list() for given in samples], type=float_list)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path, row_group_size=max(3, len(samples) // 2))
    return [path]


def _flat(samples: Sequence[Given], step: int) -> dict[str, np.ndarray]:
    return {
        "train_log_probs": np.concatenate([given.train for given in samples]),
        "rollout_log_probs": np.concatenate([given.rollout for given in samples]),
        "rollout_missing": np.concatenate([given.missing for given in samples]),
        "mask": np.concatenate([given.mask for given in samples]),
        "token_ids": np.concatenate([given.tokens for given in samples]).astype(np.int64),
        "lengths": np.array([len(given) for given in samples]),
        "sample_index": np.array([given.index for given in samples]),
        "rollout_id": np.array([given.index // 2 for given in samples]),
        "prompt_length": np.array([len(given.prompt) for given in samples]),
        "step": np.full(len(samples), step),
    }


def table_npz(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.npz"
    engines = np.array([f"e{given.index % 2}" for given in samples])
    np.savez_compressed(path, **_flat(samples, step), **{"labels/engine": engines})
    return [path]


def table_safetensors(folder: Path, step: int, samples: Sequence[Given]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.safetensors"
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in _flat(samples, step).items()}
    lengths = tensors.pop("lengths")
    tensors["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tensors["labels/engine"] = torch.tensor([given.index % 2 for given in samples])
    save_file(tensors, path, metadata={"labels/engine": json.dumps(["e0", "e1"])})
    return [path]


# --- SkyRL ----------------------------------------------------------------------------------------------------------

SKYRL_MODULE = "skyrl.backends.skyrl_train.training_batch"


def skyrl(folder: Path, step: int, samples: Sequence[Given], response_mask: bool = True) -> list[Path]:
    """Left-padded, as SkyRL writes it; SkyRL's module is there only while it is pickled."""
    longest = max(len(given.prompt) for given in samples)
    width = max(len(given) for given in samples)

    def left(values: Sequence[Any] | np.ndarray, size: int, dtype: Any) -> np.ndarray:
        return np.concatenate([np.zeros(size - len(values), dtype=dtype), np.asarray(values, dtype=dtype)])

    def batch(get: Callable[[Given], Any], size: int, dtype: Any) -> dict[str, Any]:
        array = np.stack([left(get(given), size, dtype) for given in samples])
        return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}

    state = {
        "batch_dict": {
            "sequences": batch(lambda g: g.prompt + g.tokens, longest + width, np.int64),
            "attention_mask": batch(lambda g: [1] * (len(g.prompt) + len(g)), longest + width, np.int64),
            "response_mask": batch(lambda g: [1] * len(g), width, np.int64) if response_mask else None,
            "loss_mask": batch(lambda g: g.mask, width, np.int64),
            "rollout_logprobs": batch(lambda g: g.rollout, width, np.float32),
            "action_log_probs": batch(lambda g: g.train, width, np.float32),
            "values": None,
        },
        "batch_size": len(samples),
        "device": torch.device("cpu"),
        "metadata": {"uids": [str(given.index) for given in samples]},
    }
    path = folder / "dumped_data" / f"global_step_{step}_training_input.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [SKYRL_MODULE.rsplit(".", cut)[0] for cut in range(4)]
    sys.modules.update({name: types.ModuleType(name) for name in names})
    try:
        module: Any = sys.modules[SKYRL_MODULE]
        module.TrainingInputBatch = type(
            "TrainingInputBatch",
            (dict,),
            {
                "__module__": SKYRL_MODULE,
                "__reduce__": lambda self: (module._rebuild_tensor_batch, (type(self), state)),
            },
        )
        exec("def _rebuild_tensor_batch(kind, state): raise AssertionError('SkyRL is not needed')", vars(module))
        module._rebuild_tensor_batch.__module__ = SKYRL_MODULE
        path.write_bytes(pickle.dumps(module.TrainingInputBatch()))
    finally:
        for name in names:
            del sys.modules[name]
    return [path]


Writer = Callable[[Path, int, Sequence[Given]], list[Path]]
WRITERS: dict[str, tuple[str, Writer]] = {
    "slime": ("slime", slime),
    "slime per rank": ("slime", slime_per_rank),
    "miles": ("miles", miles),
    "nemo-rl": ("nemo-rl", nemo_rl),
    "prime-rl": ("prime-rl", prime_rl),
    "skyrl": ("skyrl", skyrl),
    "table jsonl": ("table", table_jsonl),
    "table parquet": ("table", table_parquet),
    "table npz": ("table", table_npz),
    "table safetensors": ("table", table_safetensors),
}
"""Name -> (format, writer of one step)."""
KEEPS_MISSING = ("nemo-rl", "prime-rl", "table jsonl", "table parquet", "table npz", "table safetensors")
NONFINITE_IS_NULL = ("prime-rl",)
