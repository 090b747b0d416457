"""The shapes that sparse MLA is judged at: 64 heads over 2048 selected rows of 512 + 64 features."""

from __future__ import annotations

import functools

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import runs
from pallas_kernels.sparse_mla import tpu, tpu_backward

HEADS, LATENT, ROPE, TOP_K, SCALE, PAGE = 64, 512, 64, 2048, 192**-0.5, 128
FEATURES = LATENT + ROPE
PAIRS = functools.partial(runs, unknown=TOP_K // (2 * tpu.TILE))  # a full selection's tiles, two by two


def forward(queries: int, keys: int) -> Case:
    """A row of a learning batch."""

    def build(backend: str):
        from pallas_kernels.sparse_mla import sparse_mla

        def kernel(*args):
            return sparse_mla(*args, SCALE, backend=backend)

        return kernel, _attend, _arguments(queries, keys)

    return Case("sparse_mla", f"{queries} queries, {keys // 1024}k keys", *_account(queries), build, PAIRS)


def paged(batch: int, queries: int, keys: int, fp8: bool = False) -> Case:
    """A chunk of a prompt, or a step of many sequences: each has its pages anywhere in the pool."""

    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.sparse_mla import sparse_mla_paged

        def step(backend):
            return lambda *args: sparse_mla_paged(*args, SCALE, backend=backend)

        bf16, i32 = jnp.bfloat16, jnp.int32
        row = ((batch, queries, TOP_K), i32), ((batch, queries), i32)
        q = ((batch, queries, HEADS, LATENT), bf16), ((batch, queries, HEADS, ROPE), bf16)
        pages = ((batch * keys // PAGE, PAGE, 1, LATENT // (4 if fp8 else 2) + 128), jnp.uint32)
        return step(backend), step("xla"), [*q, pages, ((batch, keys // PAGE), i32), *row]

    shape = f"{queries} queries of {batch} sequences, {keys // 1024}k keys in pages" + fp8 * ", fp8"
    multiply_adds, moved = _account(batch * queries)
    moved -= fp8 * batch * queries * TOP_K * (LATENT - 4 * LATENT // 128)
    return Case("sparse_mla", shape, multiply_adds, moved, build, PAIRS)


def backward(queries: int, keys: int) -> Case:
    """Cotangents of a row of a learning batch."""

    def build(backend: str):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.sparse_mla import gpu_backward

        def kernel(*args):
            return {"tpu": tpu_backward, "gpu": gpu_backward}[backend].backward(*args, SCALE)

        def xla(q_latent, q_rope, latent, rope, index, count, out, logsumexp, d_out, d_logsumexp):
            run = lambda *args: _attend(*args, index, count)
            return jax.vjp(run, q_latent, q_rope, latent, rope)[1]((d_out, d_logsumexp))

        result = [((1, queries, HEADS, LATENT), jnp.bfloat16), ((1, queries, HEADS), jnp.float32)]
        return kernel, xla, [*_arguments(queries, keys), *result, *result]

    used, _ = _account(queries)
    moved = 2 * queries * HEADS * (2 * FEATURES + 2 * LATENT) + keys * FEATURES * (2 + 4)
    multiply_adds = used + queries * TOP_K * HEADS * (2 * FEATURES + LATENT)
    shape = f"{queries} queries, {keys // 1024}k keys"
    # Of a single chunk: a loop over several is XLA's, whose trips the schedule does not show.
    times = functools.partial(runs, unknown=TOP_K // tpu_backward.TILE)
    # Packed rows, the cotangents of two halves of the queries, those of queries: words each.
    temporary = {"tpu": 4 * (keys * (384 + 2 * 640) + queries * HEADS * 640) + (2 << 20)}
    # What queries add to rows and their sums, weights and d_score, where each query has a key.
    rows, pairs = (queries * TOP_K + 2 * keys) * FEATURES, queries * HEADS * TOP_K
    temporary["gpu"] = 4 * rows + 2 * 2 * pairs + 4 * queries * keys + (8 << 20)
    return Case("sparse_mla_backward", shape, multiply_adds, moved, build, times, temporary=temporary)


def _arguments(queries: int, keys: int):
    import jax.numpy as jnp

    of = lambda *shape, dtype=jnp.bfloat16: ((1, *shape), dtype)
    q, rows = (of(queries, HEADS, LATENT), of(queries, HEADS, ROPE)), (of(keys, LATENT), of(keys, ROPE))
    return [*q, *rows, of(queries, TOP_K, dtype=jnp.int32), of(queries, dtype=jnp.int32)]


def _account(queries: int) -> tuple[int, int]:
    """Useful multiply-adds, and bytes that have to move: queries, results, and every selected row once per query."""
    moved = 2 * (TOP_K * FEATURES + HEADS * (FEATURES + LATENT)) + 4 * (TOP_K + HEADS)
    return queries * TOP_K * HEADS * (FEATURES + LATENT), queries * moved


def _attend(q_latent, q_rope, latent, rope, index, count):
    """XLA's formulation with all selected rows [1,S,K,F] gathered at once: no loop hides work from the schedule."""
    import jax
    import jax.numpy as jnp

    q, rows = jnp.concatenate([q_latent, q_rope], axis=-1), jnp.concatenate([latent, rope], axis=-1)
    keys = rows[0][index]
    score = jnp.einsum("bshf,bskf->bshk", q, keys, preferred_element_type=jnp.float32) * SCALE
    score = jnp.where(jnp.arange(TOP_K) < count[..., None, None], score, -jnp.inf)
    weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
    out = jnp.einsum("bshk,bskc->bshc", weight, keys[..., :LATENT], preferred_element_type=jnp.float32)
    return out.astype(q.dtype), jax.nn.logsumexp(score, axis=-1)


CASES = {
    "mla_forward_8k": forward(64, 1 << 13),
    "mla_prefill_128k": paged(1, 64, 1 << 17),
    "mla_decode_128k": paged(64, 1, 1 << 17),
    "mla_decode_128k_fp8": paged(64, 1, 1 << 17, fp8=True),
    "mla_backward_8k": backward(64, 1 << 13),
}
