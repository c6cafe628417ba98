"""Whatever `torch.set_default_device` says, the audit's tensors lie where their inputs do, or in host memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlk_audit
from rlk_audit import AuditConfig, Auditor, TokenBatch
from rlk_audit.evidence import EvidenceBuffer

PACKAGE = Path(rlk_audit.__file__).parent
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
TRAIN, ROLLOUT = [[-0.5, -1.0], [-2.0, -0.25, -3.0]], [[-0.5, -1.5], [-2.0, None, -1.0]]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The meta device stands for any that is not where the inputs are: its tensors have no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def padded(dtype: Any) -> dict[str, Any]:
    train, rollout = np.full((2, 3), -1.0, dtype), np.full((2, 3), -1.0, dtype)
    train[1, 2] = -3.0
    return {"train_log_probs": train, "rollout_log_probs": rollout, "mask": np.ones((2, 3), np.int64)}


def lists() -> TokenBatch:
    return TokenBatch.from_lists(
        TRAIN, ROLLOUT, [[1, 1], [1, 1, 0]], sample_index=[7, None], sample_slot=[0, 1], token_ids=[[1, 2], [3, 4, 5]]
    )


def padded_tensors() -> TokenBatch:
    values = {name: torch.from_numpy(column) for name, column in padded(np.float32).items()}
    return TokenBatch.from_padded(**values, response_start=[0, 1], sample_index=[4, 5])


def packed() -> TokenBatch:
    values = torch.from_numpy(np.linspace(-3, -1, 5))
    return TokenBatch.from_packed(values, (values - 0.5).tolist(), [1] * 5, cu_seqlens=[0, 2, 5], sample_index=[1, 2])


def shard() -> TokenBatch:
    values = torch.from_numpy(np.full((1, 4), -1.0))
    return TokenBatch.from_cp_shard(values, values, np.ones((1, 4)), cp_rank=1, cp_size=2, seq_length=8)


@pytest.mark.parametrize("update", [lists, padded_tensors, packed, shard, lambda: padded(np.float64)])
@pytest.mark.usefixtures("elsewhere", "kernel")
def test_the_figures_and_the_evidence_are_the_same(update: Any, tmp_path: Path) -> None:
    told = []
    for device in ("meta", "cpu"):
        torch.set_default_device(device)
        evidence = EvidenceBuffer(tmp_path / device)
        auditor = Auditor(AuditConfig(samples_per_step=4, breakdowns={"position": "auto"}), evidence=evidence)
        given = update()
        auditor.update(**given) if isinstance(given, dict) else auditor.update(given)
        assert auditor.collector is not None
        assert auditor.collector.last_error is None
        evidence.write(1, force=True)
        report = auditor.step(1)
        lines = [file.read_bytes() for file in sorted((tmp_path / device).rglob("*.jsonl*"))]
        auditor.close()
        told.append((report.to_dict() | {"updates": None}, lines))
    assert told[0] == told[1]
    assert told[0][0]["metrics"]["compared_token_count"] >= 3


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_new_tensor_is_told_where(path: Path) -> None:
    untold = [
        f"{path.name}:{node.lineno} torch.{node.func.attr}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not untold
