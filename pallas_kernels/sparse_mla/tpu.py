"""Mosaic kernel: each query's selected rows come from HBM one by one while the tile before them is attended.

Rows are packed as `rows.py` says and copied as `row_copies.py` does; everything else hides behind the copies' starts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.products import product
from pallas_kernels.row_copies import TILE, TOGETHER, params, prepared, scratch, walk
from pallas_kernels.sparse_mla.rows import LANES, joined, pack, unpack, words

PACKED = 512  # rows packed together
NEVER = -1e30  # below every score, yet finite: a maximum over nothing


def forward(q_latent, q_rope, latent, rope, index, count, scale: float, *, tile: int = TILE, interpret=False):
    """See `pallas_kernels.sparse_mla.reference.forward`."""
    batch, queries = count.shape
    rows = packed(latent, rope, interpret=interpret)
    row = index + (jnp.arange(batch) * rows.shape[1])[:, None, None]
    flat = lambda a: a.reshape(batch * queries, *a.shape[2:])
    rows = rows.reshape(-1, *rows.shape[2:])
    out, logsumexp = attend(
        *map(flat, (q_latent, q_rope)), rows, flat(row), flat(count), scale, tile=tile, interpret=interpret
    )
    return out.reshape(q_latent.shape), logsumexp.reshape(q_latent.shape[:3])


def paged(q_latent, q_rope, pages, table, index, count, scale: float, *, tile: int = TILE, interpret=False):
    """See `pallas_kernels.sparse_mla.sparse_mla_paged`."""
    batch, queries = count.shape
    flat = lambda a: a.reshape(batch * queries, *a.shape[2:])
    of_query = jnp.repeat(table, queries, axis=0)
    row = physical(flat(index), of_query, pages.shape[1], interpret=interpret)
    rows = pages.reshape(-1, *pages.shape[2:])
    inputs = flat(q_latent), flat(q_rope), rows, row, flat(count)
    out, logsumexp = attend(*inputs, scale, tile=tile, interpret=interpret)
    return out.reshape(q_latent.shape), logsumexp.reshape(q_latent.shape[:3])


def physical(index, table, page: int, *, interpret=False):
    """Rows in the pool of the tokens at index [N,K] of the sequences whose pages are table [N,M].

    XLA looks the pages up one by one, at as many cycles as their rows' copies take; here 8 x 128 gathers are one
    instruction, within a register of 128 pages.
    """
    (queries, top_k), pages = index.shape, table.shape[1]
    fill = lambda a: jnp.pad(a, [(0, -queries % TOGETHER), (0, -a.shape[1] % LANES)])
    index, table = fill(index), fill(table)
    bits = page.bit_length() - 1

    def kernel(index, table, out):
        def some(c, _):
            at = pl.ds(pl.multiple_of(c * LANES, LANES), LANES)
            token = index[:, at]
            number, found = token >> bits, jnp.zeros_like(token)
            for first in range(0, pages, LANES):
                here = table[:, first : first + LANES]
                looked_up = jnp.take_along_axis(here, number & (LANES - 1), axis=1, mode="promise_in_bounds")
                found = jnp.where(number >> 7 == first >> 7, looked_up, found)
            out[:, at] = (found << bits) + (token & (page - 1))
            return 0

        jax.lax.fori_loop(0, index.shape[1] // LANES, some, 0)

    block = lambda a: pl.BlockSpec((TOGETHER, a.shape[1]), lambda n: (n, 0))
    return pl.pallas_call(
        kernel,
        grid=(len(index) // TOGETHER,),
        in_specs=[block(index), block(table)],
        out_specs=block(index),
        out_shape=jax.ShapeDtypeStruct(index.shape, jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="physical_rows",
    )(index, table)[:queries, :top_k]


def packed(latent, rope, *, split=False, interpret=False):
    """`pack_rows` [B,T,1,W], in one pass, where XLA takes several; `split`: [B,T·W/128,128], lanes below each other.

    T is filled up to whole blocks.
    """
    batch, keys, size = latent.shape
    width = words(latent.dtype, size, rope.shape[2])
    block = min(PACKED, -(-keys // 8) * 8)
    blocks, pieces = -(-keys // block), width // LANES

    def kernel(latent, rope, out):
        row = pack(latent[0], rope[0])
        if not split:
            out[0] = row[:, None]
        for j in range(pieces if split else 0):
            out[0, pl.ds(j, block, stride=pieces)] = row[:, j * LANES : (j + 1) * LANES]

    rows = lambda *shape: pl.BlockSpec((1, *shape), lambda b, t: (b, t, *[0] * (len(shape) - 1)))
    shape = (block * pieces, LANES) if split else (block, 1, width)
    return pl.pallas_call(
        kernel,
        grid=(batch, blocks),
        in_specs=[rows(block, size), rows(block, rope.shape[2])],
        out_specs=rows(*shape),
        out_shape=jax.ShapeDtypeStruct((batch, blocks * shape[0], *shape[1:]), jnp.uint32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="pack_rows",
    )(latent, rope)


def put_rows(pool, rows, at, *, interpret=False):
    """See `pallas_kernels.sparse_mla.put_rows`. XLA's scatter would first copy the pool into another layout."""
    number, width = rows.shape[0], rows.shape[-1]
    block = min(PACKED, -(-number // 8) * 8)
    blocks = -(-number // block)
    fill = [(0, blocks * block - number)]
    at = jnp.where((at >= 0) & (at < len(pool)), at, -1).astype(jnp.int32)
    at = jnp.pad(at, fill, constant_values=-1).reshape(blocks, 1, block)
    rows = jnp.pad(rows, [*fill, (0, 0), (0, 0)])

    def kernel(at, rows, _, pool, done):
        def each(act):
            def one(i, _):
                row = at[0, 0, i]
                pl.when(row >= 0)(lambda: act(pltpu.make_async_copy(rows.at[i], pool.at[jnp.maximum(row, 0)], done)))
                return 0

            jax.lax.fori_loop(0, block, one, 0)

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda n: (n, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, 1, width), lambda n: (n, 0, 0)),
            whole,
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=2 * rows.size * 4, transcendentals=0),
        interpret=interpret,
        name="put_rows",
    )(at, rows, pool)


def attend(q_latent, q_rope, rows, index, count, scale: float, *, tile: int = TILE, interpret=False):
    """Queries [N,H,C] and [N,H,R] against packed rows uint32[P,1,W] at index [N,K] -> out [N,H,C], logsumexp [N,H]."""
    queries, heads, latent = q_latent.shape
    q = joined(q_latent, q_rope)
    width = q.shape[2]
    pad = lambda a, *sizes: jnp.pad(a, [(0, -n % size) for n, size in zip(a.shape, sizes, strict=True)])
    q = pad(q, TOGETHER, 16, 1)
    padded, rows_of_q = q.shape[:2]
    index, count = prepared(index, count, tile)
    steps, tiles = len(index), index.shape[1] // TOGETHER
    smem = lambda *block: pl.BlockSpec((1, *block), lambda n: (n, *[0] * len(block)), memory_space=pltpu.SMEM)
    vmem = lambda *block: pl.BlockSpec((TOGETHER, *block), lambda n: (n, *[0] * len(block)))
    out, logsumexp = pl.pallas_call(
        functools.partial(_kernel, latent=latent, scale=scale),
        grid=(steps,),
        in_specs=[
            smem(TOGETHER * tiles, tile),
            smem(1, TOGETHER),
            vmem(rows_of_q, width),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[vmem(rows_of_q, latent), vmem(1, LANES)],
        out_shape=[
            jax.ShapeDtypeStruct((padded, rows_of_q, latent), q.dtype),
            jax.ShapeDtypeStruct((padded, 1, LANES), jnp.float32),
        ],
        scratch_shapes=[
            *scratch(tile, rows),
            *[pltpu.VMEM((rows_of_q, tile), jnp.float32)] * 2,
            pltpu.VMEM((rows_of_q, latent), jnp.float32),
        ],
        compiler_params=params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * padded * rows_of_q * tiles * tile * (width + latent),
            bytes_accessed=padded
            * (tiles * tile * rows.shape[2] * 4 + rows_of_q * (width + latent) * q.dtype.itemsize),
            transcendentals=padded * rows_of_q * tiles * tile,
        ),
        interpret=interpret,
        name="sparse_mla",
    )(index, count, q, rows)
    return out[:queries, :heads], logsumexp[:queries, 0, :heads]


def _kernel(index, count, q, rows, out, logsumexp, *refs, latent, scale):
    *buffers, top, total, sums = refs

    def begin(query):
        top[...] = jnp.full_like(top, NEVER)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    def attend_tile(tile, query, first):
        keys = unpack(tile[...], q.dtype, latent)
        score = product(q[query], keys, (1, 1)) * scale
        column = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
        score = jnp.where(column < count[0, 0, query], score, NEVER)
        new_top = jnp.maximum(top[...], jnp.max(score, axis=1, keepdims=True))
        fade = jnp.exp(top[...] - new_top)
        weight = jnp.exp(score - new_top)
        top[...] = new_top
        total[...] = total[...] * fade + jnp.sum(weight, axis=1, keepdims=True)
        part = product(weight.astype(q.dtype), keys[:, :latent], (1, 0))
        sums[...] = sums[...] * fade[:, :1] + part

    def finish(query):
        some = count[0, 0, query] > 0
        out[query] = jnp.where(some, sums[...] / total[:, :1], 0).astype(out.dtype)
        each = jnp.where(some, top[:, :1] + jnp.log(total[:, :1]), -jnp.inf)
        head = jax.lax.broadcasted_iota(jnp.int32, (len(each), LANES), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (len(each), LANES), 1)
        logsumexp[query] = jnp.sum(jnp.where(head == lane, each, 0), axis=0, keepdims=True)

    walk(index, count, rows, buffers, begin, attend_tile, finish)
