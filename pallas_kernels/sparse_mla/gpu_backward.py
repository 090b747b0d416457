"""GPU kernels of the gradient: queries' cotangents, what each query adds to its rows, and the sum of that in order.

Rows are shared between queries, and atomic additions would come in another order each run. So a query leaves its
contributions as they are, [K, C + R] in float32, for a block of queries at a time, and a program that owns some keys
adds up those of the block's queries, first to last.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.blocks import in_blocks
from pallas_kernels.gpu import LOG2_E, by_key, gather, shared_memory
from pallas_kernels.products import product
from pallas_kernels.sparse_mla.gpu import Tiling, check, pad_heads, tiling

CONTRIBUTIONS = 1 << 27  # values of queries' contributions that exist at once
HEADS = {227: 64, 163: 32, 99: 16}  # of a program, whose q and d_out stay in as much shared memory, in KiB
COLUMNS = 256  # of a row's features that are added up at once
ROWS = 64  # of a query whose contributions a program computes
OWNED = 16  # keys of a program that adds up


def backward(
    q_latent,
    q_rope,
    latent,
    rope,
    index,
    count,
    out,
    logsumexp,
    d_out,
    d_logsumexp,
    scale: float,
    interpret: bool = False,
):
    """Cotangents of the first four; `pallas_kernels.sparse_mla.sparse_mla` has the formula."""
    check(q_latent, q_rope, latent.dtype, interpret)
    batch, queries, heads, size = q_latent.shape
    (keys, roped), top_k = rope.shape[1:], index.shape[-1]
    tile = tiling(heads)
    tile = tile._replace(heads=min(tile.heads, HEADS[shared_memory()]))
    by_query, by_row = tile._replace(rows=32), tile._replace(rows=ROWS)
    wide = jnp.float32
    # d_score = p * (d_out . row - shift): of softmax and logsumexp together.
    shift = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_logsumexp
    logsumexp = jnp.where(logsumexp == -jnp.inf, 0, logsumexp)
    block = max(1, min(queries, CONTRIBUTIONS // (batch * top_k * (size + roped))))
    split, join = in_blocks(queries, block)

    def of_block(so_far, inputs):
        q_latent, q_rope, index, count, d_out, logsumexp, shift = inputs
        flat = lambda a: a.reshape(batch * block, *a.shape[2:])
        per_head = lambda a: pad_heads(flat(a), tile.heads)
        queried = per_head(q_latent), per_head(q_rope), per_head(d_out.astype(q_latent.dtype))
        softmax = per_head(logsumexp[..., None])[..., 0], per_head(shift[..., None])[..., 0]
        rows = latent, rope, flat(index), flat(count), block
        weight, d_score = _weights(*queried, *softmax, *rows, scale, by_query, interpret)
        d_q = _of_queries(d_score, *rows, by_row, interpret)
        added = _of_rows(*queried, weight, d_score, flat(count), by_row, interpret)
        # Where among its rows a query has a key, -1 where nowhere.
        places = by_key(jnp.arange(top_k, dtype=jnp.int32), index, count, keys, -1)
        so_far = _add_up(so_far, added, places, interpret)
        back = lambda a: a[:, :heads].reshape(batch, block, heads, a.shape[-1])
        return so_far, tuple(map(back, d_q))

    nothing = jnp.zeros((batch, keys, size), wide), jnp.zeros((batch, keys, roped), wide)
    inputs = tuple(map(split, (q_latent, q_rope, index, count, d_out, logsumexp, shift)))
    (d_latent, d_rope), d_q = jax.lax.scan(of_block, nothing, inputs)
    return *map(join, d_q), d_latent.astype(latent.dtype), d_rope.astype(rope.dtype)


def _weights(
    q_latent, q_rope, d_out, logsumexp, shift, latent, rope, index, count, queries, scale, tile: Tiling, interpret
):
    """Weights p and cotangents of scores, [N,H,K] in q's dtype; anything behind a query's rows."""
    number, heads, _ = q_latent.shape
    keys, top_k, kind = latent.shape[1], index.shape[-1], q_latent.dtype

    def kernel(q_ref, qr_ref, d_out_ref, lse_ref, shift_ref, latent_ref, rope_ref, index_ref, count_ref, *outs):
        program = pl.program_id(0)
        at = pl.ds(pl.program_id(1) * tile.heads, tile.heads)
        end = count_ref[program]
        q, qr, d_out = q_ref[program, at, :], qr_ref[program, at, :], d_out_ref[program, at, :]
        lse, moved = lse_ref[program, at] * LOG2_E, shift_ref[program, at]

        def step(i, carry):
            column = i * tile.rows + jnp.arange(tile.rows)
            row = index_ref[program, jnp.minimum(column, end - 1)] + program // queries * keys
            values = gather(latent_ref, row)
            score = product(q, values, (1, 1)) + product(qr, gather(rope_ref, row), (1, 1))
            weight = jnp.exp2(score * (scale * LOG2_E) - lse[:, None])
            d_score = weight * (product(d_out, values, (1, 1)) - moved[:, None]) * scale
            for ref, value in zip(outs, (weight, d_score), strict=True):
                ref[program, at, pl.ds(i * tile.rows, tile.rows)] = value.astype(kind)
            return carry

        jax.lax.fori_loop(0, pl.cdiv(end, tile.rows), step, jnp.int32(0))

    padded = pl.cdiv(top_k, ROWS) * ROWS
    return pl.pallas_call(
        kernel,
        name="sparse_mla_backward_weights",
        grid=(number, heads // tile.heads),
        out_shape=[jax.ShapeDtypeStruct((number, heads, padded), kind)] * 2,
        compiler_params=tile.compiler_params(),
        interpret=interpret,
    )(q_latent, q_rope, d_out, logsumexp, shift, *map(_rows, (latent, rope)), index, count)


def _of_queries(d_score, latent, rope, index, count, queries, tile: Tiling, interpret):
    """d(q_latent) and d(q_rope) [N,H,·]: the rows, weighted by their scores' cotangents."""
    (number, heads, _), size, roped = d_score.shape, latent.shape[-1], rope.shape[-1]
    keys, kind = latent.shape[1], latent.dtype
    part = min(COLUMNS, size)

    def kernel(d_score_ref, latent_ref, rope_ref, index_ref, count_ref, dq_ref, dqr_ref):
        program = pl.program_id(0)
        at = pl.ds(pl.program_id(1) * tile.heads, tile.heads)
        end = count_ref[program]

        def total(ref, first: int, wide: int):
            def step(i, so_far):
                column = i * tile.rows + jnp.arange(tile.rows)
                row = index_ref[program, jnp.minimum(column, end - 1)] + program // queries * keys
                weight = d_score_ref[program, at, pl.ds(i * tile.rows, tile.rows)]
                weight = jnp.where(column < end, weight, 0)
                return so_far + product(weight, gather(ref, row, first, wide), (1, 0))

            zeros = jnp.zeros((tile.heads, wide))
            return jax.lax.fori_loop(0, pl.cdiv(end, tile.rows), step, zeros).astype(kind)

        for first in range(0, size, part):
            dq_ref[program, at, pl.ds(first, part)] = total(latent_ref, first, part)
        dqr_ref[program, at, :] = total(rope_ref, 0, roped)

    return pl.pallas_call(
        kernel,
        name="sparse_mla_backward_queries",
        grid=(number, heads // tile.heads),
        out_shape=[jax.ShapeDtypeStruct((number, heads, wide), kind) for wide in (size, roped)],
        compiler_params=tile.compiler_params(),
        interpret=interpret,
    )(d_score, *map(_rows, (latent, rope)), index, count)


def _rows(a):
    return a.reshape(-1, a.shape[-1])


def _of_rows(q_latent, q_rope, d_out, weight, d_score, count, tile: Tiling, interpret):
    """What each query adds to its rows, float32 [N,K,C] and [N,K,R]: nothing is written behind its last row's tile."""
    (number, heads, size), roped, columns = q_latent.shape, q_rope.shape[-1], weight.shape[-1]

    def kernel(q_ref, qr_ref, d_out_ref, weight_ref, d_score_ref, count_ref, d_latent_ref, d_rope_ref):
        program = pl.program_id(0)
        start = pl.program_id(1) * tile.rows
        rows = pl.ds(start, tile.rows)

        def total(columns, *pairs):
            """Over heads, of what they weigh with times the queries' columns."""

            def step(i, so_far):
                some = pl.ds(i * tile.heads, tile.heads)
                for weight_ref, of_query_ref in pairs:
                    so_far += product(weight_ref[program, some, rows], of_query_ref[program, some, columns], (0, 0))
                return so_far

            return jax.lax.fori_loop(0, heads // tile.heads, step, jnp.zeros((tile.rows, columns.size)))

        @pl.when(start < count_ref[program])
        def _():
            for first in range(0, size, COLUMNS):
                columns = pl.ds(first, min(COLUMNS, size))
                added = total(columns, (d_score_ref, q_ref), (weight_ref, d_out_ref))
                d_latent_ref[program, rows, columns] = added
            d_rope_ref[program, rows, :] = total(pl.ds(0, roped), (d_score_ref, qr_ref))

    return pl.pallas_call(
        kernel,
        name="sparse_mla_backward_rows",
        grid=(number, columns // tile.rows),
        out_shape=[jax.ShapeDtypeStruct((number, columns, wide), jnp.float32) for wide in (size, roped)],
        compiler_params=tile.compiler_params(),
        interpret=interpret,
    )(q_latent, q_rope, d_out, weight, d_score, count)


def _add_up(so_far, added, places, interpret):
    """so_far[b,t] + Σ_s added[b,s,places[b,s,t]], s ascending, over the queries that have key t."""
    (batch, queries, keys), (size, roped) = places.shape, (a.shape[-1] for a in added)
    owned = min(OWNED, pl.next_power_of_2(keys))
    padded = pl.cdiv(keys, owned) * owned
    places = jnp.pad(places, ((0, 0), (0, 0), (0, padded - keys)), constant_values=-1)

    def kernel(latent_ref, rope_ref, added_latent_ref, added_rope_ref, places_ref, d_latent_ref, d_rope_ref):
        of, start = pl.program_id(0), pl.program_id(1) * owned
        key = start + jnp.arange(owned)
        inside = (key < keys)[:, None]

        def old(ref):
            return plt.load(ref.at[of, key[:, None], jnp.arange(ref.shape[-1])[None, :]], mask=inside, other=0)

        def step(i, carry):
            place = places_ref[of, i, pl.ds(start, owned)]
            has, row = (place >= 0)[:, None], jnp.maximum(place, 0)[:, None]

            def new(ref):
                at = ref.at[of * queries + i, row, jnp.arange(ref.shape[-1])[None, :]]
                return plt.load(at, mask=has, other=0)

            return carry[0] + new(added_latent_ref), carry[1] + new(added_rope_ref)

        sums = jax.lax.fori_loop(0, queries, step, (old(latent_ref), old(rope_ref)))
        for ref, total in zip((d_latent_ref, d_rope_ref), sums, strict=True):
            plt.store(ref.at[of, key[:, None], jnp.arange(ref.shape[-1])[None, :]], total, mask=inside)

    return pl.pallas_call(
        kernel,
        name="sparse_mla_backward_sums",
        grid=(batch, padded // owned),
        out_shape=[jax.ShapeDtypeStruct((batch, keys, wide), jnp.float32) for wide in (size, roped)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(*so_far, *added, places)
