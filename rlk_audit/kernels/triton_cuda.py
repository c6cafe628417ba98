"""The per-token work on CUDA in two Triton kernels, with torch's exponentials between them.

The first kernel reads the inputs and classifies; the second adds what torch has rounded to every table. Only integers
are added with atomics, so the order in which the device adds them does not show. Several copies of the tables, one for
so many programs, keep the hot bins (a dlogp of zero, the exponent that most probabilities share) from queueing.
Nothing is read on the host, and shapes depend on the number of tokens alone, so a CUDA graph can capture it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_audit.config import TOKEN_CLASSES
from rlk_audit.exact_sum import SIGNED_SLOTS, UNSIGNED_SLOTS
from rlk_audit.layout import COUNTER_INDEX, EXTREMES, MINIMA, SUM_OFFSETS, StateLayout
from rlk_audit.measure import LN2, SQUARE_OVERFLOW, ZERO_FILL_TRAIN_LOGP, FlatTokens, Rounded, add_to_parts
from rlk_audit.sketch import BIAS, MANTISSA_BITS, MAX_EXPONENT, MIN_EXPONENT
from rlk_audit.state import State
from rlk_audit.worst import NO_TOKEN

BLOCK = 1024
"""Tokens of a program."""
COPIES = 64
"""Tables that programs share; they are summed at the end."""


def measure(tokens: FlatTokens, layout: StateLayout, state: State) -> tuple[Tensor, Tensor]:
    """Add tokens to ``state``; see ``measure.measure``, whose every bit it gives."""
    count = tokens.train.numel()
    device = tokens.train.device
    programs = triton.cdiv(count, BLOCK)
    copies = min(COPIES, programs)
    train, rollout, dlogp, magnitude = torch.empty(4, count, dtype=torch.float64, device=device).unbind()
    compared = torch.empty(count, dtype=torch.bool, device=device)
    if not count:
        return magnitude, compared
    tables = torch.zeros(copies, layout.additive_length, dtype=torch.int64, device=device)
    extremes = torch.empty(len(EXTREMES), programs, dtype=torch.float64, device=device)
    config = layout.config
    _classify[(programs,)](
        _wide(tokens.train),
        _wide(tokens.rollout),
        tokens.active.contiguous(),
        _given(tokens.missing, tokens.active),
        _given(tokens.mismatch, tokens.active),
        train,
        rollout,
        dlogp,
        magnitude,
        compared,
        tables,
        extremes,
        count,
        programs,
        config.sentinel_floor,
        config.positive_tolerance,
        math.log1p(-config.eps_low),
        math.log1p(config.eps_high),
        copies,
        layout.additive_length,
        HAS_MISSING=tokens.missing is not None,
        HAS_MISMATCH=tokens.mismatch is not None,
        **_CLASSIFY_CONSTANTS,
    )
    _accumulate[(programs,)](
        *Rounded.of(train, rollout, dlogp),
        compared,
        tables,
        extremes,
        count,
        programs,
        copies,
        layout.additive_length,
        GROUPING_POWER=config.grouping_power,
        SKETCH=layout.fields["sketch"].offset,
        SUMS_AT=layout.sums.start,
        **_ACCUMULATE_CONSTANTS,
    )
    state.additive += tables.sum(0)
    minima, maxima = state.extremes[: len(MINIMA)], state.extremes[len(MINIMA) :]
    torch.minimum(minima, extremes[: len(MINIMA)].amin(1), out=minima)
    torch.maximum(maxima, extremes[len(MINIMA) :].amax(1), out=maxima)
    add_to_parts(tokens, layout, state, rollout, dlogp, compared)
    return magnitude, compared


def _wide(values: Tensor) -> Tensor:
    """Return values as float32 or float64, exactly: Triton's interpreter cannot convert bfloat16."""
    return (values if values.dtype in (torch.float32, torch.float64) else values.float()).contiguous()


def _given(flags: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise.contiguous() if flags is None else flags.contiguous()


_CLASSIFY_CONSTANTS: dict[str, Any] = {
    name.upper(): COUNTER_INDEX[name]
    for name in (
        "inactive",
        *TOKEN_CLASSES,
        "token_mismatch",
        "identical",
        "clipped_low",
        "clipped_high",
        "tail_ln2",
        "zero_fill_suspect",
    )
} | {"LN2": LN2, "ZERO_FILL_TRAIN_LOGP": ZERO_FILL_TRAIN_LOGP, "NO_TOKEN": NO_TOKEN, "BLOCK": BLOCK}


@triton.jit
def _count(table, place, where):  # type: ignore[no-untyped-def]
    tl.atomic_add(table + place, tl.sum(where.to(tl.int64)))


@triton.jit
def _float64(value):  # type: ignore[no-untyped-def]
    """A scalar that stays float64 in a comparison: Triton 3.7 makes a Python number there a float32."""
    return tl.full((), value, tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _classify(  # type: ignore[no-untyped-def]
    train_in,
    rollout_in,
    active_in,
    missing_in,
    mismatch_in,
    train_out,
    rollout_out,
    dlogp_out,
    magnitude_out,
    compared_out,
    tables,
    extremes,
    count,
    programs,
    floor: tl.float64,
    tolerance: tl.float64,
    clip_low: tl.float64,
    clip_high: tl.float64,
    copies,
    length,
    HAS_MISSING: tl.constexpr,
    HAS_MISMATCH: tl.constexpr,
    INACTIVE: tl.constexpr,
    REJECTED: tl.constexpr,
    ROLLOUT_MISSING: tl.constexpr,
    ROLLOUT_SENTINEL: tl.constexpr,
    TRAIN_SENTINEL: tl.constexpr,
    ROLLOUT_NAN: tl.constexpr,
    ROLLOUT_NEGINF: tl.constexpr,
    TRAIN_NAN: tl.constexpr,
    TRAIN_NEGINF: tl.constexpr,
    POSITIVE: tl.constexpr,
    COMPARED: tl.constexpr,
    TOKEN_MISMATCH: tl.constexpr,
    IDENTICAL: tl.constexpr,
    CLIPPED_LOW: tl.constexpr,
    CLIPPED_HIGH: tl.constexpr,
    TAIL_LN2: tl.constexpr,
    ZERO_FILL_SUSPECT: tl.constexpr,
    LN2: tl.constexpr,
    ZERO_FILL_TRAIN_LOGP: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count classes and thresholds; where a token is not compared make T, R and d 0 and its magnitude NO_TOKEN."""
    floor, tolerance = _float64(floor), _float64(tolerance)
    clip_low, clip_high = _float64(clip_low), _float64(clip_high)
    program = tl.program_id(0)
    table = tables + (program % copies).to(tl.int64) * length
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    train = tl.load(train_in + place, mask=inside, other=0.0).to(tl.float64)
    rollout = tl.load(rollout_in + place, mask=inside, other=0.0).to(tl.float64)
    active = tl.load(active_in + place, mask=inside, other=0).to(tl.int1)
    free = active  # active tokens that no class has taken yet
    if HAS_MISMATCH:
        taken = free & tl.load(mismatch_in + place, mask=inside, other=0).to(tl.int1)
        _count(table, TOKEN_MISMATCH, taken)
        _count(table, REJECTED, taken)
        free = free & ~taken
    if HAS_MISSING:
        taken = free & tl.load(missing_in + place, mask=inside, other=0).to(tl.int1)
        _count(table, ROLLOUT_MISSING, taken)
        free = free & ~taken
    lowest = float("-inf")
    taken = free & (rollout <= floor) & (rollout > lowest)
    _count(table, ROLLOUT_SENTINEL, taken)
    free = free & ~taken
    taken = free & (train <= floor) & (train > lowest)
    _count(table, TRAIN_SENTINEL, taken)
    free = free & ~taken
    taken = free & (rollout != rollout)
    _count(table, ROLLOUT_NAN, taken)
    free = free & ~taken
    taken = free & (rollout == lowest)
    _count(table, ROLLOUT_NEGINF, taken)
    free = free & ~taken
    taken = free & (train != train)
    _count(table, TRAIN_NAN, taken)
    free = free & ~taken
    taken = free & (train == lowest)
    _count(table, TRAIN_NEGINF, taken)
    free = free & ~taken
    taken = free & ((train > tolerance) | (rollout > tolerance))
    _count(table, POSITIVE, taken)
    compared = free & ~taken
    _count(table, COMPARED, compared)
    _count(table, INACTIVE, inside & ~active)

    train = tl.where(compared, train, 0.0)
    rollout = tl.where(compared, rollout, 0.0)
    dlogp = train - rollout + 0.0  # a zero is +0.0 whatever the signs were
    magnitude = tl.abs(dlogp)
    _count(table, IDENTICAL, compared & (dlogp == 0.0))
    _count(table, CLIPPED_LOW, dlogp < clip_low)
    _count(table, CLIPPED_HIGH, dlogp > clip_high)
    _count(table, TAIL_LN2, magnitude > _float64(LN2))
    _count(table, ZERO_FILL_SUSPECT, compared & (rollout == 0.0) & (train < ZERO_FILL_TRAIN_LOGP))
    tl.store(train_out + place, train, mask=inside)
    tl.store(rollout_out + place, rollout, mask=inside)
    tl.store(dlogp_out + place, dlogp, mask=inside)
    tl.store(magnitude_out + place, tl.where(compared, magnitude, NO_TOKEN), mask=inside)
    tl.store(compared_out + place, compared, mask=inside)
    tl.store(extremes + program, tl.min(tl.where(compared, dlogp, float("inf"))))
    tl.store(extremes + programs + program, tl.min(tl.where(compared, magnitude, float("inf"))))
    tl.store(extremes + 2 * programs + program, tl.max(tl.where(compared, dlogp, lowest)))
    tl.store(extremes + 3 * programs + program, tl.max(tl.where(compared, magnitude, lowest)))


_OFFSETS = {f"{name.upper()}_AT": at for name, at in SUM_OFFSETS.items()}
_ACCUMULATE_CONSTANTS: dict[str, Any] = _OFFSETS | {
    "OVERFLOW_RATIO": COUNTER_INDEX["overflow_ratio"],
    "OVERFLOW_SQUARE": COUNTER_INDEX["overflow_square"],
    "OVERFLOW_K3": COUNTER_INDEX["overflow_k3"],
    "OVERFLOW_MULT": COUNTER_INDEX["overflow_mult"],
    "SQUARE_OVERFLOW": SQUARE_OVERFLOW,
    "UNSIGNED": UNSIGNED_SLOTS,
    "SIGNED": SIGNED_SLOTS,
    "LOWEST_EXPONENT": MIN_EXPONENT + BIAS,
    "OCTAVES": MAX_EXPONENT - MIN_EXPONENT,
    "MANTISSA": MANTISSA_BITS,
    "BLOCK": BLOCK,
}


@triton.jit
def _mantissa(bits):  # type: ignore[no-untyped-def]
    implicit = (((bits >> 23) & 0xFF) != 0).to(tl.int32) << 23
    return ((bits & 0x7FFFFF) | implicit).to(tl.int64)


@triton.jit
def _add_terms(slots, values, where):  # type: ignore[no-untyped-def]
    bits = values.to(tl.int32, bitcast=True)
    tl.atomic_add(slots + ((bits >> 23) & 0x1FF), _mantissa(bits), mask=where)


@triton.jit  # type: ignore[untyped-decorator]
def _add_squares(slots, values, where, UNSIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = values.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    square = _mantissa(bits) * _mantissa(bits)
    tl.atomic_add(slots + exponent, square >> 24, mask=where)
    tl.atomic_add(slots + UNSIGNED + exponent, square & 0xFFFFFF, mask=where)


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(slots, left, right, where, SIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    of_left, of_right = left.to(tl.int32, bitcast=True), right.to(tl.int32, bitcast=True)
    product = _mantissa(of_left) * _mantissa(of_right)
    exponent = tl.maximum((of_left >> 23) & 0xFF, 1) + tl.maximum((of_right >> 23) & 0xFF, 1)
    tl.atomic_add(slots + exponent, product >> 24, mask=where)
    tl.atomic_add(slots + SIGNED + exponent, product & 0xFFFFFF, mask=where)


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(  # type: ignore[no-untyped-def]
    dlogp_in,
    ratio_in,
    k3_in,
    mult_in,
    train_logp_in,
    train_prob_in,
    rollout_prob_in,
    prob_diff_in,
    compared_in,
    tables,
    extremes,
    count,
    programs,
    copies,
    length,
    GROUPING_POWER: tl.constexpr,
    SKETCH: tl.constexpr,
    SUMS_AT: tl.constexpr,
    DLOGP_AT: tl.constexpr,
    DLOGP_SQUARED_AT: tl.constexpr,
    RATIO_AT: tl.constexpr,
    RATIO_SQUARED_AT: tl.constexpr,
    K3_AT: tl.constexpr,
    MULT_AT: tl.constexpr,
    TRAIN_LOGP_AT: tl.constexpr,
    TRAIN_PROB_AT: tl.constexpr,
    TRAIN_PROB_SQUARED_AT: tl.constexpr,
    ROLLOUT_PROB_AT: tl.constexpr,
    ROLLOUT_PROB_SQUARED_AT: tl.constexpr,
    PROB_PRODUCT_AT: tl.constexpr,
    PROB_DIFF_AT: tl.constexpr,
    OVERFLOW_RATIO: tl.constexpr,
    OVERFLOW_SQUARE: tl.constexpr,
    OVERFLOW_K3: tl.constexpr,
    OVERFLOW_MULT: tl.constexpr,
    SQUARE_OVERFLOW: tl.constexpr,
    UNSIGNED: tl.constexpr,
    SIGNED: tl.constexpr,
    LOWEST_EXPONENT: tl.constexpr,
    OCTAVES: tl.constexpr,
    MANTISSA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add compared tokens to the exact sums, the sketch and the counts of overflows."""
    program = tl.program_id(0)
    table = tables + (program % copies).to(tl.int64) * length
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    compared = tl.load(compared_in + place, mask=place < count, other=0).to(tl.int1)
    sums = table + SUMS_AT
    infinite = float("inf")

    dlogp = tl.load(dlogp_in + place, mask=compared, other=0.0)
    _add_terms(sums + DLOGP_AT, dlogp, compared)
    _add_squares(sums + DLOGP_SQUARED_AT, dlogp, compared, UNSIGNED)
    bits = dlogp.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bins: tl.constexpr = OCTAVES << GROUPING_POWER
    # As sketch.bin_index: 1 is `under`, bins + 2 is `over`; zero alone stays at distance 0.
    distance = (magnitude >> (MANTISSA - GROUPING_POWER)) - ((LOWEST_EXPONENT << GROUPING_POWER) - 2)
    distance = tl.minimum(tl.maximum(distance, 1), bins + 2) * (magnitude != 0).to(tl.int32)
    bin_at = bins + 2 + tl.where(bits < 0, -distance, distance)
    tl.atomic_add(table + SKETCH + bin_at, compared.to(tl.int64), mask=compared)

    ratio = tl.load(ratio_in + place, mask=compared, other=0.0)
    overflows = ratio == infinite
    _count(table, OVERFLOW_RATIO, overflows)
    _count(table, OVERFLOW_SQUARE, ratio >= SQUARE_OVERFLOW)
    finite = compared & ~overflows
    _add_terms(sums + RATIO_AT, ratio, finite)
    _add_squares(sums + RATIO_SQUARED_AT, ratio, finite, UNSIGNED)

    k3 = tl.load(k3_in + place, mask=compared, other=0.0)
    _count(table, OVERFLOW_K3, k3 == infinite)
    _add_terms(sums + K3_AT, k3, compared & (k3 != infinite))
    mult = tl.load(mult_in + place, mask=compared, other=0.0)
    _count(table, OVERFLOW_MULT, mult == infinite)
    _add_terms(sums + MULT_AT, mult, compared & (mult != infinite))

    _add_terms(sums + TRAIN_LOGP_AT, tl.load(train_logp_in + place, mask=compared, other=0.0), compared)
    train_prob = tl.load(train_prob_in + place, mask=compared, other=0.0)
    rollout_prob = tl.load(rollout_prob_in + place, mask=compared, other=0.0)
    _add_terms(sums + TRAIN_PROB_AT, train_prob, compared)
    _add_squares(sums + TRAIN_PROB_SQUARED_AT, train_prob, compared, UNSIGNED)
    _add_terms(sums + ROLLOUT_PROB_AT, rollout_prob, compared)
    _add_squares(sums + ROLLOUT_PROB_SQUARED_AT, rollout_prob, compared, UNSIGNED)
    _add_products(sums + PROB_PRODUCT_AT, train_prob, rollout_prob, compared, SIGNED)
    prob_diff = tl.load(prob_diff_in + place, mask=compared, other=0.0)
    _add_terms(sums + PROB_DIFF_AT, prob_diff, compared)
    largest = tl.max(tl.where(compared, prob_diff, float("-inf")))
    tl.store(extremes + 4 * programs + program, largest.to(tl.float64))
