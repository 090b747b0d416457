"""GPU kernel (Pallas by way of Triton): keys stream by, and each query keeps those that may still be among its best.

A candidate is a key whose score is above the query's threshold. Candidates queue up in memory, ascending; when they
fill the queue, the best k stay and the threshold rises to the lowest of them: a later key that ties with it loses, as
the rule wants. Of T keys with random scores some k · ln(T / k) become candidates, so that a queue of 2 k is pruned
ln(T / k) times; with rising scores T / k times.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu import gather, sharers, want_float8
from pallas_kernels.index_select.reference import LOWEST, ranks
from pallas_kernels.products import product

KEYS = 128  # scored at once
COLUMNS = {2: 128, 4: 32}  # heads of all queries of a program, by the bytes of a key's entry
LARGEST = 2048  # top_k: a queue has twice that, and registers hold what a program prunes
LEAST = 4096  # keys of a program where several share a block's
MERGED = 8  # programs whose candidates are merged at once
PARAMETERS = plt.CompilerParams(num_warps=8, num_stages=3)


def index_select(q, w, k, first, last, top_k: int, k_scale=None, interpret: bool = False):
    """See `pallas_kernels.index_select.index_select`."""
    keys = k.shape[1]

    def rows(refs, of, key):
        return of * keys + key

    return _select(q, w, k.reshape(-1, k.shape[-1]), k_scale, [], rows, first, last, top_k, keys, interpret)


def index_select_paged(q, w, pages, table, first, last, top_k: int, page_scale=None, interpret: bool = False):
    """See `pallas_kernels.index_select.index_select_paged`."""
    entries, page = table.shape[1], pages.shape[1]

    def rows(refs, of, key):
        (table_ref,) = refs
        return table_ref[of * entries + key // page] * page + key % page

    flat = pages.reshape(-1, pages.shape[-1])
    return _select(q, w, flat, page_scale, [table.reshape(-1)], rows, first, last, top_k, entries * page, interpret)


def _select(q, w, k, k_scale, more, rows, first, last, top_k, keys, interpret):
    """`rows(refs of more, sequence, key)` tells where in k a sequence's key lies."""
    if k.dtype == jnp.float8_e4m3fn:
        want_float8("index_select")
    kind = jnp.dtype(jnp.bfloat16 if k.dtype == jnp.float8_e4m3fn else k.dtype)  # holds float8 exactly
    batch, queries, heads, width = q.shape
    most = COLUMNS.get(kind.itemsize, 0)
    if width < 16 or width & (width - 1) or heads > most or top_k > LARGEST:
        raise NotImplementedError(
            f"index_select on GPU wants a power of two of index features from 16, at most {COLUMNS[2]} heads "
            f"({COLUMNS[4]} in float32) and top_k up to {LARGEST}; got {width}, {heads} in {k.dtype} and {top_k}"
        )
    columns = max(16, pl.next_power_of_2(heads))
    block = min(most // columns, pl.next_power_of_2(queries))
    blocks = pl.cdiv(queries, block)
    kept = max(KEYS, pl.next_power_of_2(top_k))
    splits = sharers(batch * blocks, keys, LEAST)

    def by_block(a, *pad):
        a = jnp.pad(a, [(0, 0), (0, blocks * block - queries), *pad])
        return a.reshape(batch * blocks, block, *a.shape[2:])

    heads_to = (0, columns - heads)
    q = by_block(q.astype(kind), heads_to, (0, 0)).reshape(batch * blocks, block * columns, width)
    w = by_block(w.astype(jnp.float32), heads_to).reshape(batch * blocks, block * columns)
    first, last = by_block(first), by_block(jnp.minimum(last, keys))
    scales = [] if k_scale is None else [k_scale.reshape(-1)]

    def kernel(q_ref, w_ref, first_ref, last_ref, k_ref, *refs):
        *refs, queue_rank_ref, queue_key_ref, rank_ref, key_ref, count_ref = refs
        scale_ref = refs.pop(0) if scales else None
        program, split = pl.program_id(0), pl.program_id(1)
        first, last = first_ref[program, :], last_ref[program, :]
        begin, end = jnp.min(first), jnp.max(last)
        span = pl.cdiv(pl.cdiv(jnp.maximum(end - begin, 0), splits), KEYS) * KEYS
        begin = begin + split * span
        end = jnp.minimum(begin + span, end)
        q, w = q_ref[program, :, :], w_ref[program, :]

        def barrier():
            if not interpret:
                plt.debug_barrier()

        def prune(query, fill, to_rank_ref, to_key_ref):
            """The best top_k of a query's queue, to the start of what may be the queue itself; their threshold."""
            place = jnp.arange(2 * kept)
            rank = jnp.where(place < fill, queue_rank_ref[program, split, query, place], LOWEST)
            threshold, stays, target = best(rank, jnp.minimum(fill, top_k))
            key = queue_key_ref[program, split, query, place]
            barrier()  # all is read before any of it is written over
            at = program, split, query, jnp.where(stays, target, 2 * kept)
            plt.store(to_rank_ref.at[at], rank, mask=stays)
            plt.store(to_key_ref.at[at], key, mask=stays)
            barrier()
            return threshold

        def prune_full(query, carry):
            threshold, fill = carry
            mine = jnp.arange(block) == query
            held = jnp.sum(jnp.where(mine, fill, 0))

            def pruned():
                lowest = prune(query, held, queue_rank_ref, queue_key_ref)
                return jnp.where(mine, lowest, threshold), jnp.where(mine, top_k, fill)

            return jax.lax.cond(held > 2 * kept - KEYS, pruned, lambda: (threshold, fill))

        def step(i, carry):
            threshold, fill = carry
            key = begin + i * KEYS + jnp.arange(KEYS)
            row = rows(refs, program // blocks, jnp.minimum(key, end - 1))
            tile = gather(k_ref, row).astype(kind)
            dots = jnp.maximum(product(tile, q, (1, 1)), 0) * w[None, :]
            score = jnp.sum(dots.reshape(KEYS, block, columns), axis=2)
            if scale_ref is not None:
                score = score * scale_ref[row][:, None]
            key = key[:, None]
            seen = (key >= first[None, :]) & (key < jnp.minimum(last, end)[None, :])
            rank = jnp.where(seen, ranks(score), LOWEST)
            hit = rank > threshold[None, :]
            place = fill[None, :] + jnp.cumsum(hit.astype(jnp.int32), axis=0) - 1
            at = program, split, jnp.arange(block)[None, :], jnp.where(hit, place, 2 * kept)
            plt.store(queue_rank_ref.at[at], rank, mask=hit)
            plt.store(queue_key_ref.at[at], jnp.broadcast_to(key, hit.shape), mask=hit)
            fill = fill + jnp.sum(hit.astype(jnp.int32), axis=0)

            def pruned():
                barrier()
                return jax.lax.fori_loop(0, block, prune_full, (threshold, fill))

            return jax.lax.cond(jnp.max(fill) > 2 * kept - KEYS, pruned, lambda: (threshold, fill))

        nothing = jnp.full(block, LOWEST, jnp.int32), jnp.zeros(block, jnp.int32)
        _, fill = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(end - begin, 0), KEYS), step, nothing)
        barrier()

        def last_time(query, _):
            held = jnp.sum(jnp.where(jnp.arange(block) == query, fill, 0))
            return prune(query, held, rank_ref, key_ref)

        jax.lax.fori_loop(0, block, last_time, jnp.int32(0))
        count_ref[program, split, :] = jnp.minimum(fill, top_k)

    queue, found = ((batch * blocks, splits, block, size) for size in (2 * kept, kept))
    *_, rank, key, count = pl.pallas_call(
        kernel,
        name="index_select",
        grid=(batch * blocks, splits),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (queue, queue, found, found, queue[:-1])],
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(q, w, first, last, k, *scales, *more)
    while rank.shape[1] > 1:
        rank, key, count = _merge(rank, key, count, top_k, interpret)
    count = count.reshape(batch, blocks * block)[:, :queries]
    key = key.reshape(batch, blocks * block, kept)[:, :queries, :top_k]
    return jnp.where(jnp.arange(top_k) < count[..., None], key, 0), count


def best(rank, wanted):
    """The lowest of the `wanted` highest of N ranks, which those are, and each one's place among them.

    Ties go to the lower column; `wanted` is at most the number of ranks above LOWEST.
    """
    count = lambda mask: jnp.sum(mask.astype(jnp.int32))
    running = lambda mask: jnp.cumsum(mask.astype(jnp.int32), axis=0)

    def next_bit(i, threshold):
        higher = threshold + (jnp.int32(1) << (31 - i))
        return jnp.where(count(rank >= higher) >= wanted, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, next_bit, jnp.int32(LOWEST))
    above, tied = rank > threshold, (rank == threshold) & (rank > LOWEST)
    stays = above | (tied & (running(tied) <= wanted - count(above)))
    return threshold, stays, running(stays) - 1


def _merge(rank, key, count, top_k: int, interpret: bool):
    """The best top_k of the candidates [N,Z,R,kept] of each `MERGED` programs, in their order: [N,Z/MERGED,R,kept]."""
    number, splits, block, kept = rank.shape
    together = min(MERGED, splits)

    def kernel(rank_ref, key_ref, count_ref, to_rank_ref, to_key_ref, to_count_ref):
        program, group, query = (pl.program_id(axis) for axis in range(3))
        column = jnp.arange(together * kept)
        at = program, group * together + column // kept, query, column % kept
        fill = count_ref[program, group * together + column // kept, query]
        rank = jnp.where(column % kept < fill, rank_ref[at], LOWEST)
        wanted = jnp.minimum(jnp.sum((rank > LOWEST).astype(jnp.int32)), top_k)
        _, stays, target = best(rank, wanted)
        to = program, group, query, jnp.where(stays, target, kept)
        plt.store(to_rank_ref.at[to], rank, mask=stays)
        plt.store(to_key_ref.at[to], key_ref[at], mask=stays)
        to_count_ref[program, group, query] = wanted

    merged = (number, splits // together, block, kept)
    return pl.pallas_call(
        kernel,
        name="index_select_merge",
        grid=merged[:-1],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (merged, merged, merged[:-1])],
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(rank, key, count)
