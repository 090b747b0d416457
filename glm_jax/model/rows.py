"""Attention over whole rows of documents, in chunks of queries: what training and `forward` run.

Where several devices share a row (model/context.py), S counts a device's own columns and T those of the row: queries
and all that is made of them are its own, keys are the row's. What crosses is, per token of the row, an index key (X
numbers, in layers that compute a selection) and a cache row (R + P numbers), one for all heads: 256 and 1,152 bytes of
GLM-5.2 in bfloat16. Gradients come back the same way. All cache rows cross, not the selected ones alone: thousands of
queries that select 2048 tokens each leave out nearly none between them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import attention, context, indexer, kernels
from glm_jax.model.attention import Attention
from glm_jax.model.chunks import chunked
from glm_jax.model.config import ModelConfig
from glm_jax.model.norms import wide
from glm_jax.model.rope import rope_tables
from glm_jax.model.selection import Bits, Indices, Selection, mask_of, pack

DENSE_COLUMNS = 1024  # up to this many keys, dense scores under a mask are faster than gathering the selected ones
QUERY_CHUNK = 512  # queries whose scores exist at once


class Visibility(NamedTuple):
    """Who sees whom in a batch of rows, and where each token stands in its document."""

    document: Int[Array, "B S"]
    column: Int[Array, "B S"]
    first: Int[Array, "B S"]  # the column at which a token's document begins, where documents stand in one piece
    cos: Array
    sin: Array
    documents: Int[Array, "B T"]  # of all columns
    kernels: bool  # attention goes by the Pallas kernels; they want documents in one piece

    @property
    def valid(self) -> Bool[Array, "B S"]:
        return self.document > 0


def look(documents: Int[Array, "B T"], config: ModelConfig, by_kernels: bool = False) -> Visibility:
    """What this device's tokens see, from the document ids of whole rows."""
    column = jnp.broadcast_to(jnp.arange(documents.shape[1]), documents.shape)
    position, document, column = context.own((positions(documents), documents, column))
    cos, sin = rope_tables(position, config)
    return Visibility(document, column, column - position, cos, sin, documents, by_kernels)


@struct.dataclass
class Carried:
    """What passes from layer to layer."""

    selection: Selection | None
    kl: Float[Array, ""]  # Σ over layers and tokens of KL(attention ‖ indexer), mean over the layers a selection serves


def nothing_carried(view: Visibility, config: ModelConfig, selecting: bool, train_indexer: bool) -> Carried:
    """What the first layer finds."""
    return Carried(
        _no_selection(view, config, train_indexer) if selecting else None, jnp.zeros((), wide(jnp.dtype(config.dtype)))
    )


def _dense(columns: int, config: ModelConfig) -> bool:
    return columns <= max(DENSE_COLUMNS, config.index_topk)


def by_kernels(columns: int, config: ModelConfig, trace: bool, train_indexer: bool = False) -> bool:
    """Whether the kernels can give what is asked for: neither a trace nor probabilities."""
    return kernels.wanted() and not _dense(columns, config) and not trace and not train_indexer


def _no_selection(view: Visibility, config: ModelConfig, train_indexer: bool) -> Selection:
    """What layer 0 finds: never read, since layer 0 computes; it gives the scans' carry its shape."""
    shape, columns = view.document.shape, view.documents.shape[1]
    dense = _dense(columns, config)
    size = (*shape, columns if dense else config.index_topk)
    log_q = jnp.zeros(size, wide(config.dtype)) if train_indexer else None
    if dense:
        return Bits(pack(jnp.zeros(size, bool)), log_q)
    return Indices(jnp.zeros(size, jnp.int32), jnp.zeros(shape, jnp.int32), log_q)


def kl_weights(config: ModelConfig) -> list[float]:
    """Per layer 1 / (layers that share its selection): the indexer's loss is the mean KL over the layers it serves.

    Its gradient is that of the KL to their mean attention (IndexCache, arXiv 2603.12201, multi-layer loss).
    """
    starts = [*config.full_layers, config.num_hidden_layers]
    return [1 / (end - start) for start, end in zip(starts, starts[1:], strict=False) for _ in range(end - start)]


def attend(
    p: Attention,
    config: ModelConfig,
    x: Float[Array, "B S D"],
    view: Visibility,
    state: Carried,
    compute: bool,
    kl_weight: Float[Array, ""] | float | None = None,
    kv: Float[Array, "B T RP"] | None = None,
) -> tuple[Float[Array, "B S D"], Carried]:
    """Attention of a layer over whole rows, in chunks of queries; it computes a selection, or takes the carried one.

    kl_weight: of this layer in the indexer's loss; None where the indexer is not trained. kv: cache rows of all columns
    to attend to instead of those of `x`.
    """
    train_indexer = kl_weight is not None
    columns = view.documents.shape[1]
    sparse, dense = columns > config.index_topk, _dense(columns, config)
    c_q = attention.query_latent(p, config, x)
    q_nope, q_rope = attention.queries(p, config, c_q, view.cos, view.sin)
    kv = context.whole(attention.rows(p, config, x, view.cos, view.sin)) if kv is None else kv
    per_query = {"q_nope": q_nope, "q_rope": q_rope, "document": view.document, "column": view.column}
    if compute:
        # The indexer learns from its own loss alone, and the model from its own: no gradient crosses.
        x_in, c_in = jax.lax.stop_gradient(x), jax.lax.stop_gradient(c_q)
        per_query["index_q"], per_query["index_w"] = indexer.queries(p.indexer, config, x_in, c_in, view.cos, view.sin)
        index_k = context.whole(indexer.keys(p.indexer, x_in, view.cos, view.sin))
    elif state.selection is not None:
        per_query["selection"] = state.selection
    if view.kernels:
        selection = state.selection
        if compute:
            last = jnp.where(view.valid, view.column + 1, 0)
            index_q, index_w = per_query["index_q"], per_query["index_w"]
            selection = Indices(*kernels.select(index_q, index_w, index_k, view.first, last, config.index_topk))
        latent, k_rope = jnp.split(kv, [config.kv_lora_rank], axis=-1)
        queries = attention.into_latent(p, q_nope), q_rope
        out = kernels.attend(*queries, latent, k_rope, selection.index, selection.count, config.softmax_scale)
        return attention.output(p, attention.out_of_latent(p, out)), state.replace(selection=selection)

    def chunk(q):
        mask = attention.visible(q["document"], view.documents, q["column"][0])
        selection = q.get("selection")
        if compute:
            q_and_w, keys = (q["index_q"], q["index_w"]), lambda first: index_k[:, :first]
            selection = indexer.choose(*q_and_w, keys, mask, config.index_topk, train_indexer, as_bits=dense)
        if dense:
            if sparse:
                mask = mask_of(selection, columns)
            out, prob = attention.expanded(p, config, q["q_nope"], q["q_rope"], kv, mask)
        else:
            read = attention.gathering(partial(attention.gather_from, kv))
            out, prob = attention.absorbed(p, config, q["q_nope"], q["q_rope"], selection, read)
        kl = indexer.kl(selection.log_q, jnp.mean(prob, axis=1)) if train_indexer else None
        return out, selection, kl

    out, selection, kl = chunked(chunk, per_query, QUERY_CHUNK)
    if train_indexer:
        state = state.replace(kl=state.kl + kl_weight * jnp.sum(jnp.where(view.valid, kl, 0.0)))
    return attention.output(p, out), state.replace(selection=selection)


def positions(document_ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """A token's index within its document, also where others interrupt it; 0 for padding."""
    column = jnp.arange(document_ids.shape[1])
    order = jnp.argsort(document_ids, axis=1, stable=True)  # document after document, columns ascending
    grouped = jnp.take_along_axis(document_ids, order, axis=1)
    previous = jnp.pad(grouped[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start = jax.lax.cummax(jnp.where(grouped != previous, column, 0), axis=1)
    index = jnp.take_along_axis(column - start, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(document_ids > 0, index, 0)
