"""Selected rows, copied from HBM one by one while the tile before them is worked on: what TPU kernels share.

The scalar unit starts a copy in four cycles; two tiles of rows take turns, so that starts and arithmetic share the
bundles. A row is whole lanes of 32-bit words, or XLA would copy all rows into a layout in which it is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = 128  # rows worked on together
TOGETHER = 8  # queries per grid step


def prepared(index, count, tile: int):
    """index [N,K] and count [N] in blocks of a grid step: [steps, TOGETHER · tiles, tile], [steps, 1, TOGETHER].

    Beyond its count a query reads its last row again: what lies at row 0 may be anything, and 0 x NaN is NaN.
    """
    queries = len(count)
    last = jnp.take_along_axis(index, jnp.maximum(count - 1, 0)[:, None], axis=1)
    index = jnp.where(jnp.arange(index.shape[1]) < count[:, None], index, jnp.where(count[:, None] > 0, last, 0))
    index = jnp.pad(index, [(0, -queries % TOGETHER), (0, -index.shape[1] % (2 * tile))], mode="edge")
    count = jnp.pad(count, (0, -queries % TOGETHER))
    steps = len(count) // TOGETHER
    return index.reshape(steps, -1, tile), count.reshape(steps, 1, TOGETHER)


def scratch(tile: int, rows) -> list:
    """Two tiles of rows and what says that they are there."""
    return [*[pltpu.VMEM((tile, rows.shape[-1]), rows.dtype)] * 2, *[pltpu.SemaphoreType.DMA(())] * 2]


def params() -> pltpu.CompilerParams:
    # Checking 2048 addresses per query would cost more than the copies: the caller's rows are in range.
    return pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=True)


def by_halves(halves: int, steps: int) -> tuple[Callable, Callable]:
    """Block specs in SMEM and VMEM of a grid over sequences, halves of the queries and steps, with one prefetch.

    In SMEM a block is a step's, in VMEM that of each of its queries.
    """
    at = lambda b, half, s: (b * halves + half) * steps + s
    rest = lambda block: [0] * len(block)
    spec = lambda first, block, **where: pl.BlockSpec(
        (first, *block), lambda b, half, s, _: (at(b, half, s), *rest(block)), **where
    )
    smem = lambda *block: spec(1, block, memory_space=pltpu.SMEM)
    return smem, lambda *block: spec(TOGETHER, block)


def walk(index, count, rows, buffers, begin: Callable, visit: Callable, finish: Callable) -> None:
    """For each query of a grid step: begin(query), visit(tile of rows, query, its first column) ..., finish(query).

    index and count are refs of `prepared`, in SMEM, and rows [P,1,W] in HBM; `buffers` the refs of `scratch`. A query
    without rows visits two tiles of anything.
    """
    even, odd, even_done, odd_done = buffers
    size, tiles = index.shape[2], index.shape[1] // TOGETHER

    def start(tile, done, number):
        for i in range(size):
            row = index[0, number, i]
            pltpu.make_async_copy(rows.at[row], tile.at[pl.ds(i, 1)], done).start()

    def wait(tile, done):
        pltpu.make_async_copy(rows.at[pl.ds(0, size), 0], tile, done).wait()

    def one_query(query, _):
        begin(query)
        pairs = jnp.maximum(jax.lax.div(count[0, 0, query] + 2 * size - 1, 2 * size), 1)

        def two_tiles(pair, _):
            tile = query * tiles + 2 * pair
            wait(even, even_done)
            start(odd, odd_done, tile + 1)
            visit(even, query, 2 * pair * size)
            wait(odd, odd_done)
            # The next query's first tile follows a query's last; after the last query one is read that nobody wants.
            following = jnp.where(pair + 1 < pairs, tile + 2, jnp.minimum(query + 1, TOGETHER - 1) * tiles)
            start(even, even_done, following)
            visit(odd, query, (2 * pair + 1) * size)
            return 0

        jax.lax.fori_loop(0, pairs, two_tiles, 0)
        finish(query)
        return 0

    start(even, even_done, 0)
    jax.lax.fori_loop(0, TOGETHER, one_query, 0)
    wait(even, even_done)
