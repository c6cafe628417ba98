"""What a rank keeps of a step, and its row of the state vector.

Everything is an integer that adds up or an extreme, so the state depends on the set of tokens alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_audit import exact_sum
from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.layout import COUNTER_INDEX, EXTREMES, FLAGS, MAXIMA, MINIMA, ROW_HEADER, WORST_TOKEN, StateLayout
from rlk_audit.worst import worst_rows

_INT64 = torch.iinfo(torch.int64)


@dataclass
class State:
    """All that is kept of a step on one rank.

    Attributes:
        additive: int64 [layout.additive_length], the fields that add up.
        extremes: float64 [len(EXTREMES)], minima at +inf and maxima at -inf while nothing was compared.
        worst: int64 [config.worst_k, len(layout.worst_fields)], worst first; rows with ``valid`` 0 are empty.
        flags: int64 scalar, FLAGS.
        updates_since_rollout: int64 [2], fewest and most optimizer updates; int64's max and min while unknown.
    """

    additive: Tensor
    extremes: Tensor
    worst: Tensor
    flags: Tensor
    updates_since_rollout: Tensor

    @classmethod
    def empty(cls, layout: StateLayout, device: torch.device) -> State:
        """Return the state of no token."""
        return cls(
            torch.zeros(layout.additive_length, dtype=torch.int64, device=device),
            torch.tensor([math.inf] * len(MINIMA) + [-math.inf] * len(MAXIMA), dtype=torch.float64, device=device),
            torch.zeros(layout.config.worst_k, len(layout.worst_fields), dtype=torch.int64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.tensor([_INT64.max, _INT64.min], device=device),
        )

    @classmethod
    def of_vector(cls, vector: Tensor, layout: StateLayout) -> State:
        """Return the state of a whole group from its summed vector; reads nothing on the host."""
        rows = vector[layout.additive_length :].reshape(layout.group_size, layout.row_length)
        column = {name: rows[:, index] for index, name in enumerate(ROW_HEADER)}
        empty = column["compared"] == 0
        floats = {name: column[name].contiguous().view(torch.float64) for name in EXTREMES}
        lowest = [floats[name].masked_fill(empty, math.inf).amin() for name in MINIMA]
        highest = [floats[name].masked_fill(empty, -math.inf).amax() for name in MAXIMA]
        flags = torch.zeros_like(column["flags"][0])
        for bit in FLAGS.values():
            flags += bit * ((column["flags"] & bit) != 0).any()
        # A total has no count of its own to be expected, so what a step found is kept.
        active = vector[layout.fields["counters"].slice][COUNTER_INDEX[TOKEN_CLASSES[0]] :][: len(TOKEN_CLASSES)].sum()
        expected = column["expected_active"]
        odd = ((expected > 0) & (expected != active + 1)).any() & (flags & FLAGS["unexpected_token_count"] == 0)
        flags += FLAGS["unexpected_token_count"] * odd
        apart = (column["step"] != column["step"][0]).any() & (flags & FLAGS["step_mismatch"] == 0)
        flags += FLAGS["step_mismatch"] * apart
        worst = rows[:, len(ROW_HEADER) :].reshape(-1, len(layout.worst_fields))
        return cls(
            vector[: layout.additive_length].clone(),
            torch.stack(lowest + highest),
            worst_rows(worst, layout.config.worst_k, layout.config.one_worst_per_sample),
            flags,
            torch.stack([column["updates_since_rollout_min"].amin(), column["updates_since_rollout_max"].amax()]),
        )

    def clone(self) -> State:
        """Return a copy; unlike ``empty``, it reads nothing from the host."""
        return State(*(tensor.clone() for tensor in self.tensors()))

    def copy_from(self, other: State) -> None:
        """Take another state's values, in place."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def add(self, other: State, worst_per_sample: bool) -> None:
        """Take in another state, in place; the other stays as it is."""
        # What may fail comes first, so that a failure leaves nothing half added.
        worst = worst_rows(torch.cat([self.worst, other.worst]), len(self.worst), worst_per_sample)
        count = len(MINIMA)
        self.worst.copy_(worst)
        self.additive += other.additive
        self.extremes[:count].clamp_(max=other.extremes[:count])
        self.extremes[count:].clamp_(min=other.extremes[count:])
        self.flags |= other.flags
        self.updates_since_rollout[0].clamp_(max=other.updates_since_rollout[0])
        self.updates_since_rollout[1].clamp_(min=other.updates_since_rollout[1])

    def to(self, device: torch.device) -> State:
        """Return the state on a device."""
        return State(*(tensor.to(device) for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the attributes."""
        return self.additive, self.extremes, self.worst, self.flags, self.updates_since_rollout

    def digest(self) -> Tensor:
        """Return an int64 hash of the additive fields: their sum under odd weights, modulo 2^64."""
        place = torch.arange(len(self.additive), device=self.additive.device)
        # Multiplying by an odd constant and folding the high bits down makes the weight of each place its own.
        weight = (place * -7046029254386353131) ^ (place << 31)
        return (self.additive * (weight | 1)).sum()

    def pack(
        self, layout: StateLayout, group_rank: int, rank: int, *, expected_active: int = 0, step: int = 0
    ) -> Tensor:
        """Return the vector [layout.length] of this rank: the additive fields and its own row, zeros elsewhere."""
        vector = torch.zeros(layout.length, dtype=torch.int64, device=self.additive.device)
        vector[: layout.additive_length] = self.additive
        vector[layout.row_slice(group_rank)] = self._row(layout, rank, expected_active, step)
        return vector

    def _row(self, layout: StateLayout, rank: int, expected_active: int, step: int) -> Tensor:
        counters = self.additive[layout.fields["counters"].slice]
        dlogp_slots = self.additive[layout.fields["sum_dlogp"].slice]
        header: dict[str, int | Tensor] = {
            "fingerprint": layout.fingerprint,
            "flags": self.flags,
            "rank": rank,
            "compared": counters[COUNTER_INDEX["compared"]],
            "update_failed": counters[COUNTER_INDEX["update_failed"]],
            "abs_dlogp_sum": exact_sum.magnitude_sum_float64(dlogp_slots).view(torch.int64),
            "updates_since_rollout_min": self.updates_since_rollout[0],
            "updates_since_rollout_max": self.updates_since_rollout[1],
            "expected_active": expected_active,
            "step": step,
        }
        header |= dict(zip(EXTREMES, self.extremes.view(torch.int64), strict=True))
        # Filled on the device and stacked at once: an assignment to each place would be an operation of its own.
        told = {n: v if isinstance(v, Tensor) else self.flags.new_full((), v) for n, v in header.items()}
        worst = self.worst[: layout.worst_k].clone()
        held_by = worst[:, WORST_TOKEN.index("rank")]
        held_by.masked_fill_(held_by < 0, rank)  # in a whole group's state it is known already
        return torch.cat([torch.stack([told[name] for name in ROW_HEADER]), worst.reshape(-1)])
