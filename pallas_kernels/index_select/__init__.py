"""Lightning indexer and selection in one operation: the k best visible keys of every query, exactly.

    index_select(q, w, k, first, last, top_k) -> index, count

The `[queries, keys]` scores are never written to memory by the kernels; the reference keeps a block of them at a time.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import choose
from pallas_kernels.index_select import reference, tpu

__all__ = ["index_select"]


def index_select(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    k: Float[Array, "B T X"],
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    top_k: int,
    backend: str | None = None,
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """The top_k keys t of each query by I[s,t] = Σ_j w[s,j] · relu(q[s,j] · k[t]), in float32, over first ≤ t < last.

    `first` and `last` describe causal order and packed documents alike; a query with last ≤ first selects nothing.
    Equal scores go to the lower t. Returns ascending key numbers, 0 from `count` on (K = min(top_k, T)), and
    count = min(top_k, last - first). Not differentiable: the indexer learns by its own loss.

    q and k are bfloat16 or float32, w float32 with both scale factors (X^-1/2, J^-1/2) folded in. `backend` is "tpu",
    "xla", or None for what serves these shapes on the platform at hand. Raises NotImplementedError with the reason
    where a backend that was asked for by name cannot serve them, ValueError for shapes that do not fit together.
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
    serve = choose("index_select", {"tpu": tpu.index_select, "xla": reference.index_select}, backend)
    q, w, k = jax.lax.stop_gradient((q, w, k))
    return serve(q, w, k, first, last, min(top_k, k.shape[1]))
