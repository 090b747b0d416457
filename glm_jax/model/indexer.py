"""The lightning indexer: cheap scores for every visible key, and the exact top-k that sparse attention reads.

Source: GLM-5.2 as transformers computes it; DeepSeek-V3.2 (arXiv 2512.02556) for the design and its training loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

from glm_jax.model.chunks import chunked
from glm_jax.model.config import ModelConfig
from glm_jax.model.norms import layer_norm, linear, rope, wide
from glm_jax.model.target import on_cpu
from glm_jax.model.tree import Leaf

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


@struct.dataclass
class Indices:
    """The keys that each query attends to, for all heads: the first `count` entries of `index`, ascending columns.

    Entries from `count` on are 0 and never read. `log_q` is the indexer's log-probability of each selected key (softmax
    over the selected set), there only when the indexer is being trained.
    """

    index: Int[Array, "B S K"]
    count: Int[Array, "B S"]
    log_q: Float[Array, "B S K"] | None = None


@struct.dataclass
class Bits:
    """The same as one bit per column, for attention that scores every column under a mask."""

    bits: UInt8[Array, "B S W"]  # W = ceil(T / 8), as numpy packs them
    log_q: Float[Array, "B S T"] | None = None  # -inf where not selected


Selection = Indices | Bits


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


def select(score: Float[Array, "*B T"], visible: Bool[Array, "*B T"], top_k: int) -> Bool[Array, "*B T"]:
    """The top_k best visible keys of each query (all, where fewer are visible), ties to the lower column.

    Found by bisection over the bits of the scores, then over the columns of those that tie with the last one chosen:
    counts alone, nothing is sorted.
    """
    columns = score.shape[-1]
    if columns <= top_k:
        return visible
    rank = jnp.where(visible, _ordered_bits(score), 0)
    threshold, chosen = _threshold(rank, top_k)

    def without_ties():
        return rank >= threshold

    def lowest_of_ties():
        above, tied = rank > threshold, rank == threshold
        left = top_k - _count(above)
        column = jnp.arange(columns)
        end = _largest(lambda end: _count(tied & (column < end)) <= left, columns.bit_length(), left.shape)
        return above | (tied & (column < end))

    return visible & jax.lax.cond(jnp.any(chosen > top_k), lowest_of_ties, without_ties)


def _ordered_bits(score: Float[Array, "*B T"]) -> UInt[Array, "*B T"]:
    """Unsigned integers in the order of the floats, all above 0; -0 counts as 0."""
    bits = jnp.finfo(score.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    raw = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), unsigned)
    sign = jnp.asarray(1 << (bits - 1), unsigned)
    return jnp.where(raw >= sign, ~raw, raw | sign)


def _count(hit: Bool[Array, "*B T"]) -> Int[Array, "*B 1"]:
    return jnp.sum(hit, axis=-1, keepdims=True, dtype=jnp.int32)


def _threshold(rank: UInt[Array, "*B T"], top_k: int) -> tuple[UInt[Array, "*B 1"], Int[Array, "*B 1"]]:
    """Per query the rank that its best `top_k` keys reach, and how many reach it: more where some tie.

    Bit after bit from the highest; on a CPU only until every query has its keys. 0 where fewer are visible.
    """
    dtype, bits = rank.dtype, rank.dtype.itemsize * 8
    enough = _count(rank > 0) <= top_k
    early = on_cpu()  # elsewhere an `any` over all queries would be a collective per bit

    def unfinished(carry):
        bit, _, chosen = carry
        return (bit >= 0) & (jnp.any(chosen != top_k) | (not early))

    def next_bit(carry):
        bit, threshold, chosen = carry
        longer = threshold | (jnp.ones((), dtype) << bit.astype(dtype))
        reach = _count(rank >= longer)
        holds = reach >= top_k
        return bit - 1, jnp.where(holds, longer, threshold), jnp.where(holds, reach, chosen)

    start = (jnp.int32(bits - 1), jnp.zeros(enough.shape, dtype), jnp.where(enough, top_k, rank.shape[-1]))
    _, threshold, chosen = jax.lax.while_loop(unfinished, next_bit, start)
    return threshold, chosen


def _largest(holds: Callable[[Array], Array], bits: int, shape: tuple[int, ...]) -> Int[Array, "*B"]:
    """Per query the largest number of `bits` bits for which `holds`, which is true up to some number, false beyond."""

    def next_bit(i, number):
        longer = number | (1 << (bits - 1 - i))
        return jnp.where(holds(longer), longer, number)

    return jax.lax.fori_loop(0, bits, next_bit, jnp.zeros(shape, jnp.int32))


def indices(mask: Bool[Array, "*B T"], size: int) -> tuple[Int[Array, "*B K"], Int[Array, "*B"]]:
    """The columns of a mask of at most `size`, ascending, then zeros; their count.

    The i-th set bit, found by bisection: over words of 32 columns by their running counts, then inside the word.
    """
    columns = mask.shape[-1]
    words = -(-columns // 32)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * 32 - columns)])
    by_word = padded.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32)
    word = jnp.sum(by_word << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    up_to = jnp.cumsum(_set_bits(word), axis=-1)
    wanted = jnp.arange(min(size, columns))
    at = lambda a, i: jnp.take_along_axis(a, jnp.minimum(i, words - 1), axis=-1, mode="promise_in_bounds")
    shape = (*mask.shape[:-1], wanted.size)
    before = _largest(lambda n: (n <= words) & (at(up_to, n - 1) <= wanted), words.bit_length(), shape)
    rest, nth = at(word, before), wanted - at(up_to - _set_bits(word), before)
    column = 32 * before
    for half in (16, 8, 4, 2, 1):
        low = rest & jnp.uint32((1 << half) - 1)
        beyond = nth >= _set_bits(low)
        column = jnp.where(beyond, column + half, column)
        nth = jnp.where(beyond, nth - _set_bits(low), nth)
        rest = jnp.where(beyond, rest >> half, low)
    count = up_to[..., -1]
    return jnp.where(wanted < count[..., None], column, 0), count


def _set_bits(word: UInt[Array, "*B"]) -> Int[Array, "*B"]:
    return jax.lax.population_count(word).astype(jnp.int32)


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


def pack(mask: Bool[Array, "B S T"]) -> UInt8[Array, "B S W"]:
    return jnp.packbits(mask, axis=-1)


def mask_of(selection: Bits, columns: int) -> Bool[Array, "B S T"]:
    """A selection as a mask over all columns, for one layer's dense scores; never kept."""
    return jnp.unpackbits(selection.bits, axis=-1, count=columns).astype(bool)


def as_indices(selection: Selection, columns: int, top_k: int) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """Any selection as indices and counts."""
    if isinstance(selection, Indices):
        return selection.index, selection.count
    return indices(mask_of(selection, columns), top_k)


def _log_softmax(score, mask):
    """Over the masked-in entries, -inf elsewhere; finite where a query selects nothing, and nothing reads it."""
    nothing = ~jnp.any(mask, axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(mask, score, jnp.where(nothing, 0.0, -jnp.inf)), axis=-1)


def live(index: Int[Array, "*B K"], count: Int[Array, "*B"]) -> Bool[Array, "*B K"]:
    """Which entries of a selection are real."""
    return jnp.arange(index.shape[-1]) < count[..., None]


def kl(log_q: Float[Array, "B S K"], attention: Float[Array, "B S K"]) -> Float[Array, "B S"]:
    """KL(p ‖ q) per query, p the attention averaged over heads on the selected keys, q the indexer (V3.2 §2.1).

    Keys are counted where p > 0, so p must be 0 where nothing was selected.
    """
    p = jax.lax.stop_gradient(attention)
    seen = p > 0
    log_ratio = jnp.log(jnp.where(seen, p, 1.0)) - jnp.where(seen, log_q, 0.0)
    return jnp.sum(jnp.where(seen, p * log_ratio, 0.0), axis=-1)
