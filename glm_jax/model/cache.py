"""Latent caches and the forward pass over them: prefill in chunks, and decode of one token per slot."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_jax.model import attention, cache_row, indexer, kernels
from glm_jax.model.attention import Attention
from glm_jax.model.config import ModelConfig
from glm_jax.model.heads import embed
from glm_jax.model.layers import run_layers
from glm_jax.model.norms import rms_norm
from glm_jax.model.rope import rope_tables
from glm_jax.model.rows import DENSE_COLUMNS
from glm_jax.model.schedule import LayerKind
from glm_jax.model.selection import Bits, Indices, Selection, mask_of, pack
from glm_jax.model.target import on_cpu
from glm_jax.model.weights import Transformer

FEW_QUERIES = 8  # of a row: up to here a step is a decode step, which reads cache rows as they are
APART = 2048  # beyond so many columns a CPU scores the keys of each slot by itself: most see fewer than the longest
AT_ONCE = 1 << 22  # numbers that a decode step may gather at once on a CPU
DENSE_DECODE = 2  # decode scores all of DENSE_COLUMNS or less while they are at most so many times those it would read


@struct.dataclass
class Caches:
    """Every layer's rows in one buffer, so that a loop updates them in place: P pages of G columns.

    A sequence of N pages has T = N G columns; a table tells which pages those are. Without one, sequence b has page b
    to itself. A latent row and its rope key stand side by side: a decode step gathers both with one read.
    """

    row: cache_row.Rows  # [L, P, G, RP], or [L, P, G, 1, W] where the kernels read them
    index_key: Float[Array, "F P G X"]  # of the F computing layers

    @property
    def pages(self) -> int:
        return self.row.shape[1]

    @property
    def page(self) -> int:
        """Columns of a page."""
        return self.row.shape[2]


def init(config: ModelConfig, pages: int, columns: int) -> Caches:
    """Empty caches of the model's layers. Their content is never read beyond what was written."""
    return empty(config, config.num_hidden_layers, len(config.full_layers), pages, columns)


def empty(config: ModelConfig, layers: int, computing: int, pages: int, columns: int) -> Caches:
    return Caches(
        row=cache_row.empty(config, layers, pages, columns),
        index_key=jnp.zeros((computing, pages, columns, config.index_head_dim), jnp.dtype(config.dtype)),
    )


@struct.dataclass
class CacheState:
    """What passes from layer to layer."""

    selection: Selection
    caches: Caches


class Place(NamedTuple):
    """Where the new tokens of each row stand in the cache, and what they see there."""

    table: Int[Array, "B N"] | None  # the pages of each row, beyond the cache where it has none; None: row b has page b
    page: Int[Array, "B S"]  # to write to; beyond the cache where a token is not valid or has no page
    offset: Int[Array, "B S"]  # within that page
    valid: Bool[Array, "B S"]
    visible: Bool[Array, "B S T"]
    cos: Array
    sin: Array

    def write(self, cache: Shaped[Array, "L P G *C"], layer, new: Shaped[Array, "B S *C"]) -> Shaped[Array, "L P G *C"]:
        if cache_row.packed(cache):
            return kernels.write_rows(cache, layer, self.page * cache.shape[2] + self.offset, new)
        if new.shape[:2] == (1, 1):
            # XLA turns a scatter of one row into a select over the whole cache; this stays one row.
            at = (layer, self.page[0, 0], self.offset[0, 0], 0)
            old = jax.lax.dynamic_slice(cache, at, (1, 1, 1, new.shape[-1]))
            inside = self.page[0, 0] < cache.shape[1]
            return jax.lax.dynamic_update_slice(cache, jnp.where(inside, new[None], old), at)
        return cache.at[layer, self.page, self.offset].set(new, mode="drop")

    def read(self, cache: Shaped[Array, "L P G *C"], layer, first: int | None = None) -> Shaped[Array, "B T *C"]:
        """The first columns (default: all) of the rows' sequences."""
        if self.table is None:
            return cache[layer, :, :first]
        columns = cache.shape[2]
        pages = None if first is None else -(-first // columns)
        found = cache.at[layer, self.table[:, :pages]].get(mode="clip")
        return found.reshape(found.shape[0], -1, *cache.shape[3:])[:, :first]

    def find(self, index: Int[Array, "B S K"], columns: int) -> tuple[Int[Array, "B S K"], Int[Array, "B S K"]]:
        """Pages of `columns` columns, and places in them, of columns of each row's sequence."""
        return _find(self.table, index, columns)


def _find(table: Int[Array, "B N"] | None, column: Int[Array, "B ..."], columns: int) -> tuple[Array, Array]:
    if table is None:
        row = jnp.arange(column.shape[0]).reshape(-1, *[1] * (column.ndim - 1))
        return jnp.broadcast_to(row, column.shape), column
    rows = column.shape[0]
    page = jnp.take_along_axis(table, (column // columns).reshape(rows, -1), axis=1, mode="clip")
    return page.reshape(column.shape), column % columns


def gather(
    config: ModelConfig, caches: Caches, table: Int[Array, "B N"] | None, layer, index: Int[Array, "B ..."]
) -> Float[Array, "B ... RP"]:
    """A layer's rows at these columns of each row's sequence."""
    rows = caches.row.at[layer, *_find(table, index, caches.page)].get(mode="promise_in_bounds")
    return cache_row.load(config, rows)


def place(
    config: ModelConfig,
    caches: Caches,
    queries: int,
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    table: Int[Array, "B N"] | None,
) -> Place:
    """Of `count` new tokens per row, of at most `queries`, the first at column `start`."""
    columns = caches.page * (1 if table is None else table.shape[1])
    column = start[:, None] + jnp.arange(queries)
    valid = jnp.arange(queries) < count[:, None]
    cos, sin = rope_tables(column, config)
    visible = (jnp.arange(columns) <= column[..., None]) & valid[..., None]
    page, offset = _find(table, column, caches.page)
    page = jnp.where(valid & (column < columns), page, caches.pages)
    return Place(table, page, offset, valid, visible, cos, sin)


def no_selection(config: ModelConfig, place: Place) -> Selection:
    """What the first layer finds: never read where it computes one; it gives the carry its shape."""
    queries, columns = place.visible.shape[1:]
    # Up to here scoring every column costs less than gathering the selected ones of each query.
    reads = config.index_topk * queries
    dense = DENSE_COLUMNS if queries > FEW_QUERIES else min(DENSE_COLUMNS, DENSE_DECODE * reads)
    if columns <= max(dense, config.index_topk):
        return Bits(pack(place.visible))
    shape = place.valid.shape
    return Indices(jnp.zeros((*shape, config.index_topk), jnp.int32), jnp.zeros(shape, jnp.int32))


def attend(config: ModelConfig, place: Place, kind: LayerKind, p: Attention, x, state: CacheState, numbers):
    """Attention of new tokens over the cache, which gets their rows first; see layers.run_layers."""
    number, full_number = numbers
    columns, queries = place.visible.shape[2], x.shape[1]
    c_q = attention.query_latent(p, config, x)
    q_nope, q_rope = attention.queries(p, config, c_q, place.cos, place.sin)
    row = cache_row.store(config, attention.rows(p, config, x, place.cos, place.sin))
    caches = state.caches.replace(row=place.write(state.caches.row, number, row))
    selection = state.selection
    if kind.full and columns > config.index_topk:
        index_key = indexer.keys(p.indexer, x, place.cos, place.sin)
        caches = caches.replace(index_key=place.write(caches.index_key, full_number, index_key))
        index_q, index_w = indexer.queries(p.indexer, config, x, c_q, place.cos, place.sin)
        keys, as_bits = (caches.index_key, full_number), isinstance(selection, Bits)
        selection = _choose(config, place, index_q, index_w, keys, as_bits)
    if isinstance(selection, Indices) and cache_row.packed(caches.row):
        q, found = (attention.into_latent(p, q_nope), q_rope), (selection.index, selection.count)
        out = kernels.attend_paged(*q, caches.row, number, place.table, *found, config.softmax_scale)
        out = attention.out_of_latent(p, out)
    elif isinstance(selection, Indices):
        where = place.find(selection.index, caches.page)
        gather = lambda where, _: caches.row.at[number, *where].get(mode="promise_in_bounds")
        read = lambda query: attention.gathering(partial(gather, query[0]))(query[1])
        shape = place.valid.shape
        if on_cpu() and queries <= FEW_QUERIES:
            # In a decode step every query passes for a slot, all at once; or for a query of one slot, a few at a time.
            gathered = selection.index.size * config.row_dim
            shape = (-1, 1) if gathered <= AT_ONCE else (1, -1)
        args = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[2:]), (q_nope, q_rope, (where, selection)))
        out, _ = attention.absorbed(p, config, *args, read)
        out = out.reshape(*place.valid.shape, *out.shape[2:])
    else:
        kv, mask = cache_row.load(config, place.read(caches.row, number)), mask_of(selection, columns)
        if queries > FEW_QUERIES:
            out, _ = attention.expanded(p, config, q_nope, q_rope, kv, mask)
        else:
            out = attention.absorbed_all(p, config, q_nope, q_rope, kv, mask)
    return attention.output(p, out), CacheState(selection, caches)


def _choose(config: ModelConfig, place: Place, index_q, index_w, keys, as_bits: bool) -> Selection:
    """What new tokens select, by the index keys of a layer in (cache, layer)."""
    choose = partial(indexer.choose, top_k=config.index_topk, trained=False, as_bits=as_bits)
    rows, queries, columns = place.visible.shape
    if kernels.select_from_caches(keys[0].shape[2]) and queries <= FEW_QUERIES and not as_bits:
        last = jnp.sum(place.visible, axis=-1, dtype=jnp.int32)
        return Indices(*kernels.select_paged(index_q, index_w, *keys, place.table, last, config.index_topk))
    if not on_cpu() or queries > FEW_QUERIES or rows == 1 or columns <= APART:
        return choose(index_q, index_w, partial(place.read, *keys), place.visible)

    def one_row(args):
        index_q, index_w, visible, table = jax.tree.map(lambda a: a[None], args)
        return choose(index_q, index_w, partial(place._replace(table=table).read, *keys), visible)

    table = jnp.arange(rows)[:, None] if place.table is None else place.table
    found = jax.lax.map(one_row, (index_q, index_w, place.visible, table))
    return jax.tree.map(lambda a: a[:, 0], found)


def extend(
    params: Transformer,
    config: ModelConfig,
    caches: Caches,
    tokens: Int[Array, "B S"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    table: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B S D"], Caches]:
    """Runs `count` new tokens of each row, the first at column `start`, and appends them to its cached sequence.

    `table` names the pages of the rows' sequences (default: row b has page b); an entry beyond the cache stands for no
    page, and what would be written there is lost. Rows with count 0, and tokens from count on, write nothing, and
    their results mean nothing. Returns the states after the final norm.
    """
    at = place(config, caches, tokens.shape[1], start, count, table)
    x = embed(params, tokens, at.valid, config.dtype)
    state = CacheState(no_selection(config, at), caches)
    x, state, _ = run_layers(params, config, x, at, state, partial(attend, config))
    return rms_norm(x, params.norm, config.rms_norm_eps), state.caches
