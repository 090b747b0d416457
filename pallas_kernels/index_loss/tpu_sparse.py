"""Mosaic kernels of the loss over selected keys: a query's rows of k and c come from HBM by `row_copies`.

Loss and dI. Heads are rows of products with a tile of keys; per query a lane keeps what the keys that fell to it add up
to, and the lanes are joined at its end. With u[j] = Σ_t dI[t] 1[q_j · k_t > 0] k_t, dq = w u and dw = q · u.

dk. A chunk of the keys and of their cotangents lies in VMEM; what a query adds to its keys is added row by row, queries
in their order, so that the sums are the same bits each time. Two halves of the queries have sums of their own, for two
cores.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_loss.reference import kl
from pallas_kernels.index_loss.tpu import LOG2_E, LOSS, LSE, MASS
from pallas_kernels.products import product
from pallas_kernels.row_copies import TILE, TOGETHER, by_halves, params, prepared, scratch, walk

LANES = 128
TOP, TOTAL, SUM, OWN, CROSS = range(5)  # of the running state, a row of lanes each
NEVER = -1e30  # below every score
CHUNK = 8192  # keys in VMEM, and their cotangents: 0.5 kB each
GROUP = 4  # rows whose loads and stores may overlap


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 9, 10))
def sparse_index_loss(q, w, k, a, c, lse, scale: float, index, count, tile: int = TILE, interpret=False):
    """See `pallas_kernels.index_loss.sparse_index_loss`. bfloat16 or float32, X = 128."""
    return forward(q, w, k, a, c, lse, scale, index, count, tile, interpret)[..., LOSS]


def _keep(q, w, k, a, c, lse, scale, index, count, tile, interpret):
    kept = forward(q, w, k, a, c, lse, scale, index, count, tile, interpret)
    return kept[..., LOSS], (q, w, k, a, c, lse, index, count, kept)


def _pull(scale, tile, interpret, saved, cotangent):
    return *backward(*saved, cotangent, scale, tile, interpret), *[None] * 5


sparse_index_loss.defvjp(_keep, _pull)


def forward(q, w, k, a, c, lse, scale, index, count, tile=TILE, interpret=False):
    """[B, S, LANES]: loss, logsumexp of I and Σ p of each query."""
    operands, specs = _operands(q, w, k, a, c, lse, index, count, tile)
    number = len(operands[2])
    found = pl.pallas_call(
        functools.partial(_loss_kernel, scale=scale),
        grid=(number // TOGETHER,),
        in_specs=specs,
        out_specs=_per_query(1, LANES),
        out_shape=jax.ShapeDtypeStruct((number, 1, LANES), jnp.float32),
        scratch_shapes=[*scratch(tile, operands[-1]), pltpu.VMEM((8, tile), jnp.float32)],
        compiler_params=params(),
        interpret=interpret,
        name="sparse_index_loss",
    )(*operands)
    return found[: count.size, 0].reshape(*count.shape, LANES)


def backward(q, w, k, a, c, lse, index, count, kept, cotangent, scale, tile=TILE, interpret=False):
    """dq, dw, dk, given what `forward` gave."""
    operands, specs = _operands(q, w, k, a, c, lse, index, count, tile)
    (number, heads, width), columns = operands[2].shape, operands[0].shape[1] * tile // TOGETHER
    mass = kept[..., MASS]
    inverse = jnp.where(mass == 0, 0, 1 / jnp.where(mass == 0, 1, mass))
    per_query = jnp.stack([kept[..., LSE], inverse, jnp.where(mass == 0, 0, cotangent)], axis=-1)
    per_query = _queries(per_query[..., None, :])
    u, di = pl.pallas_call(
        functools.partial(_gradient_kernel, scale=scale),
        grid=(number // TOGETHER,),
        in_specs=[*specs[:-1], _per_query(1, per_query.shape[-1]), specs[-1]],
        out_specs=[_per_query(heads, width), _per_query(1, columns)],
        out_shape=[jax.ShapeDtypeStruct((number, *shape), jnp.float32) for shape in ((heads, width), (1, columns))],
        scratch_shapes=scratch(tile, operands[-1]),
        compiler_params=params(),
        interpret=interpret,
        name="sparse_index_loss_queries",
    )(*operands[:-1], per_query, operands[-1])
    u = u[: count.size, : q.shape[2]].reshape(q.shape)
    some = (count > 0)[..., None]
    dq = jnp.where(some[..., None], w[..., None] * u, 0)
    dw = jnp.where(some, jnp.sum(q.astype(jnp.float32) * u, axis=-1), 0)
    dk = _of_keys(q, w, k, index, count, di[: count.size, 0].reshape(*count.shape, columns), tile, interpret)
    return dq.astype(q.dtype), dw.astype(w.dtype), dk.astype(k.dtype)


def _queries(x):
    """[N, ...] in whole grid steps."""
    x = x.reshape(-1, *x.shape[2:])
    return jnp.pad(x, [(0, -len(x) % TOGETHER), *[(0, 0)] * (x.ndim - 1)])


def _per_query(*block):
    return pl.BlockSpec((TOGETHER, *block), lambda n: (n, *[0] * len(block)))


def _operands(q, w, k, a, c, lse, index, count, tile):
    """index and count, q, w, a and lse of each query, packed rows of all keys; how each comes to the kernel.

    Heads are filled up to whole registers with such as add nothing.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float32) or a.dtype != q.dtype or q.shape[3] != LANES:
        raise NotImplementedError(
            f"sparse_index_loss on tpu wants queries of one type, bfloat16 or float32, and {LANES} index features; got "
            f"{q.dtype}, {a.dtype} and {q.shape[3]}"
        )
    keys = k.shape[1]
    rows = _pack(k, c)
    row = (index + (jnp.arange(len(index)) * keys)[:, None, None]).reshape(-1, index.shape[2])
    features = rows.shape[-1] * (1 if q.dtype == jnp.float32 else 2)
    fill = lambda x, value=0.0: jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % 16), (0, 0)], constant_values=value)
    behind = features - LANES - a.shape[3]
    a = jnp.pad(fill(a), [(0, 0), (0, 0), (0, 0), (LANES, behind)])
    w, lse = (x.astype(jnp.float32)[..., None] for x in (w, lse))
    of_queries = [_queries(x) for x in (fill(q), fill(w), a, fill(lse, jnp.inf))]
    index, count = prepared(row, count.reshape(-1), tile)
    smem = lambda *block: pl.BlockSpec((1, *block), lambda n: (n, *[0] * len(block)), memory_space=pltpu.SMEM)
    specs = [smem(*index.shape[1:]), smem(*count.shape[1:]), *(_per_query(*x.shape[1:]) for x in of_queries)]
    return [index, count, *of_queries, rows], [*specs, pl.BlockSpec(memory_space=pl.ANY)]


def _pack(k, c):
    """uint32 [B·T,1,W]: a key's features and attention's behind them, in bfloat16 two to a word, half a row apart."""
    lanes = LANES if k.dtype == jnp.float32 else 2 * LANES
    both = jnp.concatenate([k, c.astype(k.dtype)], axis=-1).reshape(-1, k.shape[-1] + c.shape[-1])
    both = jnp.pad(both, [(0, 0), (0, -both.shape[1] % lanes)])
    bits = jax.lax.bitcast_convert_type(both.astype(jnp.float32), jnp.uint32)
    if k.dtype == jnp.bfloat16:
        low, high = jnp.split(bits, 2, axis=1)
        bits = low >> 16 | high
    return bits[:, None]


def _unpack(words, dtype):
    value = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    if dtype == jnp.float32:
        return value(words)
    return jnp.concatenate([value(words << 16), value(words & jnp.uint32(0xFFFF0000))], axis=1)


def _tile(tile, q, w, a, lse, query, scale):
    """relu of dots [J,tile], I and the target's p [1,tile], index keys [tile,X]."""
    features = _unpack(tile[...], q.dtype)
    logits = product(a[query], features, (1, 1)) * (scale * LOG2_E)
    p = jnp.sum(jnp.exp2(logits - lse[query] * LOG2_E), axis=0, keepdims=True)
    keys = features[:, :LANES]
    dots = jnp.maximum(product(q[query], keys, (1, 1)), 0)
    return dots, jnp.sum(dots * w[query], axis=0, keepdims=True), p, keys


def _seen(first, size, count):
    return first + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < count


def _loss_kernel(index, count, q, w, a, lse, rows, kept, *refs, scale):
    *buffers, state = refs
    size = index.shape[2]
    line = lambda n: pl.ds(n, 1)

    def begin(query):
        state[...] = jnp.zeros_like(state)
        state[line(TOP)] = jnp.full((1, size), NEVER)

    def visit(tile, query, first):
        _, score, p, _ = _tile(tile, q, w, a, lse, query, scale)
        seen = _seen(first, size, count[0, 0, query])
        score, p = jnp.where(seen, score, NEVER), jnp.where(seen, p, 0)
        top = jnp.maximum(state[line(TOP)], score)
        fade = jnp.exp2((state[line(TOP)] - top) * LOG2_E)
        state[line(TOTAL)] = state[line(TOTAL)] * fade + jnp.where(seen, jnp.exp2((score - top) * LOG2_E), 0)
        state[line(TOP)] = top
        state[line(SUM)] += p
        state[line(OWN)] += jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0)
        state[line(CROSS)] += jnp.where(seen, p * score, 0)

    def finish(query):
        over = lambda reduce, value: jnp.broadcast_to(reduce(value, axis=1, keepdims=True), (1, LANES))
        top = over(jnp.max, state[line(TOP)])
        total = over(jnp.sum, state[line(TOTAL)] * jnp.exp2((state[line(TOP)] - top[:, :1]) * LOG2_E))
        mass, own, cross = (over(jnp.sum, state[line(n)]) for n in (SUM, OWN, CROSS))
        lse_i = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), 0)
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        values = {LOSS: kl(own, cross, mass, lse_i), LSE: lse_i, MASS: mass}
        kept[query] = sum(jnp.where(lane == n, value, 0) for n, value in values.items())

    walk(index, count, rows, buffers, begin, visit, finish)


def _gradient_kernel(index, count, q, w, a, lse, per_query, rows, u, di, *buffers, scale):
    size = index.shape[2]

    def begin(query):
        u[query] = jnp.zeros(u.shape[1:], u.dtype)
        di[query] = jnp.zeros(di.shape[1:], di.dtype)

    def visit(tile, query, first):
        dots, score, p, keys = _tile(tile, q, w, a, lse, query, scale)
        lse_i, inverse, cotangent = (per_query[query][:, n : n + 1] for n in range(3))
        d = cotangent * (jnp.exp2((score - lse_i) * LOG2_E) - p * inverse)
        d = jnp.where(_seen(first, size, count[0, 0, query]), d, 0)
        di[query, :, pl.ds(pl.multiple_of(first, size), size)] = d
        u[query] += product(jnp.where(dots > 0, d, 0).astype(keys.dtype), keys, (1, 0))

    walk(index, count, rows, buffers, begin, visit, lambda query: None)


def _of_keys(q, w, k, index, count, di, tile, interpret):
    """dk float32 [B,T,X], dk[t] = Σ_s Σ_j dI[s,t] 1[q_sj · k_t > 0] w_sj q_sj, from dI [B,S,columns] of selections."""
    batch, queries, heads, width = q.shape
    keys, top_k, columns = k.shape[1], index.shape[2], di.shape[2]
    chunk = min(CHUNK, -(-keys // 8) * 8)
    chunks = -(-keys // chunk)
    halves = 1 if queries <= TOGETHER else 2
    pad = lambda x: jnp.pad(x, [(0, 0), (0, -queries % (halves * TOGETHER)), *[(0, 0)] * (x.ndim - 2)])
    fill = lambda x: jnp.pad(x, [(0, 0), (0, 0), (0, -heads % 16), (0, 0)])
    seen = pad((count > 0)[..., None, None])
    weighed = w.astype(jnp.float32)[..., None] * q.astype(jnp.float32)
    # A query without keys may hold anything.
    of_queries = [jnp.where(seen, pad(fill(x)), 0).astype(q.dtype) for x in (q, weighed)]
    rows = jnp.pad(k.astype(jnp.float32), [(0, 0), (0, chunks * chunk - keys), (0, 0)])
    selected = jnp.arange(top_k) < count[..., None]
    di = pad(di)[:, :, None]

    def one_chunk(_, number):
        base = number * chunk
        here = selected & (index >= base) & (index < base + chunk)
        # The row behind the chunk takes what a tile reads beside the stretch that lies in it.
        local = jnp.where(here, index - base, chunk)
        local = jnp.pad(local, [(0, 0), (0, 0), (0, columns - top_k)], constant_values=chunk)
        before = lambda bound: jnp.sum(selected & (index < bound), axis=-1)
        first, end = before(base), before(base + chunk)
        bounds = jnp.stack([first // tile, jnp.where(end > first, -(-end // tile), first // tile)], axis=2)
        bounds = bounds.astype(jnp.int32)
        found = _one_chunk(number, rows, pad(local), pad(bounds), *of_queries, di, chunk, tile, halves, interpret)
        return None, found.sum(axis=1)

    _, dk = jax.lax.scan(one_chunk, None, jnp.arange(chunks))
    return dk.swapaxes(0, 1).reshape(batch, chunks * chunk, width)[:, :keys]


def _one_chunk(number, rows, local, bounds, q, weighed, di, chunk, tile, halves, interpret):
    """Cotangents of one chunk's keys, [B,halves,chunk,X]."""
    batch, queries, heads, width = q.shape
    steps = queries // (halves * TOGETHER)
    smem, vmem = by_halves(halves, steps)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    flat = lambda x: x.reshape(batch * queries, *x.shape[2:])
    return pl.pallas_call(
        functools.partial(_keys_kernel, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, halves, steps),
            in_specs=[
                smem(1, TOGETHER * local.shape[2]),
                smem(TOGETHER, 2),
                vmem(heads, width),
                vmem(heads, width),
                vmem(1, di.shape[3]),
                anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                *[pltpu.VMEM((chunk + 8, width), jnp.float32)] * 2,
                *[pltpu.VMEM((tile, width), jnp.float32)] * 2,
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, halves, chunk, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="sparse_index_loss_keys",
    )(
        number.reshape(1),
        local.reshape(batch * queries // TOGETHER, 1, -1),
        bounds.reshape(batch * queries // TOGETHER, TOGETHER, 2),
        *map(flat, (q, weighed, di)),
        rows,
    )


def _keys_kernel(number, local, bounds, q, weighed, di, cache, dk, rows, sums, tile, d_tile, done, *, chunk):
    batch, half, step = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = len(tile)

    @pl.when(step == 0)
    def _():
        start = pl.multiple_of(number[0] * chunk, 8)
        copy = pltpu.make_async_copy(cache.at[batch, pl.ds(start, chunk)], rows.at[pl.ds(0, chunk)], done)
        copy.start()
        rows[chunk:] = jnp.zeros((len(rows) - chunk, rows.shape[1]), rows.dtype)
        sums[...] = jnp.zeros_like(sums)
        copy.wait()

    def one_query(query, _):
        def one_tile(t, _):
            start = pl.multiple_of(t * size, size)
            entry = query * (local.shape[2] // TOGETHER) + start
            for i in range(size):
                tile[pl.ds(i, 1)] = rows[pl.ds(local[0, 0, entry + i], 1)]
            dots = product(q[query], tile[...].astype(q.dtype), (1, 1))
            gradient = jnp.where(dots > 0, di[query, :, pl.ds(start, size)], 0)
            d_tile[...] = product(gradient.astype(q.dtype), weighed[query], (0, 0))
            for i in range(0, size, GROUP):  # rows of a tile differ, but for the one behind the chunk
                places = [pl.ds(local[0, 0, entry + i + g], 1) for g in range(GROUP)]
                added = [sums[at] + d_tile[pl.ds(i + g, 1)] for g, at in enumerate(places)]
                for at, value in zip(places, added, strict=True):
                    sums[at] = value
            return 0

        jax.lax.fori_loop(bounds[0, query, 0], bounds[0, query, 1], one_tile, 0)
        return 0

    jax.lax.fori_loop(0, TOGETHER, one_query, 0)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        copy = pltpu.make_async_copy(sums.at[pl.ds(0, chunk)], dk.at[batch, half], done)
        copy.start()
        copy.wait()
