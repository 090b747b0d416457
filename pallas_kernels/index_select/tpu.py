"""Mosaic kernel: a block of queries scores all keys into VMEM, selects there, and writes key numbers alone.

Scores. A block of queries visits the keys tile by tile. Keys are what the matrix unit holds still; the rows that pass
are 16 queries × J heads, so that one push of keys serves them all, and relu, weight and sum over heads are three vector
operations per result. A score is kept as an int32 that orders as it does (its rank).

Selection. The k-th highest rank of each query by bisection over its bits, 32 counting passes at most, fewer once
each of eight queries has exactly its k. Only where ranks tie at the threshold, a bisection over columns finds where the
lower ones end.

Key numbers. A matrix product with powers of two packs the mask into words of 16 keys, another counts. Each output slot
then looks for its word among 128 lanes by bisection (a gather within a register), and for its bit within the word.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select.reference import LOWEST
from pallas_kernels.index_select.reference import ranks as rank_of

LANES = 128
WORD = 16  # keys per word: sums of their powers of two stay exact in bfloat16 products with float32 sums
CHUNK = LANES * WORD  # keys whose words fill one row of lanes
THRESHOLD, END = range(2)  # of the state: a number per query, repeated over the lanes
RANKS_BYTES = 32 << 20  # of VMEM that a block's ranks may take
TOGETHER = 16  # queries per matrix product: a packed tile of bfloat16


def index_select(q, w, k, first, last, top_k: int, *, interpret=False):
    """See `pallas_kernels.index_select.index_select`. bfloat16 or float32, X a multiple of 128."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    if width % LANES:
        raise NotImplementedError(f"index_select on tpu wants a head width that is a multiple of {LANES}, got {width}")
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype != q.dtype:
        raise NotImplementedError(f"index_select on tpu takes bfloat16 or float32 q and k, got {q.dtype} and {k.dtype}")
    keys_padded = -(-keys // CHUNK) * CHUNK
    block = query_block(queries, keys_padded)
    slots = -(-top_k // LANES) * LANES
    together = min(TOGETHER, block)

    pad = lambda a, size, value=0: jnp.pad(
        a, [(0, 0), (0, -a.shape[1] % size)] + [(0, 0)] * (a.ndim - 2), constant_values=value
    )
    q, w, first, last = (pad(a, block) for a in (q, w, first, last))
    k = pad(k, CHUNK)
    padded = q.shape[1]
    # Rows in the order in which they pass: the queries of one product, head by head.
    q = q.reshape(batch, padded // together, together, heads, width).swapaxes(2, 3)
    q = q.reshape(batch, padded // together, heads * together, width)
    seen = jnp.stack([first, jnp.minimum(last, keys)], axis=-1).astype(jnp.int32)

    grid = (batch, padded // block, keys_padded // CHUNK)
    kernel = functools.partial(_kernel, top_k=top_k, heads=heads, together=together)
    index, count = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((1, block // together, heads * together, width), lambda b, s, t: (b, s, 0, 0)),
            pl.BlockSpec((1, block, heads), lambda b, s, t: (b, s, 0)),
            pl.BlockSpec((1, CHUNK, width), lambda b, s, t: (b, t, 0)),
            pl.BlockSpec((1, block, 2), lambda b, s, t: (b, s, 0)),
            pl.BlockSpec((CHUNK, LANES), lambda b, s, t: (0, 0)),
        ],
        out_specs=[
            pl.BlockSpec((1, block, slots), lambda b, s, t: (b, s, 0)),
            pl.BlockSpec((1, block, LANES), lambda b, s, t: (b, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded, slots), jnp.int32),
            jax.ShapeDtypeStruct((batch, padded, LANES), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((block, keys_padded), jnp.int32), pltpu.VMEM((2, block, LANES), jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=RANKS_BYTES + (24 << 20)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * padded * keys_padded * heads * width,
            bytes_accessed=q.size * q.dtype.itemsize
            + k.size * k.dtype.itemsize * grid[1]
            + 4 * batch * padded * (heads + slots),
            transcendentals=0,
        ),
        interpret=interpret,
        name="index_select",
    )(q, w.astype(jnp.float32), k, seen, _powers())
    return index[:, :queries, :top_k], count[:, :queries, 0]


def query_block(queries: int, keys: int) -> int:
    """Queries whose ranks fit in VMEM together: 128 at most, 8 at least."""
    fit = RANKS_BYTES // (4 * keys)
    if fit < 8:
        raise NotImplementedError(f"index_select on tpu keeps the ranks of 8 queries in VMEM: not for {keys} keys")
    return min(128, 1 << fit.bit_length() - 1, max(8, 1 << (queries - 1).bit_length()))


def _powers() -> jax.Array:
    """[CHUNK, LANES]: key t of a chunk adds 2^(t mod 16) to word t // 16."""
    key, word = jnp.arange(CHUNK)[:, None], jnp.arange(LANES)
    return jnp.where(key // WORD == word, 2.0 ** (key % WORD), 0.0).astype(jnp.bfloat16)


def _kernel(q, w, k, seen, powers, index, count, ranks, state, *, top_k, heads, together):
    step, steps = pl.program_id(2), pl.num_programs(2)
    _score(q, w, k, seen, ranks, step, heads=heads, together=together)

    @pl.when(step == steps - 1)
    def _():
        _threshold(ranks, state, top_k)
        _emit(ranks, state, powers, index, count)


def _score(q, w, k, seen, ranks, step, *, heads, together):
    """Ranks of a block's queries against one chunk of keys."""
    block = w.shape[1]
    column = step * CHUNK + jax.lax.broadcasted_iota(jnp.int32, (together, CHUNK), 1)
    exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    keys = k[0]

    def some_queries(g, _):
        rows = pl.ds(pl.multiple_of(g * together, together), together)
        dots = jax.lax.dot_general(
            q[0, g], keys, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
        )
        weight, total = w[0, rows], jnp.zeros((together, CHUNK), jnp.float32)
        for head in range(heads):
            dot = jnp.maximum(dots[head * together : (head + 1) * together], 0)
            total = total + dot * weight[:, head : head + 1]
        visible = (seen[0, rows, 0:1] <= column) & (column < seen[0, rows, 1:2])
        ranks[rows, pl.ds(pl.multiple_of(step * CHUNK, CHUNK), CHUNK)] = jnp.where(visible, rank_of(total), LOWEST)
        return 0

    jax.lax.fori_loop(0, block // together, some_queries, 0)


def _threshold(ranks, state, top_k):
    """The rank that each query's best keys reach, and the column below which ties with it count.

    Eight queries at a time, the sublanes of a register: the fewer wait for each other, the sooner they are done.
    """
    block, keys = ranks.shape

    def eight(g, _):
        rows = pl.ds(pl.multiple_of(g * 8, 8), 8)
        count = functools.partial(_count, ranks, rows)
        visible = count(lambda rank, _: rank > LOWEST)
        wanted = jnp.minimum(visible, top_k)

        def next_bit(carry):
            bit, threshold, reach = carry
            higher = threshold + jax.lax.shift_left(jnp.int32(1), bit)
            reach_higher = count(lambda rank, _: rank >= higher)
            holds = (reach_higher >= wanted) & (reach > wanted)
            return bit - 1, jnp.where(holds, higher, threshold), jnp.where(holds, reach_higher, reach)

        unfinished = lambda carry: (carry[0] >= 0) & (jnp.max(carry[2] - wanted) > 0)
        # A query that sees top_k keys or fewer takes all: they reach the lowest rank but one.
        lowest = jnp.where(visible <= top_k, LOWEST + 1, LOWEST)
        _, threshold, reach = jax.lax.while_loop(unfinished, next_bit, (jnp.int32(31), lowest, visible))
        state[THRESHOLD, rows] = threshold
        state[END, rows] = jnp.full_like(threshold, keys)

        @pl.when(jnp.max(reach - wanted) > 0)
        def _():
            left = wanted - count(lambda rank, _: rank > threshold)

            def next_column_bit(i, end):
                higher = end + jax.lax.shift_left(jnp.int32(1), keys.bit_length() - 1 - i)
                ties = count(lambda rank, column: (rank == threshold) & (column < higher))
                return jnp.where(ties <= left, higher, end)

            state[END, rows] = jax.lax.fori_loop(0, keys.bit_length(), next_column_bit, jnp.zeros_like(left))

        return 0

    jax.lax.fori_loop(0, block // 8, eight, 0)


def _count(ranks, rows, hit):
    """Of eight queries, how many ranks of each `hit` (given ranks and columns [8, 128]); repeated over the lanes."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)

    keys = ranks.shape[1]
    stride = next(size for size in (4 * CHUNK, 2 * CHUNK, CHUNK) if keys % size == 0)

    def some_keys(c, sums):
        start = pl.multiple_of(c * stride, stride)
        some = ranks[rows, pl.ds(start, stride)]  # one address: computing one per register would cost more than it
        for i in range(0, stride, LANES):
            found = hit(some[:, i : i + LANES], start + i + lane).astype(jnp.int32)
            sums = (*sums[1:], sums[0] + found)  # sums in turn, so that additions do not wait for each other
        return sums

    sums = jax.lax.fori_loop(0, keys // stride, some_keys, (jnp.zeros((8, LANES), jnp.int32),) * 4)
    return jnp.broadcast_to(jnp.sum(sum(sums), axis=1, keepdims=True), (8, LANES))


def _emit(ranks, state, powers, index, count):
    """Writes the selected columns in ascending order, and how many there are."""
    block, keys = ranks.shape
    index[...] = jnp.zeros_like(index)
    threshold, end = state[THRESHOLD, :, 0:1], state[END, :, 0:1]
    lane = jax.lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    up_to = jax.lax.broadcasted_iota(jnp.int32, ones.shape, 0) <= jax.lax.broadcasted_iota(jnp.int32, ones.shape, 1)
    up_to = jnp.where(up_to, 1.0, 0.0).astype(jnp.bfloat16)

    def product(a, b):
        """Exact: whole numbers of 8 bits at most in bfloat16, their sums below 2^24."""
        a, one_pass = a.astype(jnp.bfloat16), jax.lax.Precision.DEFAULT
        return jnp.dot(a, b, precision=one_pass, preferred_element_type=jnp.float32).astype(jnp.int32)

    def chunk(c, before):
        start = pl.multiple_of(c * CHUNK, CHUNK)
        rank = ranks[:, pl.ds(start, CHUNK)]
        column = start + jax.lax.broadcasted_iota(jnp.int32, (block, CHUNK), 1)
        chosen = (rank > threshold) | ((rank == threshold) & (column < end))
        word = product(jnp.where(chosen, 1.0, 0.0), powers[...])
        of_word = jax.lax.population_count(word).astype(jnp.float32)
        reached = before + product(of_word, up_to)  # how many are chosen up to each word
        after = before + product(of_word, ones)
        for top in range(0, block, 8):
            rows = slice(top, top + 8)
            words, reach, base, stop = word[rows], reached[rows], before[rows], after[rows]
            gather = lambda a, i: jnp.take_along_axis(a, i, axis=1, mode="promise_in_bounds")

            def slots(v, _, rows=rows, words=words, reach=reach, base=base, stop=stop, gather=gather):
                slot = v * LANES + lane
                place = jnp.zeros_like(lane)  # of the slot's word: how many words end at the slot or before it
                for bit in (64, 32, 16, 8, 4, 2, 1):
                    place = jnp.where(gather(reach, place + bit - 1) <= slot, place + bit, place)
                bits = gather(words, place)
                nth = slot - gather(reach, place) + jax.lax.population_count(bits)
                found = (c * LANES + place) * WORD
                for half in (8, 4, 2, 1):
                    low = bits & ((1 << half) - 1)
                    ahead = jax.lax.population_count(low)
                    beyond = nth >= ahead
                    found = jnp.where(beyond, found + half, found)
                    bits = jnp.where(beyond, bits >> half, low)
                    nth = jnp.where(beyond, nth - ahead, nth)
                to = pl.ds(pl.multiple_of(v * LANES, LANES), LANES)
                index[0, rows, to] = jnp.where((slot >= base) & (slot < stop), found, index[0, rows, to])
                return 0

            # Rows stand at different slots: all registers of slots that one of the eight reaches in this chunk.
            jax.lax.fori_loop(jnp.min(base) >> 7, (jnp.max(stop) + LANES - 1) >> 7, slots, 0)
        return after

    count[0] = jax.lax.fori_loop(0, keys // CHUNK, chunk, jnp.zeros((block, LANES), jnp.int32))
