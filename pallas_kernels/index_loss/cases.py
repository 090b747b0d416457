"""The shapes that the indexer's loss is judged at: a chunk of queries of the dense warm-up, all keys visible."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs

HEADS, WIDTH, ATTENTION, DEEP = 32, 128, 64, 576
SCALE = 256**-0.5
BLOCK, TILE = 64, 512


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


def sparse(queries: int, keys: int, top_k: int) -> Case:
    """Loss and gradient over selected keys."""

    def build(backend: str):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.index_loss import sparse_index_loss

        def gradients(backend: str):
            def total(q, w, k, a, c, lse, index, count):
                return jnp.sum(sparse_index_loss(q, w, k, a, c, lse, SCALE, index, count, backend))

            return jax.value_and_grad(total, argnums=(0, 1, 2))

        which = ((1, queries, top_k), jnp.int32), ((1, queries), jnp.int32)
        return gradients(backend), gradients("xla"), [*_arguments(queries, keys), *which]

    index, attention = HEADS * WIDTH, ATTENTION * DEEP
    used = queries * top_k * (4 * index + 2 * attention)
    moved = 2 * queries * (2 * top_k * (WIDTH + DEEP) + 2 * attention + 3 * index)
    # dI of a query over all keys, from that over its own.
    temporary = {"gpu": 4 * queries * (keys + 2 * top_k + index) + 4 * 2 * keys * WIDTH + (8 << 20)}
    shape = f"{queries} queries, {top_k} of {keys // 1024}k keys"
    return Case("sparse_index_loss", shape, used, moved, build, temporary=temporary, backends=("gpu",))


def _arguments(queries: int, keys: int):
    """q, w, k, a, c and lse."""
    import jax.numpy as jnp

    of = lambda *shape, dtype=jnp.bfloat16: ((1, *shape), dtype)
    of_index = of(queries, HEADS, WIDTH), of(queries, HEADS, dtype=jnp.float32), of(keys, WIDTH)
    return [*of_index, of(queries, ATTENTION, DEEP), of(keys, DEEP), of(queries, ATTENTION, dtype=jnp.float32)]


CASES = {
    "index_loss": dense(1024, 1 << 14, False),
    "index_loss_gradient": dense(1024, 1 << 14, True),
    "index_loss_sparse": sparse(256, 1 << 14, 2048),
}
