"""The Pallas kernels as the model calls them: for the target platform, each device on its part of the mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from glm_jax.model.target import on_cpu, target
from pallas_kernels.index_select import index_select, index_select_paged
from pallas_kernels.sparse_mla import put_rows, sparse_mla, sparse_mla_paged

PAGES = 16, 2048  # columns that the kernel which selects copies at once: so many at least, and at most


def wanted() -> bool:
    """Whether attention goes by the kernels: everywhere but on a CPU, which has formulations of its own."""
    return not on_cpu()


def read_caches() -> bool:
    """Whether caches are read by the kernels: where each device holds those of its own rows."""
    where = target()
    alone = where.mesh is None or where.experts is not None or _ways(where.rows) == where.mesh.size
    return wanted() and alone


def select_from_caches(columns: int) -> bool:
    """Whether keys are selected by the kernels from a cache with pages of `columns`."""
    return read_caches() and _page(columns) >= PAGES[0]


def select(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    k: Float[Array, "B T X"],
    first: Int[Array, "B S"],
    last: Int[Array, "B S"],
    top_k: int,
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """See `pallas_kernels.index_select`. Queries are divided among the devices that split the heads elsewhere."""
    queries = "heads" if q.shape[1] % _ways(target().heads) == 0 else None
    per_query = ("rows", queries)
    run = lambda *args, backend: index_select(*args, top_k, backend=backend)
    return _serve(run, (q, w, k, first, last), [per_query, per_query, ("rows",), per_query, per_query], [per_query] * 2)


def select_paged(
    q: Float[Array, "B S J X"],
    w: Float[Array, "B S J"],
    keys: Float[Array, "F P G X"],
    layer: Int[Array, ""] | int,
    table: Int[Array, "B N"] | None,
    last: Int[Array, "B S"],
    top_k: int,
) -> tuple[Int[Array, "B S K"], Int[Array, "B S"]]:
    """See `pallas_kernels.index_select_paged`: few queries, over the first `last` columns of each row's pages.

    Without a table row b has page b. Where `select_from_caches`.
    """
    run = lambda *args, backend: index_select_paged(*args, top_k, backend=backend)
    pages = _pages(keys, layer, table, len(q))
    return _on_one_device(run, q, w, *pages, jnp.zeros_like(last), last)


def attend_paged(
    q_latent: Float[Array, "B S H C"],
    q_rope: Float[Array, "B S H R"],
    rows: UInt32[Array, "L P G 1 W"],
    layer: Int[Array, ""] | int,
    table: Int[Array, "B N"] | None,
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    scale: float,
) -> Float[Array, "B S H C"]:
    """See `pallas_kernels.sparse_mla_paged`: over the selected columns of each row's pages (default: row b's is b)."""
    run = lambda *args, backend: sparse_mla_paged(*args, scale, backend=backend)
    pages = _pages(rows, layer, table, len(index))
    return _on_one_device(run, q_latent, q_rope, *pages, index, count)[0]


def write_rows(
    rows: UInt32[Array, "L P G 1 W"], layer, place: Int[Array, "B S"], new: UInt32[Array, "B S 1 W"]
) -> UInt32[Array, "L P G 1 W"]:
    """See `pallas_kernels.put_rows`: new rows at places of a layer, P · G and beyond being none."""
    inside = rows.shape[1] * rows.shape[2]
    at = jnp.where(place < inside, layer * inside + place, -1)
    pool = rows.reshape(-1, *rows.shape[3:])
    return _on_one_device(put_rows, pool, new.reshape(-1, *new.shape[2:]), at.reshape(-1)).reshape(rows.shape)


def _page(columns: int) -> int:
    """Columns of the kernels' pages, which are powers of two: a cache's page is one of these or several."""
    return min(columns & -columns, PAGES[1])


def _pages(cache: Array, layer, table: Int[Array, "B N"] | None, rows: int) -> tuple[Array, Int[Array, "B M"]]:
    """The pages of all layers in one buffer, since a layer's own would be a copy, and those of each row's sequence."""
    pages, columns = cache.shape[1:3]
    size = _page(columns)
    first = (jnp.arange(rows)[:, None] if table is None else table) + layer * pages
    within = jnp.arange(columns // size)
    of_rows = (first[..., None] * len(within) + within).reshape(rows, -1)
    return cache.reshape(-1, size, *cache.shape[3:]), of_rows.astype(jnp.int32)


def attend(
    q_latent: Float[Array, "B S H C"],
    q_rope: Float[Array, "B S H R"],
    latent: Float[Array, "B T C"],
    rope: Float[Array, "B T R"],
    index: Int[Array, "B S K"],
    count: Int[Array, "B S"],
    scale: float,
) -> Float[Array, "B S H C"]:
    """See `pallas_kernels.sparse_mla`."""
    heads, row = ("rows", None, "heads"), ("rows",)
    run = lambda *args, backend: sparse_mla(*args, scale, backend=backend)
    return _serve(run, (q_latent, q_rope, latent, rope, index, count), [heads, heads, row, row, row, row], [heads] * 2)[
        0
    ]


def _serve(run: Callable, arguments: tuple, split: list[tuple], split_results: list[tuple]):
    """`run` by the platform's kernel, by XLA where it has none for these shapes; on each device's part of the mesh.

    `split` says which dimensions are divided as batch rows or heads are.
    """
    where, on_one_device = target(), partial(_on_one_device, run)
    if where.mesh is None or where.mesh.size == 1 or where.experts:  # the last: a device on its own rows already
        return on_one_device(*arguments)
    axes = {"rows": where.rows, "heads": where.heads, None: None}
    spec = lambda dimensions: PartitionSpec(*(axes[d] for d in dimensions))
    return jax.shard_map(
        on_one_device,
        mesh=where.mesh,
        in_specs=tuple(map(spec, split)),
        out_specs=tuple(map(spec, split_results)),
        check_vma=False,  # a kernel's results do not say over which axes they vary
    )(*arguments)


def _on_one_device(run: Callable, *arguments: Array):
    try:
        return run(*arguments, backend=target().platform)
    except NotImplementedError:
        return run(*arguments, backend="xla")


def _ways(axes: tuple[str, ...]) -> int:
    mesh, ways = target().mesh, 1
    for axis in axes if mesh is not None else ():
        ways *= mesh.shape[axis]
    return ways
