"""Selection of eight queries whose ranks lie in VMEM, a query per sublane: what the TPU kernels share.

Threshold. The rank that a query's best keys reach: passes that count the ranks at or above a guess. A normal
distribution with the mean and deviation of every 16th key gives the first guess, then the logarithm of the count is
interpolated between what is known below and above; bisection of the ranks bounds what interpolation cannot. From pass
14 on a bound moves to the nearest rank that exists, so that few distinct scores are few passes. Only where
ranks tie at the threshold, a bisection over columns finds where the lower ones end.

Key numbers. One bit per key: 128 registers of 128 keys give four words per lane, and 32 x 32 bit transposes across
lanes put keys in order, 128 to a lane. A matrix product counts what is chosen up to each lane. Each output slot then
looks for its lane by bisection (a gather within a register), and for its bit within the lane's words.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select.reference import LOWEST, ranks

ROWS, LANES = 8, 128  # of a register
WORD, WORDS = 32, 4  # bits of a word, words of a lane
STEP = LANES * WORDS
SPAN = LANES * WORDS * WORD  # keys per turn of a loop, whose bits fill the lanes of four registers
REACH_SPANS = 4  # whose words are counted by one product
SLOT_REGISTERS = 2  # of output, per turn
SAMPLE = 16  # of so many ranks one is looked at for the first guess
SNAP, BISECT = 14, 16  # passes from which bounds move to ranks that exist, and every other pass bisects
HIGHEST = jnp.iinfo(jnp.int32).max


def scratch(keys: int) -> list:
    """VMEM for the bits of eight queries, and for what is chosen up to each lane of them."""
    rows = -(-keys // (SPAN * REACH_SPANS)) * REACH_SPANS * ROWS
    return [pltpu.VMEM((WORDS, rows, LANES), jnp.int32), pltpu.VMEM((rows, LANES), jnp.int32)]


def slots_of(top_k: int) -> int:
    """Output slots per query: whole turns of registers."""
    return -(-top_k // (LANES * SLOT_REGISTERS)) * LANES * SLOT_REGISTERS


def select(rank, rows, spans, visible, top_k, index, count, words, reach):
    """Writes the ascending columns of the top_k best ranks of eight queries into index[rows], their number into count.

    rank [R, keys] int32 holds LOWEST where nothing is visible; `visible` [8, 128] says how many are not, repeated over
    the lanes; the first `spans` times SPAN columns are looked at. Ranks that tie and lose are overwritten.
    """
    wanted = jnp.minimum(visible, top_k)
    threshold, reached = _threshold(rank, rows, spans, visible, wanted)

    @pl.when(jnp.max(reached - wanted) > 0)
    def _():
        _drop_ties(rank, rows, spans, threshold, wanted)

    _pack(rank, rows, spans, threshold, words)
    _emit(rows, spans, wanted, index, words, reach)
    count[rows] = wanted


def _lanes(width: int = LANES):
    return jax.lax.broadcasted_iota(jnp.int32, (ROWS, width), 1)


def _over_lanes(reduce, a):
    return jnp.broadcast_to(reduce(a, axis=1, keepdims=True), (ROWS, LANES))


def _wide(a):
    """Repeated over the lanes of as many registers as one step takes."""
    return jnp.broadcast_to(a[:, :1], (ROWS, STEP))


def _fold(rank, rows, spans, begin: tuple, step, every: int = 1):
    """`step(so far, ranks [8, 512], columns)` over the ranks: four registers, so that none waits for another."""
    column = _lanes(STEP)

    def span(i, so_far):
        start = pl.multiple_of(i * SPAN, SPAN)
        some = rank[rows, pl.ds(start, SPAN)]  # one address: computing one per register would cost more than it
        for at in range(0, SPAN, STEP * every):
            so_far = step(so_far, some[:, at : at + STEP], start + at + column)
        return so_far

    return jax.lax.fori_loop(0, spans, span, begin)


def _count(rank, rows, spans, hit):
    """How many ranks of each query `hit`, given ranks and columns; repeated over the lanes."""
    step = lambda so_far, some, column: so_far + hit(some, column).astype(jnp.int32)
    return _over_lanes(jnp.sum, _fold(rank, rows, spans, jnp.zeros((ROWS, STEP), jnp.int32), step))


def _neighbours(rank, rows, spans, guess):
    """How many ranks reach the guess, the lowest that does, the highest that does not."""
    whole = lambda value: jnp.full((ROWS, STEP), value, jnp.int32)
    guess = _wide(guess)

    def step(so_far, some, _):
        reaches, (count, above, below) = some >= guess, so_far
        above = jnp.minimum(above, jnp.where(reaches, some, HIGHEST))
        return count + reaches.astype(jnp.int32), above, jnp.maximum(below, jnp.where(reaches, LOWEST, some))

    found = _fold(rank, rows, spans, (whole(0), whole(HIGHEST), whole(LOWEST)), step)
    return tuple(map(_over_lanes, (jnp.sum, jnp.min, jnp.max), found))


def _value(rank):
    """The float32 score of a rank."""
    return jax.lax.bitcast_convert_type(jnp.where(rank < 0, rank ^ jnp.int32(0x7FFFFFFF), rank), jnp.float32)


def _moments(rank, rows, spans):
    """Mean, deviation, lowest and highest score of a sample of the visible keys."""
    whole = lambda value: jnp.full((ROWS, STEP), value, jnp.float32)

    def step(so_far, some, _):
        count, total, square, low, high = so_far
        seen, value = some > LOWEST, _value(some)
        value = jnp.where(seen, value, 0)
        low, high = jnp.where(seen, jnp.minimum(low, value), low), jnp.where(seen, jnp.maximum(high, value), high)
        return count + seen.astype(jnp.float32), total + value, square + value * value, low, high

    found = _fold(rank, rows, spans, (*map(whole, (0, 0, 0, jnp.inf, -jnp.inf)),), step, SAMPLE)
    count, total, square, low, high = map(_over_lanes, (jnp.sum, jnp.sum, jnp.sum, jnp.min, jnp.max), found)
    count = jnp.maximum(count, 1)
    mean = total / count
    return mean, jnp.sqrt(jnp.maximum(square / count - mean * mean, 0)), low, high


def _normal_quantile(share):
    """z that a share of a standard normal exceeds, to 3e-3 (Abramowitz and Stegun, 26.2.22)."""
    t = jnp.sqrt(-2 * jnp.log(jnp.maximum(jnp.minimum(share, 1 - share), 1e-9)))
    z = t - (2.30753 + 0.27061 * t) / (1 + 0.99229 * t + 0.04481 * t * t)
    return jnp.where(share < 0.5, z, -z)


class _Bound(NamedTuple):
    """One end of where a threshold may lie: [8, 128] each."""

    rank: jax.Array
    reached: jax.Array  # how many ranks reach it
    exists: jax.Array  # below: it is a rank of the query's; above: the rank under it is
    score: jax.Array  # to interpolate from, with the logarithm of how many reach it
    log: jax.Array
    weight: jax.Array


def _threshold(rank, rows, spans, visible, wanted):
    """The highest rank that `wanted` ranks or more of each query reach, or one that exactly so many reach; how many."""
    mean, deviation, low, high = _moments(rank, rows, spans)
    log = lambda count: jnp.log(jnp.maximum(count.astype(jnp.float32), 0.5))
    goal, no, one = log(wanted), jnp.zeros_like(wanted), jnp.ones_like(mean)
    first = ranks(mean + deviation * _normal_quantile(wanted / jnp.maximum(visible, 1)))
    # Interpolation starts between scores of the sample; what they reach is a guess until a pass has counted it.
    tail = 2 * wanted < visible
    lo = _Bound(
        no + LOWEST + 1, visible, no, jnp.where(tail, mean, low), log(jnp.where(tail, visible >> 1, visible)), one
    )
    hi = _Bound(no + HIGHEST, no, no, high, log(one * (SAMPLE / 2)), one)

    def next_guess(passes, lo, hi):
        left, right = (lo.log - goal) * lo.weight, (goal - hi.log) * hi.weight
        guess = ranks(lo.score + left / jnp.maximum(left + right, 1e-30) * (hi.score - lo.score))
        guess = jnp.where(passes == 0, first, guess)
        middle = (lo.rank >> 1) + (hi.rank >> 1) + (lo.rank & hi.rank & 1)
        guess = jnp.where((passes >= BISECT) & (passes % 2 == 0), middle, guess)
        guess = jnp.where((lo.exists > 0) & (lo.reached == wanted + 1), lo.rank + 1, guess)
        guess = jnp.where((hi.exists > 0) & (hi.reached == wanted - 1), hi.rank - 1, guess)
        return jnp.where(finished(lo, hi), lo.rank, jnp.clip(guess, lo.rank + 1, hi.rank - 1))

    def moved(lo, hi, side, reached, least, most, snapped):
        """The bound on the guess's side moves; when it does so again, the other's weight is halved (Illinois)."""
        up = reached >= wanted
        lo_weight = jnp.where(up | (side >= 0), 1, lo.weight * 0.5)
        hi_weight = jnp.where(up & (side > 0), hi.weight * 0.5, 1)
        new = lambda rank, weight: _Bound(rank, reached, no + snapped, _value(rank), log(reached), weight)
        pick = lambda where, new, old: jax.tree.map(functools.partial(jnp.where, where), new, old)
        lo, hi = lo._replace(weight=lo_weight), hi._replace(weight=hi_weight)
        return pick(up, new(least, lo_weight), lo), pick(up, hi, new(most, hi_weight)), jnp.where(up, 1, no - 1)

    def finished(lo, hi):
        return (lo.reached == wanted) | (hi.rank == lo.rank + 1)

    def counting(state):
        passes, lo, hi, side = state
        guess = next_guess(passes, lo, hi)
        reached = _count(rank, rows, spans, functools.partial(lambda guess, some, _: some >= guess, _wide(guess)))
        return passes + 1, *moved(lo, hi, side, reached, guess, guess, 0)

    def snapping(state):
        passes, lo, hi, side = state
        reached, least, most = _neighbours(rank, rows, spans, next_guess(passes, lo, hi))
        return passes + 1, *moved(lo, hi, side, reached, least, most + 1, 1)

    unfinished = lambda state: jnp.min(finished(*state[1:3]).astype(jnp.int32)) == 0
    state = jnp.int32(0), lo, hi, no
    state = jax.lax.while_loop(lambda state: (state[0] < SNAP - 1) & unfinished(state), counting, state)
    _, lo, _, _ = jax.lax.while_loop(unfinished, snapping, state)
    return lo.rank, lo.reached


def _drop_ties(rank, rows, spans, threshold, wanted):
    """Makes invisible what equals the threshold beyond the columns that are still wanted."""
    threshold, bits = _wide(threshold), rank.shape[1].bit_length()
    left = wanted - _count(rank, rows, spans, lambda some, _: some > threshold)

    def next_bit(i, end):
        higher = end + jax.lax.shift_left(jnp.int32(1), bits - 1 - i)
        before = _wide(higher)
        ties = _count(rank, rows, spans, lambda some, column: (some == threshold) & (column < before))
        return jnp.where(ties <= left, higher, end)

    end = _wide(jax.lax.fori_loop(0, bits, next_bit, jnp.zeros_like(left)))

    def some_keys(i, _):
        start = pl.multiple_of(i * STEP, STEP)
        some = rank[rows, pl.ds(start, STEP)]
        loses = (some == threshold) & (start + _lanes(STEP) >= end)
        rank[rows, pl.ds(start, STEP)] = jnp.where(loses, LOWEST, some)
        return 0

    jax.lax.fori_loop(0, spans * (SPAN // STEP), some_keys, 0)


def _gather(a, lane):
    return jnp.take_along_axis(a, lane, axis=1, mode="promise_in_bounds")


def _rows(at):
    return pl.ds(pl.multiple_of(at * ROWS, ROWS), ROWS)


def _int32(bits: int):
    return jnp.int32(bits - (1 << 32) if bits >> 31 else bits)


def _pack(rank, rows, spans, threshold, words):
    """A bit per key that reaches the threshold: lane p of a span's word a holds its keys 128p + 32a and 31 more."""
    reached = _wide(threshold)

    def span(i, before):
        _turn(before, jnp.maximum(i - 1, 0), words)  # beside the comparisons, since its gathers are a chain
        some = rank[rows, pl.ds(pl.multiple_of(i * SPAN, SPAN), SPAN)]
        columns = jnp.zeros((ROWS, STEP), jnp.int32)  # words of keys that are 512 apart
        for bit in range(WORD):
            columns |= jnp.where(some[:, bit * STEP : (bit + 1) * STEP] >= reached, _int32(1 << bit), 0)
        return columns

    _turn(jax.lax.fori_loop(0, spans, span, jnp.zeros((ROWS, STEP), jnp.int32)), jnp.maximum(spans - 1, 0), words)


def _turn(columns, i, words):
    """From words of keys that are 512 apart to words of keys in a row."""
    lane, turned = _lanes(), []
    for n in range(WORDS):
        word = columns[:, n * LANES : (n + 1) * LANES]
        # Rows and columns of 32 x 32 bits change places: halves, then quarters, down to single bits.
        for side in (16, 8, 4, 2, 1):
            low = _int32(sum(1 << bit for bit in range(WORD) if not bit & side))
            other = _gather(word, lane ^ side)
            from_above = (word & low) | jax.lax.shift_left(other & low, jnp.int32(side))
            from_below = (word & ~low) | (jax.lax.shift_right_logical(other, jnp.int32(side)) & low)
            word = jnp.where((lane & side) == 0, from_above, from_below)
        turned.append(word)
    # Lane 32a + b of the n-th now holds word a of the 128 keys 4b + n.
    for a in range(WORDS):
        of_lane = [_gather(word, a * WORD + (lane >> 2)) for word in turned]
        word = of_lane[0]
        for n in range(1, WORDS):
            word = jnp.where((lane & 3) == n, of_lane[n], word)
        words[a, _rows(i)] = word


def _first_beyond(reach, slot, among: int):
    """The first lane, of the first `among`, whose count goes beyond the slot; the last of them where none does."""
    place = jnp.zeros_like(slot)
    for bit in range((among - 1).bit_length() - 1, -1, -1):
        place = jnp.where(_gather(reach, place + (1 << bit) - 1) <= slot, place + (1 << bit), place)
    return place


def _reach(spans, words, reach):
    """How many keys are chosen up to each lane of each span; up to each span, a span per lane."""
    lane, size = _lanes(), REACH_SPANS * ROWS
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, (LANES, LANES))
    up_to = jnp.where(iota(0) <= iota(1), 1.0, 0.0).astype(jnp.bfloat16)
    row = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)

    def some_spans(i, carry):
        base, stops = carry
        at = pl.multiple_of(i * size, size)
        each = sum(jax.lax.population_count(words[a, pl.ds(at, size)]) for a in range(WORDS))
        written = i * REACH_SPANS + (row >> ROWS.bit_length() - 1) < spans
        # Exact: whole numbers up to 128 in bfloat16, their sums below 2^24.
        each = jnp.where(written, each, 0).astype(jnp.float32).astype(jnp.bfloat16)
        within = jnp.dot(each, up_to, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
        within = within.astype(jnp.int32)
        for n in range(REACH_SPANS):
            here = base + within[n * ROWS : (n + 1) * ROWS]
            reach[_rows(i * REACH_SPANS + n)] = here
            base = _gather(here, jnp.full_like(lane, LANES - 1))
            stops = jnp.where(lane == i * REACH_SPANS + n, base, stops)
        return base, stops

    none = jnp.zeros_like(lane)
    turns = (spans + REACH_SPANS - 1) >> REACH_SPANS.bit_length() - 1
    return jax.lax.fori_loop(0, turns, some_spans, (none, none + HIGHEST))[1]


def _emit(rows, spans, wanted, index, words, reach):
    """Writes the numbers of the keys whose bits are set."""
    stops, lane = _reach(spans, words, reach), _lanes()
    most = reach.shape[0] // ROWS
    none = jnp.zeros_like(lane)

    def slots(v, _):
        slot = [(v * SLOT_REGISTERS + u) * LANES + lane for u in range(SLOT_REGISTERS)]
        of_span = [_first_beyond(stops, its, most) for its in slot]
        live = [its < wanted for its in slot]
        ends = lambda join, absent: functools.reduce(
            join, [jnp.where(alive, its, absent) for alive, its in zip(live, of_span, strict=True)]
        )

        def span(i, so_far):
            word, up_to, found = [words[a, _rows(i)] for a in range(WORDS)], reach[_rows(i)], []
            for its_slot, its_span, so in zip(slot, of_span, so_far, strict=True):
                place = _first_beyond(up_to, its_slot, LANES)
                new = place, _gather(up_to, place), *(_gather(each, place) for each in word)
                found.append(tuple(jnp.where(its_span == i, *pair) for pair in zip(new, so, strict=True)))
            return found

        begin = [(none,) * (2 + WORDS)] * SLOT_REGISTERS
        found = jax.lax.fori_loop(jnp.min(ends(jnp.minimum, LANES)), jnp.max(ends(jnp.maximum, -1)) + 1, span, begin)
        for u, (place, stop, *word) in enumerate(found):
            key = _nth_key(of_span[u] * SPAN + place * LANES, word, stop - slot[u])
            at = pl.ds(pl.multiple_of((v * SLOT_REGISTERS + u) * LANES, LANES), LANES)
            index[rows, at] = jnp.where(live[u], key, 0)
        return 0

    jax.lax.fori_loop(0, index.shape[1] // (LANES * SLOT_REGISTERS), slots, 0)


def _nth_key(key, word, back):
    """The key, of 128 from `key` on, whose set bit in the four words is the `back`-th from the end."""
    one, two, three, four = (jax.lax.population_count(bits) for bits in word)
    nth = one + two + three + four - back
    third = nth >= one + two
    nth, key = jnp.where(third, nth - one - two, nth), jnp.where(third, key + 2 * WORD, key)
    first, (low, high) = jnp.where(third, three, one), (jnp.where(third, word[2 + i], word[i]) for i in range(2))
    second = nth >= first
    nth, key, bits = (
        jnp.where(second, nth - first, nth),
        jnp.where(second, key + WORD, key),
        jnp.where(second, high, low),
    )
    for half in (16, 8, 4, 2, 1):
        low = bits & jnp.int32((1 << half) - 1)
        ahead = jax.lax.population_count(low)
        beyond = nth >= ahead
        key, nth = jnp.where(beyond, key + half, key), jnp.where(beyond, nth - ahead, nth)
        bits = jnp.where(beyond, jax.lax.shift_right_logical(bits, jnp.int32(half)), low)
    return key
