"""The lightning indexer: cheap scores for every visible key, from which the keys are selected that attention reads.

Source: GLM-5.2 as transformers computes it; DeepSeek-V3.2 (arXiv 2512.02556) for the design and its training loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from glm_jax.model.chunks import chunked
from glm_jax.model.config import ModelConfig
from glm_jax.model.norms import layer_norm, linear, wide
from glm_jax.model.rope import rope
from glm_jax.model.selection import Bits, Indices, Selection, indices, live, pack, select
from glm_jax.model.target import on_cpu
from glm_jax.model.tree import Leaf

_TOGETHER = 8  # queries of a row whose heads are scored by one product on a CPU
_UNROLL_HEADS = 8  # up to here index heads are scored in a Python loop, beyond in a scan
SCORES = 1 << 19  # selected from at once on a CPU
FEWEST_COLUMNS = 512  # half of the columns are scored alone, where no query sees beyond, but never fewer than these


@struct.dataclass
class Indexer:
    """Parameters of one computing layer's indexer. J index heads of width X."""

    q: Array  # [Q, J, X] from the shared query latent
    k: Array  # [D, X]: one key for all heads
    k_norm: Array  # [X]
    k_norm_bias: Array  # [X]
    weights: Array  # [D, J]


def init(config: ModelConfig) -> Indexer:
    dim, heads, width = config.hidden_size, config.index_n_heads, config.index_head_dim
    return Indexer(
        q=Leaf((config.q_lora_rank, heads, width), ("latent", "index_head", None), config.q_lora_rank),
        k=Leaf((dim, width), ("embed", None), dim),
        k_norm=Leaf((width,), (None,), value=1.0),
        k_norm_bias=Leaf((width,), (None,)),
        weights=Leaf((dim, heads), ("embed", "index_head"), dim),
    )


def queries(p: Indexer, config: ModelConfig, x, c_q, cos, sin) -> tuple[Float[Array, "B S J X"], Float[Array, "B S J"]]:
    """Index queries and their float32 head weights, both scale factors (X^-1/2, J^-1/2) folded into the weights."""
    q = _rope_first(linear(c_q, p.q), cos[:, :, None], sin[:, :, None])
    w = linear(x, p.weights).astype(wide(x.dtype))
    return q, w * (config.index_n_heads * config.index_head_dim) ** -0.5


def keys(p: Indexer, x, cos, sin) -> Float[Array, "B S X"]:
    """Index keys: LayerNorm (ε = 1e-6) and rope on the first channels. These are the rows of the index-key cache."""
    return _rope_first(layer_norm(linear(x, p.k), p.k_norm, p.k_norm_bias, 1e-6), cos, sin)


def _rope_first(x, cos, sin):
    width = 2 * cos.shape[-1]
    return jnp.concatenate([rope(x[..., :width], cos, sin), x[..., width:]], axis=-1)


def scores(q: Float[Array, "B S J X"], w: Float[Array, "B S J"], k: Float[Array, "B T X"]) -> Float[Array, "B S T"]:
    """I[s,t] = Σ_j w[s,j] · relu(q[s,j] · k[t]) in float32, head by head, so that [B,S,J,T] never exists."""
    q, k = q.astype(w.dtype), k.astype(w.dtype)
    if q.shape[1] == 1:  # decode: one product for all heads, keys major
        dots = jax.nn.relu(jnp.einsum("btx,bjx->btj", k, q[:, 0]))
        return jnp.einsum("btj,bj->bt", dots, w[:, 0])[:, None]
    if q.shape[1] <= _TOGETHER and on_cpu():  # draft rows: one product for all heads of all queries
        dots = jnp.einsum("bqx,btx->bqt", q.reshape(q.shape[0], -1, q.shape[3]), k)
        dots = jax.nn.relu(dots).reshape(*w.shape, -1)
        return sum(w[..., j, None] * dots[:, :, j] for j in range(w.shape[2]))

    def add_head(total, head):
        q_head, w_head = head  # [B, S, X], [B, S]
        return total + w_head[..., None] * jax.nn.relu(jnp.einsum("bsx,btx->bst", q_head, k)), None

    heads = (jnp.moveaxis(q, 2, 0), jnp.moveaxis(w, 2, 0))
    total = jnp.zeros((*q.shape[:2], k.shape[1]), w.dtype)
    return jax.lax.scan(add_head, total, heads, unroll=min(q.shape[2], _UNROLL_HEADS))[0]


def choose(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    keys: Callable[[int], Float[Array, "B T X"]],
    visible: Bool[Array, "B S T"],
    top_k: int,
    trained: bool,
    as_bits: bool,
) -> Selection:
    """Scores and selects; with `trained`, also the log-probabilities that the indexer's loss needs.

    `keys` gives those of the first columns, so many as it is told: what no query sees costs nothing.
    """

    def among(columns: int) -> Selection:
        k = keys(columns)

        def of_chunk(chunk) -> Selection:
            q, w, seen = chunk
            score = scores(q, w, k)
            mask = select(jax.lax.stop_gradient(score), seen, top_k)
            if as_bits:
                return Bits(pack(mask), _log_softmax(score, mask) if trained else None)
            index, count = indices(mask, top_k)
            if not trained:
                return Indices(index, count)
            return Indices(index, count, _log_softmax(jnp.take_along_axis(score, index, axis=-1), live(index, count)))

        # Bisection passes over the scores again and again: on a CPU they had better stay in its cache.
        size = max(1, SCORES // (q.shape[0] * columns)) if on_cpu() else q.shape[1]
        return chunked(of_chunk, (q, w, visible[..., :columns]), size)

    sizes = [visible.shape[-1]]
    while not as_bits and (half := -(-sizes[0] // 2)) >= max(FEWEST_COLUMNS, top_k):
        sizes.insert(0, half)
    if len(sizes) == 1:
        return among(*sizes)
    reach = jnp.max(jnp.where(jnp.any(visible, axis=(0, 1)), jnp.arange(1, sizes[-1] + 1), 0))
    return jax.lax.switch(sum(reach > size for size in sizes[:-1]), [partial(among, size) for size in sizes])


def _log_softmax(score, mask):
    """Over the masked-in entries, -inf elsewhere; finite where a query selects nothing, and nothing reads it."""
    nothing = ~jnp.any(mask, axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(mask, score, jnp.where(nothing, 0.0, -jnp.inf)), axis=-1)


def kl(log_q: Float[Array, "B S K"], attention: Float[Array, "B S K"]) -> Float[Array, "B S"]:
    """KL(p ‖ q) per query, p the attention averaged over heads on the selected keys, q the indexer (V3.2 §2.1).

    Keys are counted where p > 0, so p must be 0 where nothing was selected.
    """
    p = jax.lax.stop_gradient(attention)
    seen = p > 0
    log_ratio = jnp.log(jnp.where(seen, p, 1.0)) - jnp.where(seen, log_q, 0.0)
    return jnp.sum(jnp.where(seen, p * log_ratio, 0.0), axis=-1)
