"""Dumps of miles: ``--dump-details``, one file a rank, cut over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlk_audit.dumps import shards, torch_file
from rlk_audit.dumps.rank_files import rank_parts
from rlk_audit.dumps.sample import DumpFormat, DumpPart, DumpSample, ReadOptions, Tell

NO_TRAIN_SIDE = (
    "the dump has no log_probs of the trainer on any rank: miles writes them with --get-mismatch-metrics, and not with "
    "--use-rollout-logprobs"
)


class _Miles:
    name = "miles"

    def recognises(self, path: Path) -> bool:
        return torch_file.has_keys(path, "rollout_data", "response_lengths", "cp_size")

    def parts(self, paths: Sequence[Path], tell: Tell) -> list[DumpPart]:
        return rank_parts(self.name, paths, True, tell)

    def read(self, part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
        return shards.read_shards(part, options, tell, NO_TRAIN_SIDE)


FORMAT: DumpFormat = _Miles()
