"""The per-token work on a CPU, compiled by numba: two passes over chunks that stay in cache.

The exponentials between the passes are torch's own, as in the reference: another ``exp`` may differ in its last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlk_audit import breakdowns, samples, sketch
from rlk_audit.config import AUTO, TOKEN_CLASSES, AuditConfig
from rlk_audit.exact_sum import FRACTION_BITS, SIGNED_SLOTS, UNSIGNED_SLOTS
from rlk_audit.layout import COUNTER_INDEX, COUNTERS, SUM_OFFSETS, StateLayout, breakdown_field
from rlk_audit.measure import K3_SERIES, K3_SERIES_BELOW, LN2, SQUARE_OVERFLOW, ZERO_FILL_TRAIN_LOGP, FlatTokens
from rlk_audit.state import State
from rlk_audit.worst import NO_TOKEN

CHUNK = 1 << 14
"""Tokens of a chunk; its 6 float64 and 8 float32 a token are in the second-level cache or just behind it."""

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Compile at the first call. Arithmetic stays IEEE 754's: no reordering, no fused multiply-add, 1/0 is infinite."""
    options: dict[str, Any] = {"error_model": "numpy", "nogil": True}
    try:
        compiled: Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that the cache could be written to
        compiled = numba.njit(**options)(function)
    return compiled


# Rows of the float64 buffer.
_TRAIN, _ROLLOUT, _DLOGP, _RATIO, _TRAIN_PROB, _ROLLOUT_PROB = range(6)
# Rows of the float32 buffer.
_F_DLOGP, _F_RATIO, _F_K3, _F_MULT, _F_TRAIN, _F_TRAIN_PROB, _F_ROLLOUT_PROB, _F_PROB_DIFF = range(8)

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

_DLOGP_SUM, _DLOGP_SQUARED = SUM_OFFSETS["dlogp"], SUM_OFFSETS["dlogp_squared"]
_RATIO_SUM, _RATIO_SQUARED = SUM_OFFSETS["ratio"], SUM_OFFSETS["ratio_squared"]
_K3_SUM, _MULT_SUM, _TRAIN_SUM = SUM_OFFSETS["k3"], SUM_OFFSETS["mult"], SUM_OFFSETS["train_logp"]
_TRAIN_PROB_SUM, _TRAIN_PROB_SQUARED = SUM_OFFSETS["train_prob"], SUM_OFFSETS["train_prob_squared"]
_ROLLOUT_PROB_SUM, _ROLLOUT_PROB_SQUARED = SUM_OFFSETS["rollout_prob"], SUM_OFFSETS["rollout_prob_squared"]
_PROB_PRODUCT, _PROB_DIFF_SUM = SUM_OFFSETS["prob_product"], SUM_OFFSETS["prob_diff"]

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


def measure(tokens: FlatTokens, layout: StateLayout, state: State) -> tuple[Tensor, Tensor]:
    """Add tokens to ``state``; see ``measure.measure``, whose every bit it gives."""
    count = tokens.train.numel()
    magnitude = torch.empty(count, dtype=torch.float64)
    compared = torch.empty(count, dtype=torch.bool)
    size = min(CHUNK, count)
    doubles = torch.empty(6, size, dtype=torch.float64)
    floats = np.empty((8, size), dtype=np.float32)
    additive = state.additive.numpy()
    for start in range(0, count, CHUNK):
        chunk = slice(start, min(start + CHUNK, count))
        if chunk.stop - start < doubles.shape[1]:  # part of a buffer would be compiled for once more
            doubles = torch.empty(6, chunk.stop - start, dtype=torch.float64)
        _measure_chunk(tokens.part(chunk), layout, additive, state, doubles, floats, magnitude[chunk], compared[chunk])
    return magnitude, compared


def compile_all() -> None:
    """Compile every function, or read it from the cache, so that no step waits for it; raises what numba raises."""
    layout = StateLayout(
        AuditConfig.from_dict({"breakdowns": {"engine": 1, "confidence": AUTO}, "samples_per_step": 1})
    )
    zero, place = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    yes = torch.ones(1, dtype=torch.bool)
    tokens = FlatTokens(zero, zero, yes, yes, yes, {"engine": place}, place)
    measure(tokens, layout, State.empty(layout, zero.device))


def _measure_chunk(
    tokens: FlatTokens,
    layout: StateLayout,
    additive: Ints,
    state: State,
    rows: Tensor,
    floats: npt.NDArray[np.float32],
    magnitude: Tensor,
    compared: Tensor,
) -> None:
    config = layout.config
    rows[_TRAIN].copy_(tokens.train)
    rows[_ROLLOUT].copy_(tokens.rollout)
    counters = additive[layout.fields["counters"].slice]
    active, nowhere = _full(tokens.active), np.zeros(0, dtype=np.bool_)
    of_rows, of_compared, of_magnitude = rows.numpy(), compared.numpy(), magnitude.numpy()
    _classify(
        of_rows,
        active,
        nowhere if tokens.missing is None else _full(tokens.missing),
        nowhere if tokens.mismatch is None else _full(tokens.mismatch),
        config.sentinel_floor,
        config.positive_tolerance,
        math.log1p(-config.eps_low),
        math.log1p(config.eps_high),
        counters,
        of_compared,
        of_magnitude,
    )
    torch.exp(rows[_DLOGP], out=rows[_RATIO])
    torch.exp(rows[_TRAIN], out=rows[_TRAIN_PROB])
    torch.exp(rows[_ROLLOUT], out=rows[_ROLLOUT_PROB])
    _accumulate(
        of_rows,
        of_compared,
        floats,
        floats.view(np.int32),
        counters,
        additive[layout.sums],
        additive[layout.fields["sketch"].slice],
        config.grouping_power,
        state.extremes.numpy(),
    )
    bits = floats.view(np.int32)[_F_DLOGP]
    for name in config.breakdowns:
        codes = _confidence_codes(of_rows[_ROLLOUT], _EDGES) if name == "confidence" else _full(tokens.codes[name])
        table = additive[layout.fields[breakdown_field(name)].slice]
        _add_to_breakdown(table, codes, bits, of_magnitude, of_compared)
    if tokens.slot is not None:
        table = additive[layout.fields["samples"].slice]
        _add_to_samples(table, _full(tokens.slot), active, of_compared, of_rows[_DLOGP])


def _full(values: Tensor) -> npt.NDArray[Any]:
    """Return values as a contiguous array: one value may be expanded to all tokens."""
    array: npt.NDArray[Any] = values.contiguous().numpy()
    return array


@_compiled
def _classify(
    rows: Doubles,
    active: Bools,
    missing: Bools,
    mismatch: Bools,
    floor: float,
    tolerance: float,
    clip_low: float,
    clip_high: float,
    counters: Ints,
    compared: Bools,
    magnitude: Doubles,
) -> None:
    """Count classes and thresholds; where a token is not compared make T, R and d 0 and its magnitude NO_TOKEN."""
    counts = np.zeros(len(COUNTERS), dtype=np.int64)
    for i in range(len(compared)):
        train, rollout = rows[_TRAIN, i], rows[_ROLLOUT, i]
        rejected = len(mismatch) > 0 and mismatch[i]
        if active[i] and rejected:
            counts[_TOKEN_MISMATCH] += 1
        # The comparisons are false for NaN, so that every other class has a place below.
        if (
            active[i]
            and not rejected
            and not (len(missing) > 0 and missing[i])
            and floor < rollout <= tolerance
            and floor < train <= tolerance
        ):
            dlogp = train - rollout + 0.0  # a zero is +0.0 whatever the signs were
            distance = abs(dlogp)
            rows[_DLOGP, i] = dlogp
            magnitude[i] = distance
            compared[i] = True
            counts[_COMPARED] += 1
            counts[_IDENTICAL] += dlogp == 0.0
            counts[_CLIPPED_LOW] += dlogp < clip_low
            counts[_CLIPPED_HIGH] += dlogp > clip_high
            counts[_TAIL_LN2] += distance > LN2
            counts[_ZERO_FILL_SUSPECT] += rollout == 0.0 and train < ZERO_FILL_TRAIN_LOGP
            continue
        rows[_TRAIN, i] = rows[_ROLLOUT, i] = rows[_DLOGP, i] = 0.0
        magnitude[i] = NO_TOKEN
        compared[i] = False
        if not active[i]:
            place = _INACTIVE
        elif rejected:
            place = _REJECTED
        elif len(missing) > 0 and missing[i]:
            place = _ROLLOUT_MISSING
        elif -math.inf < rollout <= floor:
            place = _ROLLOUT_SENTINEL
        elif -math.inf < train <= floor:
            place = _TRAIN_SENTINEL
        elif math.isnan(rollout):
            place = _ROLLOUT_NAN
        elif rollout == -math.inf:
            place = _ROLLOUT_NEGINF
        elif math.isnan(train):
            place = _TRAIN_NAN
        elif train == -math.inf:
            place = _TRAIN_NEGINF
        else:
            place = _POSITIVE
        counts[place] += 1
    for i in range(len(counts)):
        counters[i] += counts[i]


@_compiled
def _mantissa(bits: int, exponent: int) -> int:
    return (bits & 0x7FFFFF) | ((exponent != 0) << 23)


@_compiled
def _add_term(slots: Ints, at: int, bits: int) -> None:
    slots[at + ((bits >> 23) & 0x1FF)] += _mantissa(bits, (bits >> 23) & 0xFF)


@_compiled
def _add_square(slots: Ints, at: int, bits: int) -> None:
    exponent = (bits >> 23) & 0xFF
    square = _mantissa(bits, exponent) ** 2
    slots[at + exponent] += square >> 24
    slots[at + UNSIGNED_SLOTS + exponent] += square & 0xFFFFFF


@_compiled
def _add_product(slots: Ints, at: int, left: int, right: int) -> None:
    of_left, of_right = (left >> 23) & 0xFF, (right >> 23) & 0xFF
    product = _mantissa(left, of_left) * _mantissa(right, of_right)
    exponent = max(of_left, 1) + max(of_right, 1)
    slots[at + exponent] += product >> 24
    slots[at + SIGNED_SLOTS + exponent] += product & 0xFFFFFF


@_compiled
def _distance(bits: int, grouping_power: int) -> int:
    """Return how many bins a float32 lies from zero, see ``sketch.bin_index``."""
    magnitude = bits & 0x7FFFFFFF
    lowest_key = (sketch.MIN_EXPONENT + sketch.BIAS) << grouping_power
    bins = (sketch.MAX_EXPONENT - sketch.MIN_EXPONENT) << grouping_power
    above = (magnitude >> (sketch.MANTISSA_BITS - grouping_power)) - (lowest_key - 2)
    return min(max(above, 1), bins + 2) * (magnitude != 0)


@_compiled
def _accumulate(
    rows: Doubles,
    compared: Bools,
    floats: npt.NDArray[np.float32],
    bits: npt.NDArray[np.int32],
    counters: Ints,
    sums: Ints,
    counts: Ints,
    grouping_power: int,
    extremes: Doubles,
) -> None:
    """Add compared tokens to the exact sums, the sketch, the counts of overflows and the extremes."""
    n = len(compared)
    for i in range(n):
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
    middle = len(counts) // 2
    overflow_ratio = overflow_square = overflow_k3 = overflow_mult = 0
    lowest, least = extremes[0], extremes[1]
    highest, largest, largest_diff = extremes[2], extremes[3], extremes[4]
    for i in range(n):
        if not compared[i]:
            continue
        of_dlogp = bits[_F_DLOGP, i]
        distance = _distance(of_dlogp, grouping_power)
        counts[middle - distance if of_dlogp < 0 else middle + distance] += 1
        _add_term(sums, _DLOGP_SUM, of_dlogp)
        _add_square(sums, _DLOGP_SQUARED, of_dlogp)
        if floats[_F_RATIO, i] == math.inf:
            overflow_ratio += 1
        else:
            overflow_square += floats[_F_RATIO, i] >= SQUARE_OVERFLOW
            _add_term(sums, _RATIO_SUM, bits[_F_RATIO, i])
            _add_square(sums, _RATIO_SQUARED, bits[_F_RATIO, i])
        if floats[_F_K3, i] == math.inf:
            overflow_k3 += 1
        else:
            _add_term(sums, _K3_SUM, bits[_F_K3, i])
        if floats[_F_MULT, i] == math.inf:
            overflow_mult += 1
        else:
            _add_term(sums, _MULT_SUM, bits[_F_MULT, i])
        _add_term(sums, _TRAIN_SUM, bits[_F_TRAIN, i])
        of_train, of_rollout = bits[_F_TRAIN_PROB, i], bits[_F_ROLLOUT_PROB, i]
        _add_term(sums, _TRAIN_PROB_SUM, of_train)
        _add_square(sums, _TRAIN_PROB_SQUARED, of_train)
        _add_term(sums, _ROLLOUT_PROB_SUM, of_rollout)
        _add_square(sums, _ROLLOUT_PROB_SQUARED, of_rollout)
        _add_product(sums, _PROB_PRODUCT, of_train, of_rollout)
        _add_term(sums, _PROB_DIFF_SUM, bits[_F_PROB_DIFF, i])
        dlogp = rows[_DLOGP, i]
        lowest, least = min(lowest, dlogp), min(least, abs(dlogp))
        highest, largest = max(highest, dlogp), max(largest, abs(dlogp))
        largest_diff = max(largest_diff, np.float64(floats[_F_PROB_DIFF, i]))
    extremes[0], extremes[1] = lowest, least
    extremes[2], extremes[3], extremes[4] = highest, largest, largest_diff
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
def _add_to_breakdown(
    table: Ints, codes: Ints, bits: npt.NDArray[np.int32], magnitude: Doubles, compared: Bools
) -> None:
    """Add compared tokens to the rows of one label, see ``breakdowns.add_tokens``."""
    buckets = len(table) // _ROW
    for i in range(len(compared)):
        if not compared[i]:
            continue
        row = (codes[i] + 1 if 0 <= codes[i] < buckets - 1 else 0) * _ROW
        fixed = np.int64(np.rint(magnitude[i] * _FIXED))
        table[row + _distance(bits[i], _COARSE)] += 1
        table[row + _TAIL] += magnitude[i] > LN2
        table[row + _HIGH] += fixed >> _PART_BITS
        table[row + _LOW] += fixed & _PART_MASK


@_compiled
def _add_to_samples(table: Ints, slot: Ints, active: Bools, compared: Bools, dlogp: Doubles) -> None:
    """Add tokens to the table of samples, see ``samples.add_tokens``."""
    slots = len(table) // _SAMPLE_ROW - 1
    for i in range(len(compared)):
        row = (slot[i] if 0 <= slot[i] < slots else slots) * _SAMPLE_ROW
        fixed = np.int64(np.rint(dlogp[i] * _FIXED))
        table[row] += slot[i] >= 0
        table[row + 1] += active[i]
        table[row + 2] += compared[i]
        table[row + 3] += fixed
        table[row + 4] += abs(fixed)
