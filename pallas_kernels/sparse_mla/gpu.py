"""GPU kernels (Pallas by way of Triton): a program attends for one query, its rows gathered by their addresses.

The rows of a tile go from HBM to shared memory by asynchronous copies of 16 bytes a thread, while the matrix units work
on the tile before; Hopper's own gathering copy engine arrives only with Blackwell. One source serves Ampere and later.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from pallas_kernels.gpu import LOG2_E, gather, shared_memory, sharers
from pallas_kernels.products import product
from pallas_kernels.sparse_mla.rows import LANES

LEAST = 256  # rows of a program where several share a query's
FAR = -1e30  # below every score


class Tiling(NamedTuple):
    """What of a query is in flight at once: so much that shared memory and registers hold it."""

    heads: int
    rows: int
    warps: int
    stages: int

    def compiler_params(self):
        return plt.CompilerParams(num_warps=self.warps, num_stages=self.stages)


# By what a GPU has of shared memory, in KiB: plain rows, rows of words, rows of words with fp8.
TILINGS = {
    227: (Tiling(64, 64, 8, 2), Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 2)),  # Hopper, Blackwell
    163: (Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 2), Tiling(32, 32, 8, 2)),  # A100
    99: (Tiling(32, 32, 8, 2), Tiling(16, 16, 4, 2), Tiling(16, 16, 4, 2)),
}


def tiling(heads: int, parts: int = 1) -> Tiling:
    """`parts` of the latent in a row: 1 plain, 2 in words, 4 in words with fp8."""
    tile = TILINGS[shared_memory()][parts // 2]
    return tile._replace(heads=min(tile.heads, max(16, pl.next_power_of_2(heads))))


def check(q_latent, q_rope, latent_dtype, interpret: bool) -> None:
    """Raises NotImplementedError for what the kernels cannot serve; float32 only the interpreter can."""
    kinds = (jnp.bfloat16, jnp.float16, jnp.float32)[: 3 if interpret else 2]
    if q_latent.dtype not in kinds or latent_dtype != q_latent.dtype:
        raise NotImplementedError(
            f"sparse_mla on GPU takes queries and rows of one type, bfloat16 or float16 (float32 would fill the "
            f"registers); got {q_latent.dtype} and {latent_dtype}"
        )
    for what, size in {"latent": q_latent.shape[-1], "rope": q_rope.shape[-1]}.items():
        if size < 16 or size & (size - 1):
            raise NotImplementedError(f"sparse_mla on GPU wants a power of two of {what} features from 16, got {size}")


def forward(q_latent, q_rope, latent, rope, index, count, scale: float, interpret: bool = False):
    """See `pallas_kernels.sparse_mla.sparse_mla`."""
    check(q_latent, q_rope, latent.dtype, interpret)
    queries, keys = q_latent.shape[1], latent.shape[1]

    def fetch(rows, program, chosen):
        latent_ref, rope_ref = rows
        number = chosen + program // queries * keys
        return [gather(latent_ref, number), gather(rope_ref, number)]

    rows = latent.reshape(-1, latent.shape[-1]), rope.reshape(-1, rope.shape[-1])
    return _attend(q_latent, q_rope, rows, fetch, index, count, scale, 1, interpret)


def paged(q_latent, q_rope, pages, table, index, count, scale: float, interpret: bool = False):
    """See `pallas_kernels.sparse_mla.sparse_mla_paged`; a word is parted into features after it was gathered."""
    check(q_latent, q_rope, q_latent.dtype, interpret)
    size, roped, page = q_latent.shape[-1], q_rope.shape[-1], pages.shape[1]
    queries, entries = q_latent.shape[1], table.shape[1]
    words = pages.shape[-1] - LANES
    parts = {size: 1, size // 2: 2, size // 4: 4}.get(words)
    if parts is None or (parts == 4 and size != 4 * LANES):
        raise NotImplementedError(
            f"sparse_mla_paged on GPU reads rows of {size} latent features in {size}, {size // 2} or (of 512 features, "
            f"in fp8) {size // 4} words and {LANES} more; got {pages.shape[-1]} words"
        )
    kind, high = q_latent.dtype, np.uint32(0xFFFF0000)

    def fetch(rows, program, chosen):
        words_ref, table_ref = rows
        number = table_ref[program // queries * entries + chosen // page] * page + chosen % page
        word = gather(words_ref, number, 0, words)
        behind = gather(words_ref, number, words, roped)
        value = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(kind)
        if parts == 1:
            return [value(word), value(behind)]
        if parts == 2:
            return [value(word << 16), value(word & high), value(behind & high)]
        of = lambda i: jax.lax.bitcast_convert_type(words_ref[number, words + LANES - parts + i], jnp.float32)
        quarters = [(_from_fp8(word >> 8 * i) * (of(i) * 256)[:, None]).astype(kind) for i in range(parts)]
        return [*quarters, value(behind & high)]

    rows = pages.reshape(-1, pages.shape[-1]), table.reshape(-1)
    return _attend(q_latent, q_rope, rows, fetch, index, count, scale, parts, interpret)


def _from_fp8(word):
    """float32 of the finite float8_e4m3fn in the low byte, over 256: float16 has one more bit of exponent."""
    bits = ((word & 0x80) << 8 | (word & 0x7F) << 7).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _attend(q_latent, q_rope, rows, fetch, index, count, scale: float, parts: int, interpret: bool):
    """`fetch(refs of rows, query, chosen)` gives a tile's features as `parts` of the latent, then the rope."""
    batch, queries, heads, size = q_latent.shape
    tile = tiling(heads, parts)
    blocks, top_k, number = pl.cdiv(heads, tile.heads), index.shape[-1], batch * queries
    splits = sharers(number * blocks, top_k, LEAST)
    per_split = pl.cdiv(pl.cdiv(top_k, splits), tile.rows) * tile.rows

    flat = lambda a: pad_heads(a.reshape(number, heads, a.shape[-1]), tile.heads)
    features = [(i * size // parts, size // parts) for i in range(parts)]

    def kernel(q_latent_ref, q_rope_ref, index_ref, count_ref, *refs):
        *row_refs, out_ref, logsumexp_ref = refs
        program, split, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        at = pl.ds(block * tile.heads, tile.heads)
        q = [q_latent_ref[program, at, pl.ds(start, wide)] for start, wide in features]
        q.append(q_rope_ref[program, at, :])
        begin = split * per_split
        end = jnp.minimum(begin + per_split, count_ref[program])

        def step(i, carry):
            highest, total, sums = carry
            column = begin + i * tile.rows + jnp.arange(tile.rows)
            # Behind the last row it is gathered again, and weighs nothing: no copy needs a mask.
            keys = fetch(row_refs, program, index_ref[program, jnp.minimum(column, end - 1)])
            score = sum(product(a, b, (1, 1)) for a, b in zip(q, keys, strict=True)) * (scale * LOG2_E)
            score = jnp.where((column < end)[None, :], score, -jnp.inf)
            higher = jnp.maximum(highest, jnp.max(score, axis=1))
            weight, kept = jnp.exp2(score - higher[:, None]), jnp.exp2(highest - higher)
            total = total * kept + jnp.sum(weight, axis=1)
            weight = weight.astype(keys[0].dtype)
            sums = [a * kept[:, None] + product(weight, b, (1, 0)) for a, b in zip(sums, keys[:-1], strict=True)]
            return higher, total, sums

        start = jnp.full(tile.heads, FAR), jnp.zeros(tile.heads)
        sums = [jnp.zeros((tile.heads, wide)) for _, wide in features]
        steps = pl.cdiv(jnp.maximum(end - begin, 0), tile.rows)
        highest, total, sums = jax.lax.fori_loop(0, steps, step, (*start, sums))
        some = total > 0
        inverse = 1 / jnp.where(some, total, 1)
        for (first, wide), a in zip(features, sums, strict=True):
            out_ref[program, split, at, pl.ds(first, wide)] = (a * inverse[:, None]).astype(out_ref.dtype)
        logsumexp = (highest + jnp.log2(jnp.where(some, total, 1))) / LOG2_E
        logsumexp_ref[program, split, at] = jnp.where(some, logsumexp, -jnp.inf)

    padded = blocks * tile.heads
    out, logsumexp = pl.pallas_call(
        kernel,
        name="sparse_mla",
        grid=(number, splits, blocks),
        out_shape=[
            jax.ShapeDtypeStruct((number, splits, padded, size), q_latent.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((number, splits, padded), jnp.float32),
        ],
        compiler_params=tile.compiler_params(),
        interpret=interpret,
    )(flat(q_latent), flat(q_rope), index.reshape(number, top_k), count.reshape(number), *rows)
    out, logsumexp = _join(out, logsumexp)
    back = lambda a: a[:, :heads].reshape(batch, queries, heads, *a.shape[2:])
    return back(out.astype(q_latent.dtype)), back(logsumexp)


def pad_heads(a, block: int):
    return jnp.pad(a, [(0, 0), (0, -a.shape[1] % block), (0, 0)])


def _join(
    out: Float[Array, "N Z H C"], logsumexp: Float[Array, "N Z H"]
) -> tuple[Float[Array, "N H C"], Float[Array, "N H"]]:
    """The attention over all rows, from that over each of Z parts of them."""
    if out.shape[1] == 1:
        return out[:, 0], logsumexp[:, 0]
    whole = jax.nn.logsumexp(logsumexp, axis=1)
    weight = jnp.where(logsumexp == -jnp.inf, 0, jnp.exp(logsumexp - jnp.maximum(whole, FAR)[:, None]))
    return jnp.einsum("nzhc,nzh->nhc", out, weight, precision="highest"), whole
