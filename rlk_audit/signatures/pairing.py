"""Signatures of wrong pairing: train and rollout values are right, but stand beside the wrong partner.

Each pairs the values anew, under the hypothesis, and measures how much of the drift goes away. Values of other tokens
differ by about a nat, so a right re-pairing brings the drift down to the noise, and a wrong one raises it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlk_audit.signatures.signal import MIN_TOKENS, Signal, Value, at, clipped, drift, share, where
from rlk_audit.signatures.tokens import FILLED_OTHER
from rlk_audit.token_table import Bools, Floats, Ints, TokenTable

LAGS = (1, -1, 2, -2, 3, -3, 4, -4)
SAMPLE_FLOOR = 0.05
"""Nats, mean of clipped abs(dlogp): a sample below is not mispaired, since neighbours differ by far more."""
LEFT_OVER = 0.4
"""A sample is explained if re-pairing leaves at most this part of its drift: chance leaves about all of it."""
FOLLOWS = 0.75
"""Where that decided, samples follow that re-pairing improves so far: another fault may lie underneath."""
EXPLAINED = 0.6
"""The explained samples together must lose at least this part: room for a second fault underneath."""
BEYOND_CHANCE = 3.0
"""Lags that do not hold explain some samples by chance; what holds gains so many times as much as their median."""
MIN_SHARE = 0.08
"""... and it must be at least this part of the step's clipped drift: odd samples alone are no finding."""
BLOCK_COUNTS = (2, 4, 8, 16)
"""Contiguous context parallelism has cp blocks, zigzag 2 cp."""
BLOCK_RULES = ("even", "ceil", "floor", "sequence")
MIN_BLOCK = 2
"""Tokens a block: shorter ones are hardly blocks."""
DISTINCT = 0.75
"""At least this part of the blocks have a place: one block that fits many others, say one of zeros, is no order."""
SIMPLER = 0.85
"""A lag is meant rather than a block order if it gains at least this part as much."""
SEARCH_TOKENS = 50_000
"""Whole samples of about so many tokens choose among the hypotheses."""
SEARCH_ROWS = 2048
ROW_PREFIX = 24
"""Positions that tell a row from others: even 8 of them agree by chance within noise in none of a million rows."""
MIN_ROW = 8
SHORT_ROW, SHORT_LEFT_OVER = 4, 0.1
"""Shorter rows, down to this, must fit nearly exactly: so close are 4 values in one of 10,000 rows by chance."""
UNRELATED = 0.2
"""Correlation within samples below this means that the values belong to other tokens: real pairs are near 1."""
SAME_DISTRIBUTION = 0.3
"""The two sorted columns differ by at most this part of the drift: the same values in another order."""
MIN_UNRELATED_TOKENS = 200
"""A correlation of 0.2 is then three standard errors from zero."""


@dataclass(frozen=True)
class Repaired:
    """What a re-pairing does.

    Attributes:
        source: for each token the place of the rollout value that it is paired with, -1 for none.
        rows: samples that it explains. fits: those and others that follow where they decide.
        before, after: clipped abs(dlogp) of the explained samples.
    """

    source: Ints
    rows: Bools
    fits: Bools
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Clipped nats that go away."""
        return self.before - self.after


Search = Callable[[TokenTable, Bools], Signal | None]


def _search(table: TokenTable, search: Search) -> Signal | None:
    """Search among the compared tokens without zeros that the other side denies, and then with them.

    Such zeros are mostly filled in and belong to no token, which would blur every comparison; but a filter that keeps
    one token gives zeros too, and those belong to their pairs.
    """
    denied = _denied_zeros(table)
    found = search(table, table.compared & ~denied)
    return search(table, table.compared) if found is None and denied.any() else found


def _denied_zeros(table: TokenTable) -> Bools:
    train, rollout = table.train, table.rollout
    return np.asarray(((rollout == 0) & (train < FILLED_OTHER)) | ((train == 0) & (rollout < FILLED_OTHER)))


def _views(table: TokenTable, good: Bools) -> tuple[TokenTable, TokenTable]:
    """Return the table, and one with the rollout values mapped so that they are distributed as the train values.

    A wrong pairing leaves the distributions alone, and a temperature or a filter does not: the map undoes most of what
    such a second fault does to all values, however they are paired, so that it hides no pairing.
    """
    values = np.sort(table.rollout[good])
    place = (np.searchsorted(values, values, "left") + np.searchsorted(values, values, "right") - 1) // 2
    mapped = table.rollout.copy()
    mapped[good] = np.sort(table.train[good])[place[np.searchsorted(values, table.rollout[good])]]
    return table, table.with_rollout(mapped)


def _row_sums(table: TokenTable, values: Floats) -> Floats:
    return np.bincount(table.row, weights=values, minlength=table.row_count).astype(np.float64)


def try_pairing(table: TokenTable, source: Ints, good: Bools) -> Repaired:
    """Measure a hypothesis: each token belongs to the rollout value at `source` (-1: to none).

    A sample takes part if its pairs drift by SAMPLE_FLOOR and re-pairing leaves at most LEFT_OVER of that.
    """
    both = (source >= 0) & good & good[source]
    own = np.where(both, clipped(table.dlogp), 0.0)
    moved = np.where(both, clipped(np.where(both, table.train, 0.0) - np.where(both, table.rollout[source], 0.0)), 0.0)
    count, before, after = (_row_sums(table, column) for column in (both.astype(float), own, moved))
    drifting = (count > 0) & (before >= SAMPLE_FLOOR * count)
    rows = drifting & (count >= MIN_TOKENS) & (after <= LEFT_OVER * before)
    fits = drifting & (after <= FOLLOWS * before)
    # Samples too short to be judged alone are judged together.
    if count[fits].sum() >= MIN_TOKENS and after[drifting].sum() <= LEFT_OVER * before[drifting].sum():
        rows = fits
    return Repaired(source, rows, fits, float(before[rows].sum()), float(after[rows].sum()))


def _convincing(table: TokenTable, found: Repaired, judged: Bools) -> bool:
    total = float(clipped(table.dlogp[judged]).sum())
    return found.gain > 0 and found.gain >= EXPLAINED * found.before and found.gain >= MIN_SHARE * total


def repair(table: TokenTable, found: Repaired) -> TokenTable:
    """Return the table with the explained samples re-paired; tokens without a partner are dropped."""
    affected = found.fits[table.row]
    rollout = np.where(affected, table.rollout[found.source], table.rollout)
    kept = ~affected | (found.source >= 0)
    return table.with_rollout(rollout).take(kept)


def _signal(
    code: str, table: TokenTable, found: Repaired, rest: TokenTable, evidence: dict[str, Value], told: str
) -> Signal:
    affected = found.fits[table.row]
    samples = int(found.fits.sum())
    evidence |= {
        "samples_affected": samples,
        "sample_share": share(samples, table.row_count),
        "drift_explained": share(found.gain, found.before),
        "abs_dlogp_mean_before": share(float(np.abs(table.dlogp[affected]).sum()), int(affected.sum())),
        **where(table, affected),
    }
    after = rest.take(np.isin(rest.sample, table.sample[affected]))
    evidence["abs_dlogp_mean_after"] = share(drift(after), len(after))
    summary = (
        f"{told} in {samples} of {table.row_count} samples{at(evidence)}: re-paired, mean abs(dlogp) falls from "
        f"{evidence['abs_dlogp_mean_before']:.3g} to {evidence['abs_dlogp_mean_after']:.3g} nats"
    )
    return Signal(code, drift(table) - drift(rest), evidence, summary, rest)


# --- shift ----------------------------------------------------------------------------------------------------------


def shift(table: TokenTable) -> Signal | None:
    """Pair each token with the rollout value `lag` positions on, in its sample."""
    return _search(table, _shift)


def _shift(table: TokenTable, good: Bools) -> Signal | None:
    views = _views(table, good)
    best = [_best_lag(view, good) for view in views]
    view, (lag, found, chance) = max(zip(views, best, strict=True), key=lambda pair: pair[1][1].gain)
    if not _convincing(view, found, good) or found.gain < BEYOND_CHANCE * chance:
        return None
    late = lag > 0
    told = f"the rollout side is {abs(lag)} position{'s' * (abs(lag) > 1)} {'late' if late else 'early'}"
    told += f" (or the train side {'early' if late else 'late'})"
    evidence: dict[str, Value] = {"lag": lag, "rollout": "late" if late else "early"}
    return _signal("shift", table, found, repair(table, found), evidence, told)


def _best_lag(table: TokenTable, good: Bools) -> tuple[int, Repaired, float]:
    """Return the best lag, what it does, and what a lag gains by chance: the median of all."""
    pairings = {lag: try_pairing(table, table.find(table.row, table.position + lag), good) for lag in LAGS}
    lag, found = max(pairings.items(), key=lambda pair: pair[1].gain)
    return lag, found, float(np.median([pairing.gain for pairing in pairings.values()]))


# --- blocks of context parallelism ----------------------------------------------------------------------------------


def cp_order(table: TokenTable) -> Signal | None:
    """Pair each block of a sample with every other block, over all drifting samples at once, and take the best."""
    return _search(table, _cp_order)


def _cp_order(table: TokenTable, good: Bools) -> Signal | None:
    chosen = _drifting(table, good)
    hypotheses = list(_block_orders(table.take(chosen), good[chosen])) if chosen.any() else []
    if not hypotheses:
        return None
    # Finer cuts explain what coarser ones do, so the first that is nearly as good as the best is meant.
    most = max(found.gain for *_, found in hypotheses)
    blocks, rule, order, _ = next(h for h in hypotheses if h[-1].gain >= 0.97 * most)
    everywhere = try_pairing(table, _block_source(table, blocks, rule, np.array(order)), good)
    _, lagged, chance = _best_lag(table, good)
    if not _convincing(table, everywhere, good) or everywhere.gain < BEYOND_CHANCE * chance:
        return None
    # Blocks as short as a lag can say the same as it, in more words.
    if lagged.gain > SIMPLER * everywhere.gain:
        return None
    shown = ", ".join(map(str, order))
    evidence: dict[str, Value] = {"blocks": blocks, "order": shown, "cut": rule, "layout": _layout_name(order)}
    told = f"blocks are joined in the order {shown} ({evidence['layout']})"
    everywhere = _of_all_drifting(table, everywhere, good)
    rest = repair(table, everywhere)
    # Values from before the response, or from behind it, are no fault of their own.
    rest = rest.take(~_denied_zeros(rest) | ~np.isin(rest.sample, table.sample[everywhere.fits[table.row]]))
    return _signal("cp_order", table, everywhere, rest, evidence, told)


def _of_all_drifting(table: TokenTable, found: Repaired, good: Bools) -> Repaired:
    """Let every drifting sample follow an order that most of them have: it is the layout's, not a sample's.

    Those that another fault moves far, such as stale weights, do not show that they follow.
    """
    drifting = _drifting_rows(table, 1, good)[0]
    return replace(found, fits=found.fits | drifting) if 2 * found.fits.sum() > drifting.sum() else found


def _drifting_rows(table: TokenTable, least: int, good: Bools) -> tuple[Bools, Floats]:
    """Return the samples of at least so many pairs that drift, and the pairs of every sample."""
    count = _row_sums(table, good.astype(float))
    level = _row_sums(table, np.where(good, clipped(table.dlogp), 0.0))
    return (count >= least) & (level >= SAMPLE_FLOOR * count), count


def _drifting(table: TokenTable, good: Bools) -> Bools:
    """Return the tokens of samples that drift, up to SEARCH_TOKENS."""
    rows, count = _drifting_rows(table, MIN_TOKENS, good)
    rows &= np.cumsum(np.where(rows, count, 0)) <= max(SEARCH_TOKENS, count[rows].max(initial=0))
    return rows[table.row]


def _block_orders(table: TokenTable, good: Bools) -> Iterator[tuple[int, str, tuple[int, ...], Repaired]]:
    for blocks in BLOCK_COUNTS:
        for rule in BLOCK_RULES:
            block = _block_of(table, blocks, rule)[0]
            cost = np.full((blocks, blocks), np.inf)
            for other in range(blocks):
                source = _block_source(table, blocks, rule, np.full(blocks, other))
                both = (source >= 0) & good & good[source] & (block >= 0)
                if not both.any():
                    continue
                moved = clipped(table.train[both] - table.rollout[source[both]])
                pairs = np.bincount(block[both], minlength=blocks)
                sums = np.bincount(block[both], weights=moved, minlength=blocks)
                cost[:, other] = np.where(pairs >= MIN_TOKENS, sums / np.maximum(pairs, 1), np.inf)
            order = np.where(np.isfinite(cost).any(1), cost.argmin(1), np.arange(blocks))
            if (order != np.arange(blocks)).any() and len(np.unique(order)) >= DISTINCT * blocks:
                found = try_pairing(table, _block_source(table, blocks, rule, order), good)
                yield blocks, rule, tuple(order.tolist()), found


def _block_of(table: TokenTable, blocks: int, rule: str) -> tuple[Ints, Callable[[Ints], Ints]]:
    """Return each token's block (-1: none), and the first position of given blocks in each token's sample."""
    length = (_last_position(table) + 1)[table.row]
    offset = np.zeros_like(length)
    if rule == "sequence":
        offset = np.maximum(table.prompt, 0)
    total = length + offset
    size = total // blocks if rule == "floor" else -(-total // blocks)
    place = table.position + offset

    def first(block: Ints) -> Ints:
        return (block * total // blocks if rule == "even" else block * size) - offset

    even = ((place + 1) * blocks - 1) // np.maximum(total, 1)
    block = even if rule == "even" else place // np.maximum(size, 1)
    usable = (block < blocks) & (block >= 0) & (total >= blocks * MIN_BLOCK)
    if rule == "sequence":
        usable &= table.prompt > 0
    return np.where(usable, block, -1), first


def _last_position(table: TokenTable) -> Ints:
    last = np.zeros(table.row_count, dtype=np.int64)
    np.maximum.at(last, table.row, table.position)
    return last


def _block_source(table: TokenTable, blocks: int, rule: str, order: Ints) -> Ints:
    """Return for each token the place of the rollout value at its place in the block that `order` names."""
    block, first = _block_of(table, blocks, rule)
    other = np.where(block >= 0, order[block], -1)
    source = table.find(table.row, np.where(block >= 0, table.position - first(block) + first(other), table.position))
    # A value beyond the other block's end belongs to the block after it.
    found = np.where(source >= 0, block[source], -1)
    return np.where((block < 0) | (found == other), source, -1)


def _layout_name(order: tuple[int, ...]) -> str:
    """Name the order if it is that of zigzag shards joined without undoing it, or the reverse."""
    blocks = len(order)
    zigzag = [block for rank in range(blocks // 2) for block in (rank, blocks - 1 - rank)]
    if list(order) == zigzag or [zigzag.index(block) for block in range(blocks)] == list(order):
        return f"zigzag of cp {blocks // 2}"
    if sorted(order) == list(range(blocks)):
        return f"{blocks} blocks exchanged"
    return "blocks repeated"


# --- rows -----------------------------------------------------------------------------------------------------------


def row_order(table: TokenTable) -> Signal | None:
    """Pair each drifting sample's train values with the rollout values of every other sample."""
    return _search(table, _row_order) or _unrelated(table, table.compared & ~_denied_zeros(table))


def _row_order(table: TokenTable, good: Bools) -> Signal | None:
    drifting, _ = _drifting_rows(table, SHORT_ROW, good)
    searched = np.flatnonzero(drifting)[:SEARCH_ROWS]
    partner = _partners(table, searched, good)
    paired = partner[table.row]
    source = np.where(paired >= 0, table.find(np.maximum(paired, 0), table.position), -1)
    found = try_pairing(table, source, good)
    if not _convincing(table, found, good & _of_rows(table, searched)):
        return None
    rest = _without_strangers(table, found, repair(table, found), good, int(drifting.sum()) - len(searched))
    told = "rollout values stand beside another row's train values"
    return _signal("row_order", table, found, rest, {"partner": "found"}, told)


def _of_rows(table: TokenTable, rows: Ints) -> Bools:
    chosen = np.zeros(table.row_count, dtype=bool)
    chosen[rows] = True
    return chosen[table.row]


def _without_strangers(
    table: TokenTable, found: Repaired, rest: TokenTable, good: Bools, unsearched: int = 0
) -> TokenTable:
    """Leave out drifting samples whose partner was not found: too short, unsearched, or it is not in the table.

    If more were searched in vain than have a partner, their values must be unrelated; else another fault makes them
    drift.
    """
    strangers = _drifting_rows(table, 1, good)[0] & ~found.fits
    of_strangers = strangers[table.row]
    many = strangers.sum() - unsearched > found.fits.sum()
    if many and abs(_correlation(table, good & of_strangers)) > UNRELATED:
        return rest
    return rest.take(~np.isin(rest.sample, table.sample[of_strangers]))


def _partners(table: TokenTable, searched: Ints, good: Bools) -> Ints:
    """Return for each row the row whose rollout values fit its train values, -1 where none does."""
    number = np.full(table.row_count, -1, dtype=np.int64)
    number[searched] = np.arange(len(searched))
    place = table.position - table.position[table.row_start][table.row]
    inside = good & (place < ROW_PREFIX) & (number[table.row] >= 0)
    train, rollout = np.full((2, len(searched), ROW_PREFIX), np.nan)
    rows = number[table.row[inside]], place[inside]
    train[rows], rollout[rows] = table.train[inside], table.rollout[inside]
    partner = np.full(table.row_count, -1, dtype=np.int64)
    for i, row in enumerate(searched.tolist()):
        apart = clipped(train[i] - rollout)
        pairs = np.isfinite(apart).sum(1)
        cost = np.where(pairs >= SHORT_ROW, np.nansum(apart, 1) / np.maximum(pairs, 1), np.inf)
        own = float(np.nanmean(apart[i])) if pairs[i] else math.inf
        best = int(cost.argmin())
        left_over = LEFT_OVER if pairs[best] >= MIN_ROW else SHORT_LEFT_OVER
        if best != i and cost[best] <= left_over * own and math.isfinite(cost[best]):
            partner[row] = searched[best]
    return partner


def _unrelated(table: TokenTable, good: Bools) -> Signal | None:
    """Find values that fit no token: uncorrelated within samples, though of the same distribution."""
    train, rollout = table.train[good], table.rollout[good]
    if len(train) < MIN_UNRELATED_TOKENS:
        return None
    correlation = _correlation(table, good)
    apart = np.abs(train - rollout).mean()
    sorted_apart = np.abs(np.sort(train) - np.sort(rollout)).mean()
    if abs(correlation) > UNRELATED or apart < SAMPLE_FLOOR or sorted_apart > SAME_DISTRIBUTION * apart:
        return None
    summary = (
        f"train and rollout values are those of different tokens: their correlation within samples is "
        f"{correlation:.2f}, though sorted they differ by {sorted_apart:.3g} nats alone, against {apart:.3g} as paired"
    )
    evidence: dict[str, Value] = {"partner": "not found", "correlation": correlation, "sorted_apart": sorted_apart}
    return Signal("row_order", drift(table), evidence, summary, table.take(~good))


def _correlation(table: TokenTable, good: Bools) -> float:
    """Return the correlation of T and R within samples; 1 where one side is constant, which tells nothing."""
    row, count = table.row[good], np.maximum(_row_sums(table, good.astype(float)), 1)
    sides = []
    for side in (table.train[good], table.rollout[good]):
        mean = np.bincount(row, weights=side, minlength=table.row_count) / count
        sides.append(side - mean[row])
    spread = float(np.sqrt((sides[0] ** 2).sum() * (sides[1] ** 2).sum()))
    return float((sides[0] * sides[1]).sum()) / spread if spread else 1.0
