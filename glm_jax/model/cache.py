"""Latent caches and the forward pass over them: prefill in chunks, and decode of one token per slot."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import attention, indexer
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Bits, Indices, Selection
from glm_jax.model.layers import run_layers
from glm_jax.model.norms import rms_norm, rope_tables
from glm_jax.model.transformer import DENSE_COLUMNS
from glm_jax.model.weights import Transformer

DENSE_DECODE = 2  # decode scores all columns, not the selected ones, while there are at most so many times as many


@struct.dataclass
class Caches:
    """Every layer's rows in one buffer, so that a loop updates them in place. T columns per slot.

    A latent row and its rope key stand side by side: a decode step gathers both with one read.
    """

    row: Float[Array, "L B T RP"]  # latent ‖ rope key
    index_key: Float[Array, "F B T X"]  # of the F computing layers


def init(config: ModelConfig, slots: int, columns: int) -> Caches:
    """Empty caches. Their content is never read beyond what was written."""
    dtype = jnp.dtype(config.dtype)
    return Caches(
        row=jnp.zeros((config.num_hidden_layers, slots, columns, config.row_dim), dtype),
        index_key=jnp.zeros((len(config.full_layers), slots, columns, config.index_head_dim), dtype),
    )


@struct.dataclass
class _State:
    """What passes from layer to layer."""

    selection: Selection | None
    caches: Caches


def extend(
    params: Transformer,
    config: ModelConfig,
    caches: Caches,
    tokens: Int[Array, "B S"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    slot: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B S D"], Caches]:
    """Runs `count` new tokens of each row, the first at column `start`, and appends them to the cache of its slot.

    `slot` names the rows' slots (default: row b is slot b). Rows with count 0, and tokens from count on, write nothing,
    and their results mean nothing. Returns the states after the final norm.
    """
    rows, queries = tokens.shape
    columns = caches.row.shape[2]
    sparse = columns > config.index_topk
    # Up to here scoring every column costs less than gathering the selected ones.
    gathered = columns > (DENSE_COLUMNS if queries > 1 else DENSE_DECODE * config.index_topk)
    every_slot = slot is None
    slot = jnp.arange(rows) if every_slot else slot
    column = start[:, None] + jnp.arange(queries)
    valid = jnp.arange(queries) < count[:, None]
    target = jnp.where(valid, column, columns)  # beyond the cache: dropped
    cos, sin = rope_tables(column, config.qk_rope_head_dim, config.rope_theta, jnp.dtype(config.dtype))
    visible = (jnp.arange(columns) <= column[..., None]) & valid[..., None]
    x = jnp.where(valid[..., None], params.embed[tokens].astype(config.dtype), 0)

    def write(cache, layer, new):
        return cache.at[layer, slot[:, None], target].set(new, mode="drop")

    def read(cache, layer):
        return cache[layer] if every_slot else cache[layer, slot]

    def attend(kind, p, x, state, numbers):
        number, full_number = numbers
        c_q = attention.query_latent(p, config, x)
        q_nope, q_rope = attention.queries(p, config, c_q, cos, sin)
        caches = state.caches.replace(row=write(state.caches.row, number, attention.rows(p, config, x, cos, sin)))
        selection = state.selection
        if kind.full and sparse:
            index_key = write(caches.index_key, full_number, indexer.keys(p.indexer, x, cos, sin))
            caches = caches.replace(index_key=index_key)
            index_q, index_w = indexer.queries(p.indexer, config, x, c_q, cos, sin)
            keys = read(index_key, full_number)
            selection = indexer.choose(
                index_q, index_w, keys, visible, config.index_topk, trained=False, as_bits=not gathered
            )
        if gathered:
            rows_of = attention.gathering(lambda index: caches.row[number, slot[:, None], index])
            out, _ = attention.absorbed(p, config, q_nope, q_rope, selection, rows_of)
        else:
            mask = indexer.mask_of(selection, columns) if sparse else visible
            kv = read(caches.row, number)
            if queries > 1:
                out, _ = attention.expanded(p, config, q_nope, q_rope, kv, mask)
            else:
                out, _ = attention.absorbed(p, config, q_nope, q_rope, mask, lambda mask: (kv, mask))
        return attention.output(p, out), _State(selection, caches)

    x, state, _ = run_layers(params, config, x, valid, _State(_no_selection(visible, config, gathered), caches), attend)
    return rms_norm(x, params.norm, config.rms_norm_eps), state.caches


def _no_selection(visible: Bool[Array, "B S T"], config: ModelConfig, gathered: bool) -> Selection:
    """What layer 0 finds: never read, since layer 0 computes; it gives the scans' carry its shape."""
    if not gathered:
        return Bits(indexer.pack(visible))
    shape = visible.shape[:2]
    return Indices(jnp.zeros((*shape, config.index_topk), jnp.int32), jnp.zeros(shape, jnp.int32))
