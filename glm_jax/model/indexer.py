"""The lightning indexer: cheap scores for every visible key, and the exact top-k that sparse attention reads.

Source: GLM-5.2 as transformers computes it; DeepSeek-V3.2 (arXiv 2512.02556) for the design and its training loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.config import ModelConfig
from glm_jax.model.norms import layer_norm, linear, rope, wide
from glm_jax.model.tree import Leaf

_UNROLL_HEADS = 8  # up to here index heads are scored in a Python loop, beyond in a scan


@struct.dataclass
class Indexer:
    """Parameters of one computing layer's indexer. J index heads of width X."""

    q: Array  # [Q, J, X] from the shared query latent
    k: Array  # [D, X]: one key for all heads
    k_norm: Array  # [X]
    k_norm_bias: Array  # [X]
    weights: Array  # [D, J]


@struct.dataclass
class Selection:
    """The keys that each query attends to, for all heads: the first `count` entries of `index`, ascending columns.

    Entries from `count` on are 0 and never read. `log_q` is the indexer's log-probability of each selected key (softmax
    over the selected set), there only when the indexer is being trained.
    """

    index: Int[Array, "B S K"]
    count: Int[Array, "B S"]
    log_q: Float[Array, "B S K"] | None = None


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

    def add_head(total, head):
        q_head, w_head = head  # [B, S, X], [B, S]
        return total + w_head[..., None] * jax.nn.relu(jnp.einsum("bsx,btx->bst", q_head, k)), None

    heads = (jnp.moveaxis(q, 2, 0), jnp.moveaxis(w, 2, 0))
    total = jnp.zeros((*q.shape[:2], k.shape[1]), w.dtype)
    return jax.lax.scan(add_head, total, heads, unroll=min(q.shape[2], _UNROLL_HEADS))[0]


def select(
    score: Float[Array, "B S T"], visible: Bool[Array, "B S T"], top_k: int
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """The min(top_k, T) best visible keys of each query in ascending order, ties to the lower column; their count."""
    columns = score.shape[-1]
    size = min(top_k, columns)
    best, index = jax.lax.top_k(jnp.where(visible, score, -jnp.inf), size)
    count = jnp.minimum(jnp.sum(visible, axis=-1, dtype=jnp.int32), size)
    # Ascending order by a second top-k of the negated columns: XLA's sort is several times slower on a CPU.
    index = -jax.lax.top_k(-jnp.where(best > -jnp.inf, index, columns), size)[0]
    return jnp.where(jnp.arange(size) < count[..., None], index, 0).astype(jnp.int32), count


def choose(q, w, k, visible, top_k: int, trained: bool) -> Selection:
    """Scores and selects; with `trained`, also the log-probabilities that the indexer's loss needs."""
    score = scores(q, w, k)
    index, count = select(jax.lax.stop_gradient(score), visible, top_k)
    if not trained:
        return Selection(index, count)
    selected = jnp.where(live(index, count), jnp.take_along_axis(score, index, axis=-1), -jnp.inf)
    # A padding query selects nothing: keep its softmax finite, nothing reads it.
    selected = jnp.where(count[..., None] > 0, selected, 0.0)
    return Selection(index, count, jax.nn.log_softmax(selected, axis=-1))


def live(index: Int[Array, "*B K"], count: Int[Array, "*B"]) -> Bool[Array, "*B K"]:
    """Which entries of a selection are real."""
    return jnp.arange(index.shape[-1]) < count[..., None]


def kl(selection: Selection, attention: Float[Array, "B S K"]) -> Float[Array, "B S"]:
    """KL(p ‖ q) per query, p the attention averaged over heads on the selected keys, q the indexer (V3.2 §2.1)."""
    p = jax.lax.stop_gradient(attention)
    seen = live(selection.index, selection.count) & (p > 0)
    log_ratio = jnp.log(jnp.where(seen, p, 1.0)) - jnp.where(seen, selection.log_q, 0.0)
    return jnp.sum(jnp.where(seen, p * log_ratio, 0.0), axis=-1)
