"""XLA's formulation: scores of a block of queries, then an exact selection by bisection over the scores' bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.blocks import in_blocks

LOWEST = jnp.iinfo(jnp.int32).min  # the rank of what is not visible
SCORES = 1 << 24  # (query, key) pairs that exist at once


def index_select(q, w, k, first, last, top_k: int, k_scale=None) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """See `pallas_kernels.index_select.index_select`."""
    batch, queries = w.shape[:2]
    keys = k.shape[1]
    size = max(1, min(queries, SCORES // (batch * keys)))
    split, join = in_blocks(queries, size)

    def block(args):
        q, w, first, last = args
        column = jnp.arange(keys)
        visible = (first[..., None] <= column) & (column < last[..., None])
        score = scores(q, w, k) if k_scale is None else scores(q, w, k) * k_scale[:, None]
        return columns_of(select(jnp.where(visible, ranks(score), LOWEST), top_k), top_k)

    return jax.tree.map(join, jax.lax.map(block, (split(q), split(w), split(first), split(last))))


def index_select_paged(
    q, w, pages, table, first, last, top_k: int, page_scale=None
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """See `pallas_kernels.index_select.index_select_paged`. Gathers the pages first."""
    in_order = lambda a: a[table].reshape(table.shape[0], -1, *a.shape[2:])
    scale = None if page_scale is None else in_order(page_scale)
    return index_select(q, w, in_order(pages), first, last, top_k, scale)


def scores(q: Float[Array, "B S J X"], w: Float[Array, "B S J"], k: Float[Array, "B T X"]) -> Float[Array, "B S T"]:
    """I[s,t] = Σ_j w[s,j] · relu(q[s,j] · k[t]), accumulated in float32 (float64 for float64 inputs)."""
    q, k = (a.astype(jnp.bfloat16) if a.dtype == jnp.float8_e4m3fn else a for a in (q, k))  # exact
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dots = jax.nn.relu(jnp.einsum("bsjx,btx->bsjt", q, k, preferred_element_type=wide))
    return jnp.einsum("bsjt,bsj->bst", dots, w.astype(wide))


def ranks(score: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """Integers in the order of the float32 scores, above LOWEST; -0 counts as 0."""
    raw = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score.astype(jnp.float32)), jnp.int32)
    return jnp.where(raw < 0, raw ^ jnp.int32(0x7FFFFFFF), raw)


def select(rank: Int[Array, "*B T"], top_k: int) -> Bool[Array, "*B T"]:
    """The top_k highest ranks above LOWEST, ties to the lower column."""
    count = lambda hit: jnp.sum(hit, axis=-1, keepdims=True, dtype=jnp.int32)
    wanted = jnp.minimum(count(rank > LOWEST), top_k)

    def next_bit(i, threshold):
        higher = threshold + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - i)
        return jnp.where(count(rank >= higher) >= wanted, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, next_bit, jnp.full_like(wanted, LOWEST))
    above, tied = rank > threshold, (rank == threshold) & (rank > LOWEST)
    return above | (tied & (jnp.cumsum(tied, axis=-1) <= wanted - count(above)))


def columns_of(mask: Bool[Array, "*B T"], top_k: int) -> tuple[Int[Array, "*B K"], Int[Array, "*B"]]:
    """The columns of a mask, ascending, then zeros; their count."""
    running = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    rows, keys = running.reshape(-1, mask.shape[-1]), jnp.arange(top_k)
    index = jax.vmap(lambda row: jnp.searchsorted(row, keys + 1))(rows).reshape(*mask.shape[:-1], top_k)
    count = running[..., -1]
    return jnp.where(keys < count[..., None], index, 0).astype(jnp.int32), count
