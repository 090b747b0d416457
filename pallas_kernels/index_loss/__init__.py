"""The indexer's training loss: how far its scores lie from where attention looks, and the gradient of that.

    index_loss(q, w, k, a, c, lse, scale, first, last)          over all visible keys: the dense warm-up
    sparse_index_loss(q, w, k, a, c, lse, scale, index, count)  over the selected keys: the sparse stage

Neither scores nor attention probabilities of shape `[queries, keys]` are kept, not for the gradient either: it
recomputes them tile by tile.

An indexer that serves several layers learns from all of them: its loss is the mean of these losses over the layers,
each with that layer's a, c and lse (IndexCache). The gradient is that of the KL to the mean of their targets, and no
layer's activations have to wait for another's; the indexer is scored again for every layer, which is the small part.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.backend import choose
from pallas_kernels.index_loss import gpu, reference, tpu, tpu_sparse

__all__ = ["index_loss", "sparse_index_loss"]


def index_loss(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    k: Float[Array, "B T X"],
    a: Float[Array, "B S H D"],
    c: Float[Array, "B T D"],
    lse: Float[Array, "B S H"],
    scale: float,
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    backend: str | None = None,
) -> Float[Array, "B S"]:
    """KL(p ‖ softmax(I)) of each query over the keys first ≤ t < last, in nats; 0 for a query that sees none.

        I[s,t] = Σ_j w[s,j] · relu(q[s,j] · k[t])
        p[s,t] ∝ Σ_h exp(scale · a[s,h] · c[t] - lse[s,h]),  Σ_t p[s,t] = 1

    q, w and k are the indexer's as `index_select` takes them. a and c are attention's queries and its one key per token
    (absorbed latent attention: D = 512 + 64), lse the logsumexp of scale · a · c over the same keys, which attention's
    forward pass has; an error in it that all heads of a query share cancels, for p is normalised here.

    Differentiable by q, w and k: ∂loss/∂I = softmax(I) - p. a, c and lse get no gradient. Keys and queries beyond what
    is visible may hold anything, NaN too. Sums are float32 (float64 for float64 inputs); bfloat16 inputs cost the loss
    nothing and a gradient at most 1 % of its largest entry. `backend` is "tpu", "gpu", "xla", or None for what serves
    these shapes on the platform at hand; NotImplementedError with the reason where a backend that was asked for by name
    cannot, ValueError for shapes that do not fit together.
    Source: DeepSeek-V3.2 (arXiv 2512.02556, §2.1.1), dense warm-up.
    """
    _check("index_loss", q, w, k, a, c, lse, {"first": first, "last": last})
    implementations = {"tpu": tpu.index_loss, "gpu": gpu.index_loss, "xla": reference.index_loss}
    serve = choose("index_loss", implementations, backend)
    return serve(q, w, k, *_targets(a, c, lse), float(scale), first, last)


def sparse_index_loss(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    k: Float[Array, "B T X"],
    a: Float[Array, "B S H D"],
    c: Float[Array, "B T D"],
    lse: Float[Array, "B S H"],
    scale: float,
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    backend: str | None = None,
) -> Float[Array, "B S"]:
    """`index_loss` over the first `count` of the keys `index` alone, which differ from each other: both distributions
    and lse are those over the selected keys. Same errors.

    Source: DeepSeek-V3.2 (arXiv 2512.02556, §2.1.1), sparse training.
    """
    _check("sparse_index_loss", q, w, k, a, c, lse, {"index": index[..., 0], "count": count})
    implementations = {
        "tpu": tpu_sparse.sparse_index_loss,
        "gpu": gpu.sparse_index_loss,
        "xla": reference.sparse_index_loss,
    }
    serve = choose("sparse_index_loss", implementations, backend)
    return serve(q, w, k, *_targets(a, c, lse), float(scale), index, count)


def _targets(*arrays):
    return map(jax.lax.stop_gradient, arrays)


def _check(name, q, w, k, a, c, lse, per_query) -> None:
    batch, queries, heads, width = q.shape
    row, keys = (batch, queries), k.shape[1]
    if w.shape != (*row, heads) or k.shape != (batch, keys, width):
        raise ValueError(
            f"{name}: q {q.shape} wants w {(*row, heads)} and k ({batch}, T, {width}); got w {w.shape}, k {k.shape}"
        )
    if a.shape[:2] != row or lse.shape != a.shape[:3] or c.shape != (batch, keys, a.shape[3]):
        raise ValueError(
            f"{name}: q {q.shape} and k {k.shape} want a {(*row, 'H', 'D')}, lse {(*row, 'H')} and c "
            f"{(batch, keys, 'D')}; got a {a.shape}, lse {lse.shape}, c {c.shape}"
        )
    for what, array in per_query.items():
        if array.shape != row:
            raise ValueError(f"{name}: {what} wants {row} for q {q.shape}, got {array.shape}")
