"""Collector: log-probabilities of micro-batches -> one state, on the device, without communication or host syncs."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlk_audit import breakdowns, samples
from rlk_audit.config import AuditConfig, as_config, differences
from rlk_audit.kernels.choice import measure_for
from rlk_audit.layout import COUNTER_INDEX, FLAGS, StateLayout, label_column
from rlk_audit.measure import FlatTokens
from rlk_audit.ragged import to_float_and_missing
from rlk_audit.report import StepReport
from rlk_audit.state import State
from rlk_audit.tokens import PerToken, TokenBatch, Values, one_per_row
from rlk_audit.worst import abs_dlogp_of_rows, kth_largest_bound, select_worst

logger = logging.getLogger(__name__)

ERROR_INTERVAL = 100
"""Steps in which a reason why an update failed, or a sample was refused, is logged once."""
ERROR_SENTENCES = 8
"""Different reasons that are logged in them: some name a sample, so that each is another."""

_STEPS = 2**62
"""Steps are told apart modulo this, so that a number of any size has its place in an int64."""


class Collector:
    """Accumulates one rank's micro-batches of a step.

    Args:
        config: the audit's settings.
        device: where the state lives and where inputs are expected; others are copied there.

    ``update`` starts no communication and, for inputs on the device, no host synchronisation. It keeps no input and no
    autograd graph, and never raises for its data: a failed update counts nothing but ``update_failed``.
    """

    def __init__(self, config: AuditConfig | None = None, device: str | torch.device = "cpu") -> None:
        self.config = as_config(config)
        self.device = torch.device(device)
        self.layout = StateLayout(self.config)
        self._measure_tokens = measure_for(self.config.kernel, self.device)
        self.last_error: str | None = None
        """The sentence on the step's last failed update or refused sample."""
        with torch.inference_mode(False), torch.no_grad():
            self._state = State.empty(self.layout, self.device)
            self._empty = State.empty(self.layout, self.device)
        self.agreed_group: object = None
        """The process group whose ranks agreed on the settings; kept by ``all_reduce``."""
        self.hosts: Mapping[int, str] = {}
        """Global rank -> host of the ranks that agreed."""
        self.updates = 0
        """Micro-batches that came since the last ``reset``."""
        self._microbatches: set[int] = set()
        self._expected_active = 0
        self._silent_steps = 0
        self._told: set[str] = set()

    def update(
        self,
        train_log_probs: Values | TokenBatch,
        rollout_log_probs: Values | None = None,
        mask: Values | None = None,
        *,
        microbatch: int | None = None,
        labels: Mapping[str, PerToken] | None = None,
        **fields: Any,
    ) -> None:
        """Add one micro-batch.

        Args:
            train_log_probs: float tensor of any shape, natural logarithms, or a TokenBatch that holds everything.
            rollout_log_probs: same shape; None where the engine gave none at all.
            mask: same shape, bool, int or float; nonzero = active. A DTensor, here and below, stands for its shard on
                this rank, so what is given beside it has the shard's shape or is sharded alike.
            microbatch: number of the micro-batch in the step; a second update of that number is ignored and counted.
            labels: label name -> integer codes of the same shape or broadcastable; the names are those of
                ``config.breakdowns``, -1 is unknown. As with ``sample_index``, ``sample_slot``, ``rollout_id`` and
                ``updates_since_rollout``, [rows] beside [rows, columns] is one value a row.
            fields: the other fields of TokenBatch: ``valid, rollout_missing, sample_index, sample_slot, rollout_id,
                token_position, token_ids, rollout_token_ids, updates_since_rollout``.

        Raises:
            TypeError: an argument is of no usable type or has an unknown name: misuse that is the same on every rank.
        """
        batch = self.as_batch(train_log_probs, rollout_log_probs, mask, labels, **fields)
        if microbatch is not None and (isinstance(microbatch, bool) or not isinstance(microbatch, int)):
            raise TypeError(f"microbatch must be an integer, got {type(microbatch).__name__}")
        self.updates += 1
        with torch.inference_mode(False), torch.no_grad():
            if microbatch in self._microbatches:
                self._count("duplicate_microbatch")
                return
            try:
                self._state.add(self._measure(batch, microbatch), self.config.one_worst_per_sample)
            except Exception as error:  # whatever the data did, this rank must still reach the collective
                self.mark_failed(str(error))
                return
        if microbatch is not None:
            self._microbatches.add(microbatch)
        if batch.refusal is not None:
            self._tell(batch.refusal)

    def mark_failed(self, reason: str) -> None:
        """Count a failed update, also for a fault that the caller met before it could call ``update``."""
        with torch.inference_mode(False), torch.no_grad():
            self._count("update_failed")
        self._tell(f"an update failed and nothing of it was counted: {reason}")

    def expect_active(self, tokens: int) -> None:
        """Say how many active tokens the step has over the whole group; the report warns if it finds another number.

        Raises:
            TypeError, ValueError: ``tokens`` is no integer, or negative.
        """
        if not 0 <= operator.index(tokens) < 2**62:
            raise ValueError(f"the expected number of active tokens must be from 0 to 2^62, got {tokens!r}")
        self._expected_active = 1 + operator.index(tokens)

    def flag(self, name: str) -> None:
        """Set one of FLAGS for the step."""
        with torch.inference_mode(False), torch.no_grad():
            self._state.flags |= FLAGS[name]

    def digest(self) -> Tensor:
        """Return an int64 hash (scalar, on the device) of what was measured; equal states have equal hashes."""
        with torch.inference_mode(False), torch.no_grad():
            return self._state.digest()

    def reset(self) -> None:
        """Forget the step's data, in place."""
        with torch.inference_mode(False), torch.no_grad():
            self._state.copy_from(self._empty)
        self.updates = 0
        self._microbatches.clear()
        self._expected_active = 0
        self._silent_steps = max(self._silent_steps - 1, 0)
        if not self._silent_steps:
            self._told.clear()
        self.last_error = None

    def merge(self, other: Collector) -> None:
        """Add another collector's state to this one; the other stays as it is.

        Raises:
            ValueError: the two differ in a setting that gives a state its meaning; the text names it.
        """
        if other.layout.fingerprint != self.layout.fingerprint:
            told = differences(other.config.state_values(), self.config.state_values())
            raise ValueError(f"cannot merge collectors of different settings: {told}")
        with torch.inference_mode(False), torch.no_grad():
            self._state.add(other._state.to(self.device), self.config.one_worst_per_sample)
        self._microbatches |= other._microbatches

    def merge_vector(self, vector: Tensor) -> None:
        """Add what ``pack()`` of a collector of the same settings gave, as when a step is taken up again.

        Raises:
            ValueError: the vector has another length or dtype, or other settings of ``config.SETTINGS_OF_STATE``.
        """
        if vector.dtype != torch.int64 or vector.shape != (self.layout.length,):
            raise ValueError(
                f"expected an int64 vector of {self.layout.length} entries, got {vector.dtype} {tuple(vector.shape)}"
            )
        if not self.layout.made(vector):
            raise ValueError("the vector was packed with other settings; make both from one AuditConfig")
        with torch.inference_mode(False), torch.no_grad():
            self._state.add(State.of_vector(vector.to(self.device), self.layout), self.config.one_worst_per_sample)

    def pack(
        self, group_rank: int = 0, group_size: int = 1, rank: int | None = None, step: int | None = None
    ) -> Tensor:
        """Return the state as an int64 vector; the SUM of all ranks' vectors is the state of the group.

        Args:
            group_rank, group_size: this rank's place in the group, and so its row of the vector.
            rank: the global rank of the process, for the report; ``group_rank`` if not given.
            step: the step's number; the report warns of ranks that gave different ones.
        """
        if not 0 <= group_rank < group_size:
            raise ValueError(f"expected 0 <= group_rank < group_size, got {group_rank} of {group_size}")
        layout = StateLayout(self.config, group_size)
        with torch.inference_mode(False), torch.no_grad():
            return self._state.pack(
                layout,
                group_rank,
                group_rank if rank is None else rank,
                expected_active=self._expected_active,
                step=0 if step is None else 1 + step % _STEPS,
            )

    def compute(self) -> StepReport:
        """Return the report of this rank alone (``scope == "rank"``)."""
        return StepReport.from_vector(self.pack(), self.config, scope="rank")

    def _count(self, counter: str) -> None:
        self._state.additive[COUNTER_INDEX[counter]] += 1

    def _tell(self, sentence: str) -> None:
        """Keep the sentence, and log it once in ERROR_INTERVAL steps, as one of ERROR_SENTENCES at most."""
        self.last_error = sentence
        if sentence in self._told or len(self._told) == ERROR_SENTENCES:
            return
        self._told.add(sentence)
        self._silent_steps = self._silent_steps or ERROR_INTERVAL
        silent = len(self._told) == ERROR_SENTENCES
        logger.warning("%s%s", sentence, "; other reasons are not logged in these steps any more" if silent else "")

    def as_batch(
        self,
        train_log_probs: Values | TokenBatch,
        rollout_log_probs: Values | None = None,
        mask: Values | None = None,
        labels: Mapping[str, PerToken] | None = None,
        **fields: Any,
    ) -> TokenBatch:
        """Return the arguments of ``update``, without ``microbatch``, as one TokenBatch.

        Raises:
            TypeError: as ``update``.
        """
        if isinstance(train_log_probs, TokenBatch):
            if rollout_log_probs is not None or mask is not None or labels or fields:
                raise TypeError("a TokenBatch holds all fields; give it alone, with microbatch at most")
            batch = train_log_probs
        else:
            if train_log_probs is None or mask is None:
                raise TypeError("train_log_probs and mask are needed; only rollout_log_probs may be None")
            batch = TokenBatch(train_log_probs, rollout_log_probs, mask, labels=labels or {}, **fields)
        batch = batch.own_shards()
        for name in ("train_log_probs", "rollout_log_probs", "mask"):
            values = getattr(batch, name)
            if values is not None and not isinstance(values, (Tensor, np.ndarray, list, tuple)):
                raise TypeError(f"{name} must be a tensor, an array or a list, got {type(values).__name__}")
        undeclared = sorted(set(batch.labels) - set(self.config.caller_labels))
        if undeclared:
            raise TypeError(f"label {', '.join(undeclared)} is not declared in AuditConfig.breakdowns")
        return batch

    # --- one update -------------------------------------------------------------------------------------------------

    def _measure(self, batch: TokenBatch, microbatch: int | None) -> State:
        """Return what one batch adds to the state."""
        if batch.fault is not None:
            raise ValueError(batch.fault)
        state = self._empty.clone()
        shape, tokens = self._flatten(batch)
        abs_dlogp, compared = self._measure_tokens(tokens, self.layout, state)
        self._count_batch(state, batch, shape, tokens)
        if tokens.train.numel():
            self._note_updates_since_rollout(state, batch, shape, compared)
            self._keep_worst(state, batch, shape, tokens, abs_dlogp, microbatch)
        return state

    def _flatten(self, batch: TokenBatch) -> tuple[torch.Size, FlatTokens]:
        train = self._log_probs("train_log_probs", batch.train_log_probs)[0]
        shape = train.shape
        missing = None if batch.rollout_missing is None else self._nonzero(batch, "rollout_missing", shape)
        if batch.rollout_log_probs is None:
            rollout, missing = torch.zeros_like(train), torch.ones_like(train, dtype=torch.bool).reshape(-1)
        else:
            rollout, absent = self._log_probs("rollout_log_probs", batch.rollout_log_probs)
            if rollout.shape != shape:
                raise ValueError(
                    f"rollout_log_probs must have the shape of train_log_probs, {tuple(shape)}, "
                    f"got {tuple(rollout.shape)}"
                )
            if absent is not None:
                missing = absent if missing is None else missing | absent
        active = self._nonzero(batch, "mask", shape)
        mismatch = self._token_mismatch(batch, shape)
        slot = None
        if self.config.samples_per_step is not None:
            slot = self._integers("sample_slot", batch.sample_slot, shape).reshape(-1)
        codes = self._codes(batch, shape)
        return shape, FlatTokens(train.reshape(-1), rollout.reshape(-1), active, missing, mismatch, codes, slot)

    def _codes(self, batch: TokenBatch, shape: torch.Size) -> dict[str, Tensor]:
        """Return each breakdown's codes, flat; ``confidence`` has none before the values are looked at."""
        labels = self.config.caller_labels
        codes = {n: self._integers(f"label {n}", batch.labels.get(n), shape).reshape(-1) for n in labels}
        if "position" in self.config.breakdowns:
            position = self._integers("token_position", batch.token_position, shape).reshape(-1)
            codes["position"] = breakdowns.position_codes(position)
        return codes

    def _log_probs(self, name: str, values: Values) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities on the device and, flat, where the caller gave None; train has no such place."""
        if values is None:
            raise ValueError(f"{name} is missing")
        try:
            tensor, absent = to_float_and_missing(values)
        except ValueError as error:
            hint = "samples of unequal lengths go through TokenBatch.from_lists"
            raise ValueError(f"{name}: {error}; {hint}") from error
        if tensor.numel() and not tensor.is_floating_point():
            raise ValueError(f"{name} must have a floating-point dtype, got {tensor.dtype}")
        if absent is not None and name == "train_log_probs":
            raise ValueError("train_log_probs must hold numbers, got None among them")
        tensor = tensor.detach().resolve_neg()  # kernels read the memory itself
        return tensor.to(self.device), None if absent is None else absent.to(self.device).reshape(-1)

    def _nonzero(self, batch: TokenBatch, name: str, shape: torch.Size) -> Tensor:
        """Return where a field is not 0, flat and on the device."""
        if getattr(batch, name) is None:
            raise ValueError(f"{name} is missing")
        values = torch.as_tensor(getattr(batch, name), device=self.device)
        if values.shape != shape:
            raise ValueError(
                f"{name} must have the shape of train_log_probs, {tuple(shape)}, got {tuple(values.shape)}"
            )
        values = values.detach().reshape(-1)
        return values if values.dtype == torch.bool else values != 0

    def _integers(self, name: str, values: PerToken, shape: torch.Size) -> Tensor:
        """Return integer ids on the device, expanded to ``shape`` without a copy; None gives -1."""
        if values is None or isinstance(values, int):  # filled on the device: copying a host value would wait for it
            return torch.full((), -1 if values is None else values, dtype=torch.int64, device=self.device).expand(shape)
        try:
            ids = torch.as_tensor(values, device=self.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name} must be integers in one array, got {values!r:.80} ({error})") from error
        ids = one_per_row(name, ids, shape)
        if ids.numel() and (ids.is_floating_point() or ids.is_complex()):  # an empty list makes a float tensor
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
        try:
            return ids.long().expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"{name} must be broadcastable to train_log_probs {tuple(shape)}, got {tuple(ids.shape)}"
            ) from error

    def _token_mismatch(self, batch: TokenBatch, shape: torch.Size) -> Tensor | None:
        if batch.token_ids is None or batch.rollout_token_ids is None:
            return None
        train_ids = self._integers("token_ids", batch.token_ids, shape)
        return (train_ids != self._integers("rollout_token_ids", batch.rollout_token_ids, shape)).reshape(-1)

    def _count_batch(self, state: State, batch: TokenBatch, shape: torch.Size, tokens: FlatTokens) -> None:
        """Count what concerns the batch as a whole."""
        filled = tokens.train.numel() > 0
        refused = batch.refused_active
        counts: dict[str, int | Tensor] = {
            "length_mismatch": batch.refused_samples,
            "rejected": refused if isinstance(refused, int) else refused.to(self.device),
            "total": batch.refused_total,
        }
        if batch.valid is None:
            counts["total_unknown"] = int(filled)
        else:
            counts["total"] += (self._nonzero(batch, "valid", shape) | tokens.active).sum()
        for name, count in counts.items():
            if isinstance(count, Tensor) or count:  # each addition is an operation on the device
                state.additive[COUNTER_INDEX[name]] += count
        if batch.whole_slots is not None and self.config.samples_per_step is not None:
            slots = torch.as_tensor(batch.whole_slots, device=self.device).long()
            samples.add_seen(state.additive[self.layout.fields["samples"].slice], slots)
        absent = {
            "missing_metadata": any(batch.labels.get(name) is None for name in self.config.caller_labels),
            "missing_rollout_log_probs": batch.rollout_log_probs is None,
        }
        for name in filter(absent.get, absent):
            state.flags += FLAGS[name] * tokens.active.any()

    def _note_updates_since_rollout(self, state: State, batch: TokenBatch, shape: torch.Size, compared: Tensor) -> None:
        if batch.updates_since_rollout is None:
            return
        updates = self._integers("updates_since_rollout", batch.updates_since_rollout, shape).reshape(-1)
        known = compared & (updates >= 0)
        fewest, most = state.updates_since_rollout
        state.updates_since_rollout[0] = torch.where(known, updates, fewest).amin()
        state.updates_since_rollout[1] = torch.where(known, updates, most).amax()

    def _keep_worst(
        self,
        state: State,
        batch: TokenBatch,
        shape: torch.Size,
        tokens: FlatTokens,
        abs_dlogp: Tensor,
        microbatch: int | None,
    ) -> None:
        """Put the batch's worst tokens into its state."""
        places = self._candidates(abs_dlogp)
        if not places.numel():
            return
        at = _unravel(places, shape)

        def picked(name: str, ids: PerToken) -> Tensor:
            """Read ids at ``places``; expanded ids are never made full."""
            if ids is None or isinstance(ids, int):
                return torch.full_like(places, -1 if ids is None else ids)
            return self._integers(name, ids, shape)[at].expand(places.shape)

        sample, position = picked("sample_index", batch.sample_index), picked("token_position", batch.token_position)
        chosen, exists = select_worst(
            abs_dlogp[places], sample, position, self.config.worst_k, self.config.one_worst_per_sample
        )
        places, at = places[chosen], tuple(index[chosen] for index in at)
        columns = {
            "valid": exists.long(),
            "train_logp": tokens.train[places].double().view(torch.int64),
            "rollout_logp": tokens.rollout[places].double().view(torch.int64),
            "sample_index": sample[chosen],
            "rollout_id": picked("rollout_id", batch.rollout_id),
            "token_position": position[chosen],
            "token_id": picked("token_ids", batch.token_ids),
            "microbatch": torch.full_like(chosen, -1 if microbatch is None else microbatch),
            "rank": torch.full_like(chosen, -1),  # known when the state is packed
        }
        for name in self.config.caller_labels:
            code = picked(f"label {name}", batch.labels.get(name))
            columns[label_column(name)] = torch.where(
                (code >= 0) & (code < len(self.config.breakdowns[name])), code, -1
            )
        rows = torch.stack([columns[name] for name in self.layout.worst_fields], dim=1)
        state.worst.copy_(torch.where(exists[:, None], rows, 0))

    def _candidates(self, abs_dlogp: Tensor) -> Tensor:
        """Return the places of tokens that may be among the step's worst.

        On a CPU, where reading a value costs nothing, they are few; elsewhere it would be a host sync, so all of them.
        """
        if self.device.type != "cpu":
            return torch.arange(len(abs_dlogp), device=self.device)
        values = abs_dlogp.numpy()
        floor = max(float(abs_dlogp_of_rows(self._state.worst[-1:])), 0.0)
        if not self.config.one_worst_per_sample:
            floor = max(floor, kth_largest_bound(values, self.config.worst_k))
        return torch.from_numpy(np.flatnonzero(values >= floor))


def _unravel(places: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the index along each dimension of flat places; ``torch.unravel_index`` reads its shape from the host."""
    at = []
    for size in reversed(shape):
        at.append(places % size)
        places = torch.div(places, size, rounding_mode="floor")
    return tuple(reversed(at))
