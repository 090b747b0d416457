"""Mosaic kernel for decode: few queries per sequence score a paged cache of index keys, and select in VMEM.

Scores. A step serves eight rows: the draft rows of one sequence, or those of several. Each sequence's pages pass
through a ring of buffers in VMEM, tile by tile, in the table's order; the copies run ahead of the scores, into the next
sequences and the next steps, so that the memory works while a selection runs. The rows that pass the matrix unit are
heads × queries. Their weighted sum over heads adds registers first and sublanes last, and lands in the sublanes of
these queries.

Selection is `tpu_select`'s, once all eight rows have their ranks.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select.reference import LOWEST
from pallas_kernels.index_select.reference import ranks as rank_of
from pallas_kernels.index_select.tpu import factor_of
from pallas_kernels.index_select.tpu_select import LANES, ROWS, SPAN, scratch, select, slots_of
from pallas_kernels.products import product

TILE = 2048  # keys that are copied and scored at once
RING_BYTES = 16 << 20  # of VMEM for tiles in flight: what memory delivers while eight rows are selected
PARTS = 2  # of the batch, that the cores of a chip share
PACKED = 16  # rows of a packed tile of bfloat16
RANKS_BYTES = 32 << 20  # of VMEM that the ranks of eight rows may take
TABLE_ENTRIES = 1 << 16  # page numbers that scalar memory holds; more sequences take more calls
SEQUENCE, AT, ISSUED, SCORED = range(4)  # of the state: the tile to copy next, tiles copied and scored so far


def index_select_paged(q, w, pages, table, first, last, top_k: int, page_scale=None, *, interpret=False):
    """See `pallas_kernels.index_select.index_select_paged`. X a multiple of 128, S ≤ 8; float8 as in `tpu`."""
    batch, queries, heads, width = q.shape
    page, entries = pages.shape[1], table.shape[1]
    if width % LANES:
        raise NotImplementedError(f"index_select on tpu wants a head width that is a multiple of {LANES}, got {width}")
    q = q.astype(factor_of(q, pages))
    if pages.dtype.itemsize == 1 and page < 32 or page_scale is not None and page != LANES:
        raise NotImplementedError(
            f"paged index_select on tpu takes float8 in pages of 32 keys or more, its scales in pages of {LANES} keys; "
            f"got {page}"
        )
    if queries > ROWS or page > TILE:
        raise NotImplementedError(
            f"paged index_select on tpu serves {ROWS} queries per sequence and pages of {TILE} keys at most, got "
            f"{queries} and {page}"
        )
    columns = -(-entries * page // SPAN) * SPAN
    if 4 * ROWS * columns > RANKS_BYTES or columns // page > TABLE_ENTRIES:
        raise NotImplementedError(
            f"paged index_select on tpu keeps the ranks of 8 rows in VMEM: not for {columns} keys"
        )
    if batch * columns // page > TABLE_ENTRIES and batch > 1:
        half = batch // 2
        call = functools.partial(index_select_paged, top_k=top_k, page_scale=page_scale, interpret=interpret)
        parts = [
            call(*(a[i] for a in (q, w)), pages, *(a[i] for a in (table, first, last)))
            for i in (slice(half), slice(half, None))
        ]
        return jax.tree.map(lambda *a: jnp.concatenate(a), *parts)

    lines = 1 << (queries - 1).bit_length()  # rows per sequence
    share = ROWS // lines  # sequences per step
    padding = -batch % (share * PARTS)
    heads_padding = -heads % max(1, PACKED // lines)
    pad = lambda a, *by: jnp.pad(a, [(0, n) for n in by] + [(0, 0)] * (a.ndim - len(by)))
    q, w = (pad(a, padding, lines - queries, heads_padding) for a in (q, w.astype(jnp.float32)))
    first, last = (pad(a.astype(jnp.int32), padding, lines - queries) for a in (first, last))
    last = jnp.minimum(last, entries * page)
    sequences, rows = batch + padding, (heads + heads_padding) * lines
    steps = sequences // (share * PARTS)

    # Tiles are copied whole: what is beyond a sequence's last page is that page again, and no other entry is read.
    length = jnp.max(jnp.where(last > first, last, 0), axis=1)
    table, entry = pad(table.astype(jnp.int32), padding, columns // page - entries), jnp.arange(columns // page)
    final = jnp.maximum(length[:, None] - 1, 0) // page
    again = jnp.sum(jnp.where(entry == final, table, 0), axis=1, keepdims=True)
    table = jnp.where(entry < final, table, again)
    tiles = (length + TILE - 1) // TILE
    total = jnp.sum(tiles.reshape(PARTS, -1), axis=1, dtype=jnp.int32)
    number = jnp.arange(sequences)
    # The first sequence from each on that has a tile to copy.
    following = jax.lax.cummin(jnp.where(tiles > 0, number, sequences), reverse=True).astype(jnp.int32)
    following = jnp.append(following, jnp.int32(sequences))

    # Rows in the order in which they pass: head by head, a sequence's queries in turn.
    q = q.swapaxes(1, 2).reshape(sequences, rows, width)
    w = jnp.broadcast_to(w.swapaxes(1, 2).reshape(sequences, rows, 1), (sequences, rows, LANES))
    seen = jnp.stack([first, last], axis=-1).reshape(PARTS * steps, ROWS, 2)

    scales = [] if page_scale is None else [page_scale.astype(jnp.float32)]
    slots = slots_of(top_k)
    ring = 1 << (RING_BYTES // (TILE * width * pages.dtype.itemsize)).bit_length() - 1
    of_step = lambda *shape: pl.BlockSpec(shape, lambda c, i, *_: (c * steps + i, *[0] * (len(shape) - 1)))
    index, count = pl.pallas_call(
        functools.partial(_kernel, top_k=top_k, lines=lines, scaled=bool(scales)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(PARTS, steps),
            in_specs=[
                of_step(share, rows, width),
                of_step(share, rows, LANES),
                of_step(1, ROWS, 2),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in [pages, *scales]],
            ],
            out_specs=[of_step(1, ROWS, slots), of_step(1, ROWS, LANES)],
            scratch_shapes=[
                pltpu.VMEM((ring, TILE, width), pages.dtype),
                pltpu.VMEM((ROWS, columns), jnp.int32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SemaphoreType.DMA((ring,)),
                *scratch(columns),
                *[pltpu.VMEM((ring, TILE // page, page), jnp.float32) for _ in scales],
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((PARTS * steps, ROWS, slots), jnp.int32),
            jax.ShapeDtypeStruct((PARTS * steps, ROWS, LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=RANKS_BYTES + (24 << 20),
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * sequences * rows * columns * width,
            bytes_accessed=sequences * columns * width * pages.dtype.itemsize + q.size * q.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="index_select_paged",
    )(table.reshape(-1), tiles, total, following, q, w, seen, pages, *scales)
    index = index.reshape(sequences, lines, slots)[:batch, :queries, :top_k]
    return index, count.reshape(sequences, lines, LANES)[:batch, :queries, 0]


def _kernel(table, tiles, total, following, q, w, seen, pages, *refs, top_k, lines, scaled):
    scales, refs = (refs[:1], refs[1:]) if scaled else ((), refs)
    index, count, ring, ranks, state, arrived, words, reach, *scale_ring = refs
    copied = list(zip((pages, *scales), (ring, *scale_ring), strict=True))
    share, steps = q.shape[0], pl.num_programs(1)
    part, step = pl.program_id(0), pl.program_id(1)
    sequence = (part * steps + step) * share  # this step's first

    def copy(_, __):
        _copy_next(table, tiles, following, copied, state, arrived)
        return 0

    @pl.when(step == 0)
    def _():
        state[SEQUENCE], state[AT], state[ISSUED], state[SCORED] = following[part * steps * share], 0, 0, 0
        jax.lax.fori_loop(0, jnp.minimum(ring.shape[0], total[part]), copy, 0)

    longest = functools.reduce(jnp.maximum, [tiles[sequence + n] for n in range(share)])
    spans = (longest * TILE + SPAN - 1) >> SPAN.bit_length() - 1

    def clear(i, _):
        ranks[:, pl.ds(pl.multiple_of(i * TILE, TILE), TILE)] = jnp.full((ROWS, TILE), LOWEST, jnp.int32)
        return 0

    jax.lax.fori_loop(0, spans * (SPAN // TILE), clear, 0)

    def score(n, _):
        def tile(t, _, copies):
            buffer = state[SCORED] & (ring.shape[0] - 1)
            for _, into in copied:
                pltpu.make_async_copy(into.at[buffer], into.at[buffer], arrived.at[buffer]).wait()
            _score(q.at[n], w.at[n], *(into.at[buffer] for _, into in copied), seen.at[0], ranks, n, t, lines)
            state[SCORED] = state[SCORED] + 1
            return copy(0, 0) if copies else 0  # without a branch, so that addresses and scores share bundles

        own = tiles[sequence + n]
        followed = jnp.minimum(own, total[part] - state[ISSUED])
        jax.lax.fori_loop(0, followed, functools.partial(tile, copies=True), 0)
        return jax.lax.fori_loop(followed, own, functools.partial(tile, copies=False), 0)

    jax.lax.fori_loop(0, share, score, 0)
    visible = jnp.maximum(seen[0, :, 1:2] - jnp.maximum(seen[0, :, 0:1], 0), 0)
    visible = jnp.broadcast_to(visible, (ROWS, LANES))
    select(ranks, pl.ds(0, ROWS), spans, visible, top_k, index.at[0], count.at[0], words, reach)


def _copy_next(table, tiles, following, copied, state, arrived):
    """Starts the copies of the next tile's pages, and of their scales where they have some."""
    sequence, at = state[SEQUENCE], state[AT]
    (pages, ring), *scales = copied
    page = pages.shape[1]
    each = TILE // page
    unrolled = min(each, 32)
    buffer = state[ISSUED] & (ring.shape[0] - 1)
    start = sequence * (table.shape[0] // tiles.shape[0]) + at * each

    def some(turn, _):
        for i in range(unrolled):
            number = turn * unrolled + i
            into = ring.at[buffer, pl.ds(pl.multiple_of(number * page, page), page)]
            place = table[start + number]
            pltpu.make_async_copy(pages.at[place], into, arrived.at[buffer]).start()
            for scale, into in scales:
                one, row = pl.ds(place, 1), pl.ds(number, 1)
                pltpu.make_async_copy(scale.at[one], into.at[buffer, row], arrived.at[buffer]).start()
        return 0

    jax.lax.fori_loop(0, each // unrolled, some, 0)
    last = at + 1 == tiles[sequence]
    state[SEQUENCE] = jnp.where(last, following[sequence + 1], sequence)
    state[AT] = jnp.where(last, 0, at + 1)
    state[ISSUED] = state[ISSUED] + 1


def _score(q, w, keys, *refs):
    """Ranks of a sequence's queries against one tile of its keys, into their rows."""
    *scale, seen, ranks, n, t, lines = refs
    dots = product(q[...], keys[...].astype(q.dtype), (1, 1))
    total = jnp.zeros((ROWS, TILE), jnp.float32)
    for row in range(0, q.shape[0], ROWS):
        total = total + jnp.maximum(dots[row : row + ROWS], 0) * w[row : row + ROWS, 0:1]
    apart = ROWS // 2
    while apart >= lines:  # a register holds several heads of each query
        total = total + pltpu.roll(total, apart, 0)
        apart //= 2
    if scale:
        (by_page,) = scale
        rows = [jnp.broadcast_to(by_page[i : i + 1], (ROWS, LANES)) for i in range(by_page.shape[0])]
        total = total * jnp.concatenate(rows, axis=1)
    column = t * TILE + jax.lax.broadcasted_iota(jnp.int32, (ROWS, TILE), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (ROWS, TILE), 0)
    visible = (seen[:, 0:1] <= column) & (column < seen[:, 1:2]) & (row >> lines.bit_length() - 1 == n)
    at = pl.ds(pl.multiple_of(t * TILE, TILE), TILE)
    ranks[:, at] = jnp.where(visible, rank_of(total), ranks[:, at])
