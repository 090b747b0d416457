"""Mosaic kernel: a block of queries scores all keys into VMEM, selects there, and writes key numbers alone.

A block of queries visits the keys tile by tile. Keys are what the matrix unit holds still; the rows that pass are 16
queries × J heads, so that one push of keys serves them all, and relu, weight and sum over heads are three vector
operations per result. A score is kept as an int32 that orders as it does (its rank); `tpu_select` chooses among them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select.reference import LOWEST
from pallas_kernels.index_select.reference import ranks as rank_of
from pallas_kernels.index_select.tpu_select import LANES, ROWS, SPAN, scratch, select, slots_of
from pallas_kernels.products import product

TILES = (8192, 4096, 2048)  # keys per step
RANKS_BYTES = 32 << 20  # of VMEM that a block's ranks may take
TOGETHER = 16  # queries per matrix product: a packed tile of bfloat16


def index_select(q, w, k, first, last, top_k: int, k_scale=None, *, interpret=False):
    """See `pallas_kernels.index_select.index_select`. X a multiple of 128; float8 passes as bfloat16, exactly."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    if width % LANES:
        raise NotImplementedError(f"index_select on tpu wants a head width that is a multiple of {LANES}, got {width}")
    q = q.astype(factor_of(q, k))
    tile = key_tile(keys)
    keys_padded = -(-keys // tile) * tile
    columns = -(-keys // SPAN) * SPAN
    block = query_block(queries, columns)
    slots = slots_of(top_k)
    together = min(TOGETHER, block)

    pad = lambda a, size, value=0: jnp.pad(
        a, [(0, 0), (0, -a.shape[1] % size)] + [(0, 0)] * (a.ndim - 2), constant_values=value
    )
    q, w, first, last = (pad(a, block) for a in (q, w, first, last))
    k = pad(k, tile)
    scales = [] if k_scale is None else [pad(k_scale.astype(jnp.float32), tile)[:, None]]
    wide = [] if k.dtype == q.dtype else [pltpu.VMEM((tile, width), q.dtype)]
    padded = q.shape[1]
    # Rows in the order in which they pass: the queries of one product, head by head.
    q = q.reshape(batch, padded // together, together, heads, width).swapaxes(2, 3)
    q = q.reshape(batch, padded // together, heads * together, width)
    seen = jnp.stack([first, jnp.minimum(last, keys)], axis=-1).astype(jnp.int32)

    grid = (batch, padded // block, keys_padded // tile)
    kernel = functools.partial(_kernel, top_k=top_k, heads=heads, together=together, scaled=bool(scales))
    index, count = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[
            pl.BlockSpec((1, block // together, heads * together, width), lambda b, s, t: (b, s, 0, 0)),
            pl.BlockSpec((1, block, heads), lambda b, s, t: (b, s, 0)),
            pl.BlockSpec((1, tile, width), lambda b, s, t: (b, t, 0)),
            pl.BlockSpec((1, block, 2), lambda b, s, t: (b, s, 0)),
            *[pl.BlockSpec((1, 1, tile), lambda b, s, t: (b, 0, t)) for _ in scales],
        ],
        out_specs=[
            pl.BlockSpec((1, block, slots), lambda b, s, t: (b, s, 0)),
            pl.BlockSpec((1, block, LANES), lambda b, s, t: (b, s, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, padded, slots), jnp.int32),
            jax.ShapeDtypeStruct((batch, padded, LANES), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((block, columns), jnp.int32), *scratch(columns), *wide],
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
    )(q, w.astype(jnp.float32), k, seen, *scales)
    return index[:, :queries, :top_k], count[:, :queries, 0]


def key_tile(keys: int) -> int:
    """The more keys a step scores, the less its matrix products wait at both ends; padding stays below an eighth."""
    return next((tile for tile in TILES if tile * 8 <= keys), TILES[-1])


def query_block(queries: int, keys: int) -> int:
    """Queries whose ranks fit in VMEM together: 128 at most, 8 at least."""
    fit = RANKS_BYTES // (4 * keys)
    if fit < 8:
        raise NotImplementedError(f"index_select on tpu keeps the ranks of 8 queries in VMEM: not for {keys} keys")
    return min(128, 1 << fit.bit_length() - 1, max(8, 1 << (queries - 1).bit_length()))


def factor_of(q, k):
    """The type in which scores are multiplied. NotImplementedError for what no kernel takes."""
    if q.dtype == k.dtype and q.dtype in (jnp.bfloat16, jnp.float32):
        return q.dtype
    if k.dtype == jnp.float8_e4m3fn and q.dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
        return jnp.dtype(jnp.bfloat16)
    raise NotImplementedError(
        f"index_select on tpu takes q and keys in bfloat16 or float32 alike, or keys in float8_e4m3fn and q in that "
        f"or bfloat16; got {q.dtype} and {k.dtype}"
    )


def _kernel(q, w, k, seen, *refs, top_k, heads, together, scaled):
    (scale,), refs = (refs[:1], refs[1:]) if scaled else ((None,), refs)
    index, count, ranks, words, reach, *wide = refs
    step, steps = pl.program_id(2), pl.num_programs(2)
    block, keys = ranks.shape
    scored = k.shape[1]

    @pl.when((step == 0) & (steps * scored < keys))
    def _():
        ranks[...] = jnp.full_like(ranks, LOWEST)

    keys_of_step = k.at[0]
    if wide:
        (keys_of_step,) = wide
        keys_of_step[...] = k[0].astype(q.dtype)
    _score(q, w, keys_of_step, scale, seen, ranks, step, heads=heads, together=together)

    @pl.when(step == steps - 1)
    def _():
        def eight(g, _):
            rows = pl.ds(pl.multiple_of(g * ROWS, ROWS), ROWS)
            visible = jnp.maximum(seen[0, rows, 1:2] - jnp.maximum(seen[0, rows, 0:1], 0), 0)
            visible = jnp.broadcast_to(visible, (ROWS, LANES))
            select(ranks, rows, keys // SPAN, visible, top_k, index.at[0], count.at[0], words, reach)
            return 0

        jax.lax.fori_loop(0, block // ROWS, eight, 0)


def _score(q, w, k, scale, seen, ranks, step, *, heads, together):
    """Ranks of a block's queries against one chunk of keys."""
    block, tile = w.shape[1], k.shape[0]
    column = step * tile + jax.lax.broadcasted_iota(jnp.int32, (together, tile), 1)

    def some_queries(g, _):
        rows = pl.ds(pl.multiple_of(g * together, together), together)
        dots = product(q[0, g], k[...], (1, 1))
        weight, total = w[0, rows], jnp.zeros((together, tile), jnp.float32)
        for head in range(heads):
            dot = jnp.maximum(dots[head * together : (head + 1) * together], 0)
            total = total + dot * weight[:, head : head + 1]
        if scale is not None:
            total = total * scale[0]
        visible = (seen[0, rows, 0:1] <= column) & (column < seen[0, rows, 1:2])
        ranks[rows, pl.ds(pl.multiple_of(step * tile, tile), tile)] = jnp.where(visible, rank_of(total), LOWEST)
        return 0

    jax.lax.fori_loop(0, block // together, some_queries, 0)
