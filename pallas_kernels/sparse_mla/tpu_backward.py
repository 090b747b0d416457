"""Mosaic kernel: cotangents of queries and rows, with a chunk of the rows and of their cotangents held in VMEM.

A query's selection is ascending, so what falls into a chunk is a stretch of it. Rows of the stretch are picked out of
the chunk by vector loads, a tile at a time, and their cotangents are added back the same way: query after query in one
order, so that the sums are the same bits each time. Two halves of the queries have sums of their own, for two cores.

With p = exp(scale · q·row - logsumexp) and δ = Σ_c out·d_out - d_logsumexp, heads along the lanes:
    ds = p (d_out · latent - δ) scale        dq = Σ_i ds_i row_i        d_row_i = Σ_h ds q + p d_out
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.products import product
from pallas_kernels.row_copies import TILE, TOGETHER, by_halves
from pallas_kernels.sparse_mla.rows import LANES, joined, unpack, words
from pallas_kernels.sparse_mla.tpu import packed

CHUNK = 8192  # rows in VMEM: 1.5 kB each and 2.5 kB for their cotangents, at 576 features in bfloat16
GROUP = 4  # rows whose loads and stores may overlap


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
    *,
    tile: int = TILE,
    chunk: int = CHUNK,
    interpret=False,
):
    """See `pallas_kernels.sparse_mla.reference.backward`."""
    batch, queries, heads, size = q_latent.shape
    keys, top_k = latent.shape[1], index.shape[2]
    rows, pieces = (
        packed(latent, rope, split=True, interpret=interpret),
        words(latent.dtype, size, rope.shape[2]) // LANES,
    )
    chunk = min(chunk, -(-keys // 8) * 8)
    chunks = -(-keys // chunk)
    rows = jnp.pad(rows, [(0, 0), (0, max(0, chunks * chunk * pieces - rows.shape[1])), (0, 0)])

    halves = 1 if queries <= TOGETHER else 2
    pad = lambda a, value=0: jnp.pad(
        a, [(0, 0), (0, -queries % (halves * TOGETHER)), *[(0, 0)] * (a.ndim - 2)], constant_values=value
    )
    more_heads = [(0, 0), (0, 0), (0, -heads % 16)]
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_logsumexp
    logsumexp = jnp.where(count[..., None] > 0, logsumexp, 0)
    q = pad(jnp.pad(joined(q_latent, q_rope), [*more_heads, (0, 0)]))
    d_out = pad(jnp.pad(d_out.astype(q.dtype), [*more_heads, (0, 0)]))
    logsumexp, delta = (pad(jnp.pad(a, more_heads))[:, :, None] for a in (logsumexp, delta))
    index, count = pad(index), pad(count)
    selected = jnp.arange(top_k) < count[..., None]

    def one_chunk(d_q, number):
        base = number * chunk
        # The row behind the chunk takes what a tile reads beyond the stretch.
        local = jnp.where(selected, jnp.clip(index - base, 0, chunk), chunk)
        local = jnp.pad(local, [(0, 0), (0, 0), (0, -top_k % LANES + tile)], constant_values=chunk)
        bounds = jnp.stack([jnp.sum(selected & (index < b), axis=-1) for b in (base, base + chunk)], axis=2)
        arguments = number, rows, local, bounds.astype(jnp.int32), q, d_out, logsumexp, delta
        part, d_rows = _one_chunk(*arguments, scale, pieces, chunk, tile, halves, interpret)
        return d_q + part, d_rows.sum(axis=1)

    d_q, d_rows = jax.lax.scan(one_chunk, jnp.zeros(q.shape, jnp.float32), jnp.arange(chunks))
    d_rows = d_rows.swapaxes(0, 1).reshape(batch, chunks * chunk, -1)[:, :keys].astype(latent.dtype)
    d_q = d_q[:, :queries, :heads].astype(q.dtype)
    parts = lambda a, rope: (a[..., :size], a[..., size : size + rope.shape[-1]])
    return *parts(d_q, q_rope), *parts(d_rows, rope)


def _one_chunk(number, rows, local, bounds, q, d_out, logsumexp, delta, scale, words, chunk, tile, halves, interpret):
    """Cotangents float32 of q [B,S,H,F] from one chunk's rows, and of these, [B,halves,chunk·F/128,128]."""
    batch, queries, heads, width = q.shape
    steps = queries // (halves * TOGETHER)
    pieces = width // LANES
    smem, vmem = by_halves(halves, steps)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    latent = d_out.shape[3]
    flat = lambda a: a.reshape(batch * queries, *a.shape[2:])
    d_q, d_rows = pl.pallas_call(
        functools.partial(_kernel, scale=scale, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, halves, steps),
            in_specs=[
                smem(1, TOGETHER * local.shape[2]),
                smem(TOGETHER, 2),
                vmem(heads, width),
                vmem(heads, latent),
                vmem(1, heads),
                vmem(1, heads),
                anywhere,
            ],
            out_specs=[vmem(heads, width), anywhere],
            scratch_shapes=[
                pltpu.VMEM(((chunk + 8) * words, LANES), jnp.uint32),
                pltpu.VMEM(((chunk + 8) * pieces, LANES), jnp.float32),
                pltpu.VMEM((tile * words, LANES), jnp.uint32),
                pltpu.VMEM((tile * pieces, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch * queries, heads, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, halves, chunk * pieces, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            disable_bounds_checks=True,  # of every row; `local` is in range
            vmem_limit_bytes=60 << 20,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * queries * heads * local.shape[2] * (3 * width + 2 * latent),
            bytes_accessed=batch * halves * chunk * LANES * 4 * (words + pieces)
            + batch * queries * (heads * ((width + latent) * q.dtype.itemsize + 4 * width) + 4 * local.shape[2]),
            transcendentals=batch * queries * heads * local.shape[2],
        ),
        interpret=interpret,
        name="sparse_mla_backward",
    )(
        number.reshape(1),
        local.reshape(batch * queries // TOGETHER, 1, -1),
        bounds.reshape(batch * queries // TOGETHER, TOGETHER, 2),
        *map(flat, (q, d_out, logsumexp, delta)),
        rows,
    )
    return d_q.reshape(q.shape), d_rows


def _kernel(number, local, bounds, *refs, scale, chunk):
    q, d_out, logsumexp, delta, cache, d_q, d_rows, rows, sums, tile, d_tile, done = refs
    batch, half, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    latent, words, pieces = d_out.shape[2], len(rows) // (chunk + 8), q.shape[2] // LANES
    size, held = len(tile) // words, chunk * words

    @pl.when(step == 0)
    def _():
        start = pl.multiple_of(number[0] * held, 8)
        copy = pltpu.make_async_copy(cache.at[batch, pl.ds(start, held)], rows.at[pl.ds(0, held)], done)
        copy.start()
        rows[held:] = jnp.zeros((len(rows) - held, LANES), rows.dtype)
        sums[...] = jnp.zeros_like(sums)
        copy.wait()

    def one_query(query, _):
        first, end = bounds[0, query, 0], bounds[0, query, 1]
        d_q[query] = jnp.zeros(d_q.shape[1:], jnp.float32)

        def one_tile(t, _):
            start = first + t * size
            entry = query * (local.shape[2] // TOGETHER) + start
            for i in range(size):
                row = local[0, 0, entry + i]
                tile[pl.ds(i * words, words)] = rows[pl.ds(row * words, words)]
            picked = jnp.concatenate([tile[pl.ds(j, size, stride=words)] for j in range(words)], axis=1)
            keys = unpack(picked, q.dtype, latent)
            position = start + jax.lax.broadcasted_iota(jnp.int32, (size, q.shape[1]), 0)
            p = jnp.exp(product(keys, q[query], (1, 1)) * scale - logsumexp[query])
            p = jnp.where(position < end, p, 0)
            ds = p * (product(keys[:, :latent], d_out[query], (1, 1)) - delta[query]) * scale
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            d_q[query] += product(ds, keys, (0, 0))
            from_scores, from_out = product(ds, q[query], (1, 0)), product(p, d_out[query], (1, 0))
            for j in range(pieces):
                lanes = slice(j * LANES, (j + 1) * LANES)
                both = from_scores[:, lanes] + from_out[:, lanes] if j * LANES < latent else from_scores[:, lanes]
                d_tile[pl.ds(j, size, stride=pieces)] = both
            for i in range(0, size, GROUP):  # rows of a tile differ, but for the one behind the chunk
                places = [pl.ds(local[0, 0, entry + i + g] * pieces, pieces) for g in range(GROUP)]
                added = [sums[at] + d_tile[pl.ds((i + g) * pieces, pieces)] for g, at in enumerate(places)]
                for at, value in zip(places, added, strict=True):
                    sums[at] = value
            return 0

        jax.lax.fori_loop(0, jax.lax.div(end - first + size - 1, size), one_tile, 0)
        return 0

    jax.lax.fori_loop(0, TOGETHER, one_query, 0)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        copy = pltpu.make_async_copy(sums.at[pl.ds(0, chunk * pieces)], d_rows.at[batch, half], done)
        copy.start()
        copy.wait()
