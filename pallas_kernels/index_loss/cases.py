"""The shapes that the indexer's loss is judged at: a chunk of queries of the dense warm-up, and of a row after it."""

from __future__ import annotations

from functools import partial

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs

HEADS, WIDTH, ATTENTION, DEEP = 32, 128, 64, 576
SCALE = 256**-0.5
TILE, TOP_K = 512, 2048


def dense(queries: int, keys: int, gradient: bool) -> Case:
    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.index_loss import gpu, reference, tpu

        def seen(first, last):
            column = jnp.arange(keys)
            return (first[..., None] <= column) & (column < last[..., None])

        def loss(q, w, k, a, c, lse, first, last):
            run = {"tpu": tpu.forward, "gpu": gpu.index_loss}[backend]
            return run(q, w, k, a, c, lse, SCALE, first, last)

        def loss_by_xla(q, w, k, a, c, lse, first, last):
            """All queries at once: figures of a loop's body would count it once."""
            return reference.block_loss(q, w, a, lse, k, c, seen(first, last), SCALE)

        def gradients(*arguments):
            if backend == "tpu":
                return tpu.backward(*arguments, SCALE)
            *inputs, first, last, kept, cotangent = arguments
            lse_i, mass = kept[..., tpu.LSE], kept[..., tpu.MASS]
            return gpu.backward(False, *inputs, SCALE, (first, last), lse_i, mass, cotangent)

        def gradients_by_xla(q, w, k, a, c, lse, first, last, kept, cotangent):
            given = (kept[..., tpu.LSE], kept[..., tpu.MASS], cotangent)
            dq, dw, *pair = reference.block_gradient(q, w, a, lse, k, c, seen(first, last), SCALE, *given)
            return dq.astype(q.dtype), dw, reference.add_all(0, *pair, first, last).astype(k.dtype)

        row = lambda dtype: ((1, queries), dtype)
        arguments = [*_arguments(queries, keys), row(jnp.int32), row(jnp.int32)]
        if gradient:
            return gradients, gradients_by_xla, [*arguments, ((1, queries, tpu.LANES), jnp.float32), row(jnp.float32)]
        return loss, loss_by_xla, arguments

    def times(found: list[Loop]) -> list[int]:
        """Tile by tile, but for what is done once per block of queries; the walk through the tile comes last but one
        in the gradient's kernel, before dq and dw are written."""
        main = 4 if gradient else 3
        once = lambda n, nested: nested if n in (0, main) else nested // (keys // TILE)
        return [once(n, nested) for n, nested in enumerate(runs(found))]

    used = queries * keys * ((3 if gradient else 1) * HEADS * WIDTH + ATTENTION * DEEP)
    index, attention = HEADS * WIDTH, ATTENTION * DEEP
    moved = 2 * (queries * (index + attention) + keys * (WIDTH + DEEP)) + 4 * queries * (HEADS + ATTENTION)
    moved += gradient * 2 * (queries * index + keys * WIDTH)
    kernel = "index_loss_gradient" if gradient else "index_loss"
    # A program that begins with a and c gets them queries and keys in lanes, since 576 is no multiple of 128, and turns
    # them first. The gradient also takes two sums for dk.
    turned = 2 * -(-DEEP // 128) * 128 * (queries * ATTENTION + keys) + gradient * 2 * 4 * keys * WIDTH
    di = 4 * gradient * (queries * (keys + index + HEADS) + 2 * keys * WIDTH) + (2 << 20)
    shape = f"{queries} queries x {keys // 1024}k keys"
    return Case(kernel, shape, used, moved, build, times, temporary={"tpu": turned + (2 << 20), "gpu": di})


def sparse(queries: int, keys: int, gradient: bool) -> Case:
    """Over selected keys."""

    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.index_loss import gpu, reference, sparse_index_loss, tpu, tpu_sparse

        def selected(k, c, index, count):
            return k[0][index], c[0][index], jnp.arange(TOP_K) < count[..., None]

        def loss(q, w, k, a, c, lse, index, count):
            return sparse_index_loss(q, w, k, a, c, lse, SCALE, index, count, backend)

        def loss_by_xla(q, w, k, a, c, lse, index, count):
            return reference.block_loss(q, w, a, lse, *selected(k, c, index, count), SCALE)

        def gradients(*arguments):
            if backend == "tpu":
                return tpu_sparse.backward(*arguments, SCALE)
            *inputs, index, count, kept, cotangent = arguments
            given = kept[..., tpu.LSE], kept[..., tpu.MASS], cotangent
            return gpu.backward(True, *inputs, SCALE, (index, count), *given)

        def gradients_by_xla(q, w, k, a, c, lse, index, count, kept, cotangent):
            given = kept[..., tpu.LSE], kept[..., tpu.MASS], cotangent
            found = reference.block_gradient(q, w, a, lse, *selected(k, c, index, count), SCALE, *given)
            dq, dw, gradient, rows = found
            own = jnp.einsum("bsjt,bsjx->bstx", gradient, rows)
            dk = jnp.zeros((keys, WIDTH)).at[index[0]].add(own[0])
            return dq.astype(q.dtype), dw, dk.astype(k.dtype)

        row, which = (1, queries), [((1, queries, TOP_K), jnp.int32), ((1, queries), jnp.int32)]
        arguments = [*_arguments(queries, keys), *which]
        if gradient:
            return gradients, gradients_by_xla, [*arguments, ((*row, tpu.LANES), jnp.float32), (row, jnp.float32)]
        return loss, loss_by_xla, arguments

    index, attention = HEADS * WIDTH, ATTENTION * DEEP
    used = queries * TOP_K * ((3 if gradient else 1) * index + attention)
    moved = 2 * queries * (TOP_K * (WIDTH + DEEP) + attention + index) + gradient * 2 * (queries * index + keys * WIDTH)
    pairs, tiles = (partial(runs, unknown=TOP_K // (n * 128)) for n in (2, 1))
    name = "sparse_index_loss"
    times = {f"{name}_queries": pairs, f"{name}_keys": tiles} if gradient else pairs
    # Packed rows, and what XLA puts together to pack them; queries as wide as rows; keys and their cotangents, twice.
    packed = 4 * (3 * keys + queries * ATTENTION) * 384 + 4 * queries * (HEADS + ATTENTION) * 128
    temporary = {"tpu": packed + gradient * 4 * (4 * keys * WIDTH + 4 * queries * index) + (4 << 20)}
    # dI of a query over all keys, from that over its own.
    temporary["gpu"] = gradient * 4 * (queries * (keys + 2 * TOP_K + index) + 2 * keys * WIDTH) + (2 << 20)
    shape = f"{queries} queries, {TOP_K} of {keys // 1024}k keys"
    return Case(name + gradient * "_gradient", shape, used, moved, build, times, temporary=temporary)


def _arguments(queries: int, keys: int):
    """q, w, k, a, c and lse."""
    import jax.numpy as jnp

    of = lambda *shape, dtype=jnp.bfloat16: ((1, *shape), dtype)
    of_index = of(queries, HEADS, WIDTH), of(queries, HEADS, dtype=jnp.float32), of(keys, WIDTH)
    return [*of_index, of(queries, ATTENTION, DEEP), of(keys, DEEP), of(queries, ATTENTION, dtype=jnp.float32)]


CASES = {
    "index_loss": dense(1024, 1 << 14, gradient=False),
    "index_loss_gradient": dense(1024, 1 << 14, gradient=True),
    "sparse_index_loss": sparse(64, 1 << 13, gradient=False),
    "sparse_index_loss_gradient": sparse(64, 1 << 13, gradient=True),
}
