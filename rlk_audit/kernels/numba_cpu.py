"""The per-token work on a CPU, compiled by numba: two passes over chunks that stay in cache.

The exponentials between the passes are torch's own, as in the reference: another ``exp`` may differ in its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit import breakdowns, samples, sketch
from rlk_audit.config import AUTO, TOKEN_CLASSES, AuditConfig
from rlk_audit.exact_sum import FRACTION_BITS, SIGNED_SLOTS, UNSIGNED_SLOTS
from rlk_audit.layout import COUNTER_INDEX, SUM_OFFSETS, StateLayout, breakdown_field, stable_hash
from rlk_audit.measure import K3_SERIES, K3_SERIES_BELOW, LN2, SQUARE_OVERFLOW, ZERO_FILL_TRAIN_LOGP, FlatTokens
from rlk_audit.state import State
from rlk_audit.worst import NO_TOKEN

CHUNK = 1 << 13
"""Tokens of a chunk; its 6 float64 and 8 float32 a token are in the second-level cache or just behind it."""

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., Any])


# Rows of the float64 buffer.
_DLOGP, _TRAIN, _ROLLOUT, _RATIO, _TRAIN_PROB, _ROLLOUT_PROB = range(6)
_LOGARITHMS, _EXPONENTIALS = slice(_DLOGP, _RATIO), slice(_RATIO, None)
# Rows of the float32 buffer.
_F_DLOGP, _F_RATIO, _F_K3, _F_MULT, _F_TRAIN, _F_TRAIN_PROB, _F_ROLLOUT_PROB, _F_PROB_DIFF = range(8)
_PAD = 16
"""Rows are longer than a chunk by so much: rows a power of two apart would be in each other's place in the cache."""

_INACTIVE, _COMPARED = COUNTER_INDEX["inactive"], COUNTER_INDEX["compared"]
(
    _REJECTED,
    _ROLLOUT_MISSING,
    _ROLLOUT_SENTINEL,
    _TRAIN_SENTINEL,
    _ROLLOUT_NAN,
    _ROLLOUT_NEGINF,
    _TRAIN_NAN,
    _TRAIN_NEGINF,
    _POSITIVE,
) = (COUNTER_INDEX[name] for name in TOKEN_CLASSES[:-1])
_TOKEN_MISMATCH = COUNTER_INDEX["token_mismatch"]
_ZERO_FILL_SUSPECT = COUNTER_INDEX["zero_fill_suspect"]
_IDENTICAL = COUNTER_INDEX["identical"]
_CLIPPED_LOW, _CLIPPED_HIGH = COUNTER_INDEX["clipped_low"], COUNTER_INDEX["clipped_high"]
_TAIL_LN2 = COUNTER_INDEX["tail_ln2"]
_OVERFLOW_RATIO, _OVERFLOW_SQUARE = COUNTER_INDEX["overflow_ratio"], COUNTER_INDEX["overflow_square"]
_OVERFLOW_K3, _OVERFLOW_MULT = COUNTER_INDEX["overflow_k3"], COUNTER_INDEX["overflow_mult"]

_OFFSETS = {name: np.uint64(offset) for name, offset in SUM_OFFSETS.items()}
_DLOGP_SUM, _DLOGP_SQUARED = _OFFSETS["dlogp"], _OFFSETS["dlogp_squared"]
_RATIO_SUM, _RATIO_SQUARED = _OFFSETS["ratio"], _OFFSETS["ratio_squared"]
_K3_SUM, _MULT_SUM, _TRAIN_SUM = _OFFSETS["k3"], _OFFSETS["mult"], _OFFSETS["train_logp"]
_TRAIN_PROB_SUM, _TRAIN_PROB_SQUARED = _OFFSETS["train_prob"], _OFFSETS["train_prob_squared"]
_ROLLOUT_PROB_SUM, _ROLLOUT_PROB_SQUARED = _OFFSETS["rollout_prob"], _OFFSETS["rollout_prob_squared"]
_PROB_PRODUCT, _PROB_DIFF_SUM = _OFFSETS["prob_product"], _OFFSETS["prob_diff"]

_NONE, _ONE = np.uint64(0), np.uint64(1)
_MANTISSA_BITS, _MANTISSA_MASK = np.uint64(23), np.uint64(0x7FFFFF)
_EXPONENT_MASK, _SIGNED_EXPONENT_MASK = np.uint64(0xFF), np.uint64(0x1FF)
_MAGNITUDE_MASK, _INFINITY = np.uint64(0x7FFFFFFF), np.uint64(0x7F800000)
_HALF_BITS, _HALF_MASK = np.uint64(24), np.uint64(0xFFFFFF)
_UNSIGNED_SLOTS, _SIGNED_SLOTS = np.uint64(UNSIGNED_SLOTS), np.uint64(SIGNED_SLOTS)
_SQUARE_OVERFLOW = np.uint64(np.float32(SQUARE_OVERFLOW).view(np.uint32))
"""Bits of positive floats are ordered as the floats are."""

_K3_0, _K3_1, _K3_2, _K3_3, _K3_4 = K3_SERIES

_FIXED = 2.0**FRACTION_BITS
_COARSE = breakdowns.GROUPING_POWER
_PART_MASK = (1 << breakdowns.PART_BITS) - 1
_PART_BITS, _ROW, _TAIL, _HIGH, _LOW = (
    breakdowns.PART_BITS,
    breakdowns.ROW_LENGTH,
    breakdowns.TAIL,
    breakdowns.HIGH,
    breakdowns.LOW,
)
_EDGES = np.array(breakdowns.CONFIDENCE_LOGS)
_SAMPLE_ROW = samples.ROW_LENGTH
_MIN_EXPONENT, _MAX_EXPONENT = sketch.MIN_EXPONENT, sketch.MAX_EXPONENT
_BIAS, _KEY_BITS = sketch.BIAS, sketch.MANTISSA_BITS

_CONSTANTS = {name: value for name, value in globals().items() if isinstance(value, (float, int, np.generic))}
_STAMP = f"_{abs(stable_hash(repr(_CONSTANTS))):x}"
"""Constants are compiled into the functions, and numba's cache knows the text of this file alone."""


def _compiled(function: Function, **more: Any) -> Function:
    """Compile at the first call. Arithmetic stays IEEE 754's: no reordering, no fused multiply-add, 1/0 is infinite."""
    function.__qualname__ += _STAMP  # names the file in the cache
    options: dict[str, Any] = {"error_model": "numpy", "nogil": True} | more
    try:
        compiled: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that the cache could be written to
        compiled = numba.njit(**options)(function)
    return compiled


def measure(tokens: FlatTokens, layout: StateLayout, state: State) -> tuple[Tensor, Tensor]:
    """Add tokens to ``state``; see ``measure.measure``, whose every bit it gives."""
    count = tokens.train.numel()
    fields, buffers = _Fields.of(layout, state), _Buffers.of(min(CHUNK, count))
    magnitude, compared = (torch.empty(count, dtype=kind, device="cpu") for kind in (torch.float64, torch.bool))
    arrays = _Arrays.of(tokens, magnitude, compared)
    for start in range(0, count, CHUNK):
        _measure_chunk(arrays, start, min(start + CHUNK, count), layout.config, fields, buffers)
    return magnitude, compared


def compile_all() -> None:
    """Compile every function, or read it from the cache, so that no step waits for it; raises what numba raises."""
    layout = StateLayout(
        AuditConfig.from_dict({"breakdowns": {"engine": 1, "confidence": AUTO}, "samples_per_step": 1})
    )
    place, yes = torch.tensor([0], device="cpu"), torch.tensor([True], device="cpu")
    for dtype in (torch.float32, torch.float64):
        zero = torch.zeros(1, dtype=dtype, device="cpu")
        tokens = FlatTokens(zero, zero, yes, yes, yes, {"engine": place}, place)
        measure(tokens, layout, State.empty(layout, zero.device))


class _Arrays(NamedTuple):
    """Tokens and what is found of each, as contiguous arrays; log-probabilities float32, or float64 if one side is."""

    train: npt.NDArray[np.floating[Any]]
    rollout: npt.NDArray[np.floating[Any]]
    active: Bools
    missing: Bools
    """Of length 0 where there are none, as the next."""
    mismatch: Bools
    codes: Mapping[str, Ints]
    slot: Ints | None
    magnitude: Doubles
    compared: Bools

    @classmethod
    def of(cls, tokens: FlatTokens, magnitude: Tensor, compared: Tensor) -> _Arrays:
        both_float32 = tokens.train.dtype == tokens.rollout.dtype == torch.float32
        read = torch.float32 if both_float32 else torch.float64
        nowhere = np.zeros(0, dtype=np.bool_)
        return cls(
            _full(tokens.train.to(read)),
            _full(tokens.rollout.to(read)),
            _full(tokens.active),
            nowhere if tokens.missing is None else _full(tokens.missing),
            nowhere if tokens.mismatch is None else _full(tokens.mismatch),
            {name: _full(codes) for name, codes in tokens.codes.items()},
            None if tokens.slot is None else _full(tokens.slot),
            magnitude.numpy(),
            compared.numpy(),
        )


class _Fields(NamedTuple):
    """The parts of a state as arrays."""

    counters: Ints
    sums: Ints
    sketch: Ints
    extremes: Doubles
    breakdowns: Mapping[str, Ints]
    samples: Ints

    @classmethod
    def of(cls, layout: StateLayout, state: State) -> _Fields:
        additive = state.additive.numpy()
        return cls(
            additive[layout.fields["counters"].slice],
            additive[layout.sums],
            additive[layout.fields["sketch"].slice],
            state.extremes.numpy(),
            {name: additive[layout.fields[breakdown_field(name)].slice] for name in layout.config.breakdowns},
            additive[layout.fields["samples"].slice],
        )


class _Buffers(NamedTuple):
    """What is known of the compared tokens of a chunk, one after another."""

    rows: Tensor
    array: Doubles
    floats: npt.NDArray[np.float32]
    bits: npt.NDArray[np.uint32]
    place: Ints

    @classmethod
    def of(cls, length: int) -> _Buffers:
        rows = torch.empty(6, length + _PAD, dtype=torch.float64, device="cpu")
        floats = np.empty((8, length + _PAD), dtype=np.float32)
        return cls(rows, rows.numpy(), floats, floats.view(np.uint32), np.empty(length + 1, dtype=np.int64))


def _measure_chunk(
    arrays: _Arrays, start: int, stop: int, config: AuditConfig, fields: _Fields, buffers: _Buffers
) -> None:
    rows, place, bits = buffers.array, buffers.place, buffers.bits
    count = _classify(
        arrays.train,
        arrays.rollout,
        arrays.active,
        arrays.missing,
        arrays.mismatch,
        start,
        stop,
        config.sentinel_floor,
        config.positive_tolerance,
        fields.counters,
        rows,
        place,
        arrays.magnitude,
        arrays.compared,
    )
    torch.exp(buffers.rows[_LOGARITHMS, :count], out=buffers.rows[_EXPONENTIALS, :count])
    _count_thresholds(rows, count, math.log1p(-config.eps_low), math.log1p(config.eps_high), fields.counters)
    _round(rows, count, buffers.floats)
    _widen(rows, buffers.floats, count, fields.extremes)
    _accumulate(bits, count, fields.counters, fields.sums, fields.sketch, config.grouping_power)
    for name in config.breakdowns:
        if name == "confidence":
            of_tokens = _confidence_codes(rows[_ROLLOUT, :count], _EDGES)
        else:
            of_tokens = arrays.codes[name][place[:count]]
        _add_to_breakdown(fields.breakdowns[name], of_tokens, bits[_F_DLOGP], rows[_DLOGP])
    if arrays.slot is not None:
        _add_to_samples(fields.samples, arrays.slot, arrays.active, start, stop, place[:count], rows[_DLOGP])


def _full(values: Tensor) -> npt.NDArray[Any]:
    """Return values as a contiguous array: one value may be expanded to all tokens."""
    array: npt.NDArray[Any] = values.contiguous().numpy()
    return array


@_compiled
def _classify(
    train: npt.NDArray[np.floating[Any]],
    rollout: npt.NDArray[np.floating[Any]],
    active: Bools,
    missing: Bools,
    mismatch: Bools,
    start: int,
    stop: int,
    floor: float,
    tolerance: float,
    counters: Ints,
    rows: Doubles,
    place: Ints,
    magnitude: Doubles,
    compared: Bools,
) -> int:
    """Count the classes of a chunk and gather the compared tokens' T, R, d and places; return how many they are.

    The magnitude is NO_TOKEN where a token is not compared.
    """
    count = inactive = mismatched = 0
    for i in range(start, stop):
        of_train, of_rollout = np.float64(train[i]), np.float64(rollout[i])
        # Without a branch for what is common but random; the comparisons are false for NaN.
        ok = (floor < of_rollout) & (of_rollout <= tolerance) & (floor < of_train) & (of_train <= tolerance) & active[i]
        if len(mismatch) > 0:
            mismatched += active[i] & mismatch[i]
            ok &= not mismatch[i]
        if len(missing) > 0:
            ok &= not missing[i]
        dlogp = of_train - of_rollout + 0.0  # a zero is +0.0 whatever the signs were
        rows[_TRAIN, count] = of_train
        rows[_ROLLOUT, count] = of_rollout
        rows[_DLOGP, count] = dlogp
        place[count] = i
        count += ok
        magnitude[i] = abs(dlogp) if ok else NO_TOKEN
        compared[i] = ok
        if active[i] & (not ok):
            rejected, absent = len(mismatch) > 0 and mismatch[i], len(missing) > 0 and missing[i]
            counters[_class_of(of_train, of_rollout, rejected, absent, floor)] += 1
        inactive += not active[i]
    counters[_COMPARED] += count
    counters[_INACTIVE] += inactive
    counters[_TOKEN_MISMATCH] += mismatched
    return count


@_compiled
def _class_of(train: float, rollout: float, rejected: bool, missing: bool, floor: float) -> int:
    """Return the counter of an active token that is not compared: of its first class that holds."""
    if rejected:
        return _REJECTED
    if missing:
        return _ROLLOUT_MISSING
    if -math.inf < rollout <= floor:
        return _ROLLOUT_SENTINEL
    if -math.inf < train <= floor:
        return _TRAIN_SENTINEL
    if math.isnan(rollout):
        return _ROLLOUT_NAN
    if rollout == -math.inf:
        return _ROLLOUT_NEGINF
    if math.isnan(train):
        return _TRAIN_NAN
    if train == -math.inf:
        return _TRAIN_NEGINF
    return _POSITIVE


@_compiled
def _count_thresholds(rows: Doubles, count: int, clip_low: float, clip_high: float, counters: Ints) -> None:
    identical = clipped_low = clipped_high = tail = zero_fill = 0
    for i in range(count):
        dlogp = rows[_DLOGP, i]
        identical += dlogp == 0.0
        clipped_low += dlogp < clip_low
        clipped_high += dlogp > clip_high
        tail += abs(dlogp) > LN2
        zero_fill += (rows[_ROLLOUT, i] == 0.0) & (rows[_TRAIN, i] < ZERO_FILL_TRAIN_LOGP)
    counters[_IDENTICAL] += identical
    counters[_CLIPPED_LOW] += clipped_low
    counters[_CLIPPED_HIGH] += clipped_high
    counters[_TAIL_LN2] += tail
    counters[_ZERO_FILL_SUSPECT] += zero_fill


@_compiled
def _round(rows: Doubles, count: int, floats: npt.NDArray[np.float32]) -> None:
    """Round the base quantities of tokens, see ``measure.Rounded``."""
    for i in range(count):
        dlogp, ratio = rows[_DLOGP, i], rows[_RATIO, i]
        floats[_F_DLOGP, i] = dlogp
        floats[_F_RATIO, i] = ratio
        series = (((_K3_4 * dlogp + _K3_3) * dlogp + _K3_2) * dlogp + _K3_1) * dlogp + _K3_0
        near = abs(dlogp) < K3_SERIES_BELOW
        floats[_F_K3, i] = series * (dlogp * dlogp) if near else ratio - 1.0 - dlogp
        floats[_F_MULT, i] = max(ratio, 1.0 / ratio)
        floats[_F_TRAIN, i] = rows[_TRAIN, i]
        floats[_F_TRAIN_PROB, i] = rows[_TRAIN_PROB, i]
        floats[_F_ROLLOUT_PROB, i] = rows[_ROLLOUT_PROB, i]
        floats[_F_PROB_DIFF, i] = abs(floats[_F_TRAIN_PROB, i] - floats[_F_ROLLOUT_PROB, i])


# Minima and maxima of numbers that are neither NaN nor -0.0 may be taken in any order, many at once.
@partial(_compiled, fastmath={"nnan", "nsz"})
def _widen(rows: Doubles, floats: npt.NDArray[np.float32], count: int, extremes: Doubles) -> None:
    lowest, least = extremes[0], extremes[1]
    highest, largest = extremes[2], extremes[3]
    largest_diff = np.float32(extremes[4])
    for i in range(count):
        dlogp = rows[_DLOGP, i]
        lowest, least = min(lowest, dlogp), min(least, abs(dlogp))
        highest, largest = max(highest, dlogp), max(largest, abs(dlogp))
    for i in range(count):
        largest_diff = max(largest_diff, floats[_F_PROB_DIFF, i])
    extremes[0], extremes[1] = lowest, least
    extremes[2], extremes[3], extremes[4] = highest, largest, np.float64(largest_diff)


# In unsigned integers, so that an index needs no look at its sign: a float32's bits, its mantissa, a slot.


@_compiled
def _exponent(bits: np.uint64) -> np.uint64:
    return (bits >> _MANTISSA_BITS) & _EXPONENT_MASK


@_compiled
def _mantissa(bits: np.uint64) -> np.uint64:
    return (bits & _MANTISSA_MASK) | (np.uint64((bits & _INFINITY) != _NONE) << _MANTISSA_BITS)


@_compiled
def _add_term(slots: Ints, at: np.uint64, bits: np.uint64) -> None:
    slots[at + ((bits >> _MANTISSA_BITS) & _SIGNED_EXPONENT_MASK)] += np.int64(_mantissa(bits))


@_compiled
def _add_square(slots: Ints, at: np.uint64, bits: np.uint64) -> None:
    square = _mantissa(bits) * _mantissa(bits)
    slots[at + _exponent(bits)] += np.int64(square >> _HALF_BITS)
    slots[at + _UNSIGNED_SLOTS + _exponent(bits)] += np.int64(square & _HALF_MASK)


@_compiled
def _add_product(slots: Ints, at: np.uint64, left: np.uint64, right: np.uint64) -> None:
    product = _mantissa(left) * _mantissa(right)
    exponent = max(_exponent(left), _ONE) + max(_exponent(right), _ONE)
    slots[at + exponent] += np.int64(product >> _HALF_BITS)
    slots[at + _SIGNED_SLOTS + exponent] += np.int64(product & _HALF_MASK)


@_compiled
def _distance(bits: np.uint64, grouping_power: int) -> int:
    """Return how many bins a float32 lies from zero, see ``sketch.bin_index``."""
    magnitude = np.int64(bits & _MAGNITUDE_MASK)
    lowest_key = (_MIN_EXPONENT + _BIAS) << grouping_power
    bins = (_MAX_EXPONENT - _MIN_EXPONENT) << grouping_power
    above = (magnitude >> (_KEY_BITS - grouping_power)) - (lowest_key - 2)
    return int(min(max(above, 1), bins + 2) * (magnitude != 0))


@_compiled
def _accumulate(
    floats: npt.NDArray[np.uint32], count: int, counters: Ints, sums: Ints, sketched: Ints, grouping_power: int
) -> None:
    """Add the bits of rounded quantities to the exact sums, the sketch and the counts of overflows."""
    middle = len(sketched) // 2
    overflow_ratio = overflow_square = overflow_k3 = overflow_mult = 0
    for i in range(count):
        dlogp = np.uint64(floats[_F_DLOGP, i])
        distance = _distance(dlogp, grouping_power)
        sketched[np.uint64(middle - distance if dlogp > _MAGNITUDE_MASK else middle + distance)] += 1
        _add_term(sums, _DLOGP_SUM, dlogp)
        _add_square(sums, _DLOGP_SQUARED, dlogp)
        ratio = np.uint64(floats[_F_RATIO, i])
        if ratio == _INFINITY:
            overflow_ratio += 1
        else:
            overflow_square += int(ratio >= _SQUARE_OVERFLOW)
            _add_term(sums, _RATIO_SUM, ratio)
            _add_square(sums, _RATIO_SQUARED, ratio)
        k3 = np.uint64(floats[_F_K3, i])
        if k3 == _INFINITY:
            overflow_k3 += 1
        else:
            _add_term(sums, _K3_SUM, k3)
        mult = np.uint64(floats[_F_MULT, i])
        if mult == _INFINITY:
            overflow_mult += 1
        else:
            _add_term(sums, _MULT_SUM, mult)
        _add_term(sums, _TRAIN_SUM, np.uint64(floats[_F_TRAIN, i]))
        train, rollout = np.uint64(floats[_F_TRAIN_PROB, i]), np.uint64(floats[_F_ROLLOUT_PROB, i])
        _add_term(sums, _TRAIN_PROB_SUM, train)
        _add_square(sums, _TRAIN_PROB_SQUARED, train)
        _add_term(sums, _ROLLOUT_PROB_SUM, rollout)
        _add_square(sums, _ROLLOUT_PROB_SQUARED, rollout)
        _add_product(sums, _PROB_PRODUCT, train, rollout)
        _add_term(sums, _PROB_DIFF_SUM, np.uint64(floats[_F_PROB_DIFF, i]))
    counters[_OVERFLOW_RATIO] += overflow_ratio
    counters[_OVERFLOW_SQUARE] += overflow_ratio + overflow_square
    counters[_OVERFLOW_K3] += overflow_k3
    counters[_OVERFLOW_MULT] += overflow_mult


@_compiled
def _confidence_codes(rollout: Doubles, edges: Doubles) -> Ints:
    """Return the codes of ``breakdowns.confidence_codes``."""
    codes = np.zeros(len(rollout), dtype=np.int64)
    for edge in edges:
        for i in range(len(rollout)):
            codes[i] += rollout[i] >= edge
    return codes


@_compiled
def _add_to_breakdown(table: Ints, codes: Ints, bits: npt.NDArray[np.uint32], dlogp: Doubles) -> None:
    """Add compared tokens, as many as there are codes, to the rows of one label, see ``breakdowns.add_tokens``."""
    buckets = len(table) // _ROW
    for i in range(len(codes)):
        row = (codes[i] + 1 if 0 <= codes[i] < buckets - 1 else 0) * _ROW
        magnitude = abs(dlogp[i])
        fixed = np.int64(np.rint(magnitude * _FIXED))
        table[row + _distance(np.uint64(bits[i]), _COARSE)] += 1
        table[row + _TAIL] += magnitude > LN2
        table[row + _HIGH] += fixed >> _PART_BITS
        table[row + _LOW] += fixed & _PART_MASK


@_compiled
def _add_to_samples(table: Ints, slot: Ints, active: Bools, start: int, stop: int, place: Ints, dlogp: Doubles) -> None:
    """Add a chunk's tokens, those at ``place`` compared, to the table of samples, see ``samples.add_tokens``."""
    slots = len(table) // _SAMPLE_ROW - 1
    for i in range(start, stop):
        row = (slot[i] if 0 <= slot[i] < slots else slots) * _SAMPLE_ROW
        table[row] += slot[i] >= 0
        table[row + 1] += active[i]
    for i in range(len(place)):
        of_token = slot[place[i]]
        row = (of_token if 0 <= of_token < slots else slots) * _SAMPLE_ROW
        fixed = np.int64(np.rint(dlogp[i] * _FIXED))
        table[row + 2] += 1
        table[row + 3] += fixed
        table[row + 4] += abs(fixed)
