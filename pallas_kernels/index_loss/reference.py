"""XLA's formulation: a block of queries at a time, forward and backward, with its own gradient rule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

ENTRIES = 1 << 22  # of products per head, or of gathered keys, that exist at once


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def index_loss(q, w, k, a, c, lse, scale: float, first, last) -> Float[Array, "B S"]:
    """See `pallas_kernels.index_loss.index_loss`."""
    return _forward(_visible(k, c), (q, w, a, lse, first, last), scale)[0]


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def sparse_index_loss(q, w, k, a, c, lse, scale: float, index, count) -> Float[Array, "B S"]:
    """See `pallas_kernels.index_loss.sparse_index_loss`."""
    return _forward(_selected(k, c), (q, w, a, lse, index, count), scale)[0]


def _visible(k, c) -> Callable:
    """The keys of a block of queries: all, of which each query sees a stretch."""

    def keys_of(first, last):
        column = jnp.arange(k.shape[1])
        return k, c, (first[..., None] <= column) & (column < last[..., None])

    return keys_of


def _selected(k, c) -> Callable:
    """The keys of a block of queries: every query has its own."""

    def keys_of(index, count):
        rows = jax.vmap(lambda table, index: table[index])
        return rows(k, index), rows(c, index), jnp.arange(index.shape[-1]) < count[..., None]

    return keys_of


def add_all(dk, gradient, rows, first, last):
    """Adds to dk what a block's keys get from its queries: G[s,j,t] times rows[s,j]."""
    return dk + jnp.einsum("bsjt,bsjx->btx", gradient, rows)


def _add_selected(dk, gradient, rows, index, count):
    """One query after the other: its keys differ from each other, so no platform adds two rows to one at a time."""

    def add(dk, one):
        rows, index = one
        return jax.vmap(lambda dk, i, row: dk.at[i].add(row))(dk, index, rows), None

    own = jnp.einsum("bsjt,bsjx->bstx", gradient, rows)
    # What was not selected repeats a key, with zeros: adding those is as good as not adding them.
    return jax.lax.scan(add, dk, (own.swapaxes(0, 1), index.swapaxes(0, 1)))[0]


def _forward(keys_of, per_query, scale):
    """Loss, logsumexp of I and Σ_t of the target's unnormalised p, of each query."""

    def block(number):
        q, w, a, lse, *which = take(number)
        return block_loss(q, w, a, lse, *keys_of(*which), scale)

    numbers, take, join = _blocks(keys_of, per_query)
    return jax.tree.map(join, jax.lax.map(block, numbers))


def _backward(keys_of, add, k, per_query, scale, lse_i, mass, cotangent):
    """dq, dw, dk. Every block adds to dk in turn, so that its sums are the same from run to run."""

    def block(dk, number):
        q, w, a, lse, *which, lse_i, mass, cotangent = take(number)
        *found, gradient, rows = block_gradient(q, w, a, lse, *keys_of(*which), scale, lse_i, mass, cotangent)
        return add(dk, gradient, rows, *which), found

    numbers, take, join = _blocks(keys_of, (*per_query, lse_i, mass, cotangent))
    dk, rest = jax.lax.scan(block, jnp.zeros(k.shape, cotangent.dtype), numbers)
    return *map(join, rest), dk


def _rule(loss: Callable, keys_of: Callable, add: Callable) -> None:
    """Gives a loss its gradient: by q, w and k alone."""

    def forward(q, w, k, a, c, lse, scale, *which):
        value, *kept = _forward(keys_of(k, c), (q, w, a, lse, *which), scale)
        return value, (q, w, k, a, c, lse, which, kept)

    def backward(scale, saved, cotangent):
        q, w, k, a, c, lse, which, kept = saved
        found = _backward(keys_of(k, c), add, k, (q, w, a, lse, *which), scale, *kept, cotangent)
        return *(d.astype(x.dtype) for d, x in zip(found, (q, w, k), strict=True)), *[None] * (3 + len(which))

    loss.defvjp(forward, backward)


_rule(index_loss, _visible, add_all)
_rule(sparse_index_loss, _selected, _add_selected)


def block_loss(q, w, a, lse, k, c, seen, scale):
    """Of each query the loss, the logsumexp of I, and Σ_t p before it is normalised."""
    score, p = _scores(_products(q, k), w), _target(a, c, lse, scale, seen)
    mass = jnp.sum(p, axis=-1)
    top = jnp.max(jnp.where(seen, score, -jnp.inf), axis=-1, keepdims=True)
    top = jnp.where(jnp.any(seen, axis=-1, keepdims=True), top, 0)
    total = jnp.sum(jnp.where(seen, jnp.exp(score - top), 0), axis=-1)
    lse_i = top[..., 0] + jnp.log(jnp.where(total > 0, total, 1))
    cross = jnp.sum(jnp.where(seen, p * score, 0), axis=-1)
    own = jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
    return kl(own, cross, mass, lse_i), lse_i, mass


def block_gradient(q, w, a, lse, k, c, seen, scale, lse_i, mass, cotangent):
    """dq and dw, and the two whose product over queries and heads is dk.

    With u[s,j] = Σ_t dI[s,t] 1[q·k > 0] k[t], dq = w u and dw = q · u.
    """
    dots = _products(q, k)
    p = _target(a, c, lse, scale, seen) / jnp.where(mass == 0, 1, mass)[..., None]
    di = cotangent[..., None] * (jnp.exp(_scores(dots, w) - lse_i[..., None]) - p)
    di = jnp.where(seen & (mass != 0)[..., None], di, 0)
    gradient = jnp.where(dots > 0, di[:, :, None], 0)
    q, w, k = (finite(x).astype(gradient.dtype) for x in (q, w, k))
    u = jnp.einsum(f"bsjt,{_axes(k)}->bsjx", gradient, k)
    return w[..., None] * u, jnp.sum(q * u, axis=-1), gradient, w[..., None] * q


def kl(own, cross, mass, lse_i):
    """Σ p̂ log p̂ - p̂ · (I - lse_i) for p̂ = p / mass, from own = Σ p log p and cross = Σ p · I; 0 without mass."""
    safe = jnp.where(mass == 0, 1, mass)
    return jnp.where(mass == 0, 0, (own - cross) / safe - jnp.log(safe) + lse_i)


def finite(x):
    """What is not finite is nobody's key or query, or made its loss NaN; a product would spread it."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _products(rows, keys) -> Float[Array, "B S H T"]:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.einsum(f"bsjx,{_axes(keys)}->bsjt", rows, keys, preferred_element_type=wide)


def _scores(dots, w):
    return jnp.einsum("bsjt,bsj->bst", jax.nn.relu(dots), w.astype(dots.dtype))


def _target(a, c, lse, scale, seen):
    """Σ_h exp(scale · a_h · c - lse_h), 0 beyond what is seen."""
    dots = _products(a, c)
    return jnp.where(seen, jnp.sum(jnp.exp(scale * dots - lse.astype(dots.dtype)[..., None]), axis=2), 0)


def _axes(keys) -> str:
    return "btx" if keys.ndim == 3 else "bstx"


def _blocks(keys_of, per_query) -> tuple[Array, Callable, Callable]:
    """Numbers of the blocks of queries, how to take one, and how to join what blocks gave.

    Blocks are powers of two, as numbers of queries mostly are: otherwise all are padded with queries that see nothing.
    """
    q, _, a = per_query[:3]
    batch, queries = q.shape[:2]
    k, c, seen = jax.eval_shape(keys_of, *(x[:, :1] for x in per_query[4:6]))
    own = 0 if k.ndim == 3 else c.shape[-1]  # what a query's own keys take
    size = max(1, min(queries, ENTRIES // (batch * seen.shape[-1] * max(q.shape[2], a.shape[2], own))))
    size = 1 << size.bit_length() - 1
    pad = lambda x: jnp.pad(x, [(0, 0), (0, -queries % size)] + [(0, 0)] * (x.ndim - 2))
    padded = per_query if queries % size == 0 else tuple(map(pad, per_query))
    take = lambda number: [jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=1) for x in padded]
    join = lambda x: x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :queries]
    return jnp.arange(-(-queries // size)), take, join
