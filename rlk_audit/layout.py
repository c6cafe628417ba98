"""StateLayout: the one table that says what each number of the state vector means.

The vector is ``[fields that add up over ranks | one row a rank]``. Every rank writes its own row and zeros in the
others, so a single SUM both adds the fields and gathers the rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from rlk_audit import breakdowns, exact_sum, samples
from rlk_audit.config import TOKEN_CLASSES, AuditConfig
from rlk_audit.sketch import sketch_length
from rlk_audit.version import __version__

TOKEN_COUNTS = (
    "token_mismatch",
    "zero_fill_suspect",
    "identical",
    "clipped_low",
    "clipped_high",
    "tail_ln2",
    "overflow_ratio",
    "overflow_square",
    "overflow_k3",
    "overflow_mult",
)
"""What is counted of the tokens beside their classes."""

COUNTERS = (
    "inactive",
    *TOKEN_CLASSES,
    *TOKEN_COUNTS,
    "length_mismatch",
    "total",
    "total_unknown",
    "update_failed",
    "duplicate_microbatch",
)

SUMS = {
    "dlogp": exact_sum.SIGNED_SLOTS,
    "dlogp_squared": exact_sum.SQUARE_SLOTS,
    "ratio": exact_sum.UNSIGNED_SLOTS,
    "ratio_squared": exact_sum.SQUARE_SLOTS,
    "k3": exact_sum.UNSIGNED_SLOTS,
    "mult": exact_sum.UNSIGNED_SLOTS,
    "train_logp": exact_sum.SIGNED_SLOTS,
    "train_prob": exact_sum.UNSIGNED_SLOTS,
    "train_prob_squared": exact_sum.SQUARE_SLOTS,
    "rollout_prob": exact_sum.UNSIGNED_SLOTS,
    "rollout_prob_squared": exact_sum.SQUARE_SLOTS,
    "prob_product": exact_sum.PRODUCT_SLOTS,
    "prob_diff": exact_sum.UNSIGNED_SLOTS,
}
"""Exact sums over compared tokens and their lengths (see exact_sum); ``mult`` is exp(abs d), ``prob`` is exp T or R."""

SUM_OFFSETS = dict(zip(SUMS, accumulate(SUMS.values(), initial=0), strict=False))
"""Where each begins in the stretch of all sums, which follow one another."""
SUMS_LENGTH = sum(SUMS.values())

MINIMA = ("dlogp_min", "abs_dlogp_min")
MAXIMA = ("dlogp_max", "abs_dlogp_max", "prob_diff_max")
EXTREMES = MINIMA + MAXIMA
"""Kept as float64 bits; they mean something only where tokens were compared."""

FLAGS = {
    "missing_metadata": 1,
    "missing_rollout_log_probs": 2,
    "tp_disagreement": 4,
    "unexpected_token_count": 8,
    "step_mismatch": 16,
}
"""Bits of a row's ``flags``."""

ROW_HEADER = (
    "fingerprint",
    "flags",
    "rank",
    "compared",
    "update_failed",
    "abs_dlogp_sum",
    *EXTREMES,
    "updates_since_rollout_min",
    "updates_since_rollout_max",
    "expected_active",
    "step",
)
"""Fields of a rank's row ahead of its worst tokens.

``abs_dlogp_sum`` is float64 bits too; ``expected_active`` is one more than what the rank was told of the whole group,
0 if it was told nothing, and so is ``step``, the number that it gave the step.
"""

WORST_TOKEN = (
    "valid",
    "train_logp",
    "rollout_logp",
    "sample_index",
    "rollout_id",
    "token_position",
    "token_id",
    "microbatch",
    "rank",
)
"""Fields of a worst token ahead of its label codes; the log-probabilities are float64 bits."""

WORST_LOG_PROBS = slice(1, 3)

ONE_WORST_ABOVE = 1024
"""Groups of more ranks keep one worst token a row, so that rows stay small beside the rest."""


@dataclass(frozen=True)
class Field:
    """A named stretch of the state vector: ``vector[offset : offset + length]``."""

    name: str
    offset: int
    length: int

    @property
    def slice(self) -> slice:
        """The stretch as a slice."""
        return slice(self.offset, self.offset + self.length)


class StateLayout:
    """Where each field of the state stands, for one configuration and group size.

    Attributes:
        fields: name -> Field, in the vector's order; they add up over ranks.
        additive_length: their length in all, in int64; it does not depend on the group.
        sums: where the exact sums stand.
        row_length, group_size: the rows behind them.
        length: of the whole vector; it never depends on the data.
        fingerprint: int64 hash of all of the above and of the settings that give the numbers their meaning.

    Raises:
        ValueError: the vector would be larger than ``config.max_state_bytes``; the text lists its parts.
    """

    def __init__(self, config: AuditConfig, group_size: int = 1) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self.config = config
        self.group_size = group_size
        self.labels = config.caller_labels
        self.worst_k = 1 if group_size > ONE_WORST_ABOVE else config.worst_k
        # A label may have the name of another field.
        self.worst_fields = WORST_TOKEN + tuple(map(label_column, self.labels))
        lengths = {"counters": len(COUNTERS), "sketch": sketch_length(config.grouping_power)}
        lengths |= {f"sum_{name}": length for name, length in SUMS.items()}
        lengths |= {breakdown_field(n): (1 + len(c)) * breakdowns.ROW_LENGTH for n, c in config.breakdowns.items()}
        # Last, so that a run's total, to which slots mean nothing, can be without it.
        lengths["samples"] = samples.table_length(config.samples_per_step)
        self.fields: dict[str, Field] = {}
        offset = 0
        for name, length in lengths.items():
            self.fields[name] = Field(name, offset, length)
            offset += length
        self.additive_length = offset
        self.sums = slice(first := self.fields[f"sum_{next(iter(SUMS))}"].offset, first + SUMS_LENGTH)
        self.row_length = len(ROW_HEADER) + self.worst_k * len(self.worst_fields)
        self.length = offset + group_size * self.row_length
        self.fingerprint = self._fingerprint()
        self._refuse_large_state()

    def row_slice(self, group_rank: int) -> slice:
        """Return where the row of a rank of the group stands."""
        start = self.additive_length + group_rank * self.row_length
        return slice(start, start + self.row_length)

    def made(self, vector: Tensor) -> bool:
        """Return whether a vector [length] was packed with this layout; reads its fingerprint on the host."""
        return int(vector[self.row_slice(0)][ROW_HEADER.index("fingerprint")]) == self.fingerprint

    def size_table(self) -> dict[str, int]:
        """Return the bytes of each part of the vector."""
        sizes = {"counters": 8 * self.fields["counters"].length, "sketch": 8 * self.fields["sketch"].length}
        sizes["sums"] = 8 * sum(f.length for f in self.fields.values() if f.name.startswith("sum_"))
        for name, codes in self.config.breakdowns.items():
            sizes[f"breakdown {name} ({len(codes)} codes)"] = 8 * self.fields[breakdown_field(name)].length
        if self.config.samples_per_step is not None:
            sizes[f"{self.config.samples_per_step} samples"] = 8 * self.fields["samples"].length
        sizes[f"rows of {self.group_size} ranks"] = 8 * self.group_size * self.row_length
        return sizes

    def _fingerprint(self) -> int:
        meaning = {
            "version": __version__,
            "settings": self.config.state_values(),
            "group_size": self.group_size,
            "fields": [[f.name, f.offset, f.length] for f in self.fields.values()],
            "counters": COUNTERS,
            "row": [*ROW_HEADER, self.worst_k, *self.worst_fields],
        }
        return stable_hash(json.dumps(meaning, sort_keys=True))

    def _refuse_large_state(self) -> None:
        if 8 * self.length > self.config.max_state_bytes:
            parts = ", ".join(f"{name} {size}" for name, size in self.size_table().items())
            raise ValueError(
                f"the state would be {8 * self.length} bytes, more than max_state_bytes={self.config.max_state_bytes}: "
                f"{parts} bytes; ask for less or raise max_state_bytes"
            )


def label_column(label: str) -> str:
    """Return the name of a label's column in the rows of worst tokens."""
    return f"label/{label}"


def breakdown_field(label: str) -> str:
    """Return the name of a label's field."""
    return f"breakdown_{label}"


def stable_hash(text: str) -> int:
    """Return a non-zero signed 64-bit hash of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True) or 1


COUNTER_INDEX = {name: index for index, name in enumerate(COUNTERS)}
