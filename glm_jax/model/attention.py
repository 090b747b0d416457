"""Multi-head latent attention (MLA) over selected keys.

A cache row is latent ‖ rope key: RP = R + P numbers per token for all heads. Two forms of the same algebra: *expanded*
(keys and values of every head made from the latents, dense scores under a mask) and *absorbed* (queries carried into
the latent space, so attention reads cache rows as they are, and only the selected ones).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import indexer
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.norms import linear, rms_norm, wide
from glm_jax.model.quantised import dense
from glm_jax.model.rope import rope
from glm_jax.model.selection import live
from glm_jax.model.target import on_cpu
from glm_jax.model.tree import Leaf

GATHERED = 8  # queries, of all rows together, whose selected cache rows exist at once


@struct.dataclass
class Attention:
    """Parameters. H heads; N, P, U the nope, rope and value widths of a head; Q and R the query and key latents."""

    q_a: Array  # [D, Q]
    q_norm: Array  # [Q]
    q_b: Array  # [Q, H, N + P]
    kv_a: Array  # [D, R + P]
    kv_norm: Array  # [R]
    k_b: Array  # [H, R, N]: heads first, as decoding multiplies by them
    v_b: Array  # [H, R, U]
    o: Array  # [H, U, D]
    q_a_bias: Array | None  # with attention_bias
    kv_a_bias: Array | None
    o_bias: Array | None
    indexer: Indexer | None  # of layers that compute a selection


def init(config: ModelConfig, full: bool) -> Attention:
    dim, heads, q_rank, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    nope, roped, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    bias = lambda width, axis: Leaf((width,), (axis,)) if config.attention_bias else None
    return Attention(
        q_a=Leaf((dim, q_rank), ("embed", "latent"), dim),
        q_norm=Leaf((q_rank,), (None,), value=1.0),
        q_b=Leaf((q_rank, heads, nope + roped), ("latent", "head", None), q_rank),
        kv_a=Leaf((dim, rank + roped), ("embed", None), dim),
        kv_norm=Leaf((rank,), (None,), value=1.0),
        k_b=Leaf((heads, rank, nope), ("head", "latent", None), rank),
        v_b=Leaf((heads, rank, value), ("head", "latent", None), rank),
        o=Leaf((heads, value, dim), ("head", "value", "embed"), heads * value),
        q_a_bias=bias(q_rank, "latent"),
        kv_a_bias=bias(rank + roped, None),
        o_bias=bias(dim, "embed"),
        indexer=indexer.init(config) if full else None,
    )


def query_latent(p: Attention, config: ModelConfig, x: Float[Array, "B S D"]) -> Float[Array, "B S Q"]:
    """The low-rank query that MLA and the indexer share."""
    return rms_norm(_biased(linear(x, p.q_a), p.q_a_bias), p.q_norm, config.latent_norm_eps)


def queries(
    p: Attention, config: ModelConfig, c_q, cos, sin
) -> tuple[Float[Array, "B S H N"], Float[Array, "B S H P"]]:
    """Queries per head: the part without positions, and the rotated part."""
    q = linear(c_q, p.q_b)
    q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    return q_nope, rope(q_rope, cos[:, :, None], sin[:, :, None])


def rows(p: Attention, config: ModelConfig, x, cos, sin) -> Float[Array, "B S RP"]:
    """Cache rows: the normed latent, then the rotated key that all heads share."""
    latent, k_rope = jnp.split(_biased(linear(x, p.kv_a), p.kv_a_bias), [config.kv_lora_rank], axis=-1)
    return jnp.concatenate([rms_norm(latent, p.kv_norm, config.latent_norm_eps), rope(k_rope, cos, sin)], axis=-1)


def output(p: Attention, x: Float[Array, "B S H U"]) -> Float[Array, "B S D"]:
    out = linear(x.reshape(*x.shape[:2], -1), dense(p.o, x.dtype).reshape(-1, p.o.shape[-1]))
    return _biased(out, p.o_bias)


def _biased(x, bias):
    return x if bias is None else x + bias.astype(x.dtype)


def expanded(
    p: Attention, config: ModelConfig, q_nope, q_rope, kv: Float[Array, "B T RP"], mask: Bool[Array, "B S T"]
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H S T"]]:
    """Dense attention under a mask; also returns the probabilities. A query that sees nothing gets zeros."""
    latent, k_rope = jnp.split(kv, [config.kv_lora_rank], axis=-1)
    # Heads lead in every product: a batch dimension inside a dot's output costs a factor of four on a CPU.
    # Keys and values come from one product each, turned afterwards: cheaper than a product per head.
    k_nope, v = (linear(latent, dense(w, kv.dtype).swapaxes(0, 1)).swapaxes(1, 2) for w in (p.k_b, p.v_b))
    q = jnp.concatenate([q_nope, q_rope], axis=-1).swapaxes(1, 2)
    k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:3], k_rope.shape[-1]))], axis=-1)
    score = jnp.einsum("bhsd,bhtd->bhst", q, k)
    prob = _softmax(score * config.softmax_scale, mask[:, None])
    return jnp.einsum("bhst,bhtu->bhsu", prob.astype(v.dtype), v).swapaxes(1, 2), prob


Read = Callable[[Any], tuple[Float[Array, "B K RP"], Bool[Array, "B K"]]]


def absorbed(
    p: Attention, config: ModelConfig, q_nope, q_rope, per_query: Any, read: Read
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H S K"]]:
    """Attention over cache rows as they are, GATHERED queries at a time, which bounds what is gathered.

    `read` gets a query's part of `per_query` (arrays [B, S, ...]) and gives the rows to score and which of them count:
    the selected ones alone, at a cost independent of T (`gathering`).
    """
    rank = config.kv_lora_rank
    q = jnp.concatenate([into_latent(p, q_nope), q_rope], axis=-1)

    def one_query(args):
        q_BxHxR, query = args
        rows_BxKxR, seen_BxK = read(query)
        score = jnp.einsum("bhr,bkr->bhk", q_BxHxR, rows_BxKxR) * config.softmax_scale
        prob = _softmax(score, seen_BxK[:, None])
        values = rows_BxKxR if on_cpu() else rows_BxKxR[..., :rank]  # on a CPU a slice of the rows is a copy of them
        return jnp.einsum("bhk,bkr->bhr", prob.astype(values.dtype), values)[..., :rank], prob

    if q.shape[1] == 1:
        out, prob = one_query(jax.tree.map(lambda a: a[:, 0], (q, per_query)))
        out, prob = out[:, None], prob[:, :, None]
    else:
        query_first = jax.tree.map(lambda a: a.swapaxes(0, 1), (q, per_query))
        at_once = max(1, GATHERED // q.shape[0])
        out, prob = jax.lax.map(jax.checkpoint(one_query), query_first, batch_size=at_once)
        out, prob = out.swapaxes(0, 1), jnp.moveaxis(prob, 0, 2)
    return out_of_latent(p, out), prob


def absorbed_all(
    p: Attention, config: ModelConfig, q_nope, q_rope, kv: Float[Array, "B T RP"], mask: Bool[Array, "B S T"]
) -> Float[Array, "B S H U"]:
    """A few queries over all cache rows under a mask: no key or value is made from the latents."""
    q = jnp.concatenate([into_latent(p, q_nope), q_rope], axis=-1)
    batch, queries, heads, _ = q.shape
    score = jnp.einsum("bqr,btr->bqt", q.reshape(batch, queries * heads, -1), kv) * config.softmax_scale
    prob = _softmax(score, jnp.repeat(mask, heads, axis=1))
    values = kv if on_cpu() else kv[..., : config.kv_lora_rank]
    out = jnp.einsum("bqt,btr->bqr", prob.astype(kv.dtype), values)[..., : config.kv_lora_rank]
    return out_of_latent(p, out.reshape(batch, queries, heads, -1))


def into_latent(p: Attention, q_nope: Float[Array, "B S H N"]) -> Float[Array, "B S H R"]:
    """Queries that score latents as they are."""
    return jnp.einsum("bshn,hrn->bshr", q_nope, dense(p.k_b, q_nope.dtype))


def out_of_latent(p: Attention, x: Float[Array, "B S H R"]) -> Float[Array, "B S H U"]:
    """Values of what heads attended in the latent space."""
    heads_first = jnp.einsum("hnr,hru->hnu", x.reshape(-1, *x.shape[2:]).swapaxes(0, 1), dense(p.v_b, x.dtype))
    return heads_first.swapaxes(0, 1).reshape(*x.shape[:3], -1)


def gathering(gather: Callable[[Int[Array, "B K"]], Float[Array, "B K RP"]]) -> Read:
    """Reads the selected rows of a query, given its `Indices`."""
    return lambda selection: (gather(selection.index), live(selection.index, selection.count))


def gather_from(kv: Float[Array, "B T RP"], index: Int[Array, "B K"]) -> Float[Array, "B K RP"]:
    return jnp.take_along_axis(kv, index[..., None], axis=1, mode="promise_in_bounds")


def visible(
    document_q: Int[Array, "B S"], document_k: Int[Array, "B T"], column_q: Int[Array, "S"]
) -> Bool[Array, "B S T"]:
    """Key t is visible to the query at column s: same document, not padding, t ≤ s."""
    same = (document_q[:, :, None] == document_k[:, None]) & (document_q > 0)[:, :, None]
    return same & (jnp.arange(document_k.shape[1]) <= column_q[:, None])


def _softmax(score, mask):
    """Softmax in float32 over the masked-in entries of the last axis; all zeros where there are none."""
    score = jnp.where(mask, score.astype(wide(score.dtype)), -1e30)
    # Above -1e30 also where nothing is masked in, so that every exp underflows to 0 there.
    top = jnp.maximum(jax.lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True)), -1e29)
    weight = jnp.exp(score - top)
    return weight / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)
