"""The forward pass over rows of documents."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import context, rows
from glm_jax.model.config import ModelConfig
from glm_jax.model.draft import DraftOutput
from glm_jax.model.draft import forward as draft_forward
from glm_jax.model.heads import embed, unembed
from glm_jax.model.layers import run_layers
from glm_jax.model.norms import rms_norm
from glm_jax.model.rows import Carried
from glm_jax.model.selection import as_indices
from glm_jax.model.weights import Transformer


@struct.dataclass
class Output:
    """What `forward` gives; the lists are there with `trace`."""

    logits: Float[Array, "B S V"]
    hidden: list[Float[Array, "B S D"]] | None = None  # each layer's input, then the output of the final norm
    routes: list[Int[Array, "B S k"]] | None = None  # experts per sparse layer, ascending
    selection: list[tuple[Int[Array, "B S K"], Int[Array, "B S"]]] | None = None  # per computing layer
    draft: DraftOutput | None = None  # with `draft`: of the states before the last


def hidden_states(
    params: Transformer,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    document_ids: Int[Array, "B T"],
    trace: bool = False,
    train_indexer: bool = False,
) -> tuple[Float[Array, "B S D"], Carried, list]:
    """The states after the final norm, with what was carried and, if asked, the trace.

    Where several devices share a row, each is given all of it and has the states of its own columns (model/context.py);
    documents must stand in one piece then, if attention goes by kernels.
    """
    by_kernels = rows.by_kernels(tokens.shape[1], config, trace, train_indexer)
    sorts = by_kernels and context.ways() == 1
    if sorts:
        # Documents in one piece, padding last: the identity for packed rows.
        order = jnp.argsort(jnp.where(document_ids > 0, document_ids, jnp.iinfo(jnp.int32).max), axis=1, stable=True)
        tokens, document_ids = (jnp.take_along_axis(a, order, axis=1) for a in (tokens, document_ids))
    view = rows.look(document_ids, config, by_kernels)
    x = embed(params, context.own(tokens), view.valid, config.dtype)
    selecting = tokens.shape[1] > config.index_topk or trace or train_indexer
    state = rows.nothing_carried(view, config, selecting, train_indexer)
    kl_weights = jnp.asarray(rows.kl_weights(config), state.kl.dtype)

    def attend(view, kind, p, x, state, numbers):
        kl_weight = kl_weights[numbers[0]] if train_indexer else None
        return rows.attend(p, config, x, view, state, kind.full and selecting, kl_weight)

    x, state, traced = run_layers(params, config, x, view, state, attend, trace)
    x = rms_norm(x, params.norm, config.rms_norm_eps)
    if sorts:
        x = jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
    return x, state, traced


def as_documents(document_ids: Int[Array, "B S"] | Bool[Array, "B S"] | None, tokens) -> Int[Array, "B S"]:
    """Document ids from what a user gave: nothing (all one document), a mask (True = document 1), or ids."""
    if document_ids is None:
        return jnp.ones(tokens.shape, jnp.int32)
    document_ids = jnp.asarray(document_ids)
    if document_ids.shape != tokens.shape:
        raise ValueError(f"document_ids has shape {document_ids.shape}, tokens {tokens.shape}: they must be equal")
    return document_ids.astype(jnp.int32)


def forward(
    params: Transformer,
    config: ModelConfig,
    tokens: Int[Array, "B S"],
    document_ids: Int[Array, "B S"] | Bool[Array, "B S"] | None = None,
    trace: bool = False,
    draft: bool = False,
) -> Output:
    """Logits of every token, as transformers computes GLM-5.2; with `draft` also those of its draft (MTP) layer.

    `document_ids`: 0 is padding, equal numbers of one row see each other causally; a bool mask is accepted. A token's
    position is its index within its document. With `draft`, documents must stand in one piece.
    """
    documents, columns = as_documents(document_ids, tokens), tokens.shape[1]
    hidden, _, traced = hidden_states(params, config, tokens, documents, trace)
    output = Output(unembed(params, hidden))
    if draft:
        within = jnp.where(documents[:, 1:] == documents[:, :-1], documents[:, :-1], 0)
        output = output.replace(draft=draft_forward(params, config, tokens[:, 1:], hidden[:, :-1], within, trace))
    if not trace:
        return output
    return output.replace(
        hidden=[x for x, _, _ in traced] + [hidden],
        routes=[jnp.sort(routes, axis=-1) for _, routes, _ in traced if routes is not None],
        selection=[as_indices(s, columns, config.index_topk) for _, _, s in traced if s is not None],
    )
