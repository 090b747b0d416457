"""Which keys each query attends to: the exact top-k of its scores, as indices or as bits.

Everything is found by bisection over counts; nothing is sorted, and ties go to the lower column on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt, UInt8

from glm_jax.model.target import on_cpu


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


def live(index: Int[Array, "*B K"], count: Int[Array, "*B"]) -> Bool[Array, "*B K"]:
    """Which entries of a selection are real."""
    return jnp.arange(index.shape[-1]) < count[..., None]
