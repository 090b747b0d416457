"""GPU kernels (Pallas by way of Triton): a program of one query walks its keys, once for the loss and once for dI.

All heads share a product with a tile of keys; the sparse form only has a tile's keys elsewhere.

dq and dw come with dI. dk is a sum over queries, which other programs take in the queries' order, each for its own
keys: from dI, [queries, keys] in float32, of a block of queries at a time.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.blocks import in_blocks
from pallas_kernels.gpu import LOG2_E, by_key, gather, shared_memory
from pallas_kernels.index_loss.reference import kl
from pallas_kernels.products import product

FAR = -1e30  # below every score
ENTRIES = 1 << 25  # of dI that exist at once
OWNED = 64  # keys whose dk a program sums up


def tiling() -> tuple[int, plt.CompilerParams]:
    """Keys of a tile, by the shared memory that a GPU has."""
    rows, stages = {227: (32, 3), 163: (32, 2), 99: (16, 1)}[shared_memory()]
    return rows, plt.CompilerParams(num_warps=4, num_stages=stages)


class Keys(NamedTuple):
    """Where the keys of one query lie."""

    sparse: bool
    size: int  # columns that a query has: keys of the sequence, or of the selection
    total: int  # keys of the sequence
    queries: int  # of a sequence

    def walk(self, refs, program):
        """First column, its end, and which rows of all sequences' keys given columns are."""
        at = program // self.queries * self.total
        if self.sparse:
            index_ref, count_ref = refs
            return 0, count_ref[program], lambda column: index_ref[program, column] + at
        first_ref, last_ref = refs
        return jnp.maximum(first_ref[program], 0), jnp.minimum(last_ref[program], self.size), lambda column: column + at


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 9))
def index_loss(q, w, k, a, c, lse, scale: float, first, last, interpret=False):
    """See `pallas_kernels.index_loss.index_loss`. bfloat16 or float16."""
    return forward(False, q, w, k, a, c, lse, scale, (first, last), interpret)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 9))
def sparse_index_loss(q, w, k, a, c, lse, scale: float, index, count, interpret=False):
    """See `pallas_kernels.index_loss.sparse_index_loss`. bfloat16 or float16."""
    return forward(True, q, w, k, a, c, lse, scale, (index, count), interpret)[0]


def _rule(loss, sparse: bool) -> None:
    """Gives a loss its gradient: by q, w and k alone."""

    def keep(q, w, k, a, c, lse, scale, *which_and_interpret):
        *which, interpret = which_and_interpret
        value, lse_i, mass = forward(sparse, q, w, k, a, c, lse, scale, which, interpret)
        return value, (q, w, k, a, c, lse, which, lse_i, mass)

    def pull(scale, interpret, saved, cotangent):
        *inputs, which, lse_i, mass = saved
        found = backward(sparse, *inputs, scale, which, lse_i, mass, cotangent, interpret)
        return *found, *[None] * 5

    loss.defvjp(keep, pull)


_rule(index_loss, sparse=False)
_rule(sparse_index_loss, sparse=True)


def _check(q, a, interpret: bool) -> None:
    """Raises NotImplementedError for what the kernels cannot serve; float32 only the interpreter can."""
    kinds = (jnp.bfloat16, jnp.float16, jnp.float32)[: 3 if interpret else 2]
    if q.dtype not in kinds or a.dtype != q.dtype:
        raise NotImplementedError(
            f"index_loss on GPU takes queries of one type, bfloat16 or float16 (float32 would fill the registers); got "
            f"{q.dtype} and {a.dtype}"
        )
    width, size = q.shape[-1], a.shape[-1]
    if width < 16 or width & (width - 1) or size % 16:
        raise NotImplementedError(
            f"index_loss on GPU wants a power of two of index features from 16 and a multiple of 16 of attention's; "
            f"got {width} and {size}"
        )


def _pieces(size: int) -> list[tuple[int, int]]:
    """Powers of two that make up a number of features: start and size of each."""
    found, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size >> bit & 1:
            found.append((start, 1 << bit))
            start += 1 << bit
    return found


def _operands(q, w, a, lse):
    """Each query by itself, [N, ...], heads filled up to a power of two with such as add nothing."""

    def fill(x, value=0.0):
        heads = max(16, pl.next_power_of_2(x.shape[2]))
        pad = [(0, 0), (0, heads - x.shape[2]), *[(0, 0)] * (x.ndim - 3)]
        return jnp.pad(x.reshape(-1, *x.shape[2:]), pad, constant_values=value)

    return fill(q), fill(w.astype(jnp.float32)), fill(a), fill(lse.astype(jnp.float32), jnp.inf)


def _tile(refs, key_refs, program, scale: float):
    """A function of where a tile's keys lie: relu of their dots [keys,J], I and the target's p [keys], the keys."""
    q_ref, w_ref, a_ref, lse_ref = refs
    k_ref, c_ref = key_refs
    pieces = _pieces(a_ref.shape[-1])
    q, w, lse = q_ref[program, :, :], w_ref[program, :], lse_ref[program, :] * LOG2_E
    a = [a_ref[program, :, pl.ds(*piece)] for piece in pieces]

    def of(row):
        keys = gather(k_ref, row)
        dots = jnp.maximum(product(keys, q, (1, 1)), 0)
        score = jnp.sum(dots * w[None, :], axis=1)
        logits = sum(product(part, gather(c_ref, row, *piece), (1, 1)) for piece, part in zip(pieces, a, strict=True))
        p = jnp.sum(jnp.exp2(logits * (scale * LOG2_E) - lse[:, None]), axis=0)
        return dots, score, p, keys

    return of


def _layout(sparse: bool, k, per_query):
    columns = per_query[0].shape[-1] if sparse else k.shape[1]
    flat = [x.reshape(-1, *x.shape[2:]) for x in per_query]
    return Keys(sparse, columns, k.shape[1], per_query[1].shape[1]), flat


def forward(sparse: bool, q, w, k, a, c, lse, scale: float, per_query, interpret):
    """Loss, logsumexp of I and Σ p of each query, [B,S] each."""
    _check(q, a, interpret)
    keys, flat = _layout(sparse, k, per_query)
    rows, parameters = tiling()

    def kernel(*refs):
        *refs, loss_ref, lse_ref, mass_ref = refs
        program = pl.program_id(0)
        of = _tile(refs[:4], refs[4:6], program, scale)
        begin, end, row_of = keys.walk(refs[6:], program)

        def step(i, carry):
            top, total, mass, own, cross = carry
            column = begin + i * rows + jnp.arange(rows)
            _, score, p, _ = of(row_of(jnp.minimum(column, end - 1)))
            seen = column < end
            score, p = jnp.where(seen, score, FAR), jnp.where(seen, p, 0)
            higher = jnp.maximum(top, jnp.max(score))
            exponential = jnp.where(seen, jnp.exp2((score - higher) * LOG2_E), 0)
            total = total * jnp.exp2((top - higher) * LOG2_E) + jnp.sum(exponential)
            own = own + jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0))
            return higher, total, mass + jnp.sum(p), own, cross + jnp.sum(p * score)

        zero = jnp.float32(0)
        steps = pl.cdiv(jnp.maximum(end - begin, 0), rows)
        top, total, mass, own, cross = jax.lax.fori_loop(0, steps, step, (jnp.float32(FAR), zero, zero, zero, zero))
        lse_i = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), 0)
        loss_ref[program], lse_ref[program], mass_ref[program] = kl(own, cross, mass, lse_i), lse_i, mass

    operands = _operands(q, w, a, lse)
    number = operands[0].shape[0]
    found = pl.pallas_call(
        kernel,
        name="index_loss",
        grid=(number,),
        out_shape=[jax.ShapeDtypeStruct((number,), jnp.float32)] * 3,
        compiler_params=parameters,
        interpret=interpret,
    )(*operands, *(x.reshape(-1, x.shape[-1]) for x in (k, c)), *flat)
    return [x.reshape(w.shape[:2]) for x in found]


def backward(sparse: bool, q, w, k, a, c, lse, scale: float, per_query, lse_i, mass, cotangent, interpret=False):
    """dq, dw, dk, a block of queries at a time."""
    batch, queries, heads, width = q.shape
    keys = k.shape[1]
    block = max(1, min(queries, ENTRIES // (batch * keys)))
    split, join = in_blocks(queries, block)

    def of_block(dk, inputs):
        q, w, a, lse, *some = inputs
        which, (lse_i, mass, cotangent) = some[:2], some[2:]
        dq, dw, di = _of_queries(sparse, q, w, k, a, c, lse, scale, which, (lse_i, mass, cotangent), interpret)
        di = di.reshape(batch, block, -1)
        if sparse:
            index, count = which
            di = by_key(di, index, count, keys, 0)
            which = jnp.zeros_like(count), jnp.where(count > 0, keys, 0)
        dk = _of_keys(dk, q, w, k, di, which, interpret)
        back = lambda x: x[:, :heads].reshape(batch, block, heads, *x.shape[2:])
        return dk, (back(dq), back(dw))

    inputs = tuple(map(split, (q, w, a, lse, *per_query, lse_i, mass, cotangent)))
    dk, found = jax.lax.scan(of_block, jnp.zeros(k.shape, jnp.float32), inputs)
    dq, dw = map(join, found)
    return dq.astype(q.dtype), dw.astype(w.dtype), dk.astype(k.dtype)


def _of_queries(sparse, q, w, k, a, c, lse, scale, per_query, kept, interpret):
    """dq [N,J,X] and dw [N,J] of padded heads, dI [N,columns], whatever it holds where a query sees nothing."""
    keys, flat = _layout(sparse, k, per_query)
    rows, parameters = tiling()
    operands = _operands(q, w, a, lse)
    (number, heads, width), kind = operands[0].shape, q.dtype

    def kernel(*refs):
        *refs, dq_ref, dw_ref, di_ref = refs
        program = pl.program_id(0)
        of = _tile(refs[:4], refs[4:6], program, scale)
        begin, end, row_of = keys.walk(refs[6:8], program)
        lse_i, mass, cotangent = (ref[program] for ref in refs[8:])
        share = jnp.where(mass == 0, 0, 1 / jnp.where(mass == 0, 1, mass))

        def step(i, u):
            column = begin + i * rows + jnp.arange(rows)
            dots, score, p, tile = of(row_of(jnp.minimum(column, end - 1)))
            di = cotangent * (jnp.exp2((score - lse_i) * LOG2_E) - p * share)
            di = jnp.where((column < end) & (mass != 0), di, 0)
            plt.store(di_ref.at[program, column], di, mask=column < end)
            gradient = jnp.where(dots > 0, di[:, None], 0).astype(kind)
            return u + product(gradient, tile, (0, 0))

        steps = pl.cdiv(jnp.maximum(end - begin, 0), rows)
        u = jax.lax.fori_loop(0, steps, step, jnp.zeros((heads, width)))
        q, w = refs[0][program, :, :].astype(jnp.float32), refs[1][program, :]
        dq_ref[program, :, :] = jnp.where(steps > 0, w[:, None] * u, 0)
        dw_ref[program, :] = jnp.where(steps > 0, jnp.sum(q * u, axis=1), 0)

    return pl.pallas_call(
        kernel,
        name="index_loss_queries",
        grid=(number,),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((number, heads, width), (number, heads), (number, keys.size))
        ],
        compiler_params=parameters,
        interpret=interpret,
    )(*operands, *(x.reshape(-1, x.shape[-1]) for x in (k, c)), *flat, *(x.reshape(-1) for x in kept))


def _of_keys(dk, q, w, k, di, span, interpret):
    """dk[t] + Σ_s Σ_j dI[s,t] 1[q[s,j] · k[t] > 0] w[s,j] q[s,j], s ascending, over s with first ≤ t < last."""
    batch, queries, heads, width = q.shape
    keys, kind = k.shape[1], q.dtype
    pad = lambda x: jnp.pad(
        x, [(0, 0), (0, 0), (0, max(16, pl.next_power_of_2(heads)) - heads)] + [(0, 0)] * (x.ndim - 3)
    )

    def kernel(dk_ref, q_ref, w_ref, k_ref, di_ref, first_ref, last_ref, out_ref):
        of, start = pl.program_id(0), pl.program_id(1) * OWNED
        key, features = start + jnp.arange(OWNED), jnp.arange(width)[None, :]
        inside = key < keys
        at = of, jnp.minimum(key, keys - 1)[:, None], features
        tile = k_ref[at]

        def step(s, total):
            first, last = first_ref[of, s], last_ref[of, s]

            def add():
                q = q_ref[of, s, :, :]
                mine = inside & (key >= first) & (key < last)
                d = plt.load(di_ref.at[of, s, key], mask=mine, other=0)
                d = jnp.where(mine, d, 0)[:, None] * w_ref[of, s, :][None, :]
                gradient = jnp.where(product(tile, q, (1, 1)) > 0, d, 0).astype(kind)
                return total + product(gradient, q, (1, 0))

            return jax.lax.cond((last > start) & (first < start + OWNED) & (last > first), add, lambda: total)

        total = jax.lax.fori_loop(0, queries, step, dk_ref[at])
        plt.store(out_ref.at[of, key[:, None], features], total, mask=inside[:, None])

    return pl.pallas_call(
        kernel,
        name="index_loss_keys",
        grid=(batch, pl.cdiv(keys, OWNED)),
        out_shape=jax.ShapeDtypeStruct(k.shape, jnp.float32),
        input_output_aliases={0: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
    )(dk, pad(q), pad(w.astype(jnp.float32)), k, di, *span)
