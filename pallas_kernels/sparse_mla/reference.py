"""XLA's formulation: the selected rows of a block of queries are gathered, attended, and forgotten."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import in_blocks
from pallas_kernels.sparse_mla.rows import unpack

GATHERED = 1 << 26  # values of gathered rows that exist at once


def forward(
    q_latent: Float[Array, "B S H C"],
    q_rope: Float[Array, "B S H R"],
    latent: Float[Array, "B T C"],
    rope: Float[Array, "B T R"],
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    scale: float,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S H"]]:
    """See `pallas_kernels.sparse_mla.sparse_mla`."""
    batch, queries = count.shape
    q, rows = jnp.concatenate([q_latent, q_rope], axis=-1), jnp.concatenate([latent, rope], axis=-1)
    size = max(1, min(queries, GATHERED // (batch * index.shape[-1] * rows.shape[-1])))
    split, join = in_blocks(queries, size)
    attend = functools.partial(_attend, latent=latent.shape[-1], scale=scale)
    each_query = jax.vmap(jax.vmap(attend, (0, None, 0, 0)))
    # Under a gradient a block's rows are gathered again rather than kept.
    block = jax.checkpoint(lambda args: each_query(args[0], rows, args[1], args[2]))
    return jax.tree.map(join, jax.lax.map(block, (split(q), split(index), split(count))))


def _attend(q, rows, index, count, latent: int, scale: float):
    """One query [H,F] over its own rows."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    seen = jnp.arange(index.shape[0]) < count
    keys = jnp.where(seen[:, None], rows[index], 0)
    score = jnp.einsum("hf,kf->hk", q, keys, preferred_element_type=wide) * scale
    score = jnp.where(seen, score, -jnp.inf)
    logsumexp = jax.nn.logsumexp(score, axis=-1)
    weight = jnp.where(seen, jnp.exp(score - jnp.where(count > 0, logsumexp, 0)[:, None]), 0)
    out = jnp.einsum("hk,kc->hc", weight.astype(q.dtype), keys[:, :latent], preferred_element_type=wide)
    return out.astype(q.dtype), logsumexp


def backward(q_latent, q_rope, latent, rope, index, count, out, logsumexp, d_out, d_logsumexp, scale: float):
    """Cotangents of the first four, by differentiating `forward`; `out` and `logsumexp` are not needed."""
    _, pull = jax.vjp(lambda *args: forward(*args, index, count, scale), q_latent, q_rope, latent, rope)
    return pull((d_out, d_logsumexp))


def paged(q_latent, q_rope, pages, table, index, count, scale: float):
    """See `pallas_kernels.sparse_mla.sparse_mla_paged`: what a block of queries selects is gathered, then unpacked."""
    batch, queries = count.shape
    size = max(1, min(queries, GATHERED // (batch * index.shape[-1] * pages.shape[-1])))
    split, join = in_blocks(queries, size)
    block = lambda args: _attend_pages(*args, pages, table, scale)
    return jax.tree.map(join, jax.lax.map(block, tuple(map(split, (q_latent, q_rope, index, count)))))


def _attend_pages(q_latent, q_rope, index, count, pages, table, scale: float):
    batch, queries, heads, size = q_latent.shape
    number, offset = jnp.divmod(jnp.where(jnp.arange(index.shape[-1]) < count[..., None], index, 0), pages.shape[1])
    page = jnp.take_along_axis(table, number.reshape(batch, -1), axis=1).reshape(index.shape)
    keys = unpack(pages[page, offset, 0], q_latent.dtype, size)
    # Each query as a batch entry of its own, all of whose rows are selected.
    own = jnp.broadcast_to(jnp.arange(index.shape[-1]), index.shape)
    alone = lambda a: a.reshape(batch * queries, 1, *a.shape[2:])
    rows = lambda a: alone(a)[:, 0]
    latent, rope = keys[..., :size], keys[..., size : size + q_rope.shape[-1]]
    inputs = alone(q_latent), alone(q_rope), rows(latent), rows(rope), alone(own), alone(count)
    out, logsumexp = forward(*inputs, scale)
    return out.reshape(q_latent.shape), logsumexp.reshape(batch, queries, heads)


def put_rows(pool, rows, at):
    """See `pallas_kernels.sparse_mla.put_rows`."""
    return pool.at[jnp.where(at < 0, len(pool), at)].set(rows, mode="drop")
