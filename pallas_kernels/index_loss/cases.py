"""The shapes that the indexer's loss is judged at: a chunk of queries of the dense warm-up, all keys visible."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs

HEADS, WIDTH, ATTENTION, DEEP = 32, 128, 64, 576
SCALE = 256**-0.5
BLOCK, TILE = 64, 512


def dense(queries: int, keys: int, gradient: bool) -> Case:
    def build():
        import jax.numpy as jnp

        from pallas_kernels.index_loss import reference, tpu

        def seen(first, last):
            column = jnp.arange(keys)
            return (first[..., None] <= column) & (column < last[..., None])

        def loss(q, w, k, a, c, lse, first, last):
            return tpu.forward(q, w, k, a, c, lse, SCALE, first, last)

        def loss_by_xla(q, w, k, a, c, lse, first, last):
            """All queries at once: figures of a loop's body would count it once."""
            return reference.block_loss(q, w, a, lse, k, c, seen(first, last), SCALE)

        def gradients(*arguments):
            return tpu.backward(*arguments, SCALE)

        def gradients_by_xla(q, w, k, a, c, lse, first, last, kept, cotangent):
            given = (kept[..., tpu.LSE], kept[..., tpu.MASS], cotangent)
            dq, dw, *pair = reference.block_gradient(q, w, a, lse, k, c, seen(first, last), SCALE, *given)
            return dq.astype(q.dtype), dw, reference.add_all(0, *pair, first, last).astype(k.dtype)

        of_keys = lambda width: ((1, keys, width), jnp.bfloat16)
        of_queries = lambda *shape, dtype=jnp.float32: ((1, queries, *shape), dtype)
        arguments = [of_queries(HEADS, WIDTH, dtype=jnp.bfloat16), of_queries(HEADS), of_keys(WIDTH)]
        arguments += [of_queries(ATTENTION, DEEP, dtype=jnp.bfloat16), of_keys(DEEP), of_queries(ATTENTION)]
        arguments += [of_queries(dtype=jnp.int32)] * 2
        if gradient:
            return gradients, gradients_by_xla, [*arguments, of_queries(tpu.LANES), of_queries()]
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
    shape = f"{queries} queries x {keys // 1024}k keys"
    return Case(kernel, shape, used, moved, build, times, temporary=turned + (2 << 20))


CASES = {"index_loss": dense(1024, 1 << 14, False), "index_loss_gradient": dense(1024, 1 << 14, True)}
