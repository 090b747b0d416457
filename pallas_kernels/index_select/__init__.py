"""Lightning indexer and selection in one operation: the k best visible keys of every query, exactly.

    index_select(q, w, k, first, last, top_k) -> index, count
    index_select_paged(q, w, pages, table, first, last, top_k) -> index, count

The `[queries, keys]` scores are never written to memory by the kernels; the reference keeps a block of them at a time.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import choose
from pallas_kernels.index_select import gpu, reference, tpu, tpu_decode

__all__ = ["index_select", "index_select_paged"]


def index_select(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    k: Float[Array, "B T X"],
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    top_k: int,
    k_scale: Float[Array, "B T"] | None = None,
    backend: str | None = None,
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """The top_k keys t of each query by I[s,t] = Σ_j w[s,j] · relu(q[s,j] · k[t]), in float32, over first ≤ t < last.

    `first` and `last` describe causal order and packed documents alike; a query with last ≤ first selects nothing.
    Equal scores go to the lower t. Returns ascending key numbers, 0 from `count` on (K = min(top_k, T)), and
    count = min(top_k, last - first). Not differentiable: the indexer learns by its own loss.

    q and k are bfloat16, float32 or float8_e4m3fn, w float32 with both scale factors (X^-1/2, J^-1/2) folded in, and
    q's scale where it has one. A key of float8 that stands for k_scale[t] · k[t], with k_scale[t] > 0, scores
    k_scale[t] · I[s,t]. `backend` is "tpu", "gpu", "xla", or None for what serves these shapes on the platform at hand.
    Raises NotImplementedError with the reason where a backend that was asked for by name cannot serve them, ValueError
    for shapes that do not fit together.
    Source: DeepSeek-V3.2 (arXiv 2512.02556, §2.1).
    """
    batch, queries, heads, width = q.shape
    if w.shape != (batch, queries, heads) or k.shape[::2] != (batch, width) or first.shape != (batch, queries):
        raise ValueError(
            f"index_select: q {q.shape} wants w {(batch, queries, heads)}, k ({batch}, T, {width}) and first "
            f"{(batch, queries)}; got w {w.shape}, k {k.shape}, first {first.shape}"
        )
    if last.shape != first.shape or top_k < 1:
        raise ValueError(f"index_select: last {last.shape} and first {first.shape} differ, or top_k = {top_k} < 1")
    if k_scale is not None and k_scale.shape != k.shape[:2]:
        raise ValueError(f"index_select: k {k.shape} wants k_scale {k.shape[:2]}, got {k_scale.shape}")
    implementations = {"tpu": tpu.index_select, "gpu": gpu.index_select, "xla": reference.index_select}
    serve = choose("index_select", implementations, backend)
    q, w, k = jax.lax.stop_gradient((q, w, k))
    return serve(q, w, k, first, last, min(top_k, k.shape[1]), k_scale)


def index_select_paged(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    pages: Float[Array, "P page X"],
    table: Int[Array, "B N"],
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    top_k: int,
    page_scale: Float[Array, "P page"] | None = None,
    backend: str | None = None,
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """`index_select` where key t of sequence b is pages[table[b, t // page], t % page]: decode, and drafts to verify.

    A page is a power of two of keys, 16 or more. Entries of the table at or beyond ceil(max(last[b]) / page) are never
    followed, whatever they hold. page_scale is k_scale, kept by pages. K = min(top_k, N · page); everything else, and
    the errors, as in `index_select`.
    """
    batch, queries, heads, width = q.shape
    rows, page = (batch, queries), pages.shape[1]
    if w.shape != (*rows, heads) or pages.shape[2] != width or table.shape[0] != batch:
        raise ValueError(
            f"index_select_paged: q {q.shape} wants w {(*rows, heads)}, pages (P, page, {width}) and table "
            f"({batch}, N); got w {w.shape}, pages {pages.shape}, table {table.shape}"
        )
    if first.shape != rows or last.shape != rows or top_k < 1:
        raise ValueError(
            f"index_select_paged: first {first.shape} or last {last.shape} is not {rows}, or top_k = {top_k} < 1"
        )
    if page < 16 or page & (page - 1):
        raise ValueError(f"index_select_paged: a page is a power of two of keys, 16 or more; pages has {page}")
    if page_scale is not None and page_scale.shape != pages.shape[:2]:
        raise ValueError(f"index_select_paged: page_scale wants {pages.shape[:2]}, got {page_scale.shape}")
    implementations = {
        "tpu": tpu_decode.index_select_paged,
        "gpu": gpu.index_select_paged,
        "xla": reference.index_select_paged,
    }
    serve = choose("index_select_paged", implementations, backend)
    q, w, pages = jax.lax.stop_gradient((q, w, pages))
    return serve(q, w, pages, table, first, last, min(top_k, table.shape[1] * page), page_scale)
