"""Attention in the latent space over each query's own selection of tokens, absorbed form (every head reads one row).

    sparse_mla(q_latent, q_rope, latent, rope, index, count, scale) -> out, logsumexp          differentiable
    sparse_mla_paged(q_latent, q_rope, pages, table, index, count, scale) -> out, logsumexp    a decode step
    put_rows(pool, rows, at) -> pool                                            what such a step adds to the pages

Token-exact: the rows at `index` and no others are read, in whatever order they come.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.backend import choose
from pallas_kernels.sparse_mla import gpu, gpu_backward, reference, tpu, tpu_backward
from pallas_kernels.sparse_mla.rows import pack_rows

__all__ = ["pack_rows", "put_rows", "sparse_mla", "sparse_mla_paged"]


def sparse_mla(
    q_latent: Float[Array, "B S H C"],
    q_rope: Float[Array, "B S H R"],
    latent: Float[Array, "B T C"],
    rope: Float[Array, "B T R"],
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    scale: float,
    backend: str | None = None,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S H"]]:
    """out[h] = Σ_i p[h,i] · latent[t_i], p = softmax_i(scale · (q_latent[h] · latent[t_i] + q_rope[h] · rope[t_i])).

    t_i = index[i] for i < count: distinct token numbers, ascending, below T; entries from count on are never read. A
    query with count 0 gets zeros. Also returns logsumexp float32[B,S,H] of the scaled scores (-inf for count 0). Sums
    and softmax are float32, whatever the inputs (float64 stays float64); `out` has q's dtype.

    Gradients flow to q_latent, q_rope, latent and rope, from both results; the kernels add up rows in a fixed order, so
    that they are the same bits each time. `backend` is "tpu", "gpu", "xla", or None for what serves these shapes on the
    platform at hand. Raises NotImplementedError where a backend that was asked for by name cannot serve them,
    ValueError for shapes that do not fit together. Source: DeepSeek-V3.2 (arXiv 2512.02556, §2.1), multi-query mode of
    MLA.
    """
    batch, queries, heads, size = q_latent.shape
    keys = latent.shape[1]
    _fit("latent", latent, (batch, keys, size))
    _fit("q_rope", q_rope, (batch, queries, heads, q_rope.shape[-1]))
    _fit("rope", rope, (batch, keys, q_rope.shape[-1]))
    _fit("index", index, (batch, queries, index.shape[-1]))
    _fit("count", count, (batch, queries))
    return _sparse_mla(q_latent, q_rope, latent, rope, index, count, scale, backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _sparse_mla(q_latent, q_rope, latent, rope, index, count, scale, backend):
    serve = choose("sparse_mla", {"tpu": tpu.forward, "gpu": gpu.forward, "xla": reference.forward}, backend)
    return serve(q_latent, q_rope, latent, rope, index, count, scale)


def _forward(*args):
    results = _sparse_mla(*args)
    return results, (*args[:6], *results)


def _backward(scale, backend, kept, cotangents):
    implementations = {"tpu": tpu_backward.backward, "gpu": gpu_backward.backward, "xla": reference.backward}
    serve = choose("sparse_mla", implementations, backend)
    return *serve(*kept, *cotangents, scale), None, None


_sparse_mla.defvjp(_forward, _backward)


def sparse_mla_paged(
    q_latent: Float[Array, "B S H C"],
    q_rope: Float[Array, "B S H R"],
    pages: UInt32[Array, "P page 1 W"],
    table: Int[Array, "B M"],
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    scale: float,
    backend: str | None = None,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B S H"]]:
    """`sparse_mla` over pages of `pack_rows`: token t of sequence b is row t % page of pages[table[b, t // page]].

    S is one query per sequence, a few draft rows, or a chunk of a prompt. Rows of fp8 are attended in q's dtype.
    Entries of the table that no index reaches are never read. A page is a power of two of tokens, or ValueError.
    """
    batch, queries, heads, size = q_latent.shape
    _fit("q_rope", q_rope, (batch, queries, heads, q_rope.shape[-1]))
    _fit("table", table, (batch, table.shape[-1]))
    _fit("index", index, (batch, queries, index.shape[-1]))
    _fit("count", count, (batch, queries))
    page = pages.shape[1]
    if page & (page - 1):
        raise ValueError(f"sparse_mla_paged: a page holds a power of two of tokens, got {page}")
    serve = choose("sparse_mla_paged", {"tpu": tpu.paged, "gpu": gpu.paged, "xla": reference.paged}, backend)
    return serve(q_latent, q_rope, pages, table, index, count, scale)


def put_rows(
    pool: UInt32[Array, "P 1 W"], rows: UInt32[Array, "N 1 W"], at: Int[Array, "N"], backend: str | None = None
) -> UInt32[Array, "P 1 W"]:
    """The pool with these rows of `pack_rows` at these places; in place, where the pool is not used otherwise.

    Rows for places that are not in the pool are dropped. No place may be named twice.
    """
    _fit("rows", rows, (*at.shape, *pool.shape[1:]))
    return choose("put_rows", {"tpu": tpu.put_rows, "xla": reference.put_rows}, backend)(pool, rows, at)


def _fit(name: str, array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"sparse_mla: {name} is {array.shape}, the other arguments want {shape}")
