"""Every GPU kernel on the GPU at hand: its numbers beside those of XLA's formulation, and the time of both."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.index_loss import index_loss, sparse_index_loss
from pallas_kernels.index_select import index_select, index_select_paged
from pallas_kernels.quantize import quantize_blocks, quantize_rows
from pallas_kernels.sparse_mla import pack_rows, sparse_mla, sparse_mla_paged

SCALE = 192**-0.5


class Sizes(NamedTuple):
    """GLM-5.2's widths, a chunk of a prompt and a batch of decoding sequences."""

    queries: int = 256
    sequences: int = 64
    keys: int = 32768
    page: int = 128
    top_k: int = 2048
    heads: int = 64
    latent: int = 512
    rope: int = 64
    index_heads: int = 32
    index_width: int = 128
    repeats: int = 20


class Row(NamedTuple):
    """`difference`: the largest between kernel and XLA over XLA's largest value; of keys, the share that XLA lacks."""

    name: str
    difference: float
    kernel_ms: float
    xla_ms: float


def operations(sizes: Sizes, seed: int = 0) -> Iterator[tuple[str, Callable, tuple]]:
    """Each operation as a function of a backend and its arguments, and the arguments: random, the same each time."""
    rng = np.random.default_rng(seed)
    keys_of_draws = map(jax.random.key, itertools.count(seed))
    normal = lambda *shape, dtype=jnp.bfloat16: jax.random.normal(next(keys_of_draws), shape, dtype) / 4

    def selections(*lead: int):
        every = np.arange(sizes.top_k) * (sizes.keys // sizes.top_k)
        index = every + rng.integers(0, sizes.keys // sizes.top_k, (*lead, sizes.top_k))
        return jnp.asarray(index, jnp.int32), jnp.full(lead, sizes.top_k, jnp.int32)

    def queries(*lead: int):
        return normal(*lead, sizes.heads, sizes.latent), normal(*lead, sizes.heads, sizes.rope)

    def rows(*lead: int):
        return normal(*lead, sizes.latent), normal(*lead, sizes.rope)

    def indexer(*lead: int):
        w = normal(*lead, sizes.index_heads, dtype=jnp.float32)
        return normal(*lead, sizes.index_heads, sizes.index_width), w

    one, many = (1, sizes.queries), (sizes.sequences, 1)
    pool = sizes.sequences * sizes.keys // sizes.page
    table = jnp.asarray(rng.permutation(pool).reshape(sizes.sequences, -1), jnp.int32)
    seen = jnp.zeros(one, jnp.int32), jnp.full(one, sizes.keys, jnp.int32)
    seen_by_many = jnp.zeros(many, jnp.int32), jnp.full(many, sizes.keys, jnp.int32)

    by = lambda operation, *static, **named: lambda backend, *args: operation(*args, *static, **named, backend=backend)
    keys = normal(1, sizes.keys, sizes.index_width)
    yield "index_select", by(index_select, sizes.top_k), (*indexer(*one), keys, *seen)
    pages = normal(pool, sizes.page, sizes.index_width)
    yield "index_select_paged", by(index_select_paged, sizes.top_k), (*indexer(*many), pages, table, *seen_by_many)

    attended = *queries(*one), *rows(1, sizes.keys), *selections(*one)
    yield "sparse_mla", by(sparse_mla, SCALE), attended

    def gradient(backend, q_latent, q_rope, latent, rope, index, count):
        def total(*args):
            out, logsumexp = sparse_mla(*args, index, count, SCALE, backend)
            return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(logsumexp)

        return jax.grad(total, (0, 1, 2, 3))(q_latent, q_rope, latent, rope)

    yield "sparse_mla and gradient", gradient, attended
    for fp8 in (False, True):
        pages = pack_rows(*rows(pool, sizes.page), fp8=fp8)
        arguments = *queries(*many), pages, table, *selections(*many)
        yield f"sparse_mla_paged{', fp8' * fp8}", by(sparse_mla_paged, SCALE), arguments

    def learns(loss, backend, q, w, k, *rest):
        total = lambda q, w, k: jnp.sum(loss(q, w, k, *rest[:3], SCALE, *rest[3:], backend))
        return jax.value_and_grad(total, (0, 1, 2))(q, w, k)

    attention = normal(*one, sizes.heads, sizes.latent + sizes.rope), normal(1, sizes.keys, sizes.latent + sizes.rope)
    learning = *indexer(*one), keys, *attention, jnp.full((*one, sizes.heads), np.log(sizes.keys), jnp.float32)
    yield "index_loss and gradient", partial(learns, index_loss), (*learning, *seen)
    yield "sparse_index_loss and gradient", partial(learns, sparse_index_loss), (*learning, *selections(*one))

    weights = normal(2 * sizes.index_width, 4 * sizes.latent)
    yield "quantize_rows, rotated", by(quantize_rows, rotate=True), (keys,)
    yield "quantize_blocks", by(quantize_blocks), (weights,)


def compare(name: str, operation: Callable, arguments: tuple, sizes: Sizes, backend: str = "gpu") -> Row:
    """One row; RuntimeError names the operation whose kernel does not run."""
    both = [jax.jit(partial(operation, which)) for which in (backend, "xla")]
    try:
        found, wanted = (jax.tree.leaves(jax.block_until_ready(run(*arguments))) for run in both)
    except Exception as error:
        raise RuntimeError(f"{name} does not run on {jax.devices()[0].device_kind}: {error}") from error
    difference = max(_difference(a, b) for a, b in zip(found, wanted, strict=True))
    spent = [[], []]
    for _ in range(sizes.repeats):  # in turns, so that both meet the same clock
        for run, times in zip(both, spent, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times.append(1e3 * (time.perf_counter() - start))
    return Row(name, difference, *map(statistics.median, spent))


def _difference(found, wanted) -> float:
    found, wanted = (np.asarray(a) for a in (found, wanted))
    if jnp.issubdtype(wanted.dtype, jnp.integer):  # one key more moves all behind it: sets are compared
        rows = [a.reshape(-1, a.shape[-1]) for a in (found, wanted)]
        return float(np.mean([~np.isin(*pair) for pair in zip(*rows, strict=True)]))
    found, wanted = (a.astype(np.float64) for a in (found, wanted))
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def main(sizes: Sizes | None = None) -> str:
    """The table, or that there is no GPU and so nothing is claimed."""
    if jax.default_backend() != "gpu":
        return f"no GPU here (jax runs on {jax.default_backend()}): nothing was checked, nothing was timed"
    sizes = sizes or Sizes()
    return table([compare(*operation, sizes) for operation in operations(sizes)], sizes)


def table(rows: list[Row], sizes: Sizes) -> str:
    kind = jax.devices()[0].device_kind
    lines = [f"{kind}, jax {jax.__version__}, medians of {sizes.repeats}", ""]
    lines += ["| operation | difference | kernel, ms | XLA, ms | XLA / kernel |", "|---|---|---|---|---|"]
    for row in rows:
        times = f"{row.kernel_ms:.3f} | {row.xla_ms:.3f} | {row.xla_ms / row.kernel_ms:.2f}"
        lines.append(f"| {row.name} | {row.difference:.1e} | {times} |")
    return "\n".join(lines)
