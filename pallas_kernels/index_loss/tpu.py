"""Mosaic kernels: a block of queries visits the keys tile by tile, once for the loss and once for the gradient.

Rows. A query's heads are rows of one product with a tile of keys, as they lie in memory: no operand is transposed or
copied. Sums over heads put a query into every sublane.

Loss. Of each query the running maximum and sum of exp(I), and Σ p, Σ p log p and Σ p · I.

Gradient. With u[s,j] = Σ_t dI[s,t] 1[q·k > 0] k[t], dq = w u and dw = q · u: one product serves both. dk is summed over
blocks of queries in memory, each block adding to what the one before left, so that its order is fixed; where there are
several blocks, two sums of every other one, for the two cores of some chips. With bfloat16 operands dI and w q are
rounded to bfloat16 for these products, sums are float32.

Tiles that no query of a block sees are neither fetched nor computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_loss.reference import kl
from pallas_kernels.products import product

LANES = 128
TOGETHER = 32  # queries of a product: the more, the longer the matrix units keep a tile of keys
TILE = 512  # keys
BLOCK_BYTES = 12 << 20  # of a block's attention queries in VMEM
LOSS, LSE, MASS = range(3)  # lanes of what the loss keeps per query
TOP, TOTAL, SUM, OWN, CROSS = range(5)  # of the running state: a number per query, repeated over the lanes
LOG2_E = 1.4426950408889634


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 9))
def index_loss(q, w, k, a, c, lse, scale: float, first, last, interpret=False):
    """See `pallas_kernels.index_loss.index_loss`. bfloat16 or float32, X = 128, J and H multiples of 8."""
    return forward(q, w, k, a, c, lse, scale, first, last, interpret)[..., LOSS]


def _forward_rule(q, w, k, a, c, lse, scale, first, last, interpret):
    kept = forward(q, w, k, a, c, lse, scale, first, last, interpret)
    return kept[..., LOSS], (q, w, k, a, c, lse, first, last, kept)


def _backward_rule(scale, interpret, saved, cotangent):
    *arguments, kept = saved
    return *backward(*arguments, kept, cotangent, scale, interpret), *[None] * 5


index_loss.defvjp(_forward_rule, _backward_rule)


def forward(q, w, k, a, c, lse, scale, first, last, interpret=False):
    """[B, S, LANES]: loss, logsumexp of I and Σ p of each query."""
    layout = _layout(q, k, a, c)
    batch, queries = w.shape[:2]
    block, blocks, tiles = layout
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(batch, blocks, tiles),
        in_specs=_in_specs(q, a, layout, lambda s: s[0]),
        out_specs=pl.BlockSpec((1, block, LANES), lambda b, s, t, _: (b, s, 0)),
        scratch_shapes=[*_columns(q, a, block), pltpu.VMEM((5, block, LANES), jnp.float32)],
    )
    return pl.pallas_call(
        functools.partial(_loss_kernel, heads=q.shape[2], attention=a.shape[2], scale=scale),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((batch, queries, LANES), jnp.float32),
        compiler_params=_params("parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(q, k, a, layout, 1),
        interpret=interpret,
        name="index_loss",
    )(*_operands(q, w, k, a, c, lse, first, last, layout))


def backward(q, w, k, a, c, lse, first, last, kept, cotangent, scale, interpret=False):
    """dq, dw, dk, given what `forward` gave."""
    layout = _layout(q, k, a, c)
    batch, queries, heads, width = q.shape
    block, blocks, tiles = layout
    sums = min(2, blocks)
    layout = (block, -(-blocks // sums) * sums, tiles)
    mass = kept[..., MASS]
    inverse = jnp.where(mass == 0, 0, 1 / jnp.where(mass == 0, 1, mass))
    per_query = jnp.stack([kept[..., LSE], inverse, jnp.where(mass == 0, 0, cotangent)], axis=-1)
    at = lambda s: s[1] * sums + s[0]  # every other block adds to the same sum
    rows = block * heads
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(batch, sums, layout[1] // sums, tiles),
        in_specs=[
            *_in_specs(q, a, layout, at),
            pl.BlockSpec((1, block, per_query.shape[-1]), lambda b, *s: (b, at(s), 0)),
        ],
        out_specs=[
            pl.BlockSpec((1, rows, width), lambda b, *s: (b, at(s), 0)),
            pl.BlockSpec((1, 1, 1, rows), lambda b, *s: (b, at(s), 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        scratch_shapes=[
            *_columns(q, a, block),
            pltpu.VMEM((rows, width), q.dtype),
            pltpu.VMEM((rows, width), jnp.float32),
            pltpu.VMEM((TILE, width), jnp.float32),
            pltpu.VMEM((TILE, width), jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
    )
    dq, dw, dk = pl.pallas_call(
        functools.partial(_gradient_kernel, heads=heads, attention=a.shape[2], scale=scale),
        grid_spec=grid,
        out_shape=[
            jax.ShapeDtypeStruct((batch, layout[1] * rows, width), q.dtype),
            jax.ShapeDtypeStruct((batch, layout[1], 1, rows), jnp.float32),
            jax.ShapeDtypeStruct((batch, sums, tiles * TILE, width), jnp.float32),
        ],
        compiler_params=_params("parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(q, k, a, layout, 3),
        interpret=interpret,
        name="index_loss_gradient",
    )(*_operands(q, w, k, a, c, lse, first, last, layout), _pad_queries(per_query, layout))
    dq, dw = dq.reshape(batch, -1, heads, width)[:, :queries], dw.reshape(batch, -1, heads)[:, :queries]
    return dq, dw.astype(w.dtype), jnp.sum(dk, axis=1)[:, : k.shape[1]].astype(k.dtype)


def _layout(q, k, a, c) -> tuple[int, int, int]:
    """Queries per block, blocks, and tiles of keys. NotImplementedError for what the kernels cannot serve."""
    (_, queries, heads, width), (attention, deep) = q.shape, a.shape[2:]
    if width != LANES or heads % 8 or attention % 8:
        raise NotImplementedError(
            f"index_loss on tpu wants an index width of {LANES} and multiples of 8 heads, got width {width}, "
            f"{heads} index and {attention} attention heads"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float32) or {k.dtype, a.dtype, c.dtype} != {q.dtype}:
        raise NotImplementedError(
            f"index_loss on tpu takes q, k, a and c all bfloat16 or all float32, got {q.dtype}, {k.dtype}, {a.dtype}, "
            f"{c.dtype}"
        )
    row = attention * -(-deep // LANES) * LANES * a.dtype.itemsize
    block = next((size for size in (64, 32) if size * row <= BLOCK_BYTES), None)
    if block is None:
        raise NotImplementedError(
            f"index_loss on tpu keeps {TOGETHER} queries in VMEM: not of {attention} heads of {deep}"
        )
    return block, -(-queries // block), -(-k.shape[1] // TILE)


def _operands(q, w, k, a, c, lse, first, last, layout):
    """What both kernels read: the first and one past the last tile that each block sees, then the operands."""
    block, blocks, _ = layout
    batch, queries, heads, width = q.shape
    last = jnp.minimum(last, k.shape[1])
    seen = _pad_queries(jnp.stack([first, last], axis=-1).astype(jnp.int32), layout)
    some = seen[..., 1] > seen[..., 0]
    start = jnp.min(jnp.where(some, seen[..., 0], k.shape[1]).reshape(batch, blocks, block), axis=-1)
    end = jnp.max(jnp.where(some, seen[..., 1], 0).reshape(batch, blocks, block), axis=-1)
    reach = jnp.stack([jnp.where(end > 0, start // TILE, 0), -(-end // TILE)], axis=-1).reshape(-1)
    in_lanes = lambda x: _pad_queries(x.astype(jnp.float32), layout).reshape(batch, blocks, 1, -1)
    flat = lambda x: x.reshape(batch, queries * x.shape[2], x.shape[3])
    return reach, flat(q), in_lanes(w), k, flat(a), c, in_lanes(lse * LOG2_E), seen


def _pad_queries(x, layout):
    return jnp.pad(x, [(0, 0), (0, layout[0] * layout[1] - x.shape[1]), (0, 0)])


def _in_specs(q, a, layout, at):
    """Of `_operands`. `at` tells the block of queries from the grid's indices after the batch."""
    block, blocks, _ = layout
    (heads, width), (attention, deep) = q.shape[2:], a.shape[2:]
    filled = -(-q.shape[1] // block)  # a block beyond them, which sees nothing, reads the last
    rows = lambda b, *s: (b, jnp.minimum(at(s), filled - 1), 0)
    in_lanes = lambda b, *s: (b, at(s), 0, 0)

    def keys(b, *s):
        *_, t, reach = s
        place = 2 * (b * blocks + at(s))
        return b, jnp.minimum(jnp.maximum(t, reach[place]), jnp.maximum(reach[place + 1] - 1, 0)), 0

    return [
        pl.BlockSpec((1, block * heads, width), rows),
        pl.BlockSpec((1, 1, 1, block * heads), in_lanes),
        pl.BlockSpec((1, TILE, width), keys),
        pl.BlockSpec((1, block * attention, deep), rows),
        pl.BlockSpec((1, TILE, deep), keys),
        pl.BlockSpec((1, 1, 1, block * attention), in_lanes),
        pl.BlockSpec((1, block, 2), lambda b, *s: (b, at(s), 0)),
    ]


def _columns(q, a, block):
    """Scratch for w and lse: a number per row of the products, repeated over the lanes."""
    return [pltpu.VMEM((block * x.shape[2], LANES), jnp.float32) for x in (q, a)]


def _params(*semantics):
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=4 * BLOCK_BYTES)


def _cost(q, k, a, layout, of_index: int):
    """With all keys visible: the index heads' products `of_index` times over, the attention heads' once."""
    pairs = q.shape[1] * k.shape[0] * k.shape[1]
    (heads, width), (attention, deep) = q.shape[2:], a.shape[2:]
    return pl.CostEstimate(
        flops=2 * pairs * (of_index * heads * width + attention * deep),
        bytes_accessed=(q.size + a.size + k.shape[0] * k.shape[1] * (width + deep) * layout[1]) * q.dtype.itemsize,
        transcendentals=pairs * attention,
    )


def _loss_kernel(reach, q, w, k, a, c, lse, seen, kept, weight, offset, state, *, heads, attention, scale):
    block, t = kept.shape[1], pl.program_id(2)
    place = 2 * (pl.program_id(0) * pl.num_programs(1) + pl.program_id(1))

    @pl.when(t == 0)
    def _():
        _upright(w, weight)
        _upright(lse, offset)
        state[...] = jnp.zeros_like(state)
        state[TOP] = jnp.full_like(state[TOP], -jnp.inf)

    def some(g, _):
        own = pl.ds(pl.multiple_of(g * TOGETHER, TOGETHER), TOGETHER)
        visible = _visible(seen, own, t)
        rows, far = _rows(heads, g), _rows(attention, g)
        score = jnp.where(visible, _scores(product(q[0, rows], k[0], (1, 1)), weight[rows]), -jnp.inf)
        p = jnp.where(visible, _target(product(a[0, far], c[0], (1, 1)), offset[far], scale), 0)
        state[SUM, own] += _over_lanes(jnp.sum, p)
        state[OWN, own] += _over_lanes(jnp.sum, jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0))
        state[CROSS, own] += _over_lanes(jnp.sum, jnp.where(visible, p * score, 0))
        before = state[TOP, own]
        top = jnp.maximum(before, _over_lanes(jnp.max, score))
        safe = jnp.where(top == -jnp.inf, 0, top)  # a query that has seen nothing yet
        terms = jnp.where(visible, jnp.exp(score - safe[:, :1]), 0)
        state[TOTAL, own] = state[TOTAL, own] * jnp.exp(before - safe) + _over_lanes(jnp.sum, terms)
        state[TOP, own] = top
        return 0

    @pl.when((reach[place] <= t) & (t < reach[place + 1]))
    def _():
        jax.lax.fori_loop(0, block // TOGETHER, some, 0)

    @pl.when(t == pl.num_programs(2) - 1)
    def _():
        total = state[TOTAL]
        lse_i = jnp.where(total > 0, state[TOP] + jnp.log(jnp.where(total > 0, total, 1)), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, lse_i.shape, 1)
        loss = kl(state[OWN], state[CROSS], state[SUM], lse_i)
        kept[0] = jnp.where(lane == LOSS, loss, jnp.where(lane == LSE, lse_i, state[SUM]))


def _gradient_kernel(
    reach,
    *operands_and_results,
    heads,
    attention,
    scale,
):
    q, w, k, a, c, lse, seen, per_query, dq, dw, dk, *scratch = operands_and_results
    weight, offset, weighted, u, mine, theirs, semaphore = scratch
    block, t = seen.shape[1], pl.program_id(3)
    batch, half, turn = (pl.program_id(n) for n in range(3))
    place = 2 * (batch * pl.num_programs(1) * pl.num_programs(2) + turn * pl.num_programs(1) + half)
    active = (reach[place] <= t) & (t < reach[place + 1])

    def begin(here):
        weighted[here] = (_finite(weight[here]) * _finite(q[0, here].astype(jnp.float32))).astype(weighted.dtype)
        u[here] = jnp.zeros((LANES, LANES), jnp.float32)

    @pl.when(t == 0)
    def _():
        _upright(w, weight)
        _upright(lse, offset)
        _by_lanes(u.shape[0], begin)

    mine[...] = jnp.zeros_like(mine)

    def some(g, _):
        own = pl.ds(pl.multiple_of(g * TOGETHER, TOGETHER), TOGETHER)
        rows, far = _rows(heads, g), _rows(attention, g)
        visible = _visible(seen, own, t)
        dots = product(q[0, rows], k[0], (1, 1))
        score, p = _scores(dots, weight[rows]), _target(product(a[0, far], c[0], (1, 1)), offset[far], scale)
        lse_i, inverse, cotangent = (per_query[0, own, n : n + 1] for n in range(3))
        di = jnp.where(visible, cotangent * (jnp.exp(score - lse_i) - p * inverse), 0)
        spread = jnp.broadcast_to(di[:, None], (TOGETHER, heads, TILE)).reshape(dots.shape)
        gradient = jnp.where(dots > 0, spread, 0).astype(q.dtype)
        keys = _finite(k[0].astype(jnp.float32)).astype(k.dtype)
        u[rows] += product(gradient, keys, (1, 0))
        mine[...] += product(gradient, weighted[rows], (0, 0))
        return 0

    @pl.when(active)
    def _():
        jax.lax.fori_loop(0, block // TOGETHER, some, 0)

    tile = dk.at[batch, half, pl.ds(pl.multiple_of(t * TILE, TILE), TILE)]

    @pl.when(active & (turn > 0))
    def _():
        fetch = pltpu.make_async_copy(tile, theirs, semaphore)
        fetch.start()
        fetch.wait()
        mine[...] += theirs[...]

    @pl.when(active | (turn == 0))
    def _():
        store = pltpu.make_async_copy(mine, tile, semaphore)
        store.start()
        store.wait()

    def end(here):
        dq[0, here] = (_finite(weight[here]) * u[here]).astype(dq.dtype)
        # A product with ones sums over a row and lays the rows side by side.
        dw[0, 0, :, here] = product(
            jnp.ones((8, LANES), jnp.float32), _finite(q[0, here].astype(jnp.float32)) * u[here], (1, 1)
        )[:1]

    @pl.when(t == pl.num_programs(3) - 1)
    def _():
        _by_lanes(u.shape[0], end)


def _by_lanes(size: int, do) -> None:
    """Calls `do` with every stretch of 128."""

    def one(i, _):
        do(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))
        return 0

    jax.lax.fori_loop(0, size // LANES, one, 0)


def _upright(row, column) -> None:
    """A row of numbers in lanes to one number per row, repeated over the lanes."""

    def turn(here):
        column[here] = jnp.broadcast_to(row[0, 0, :, here], (LANES, LANES)).T

    _by_lanes(column.shape[0], turn)


def _visible(seen, own, t):
    column = t * TILE + jax.lax.broadcasted_iota(jnp.int32, (TOGETHER, TILE), 1)
    return (seen[0, own, 0:1] <= column) & (column < seen[0, own, 1:2])


def _rows(heads, g):
    """Of a product's queries with all their heads."""
    return pl.ds(pl.multiple_of(g * TOGETHER * heads, TOGETHER * heads), TOGETHER * heads)


def _over_heads(dots, column, term):
    """[TOGETHER, TILE]: the sum over a query's heads of `term`, given 128 keys' products and each row's number."""
    sums = []
    for left in range(0, TILE, LANES):
        terms = term(dots[:, left : left + LANES], column)
        sums.append(jnp.sum(terms.reshape(TOGETHER, -1, LANES), axis=1))
    return jnp.concatenate(sums, axis=1)


def _scores(dots, weight):
    return _over_heads(dots, weight, lambda dot, w: jnp.maximum(dot, 0) * w)


def _target(dots, offset, scale):
    return _over_heads(dots, offset, lambda dot, lse: jnp.exp2(dot * (scale * LOG2_E) - lse))


def _over_lanes(reduce, x):
    return jnp.broadcast_to(reduce(x, axis=1, keepdims=True), (TOGETHER, LANES))


def _finite(x):
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)
