"""The draft (MTP) layer: one stored layer that, from a state and the token after it, predicts the token after that.

x_j = proj[ RMS(embed(t_{j+1})) ‖ RMS(f_j) ], z = layer(x), m_j = RMS(z_j), logits_j = lm_head(m_j) → t_{j+2}, with f_j
the target's state after its final norm. It sees draft rows alone, from a cache of its own, and repeats itself to any
depth: the next row's state is m. Sources: DeepSeek-V3 (arXiv 2412.19437 §2.2); vLLM and SGLang for the order of
embedding and state, and for what the recursion hands on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from glm_jax.model import attention, cache, context, rows
from glm_jax.model.cache import Caches, CacheState
from glm_jax.model.config import ModelConfig
from glm_jax.model.heads import embed, unembed
from glm_jax.model.layers import run_layer
from glm_jax.model.norms import linear, rms_norm
from glm_jax.model.rope import rope_tables
from glm_jax.model.selection import Indices, Selection, as_indices
from glm_jax.model.weights import DRAFT_KIND, Transformer


@struct.dataclass
class DraftOutput:
    """What `forward` gives; routes and selection with `trace`."""

    logits: Float[Array, "B S V"]
    hidden: Float[Array, "B S D"]  # m: the state that the next depth starts from
    routes: Int[Array, "B S k"] | None = None  # ascending
    selection: tuple[Int[Array, "B S K"], Int[Array, "B S"]] | None = None


@struct.dataclass
class Drafts:
    """What `propose` gives: tokens, the logits that each was chosen by, and the draft rows that were attended."""

    token: Int[Array, "B depth"]
    logits: Float[Array, "B depth V"]
    selection: list[tuple[Int[Array, "B K"], Int[Array, "B"]]]  # per step


def forward(
    params: Transformer,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B S D"],
    document_ids: Int[Array, "B T"],
    trace: bool = False,
) -> DraftOutput:
    """Draft logits over whole rows: `tokens[b, j]` is the token that follows the state `hidden[b, j]`.

    Depth d + 1 is the same call with depth d's `hidden` and the tokens one further. Where several devices share a row,
    states and logits are of the own columns.
    """
    view = rows.look(document_ids, config, rows.by_kernels(tokens.shape[1], config, trace))
    selecting = tokens.shape[1] > config.index_topk or trace
    state = rows.nothing_carried(view, config, selecting, train_indexer=False)

    def attend(kind, p, x, state, numbers):
        return rows.attend(p, config, x, view, state, selecting)

    following = context.own(tokens)
    m, state, seen = _run(params, config, DRAFT_KIND, following, hidden, view.valid, state, attend, trace)
    output = DraftOutput(unembed(params, m), m)
    if not trace:
        return output
    chosen = as_indices(state.selection, tokens.shape[1], config.index_topk)
    return output.replace(routes=jnp.sort(seen[1], axis=-1), selection=chosen)


def unroll(
    params: Transformer,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "B S D"],
    document_ids: Int[Array, "B T"],
    depth: int,
    train_indexer: bool = False,
) -> tuple[Float[Array, "depth B S D"], Float[Array, ""]]:
    """What drafting to `depth` would compute from every state of whole rows if each draft were the token that follows.

    `hidden[b, j]` is the target's state of column j. m[d, b, j], of d drafts before, predicts the token at column
    j + 2 + d; it means something where that is in the document of column j. As in `propose` with a shared selection,
    steps from 1 on read the keys and the selection of step 0, so they see rows of true states alone. Also returns the
    KL sum of the layer's indexer (0 without `train_indexer`). Where several devices share a row, states and results are
    of the own columns.
    """
    columns = tokens.shape[1]
    kernels = rows.by_kernels(columns, config, trace=False, train_indexer=train_indexer)
    view = rows.look(document_ids, config, kernels)
    selecting = columns > config.index_topk or train_indexer
    carried = rows.nothing_carried(view, config, selecting, train_indexer)
    position = view.column - view.first
    made, m, kv = [], hidden, None
    for step in range(depth):
        cos, sin = rope_tables(position + step, config)
        at = view._replace(cos=cos, sin=sin)

        def attend(kind, p, x, state, numbers, at=at, kv=kv, first=step == 0):
            carried, _ = state
            kv = context.whole(attention.rows(p, config, x, at.cos, at.sin)) if first else kv
            kl_weight = 1.0 if train_indexer and first else None
            out, carried = rows.attend(p, config, x, at, carried, first and selecting, kl_weight, kv)
            return out, (carried, kv)

        following = context.own(jnp.pad(tokens[:, step + 1 :], ((0, 0), (0, step + 1))))
        m, (carried, kv), _ = _run(params, config, DRAFT_KIND, following, m, view.valid, (carried, kv), attend)
        made.append(m)
    return jnp.stack(made), carried.kl


def init_cache(config: ModelConfig, pages: int, columns: int) -> Caches:
    """The draft layer's own cache: column j holds draft row j."""
    return cache.empty(config, 1, 1, pages, columns)


def extend(
    params: Transformer,
    config: ModelConfig,
    caches: Caches,
    tokens: Int[Array, "B S"],
    hidden: Float[Array, "B S D"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    table: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B S D"], Caches, Selection]:
    """Runs `count` draft rows per slot, the first at column `start`; arguments as in `forward` and `cache.extend`.

    Returns m, the cache and the selection.
    """
    at = cache.place(config, caches, tokens.shape[1], start, count, table)
    state = CacheState(cache.no_selection(config, at), caches)
    m, state, _ = _run(params, config, DRAFT_KIND, tokens, hidden, at.valid, state, partial(cache.attend, config, at))
    return m, state.caches, state.selection


def propose(
    params: Transformer,
    config: ModelConfig,
    caches: Caches,
    tokens: Int[Array, "B S"],
    hidden: Float[Array, "B S D"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    depth: int,
    table: Int[Array, "B N"] | None = None,
    pick: Callable[[int, Float[Array, "B V"]], Int[Array, "B"]] = lambda step, logits: jnp.argmax(logits, axis=-1),
) -> tuple[Drafts, Caches]:
    """Drafts `depth` tokens, after ingesting `count` rows whose tokens the target has accepted.

    Step 0 runs the accepted rows; the last one's logits give the first draft, by `pick(step, logits)` (default: the
    most probable token). Each later step runs one row more. With `config.index_share_for_mtp_iteration` those attend to
    what the last accepted row selected, read once: nobody sees them, not even they themselves, and they leave nothing
    in the cache. Otherwise their rows are overwritten when the next round ingests what was accepted; those beyond the
    cache's last column are lost. Of a slot with count 0 nothing is written, and its drafts mean nothing.
    """
    last = jnp.maximum(count - 1, 0)
    columns = caches.page * (1 if table is None else table.shape[1])

    def at_last(a):
        return jnp.take_along_axis(a, last.reshape(-1, *[1] * (a.ndim - 1)), axis=1)

    def indices_of(selection):
        return Indices(*as_indices(selection, columns, config.index_topk))

    m, caches, selection = extend(params, config, caches, tokens, hidden, start, count, table)
    m, chosen = at_last(m), indices_of(jax.tree.map(at_last, selection))
    logits, used = [unembed(params, m)[:, 0]], [chosen]
    drafted = [pick(0, logits[0]).astype(jnp.int32)]
    shared, more = config.index_share_for_mtp_iteration, (count > 0).astype(count.dtype)
    kv = cache.gather(config, caches, table, 0, chosen.index[:, 0]) if shared and depth > 1 else None
    for step in range(1, depth):
        one, column = drafted[-1][:, None], start + count + step - 1
        if shared:
            m = _over(params, config, kv, chosen, one, m, column, more)
        else:
            m, caches, selection = extend(params, config, caches, one, m, column, more, table)
        used.append(chosen if shared else indices_of(selection))
        logits.append(unembed(params, m)[:, 0])
        drafted.append(pick(step, logits[-1]).astype(jnp.int32))
    selections = [(s.index[:, 0], s.count[:, 0]) for s in used]
    return Drafts(jnp.stack(drafted, 1), jnp.stack(logits, 1), selections), caches


def _over(
    params: Transformer,
    config: ModelConfig,
    kv: Float[Array, "B K RP"],
    chosen: Indices,
    token: Int[Array, "B 1"],
    hidden: Float[Array, "B 1 D"],
    column: Int[Array, "B"],
    count: Int[Array, "B"],
) -> Float[Array, "B 1 D"]:
    """m of a draft row per slot that attends to these cache rows, as many of them as were chosen."""
    tables = rope_tables(column[:, None], config)

    def attend(kind, p, x, state, numbers):
        q = attention.queries(p, config, attention.query_latent(p, config, x), *tables)
        out, _ = attention.absorbed(p, config, *q, chosen, attention.gathering(lambda index: kv))
        return attention.output(p, out), state

    kind, valid = DRAFT_KIND._replace(full=False), (count > 0)[:, None]
    return _run(params, config, kind, token, hidden, valid, None, attend)[0]


def _run(params: Transformer, config: ModelConfig, kind, tokens, hidden, valid, state, attend, trace: bool = False):
    """Input, layer and final norm of draft rows; returns m, the caller's state, and what was seen (with `trace`)."""
    if params.draft is None:
        raise ValueError("this model has no draft (MTP) layer: num_nextn_predict_layers is 0, or its file has none")
    p, eps = params.draft, config.rms_norm_eps
    # Embedding first, state second; a row that is not valid is zero in both.
    embedded = embed(params, tokens, valid, config.dtype)
    hidden = jnp.where(valid[..., None], hidden.astype(config.dtype), 0)
    both = [rms_norm(embedded, p.embed_norm, eps), rms_norm(hidden, p.hidden_norm, eps)]
    x = linear(jnp.concatenate(both, axis=-1), p.proj)
    z, state, seen = run_layer(kind, p.layer, x, state, (0, 0), config=config, valid=valid, attend=attend, trace=trace)
    return rms_norm(z, p.norm, eps), state, seen
