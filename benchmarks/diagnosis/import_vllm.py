"""Copy recorded pairs of vLLM and a Hugging Face forward into `pairs/tune`, without faults that were derived from them.

    python benchmarks/diagnosis/import_vllm.py FOLDER

FOLDER holds `s<seed>_v<vocabulary>_<mode>_<condition>.jsonl.gz` in the `table` format.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
from recordings import PAIRS

RECORDED = re.compile(r"healthy|stale|temperature|top_|wrong_token")


def columns_of(path: Path) -> dict[str, np.ndarray]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    joined = {
        part: np.concatenate([row[f"{part}_log_probs"] for row in rows]).astype(np.float32)
        for part in ("train", "rollout")
    }
    return joined | {
        "lengths": np.array([len(row["mask"]) for row in rows]),
        "prompts": np.array([row["prompt_length"] for row in rows]),
        "engines": np.array([int(row["labels"]["engine"][1:]) for row in rows]),
    }


def main() -> None:
    found: dict[str, dict[str, np.ndarray]] = {}
    for path in sorted(Path(sys.argv[1]).glob("s*_v*.jsonl.gz")):
        seed, vocabulary, _, condition = path.name.removesuffix(".jsonl.gz")[1:].split("_", 3)
        if RECORDED.match(condition):
            columns = found.setdefault(seed, {"vocabulary": np.array(int(vocabulary[1:]))})
            if condition.startswith(("temperature", "top_")):
                condition = (
                    f"vllm_{condition}"  # processed log-probs, which the other engine's conditions keep beside raw
                )
            columns |= {f"{condition}/{name}": column for name, column in columns_of(path).items()}
    for seed, columns in found.items():
        np.savez_compressed(PAIRS / "tune" / f"vllm{seed}.npz", **columns)


if __name__ == "__main__":
    main()
