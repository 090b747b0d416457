"""FP8 with one float32 scale per block of 128, and the Hadamard transform that spreads outliers before it.

    quantize_rows(x) -> values, scale        a scale per 1 x 128: activations, index queries and keys
    quantize_blocks(w) -> values, scale      a scale per 128 x 128: weights, as `weight_scale_inv` of FP8 checkpoints
    dequantize_rows, dequantize_blocks       values · scale
    hadamard(x)                              x · H, its own inverse

No gradient passes through a rounding: derivatives of `quantize_*` are those of a constant. `hadamard` and
`dequantize_*` are XLA's on every platform (one product, one multiplication) and differentiable.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from pallas_kernels.backend import choose
from pallas_kernels.quantize import gpu, reference, tpu
from pallas_kernels.quantize.reference import BLOCK, LARGEST, hadamard

__all__ = [
    "BLOCK",
    "LARGEST",
    "dequantize_blocks",
    "dequantize_rows",
    "hadamard",
    "quantize_blocks",
    "quantize_rows",
]


def quantize_rows(
    x: Float[Array, "*B X"], power_of_two: bool = True, rotate: bool = False, backend: str | None = None
) -> tuple[Float[Array, "*B X"], Float[Array, "*B N"]]:
    """values · scale ≈ x with a scale per 128 entries of the last axis, the last block shorter where 128 does not fit.

    scale = max|x| / 448 of the block, float32, with `power_of_two` rounded up to one, 1 for a block of zeros and never
    below 2^-126. values = x / scale in float8_e4m3fn, to the nearest, ties to even: for finite x neither infinite nor
    NaN, and |values · scale - x| ≤ max(2^-4 · |x|, 2^-10 · scale). With `rotate`, x is first multiplied by the Hadamard
    matrix (X a power of two) in float32, which no product of two such rows can tell: q and k of the indexer.

    x is bfloat16 or float32. `backend` is "tpu", "gpu", "xla", or None for what serves these shapes on the platform at
    hand. Raises NotImplementedError with the reason where a backend asked for by name cannot serve, ValueError for an
    empty x, or for `rotate` where X is no power of two. Source: DeepSeek-V3 (arXiv 2412.19437, §3.3.2); DeepSeek-V3.2.
    """
    if x.ndim < 1 or x.size == 0:
        raise ValueError(f"quantize_rows: x has shape {x.shape}; it wants at least one entry")
    if rotate:
        reference.check_width("quantize_rows with rotate", x.shape[-1])
    implementations = {"tpu": tpu.quantize_rows, "gpu": gpu.quantize_rows, "xla": reference.quantize_rows}
    serve = choose("quantize_rows", implementations, backend)
    return serve(jax.lax.stop_gradient(x), power_of_two, rotate)


def quantize_blocks(
    w: Float[Array, "*B M N"], power_of_two: bool = True, backend: str | None = None
) -> tuple[Float[Array, "*B M N"], Float[Array, "*B m n"]]:
    """values · scale ≈ w with a scale per 128 x 128 entries, blocks at the edges smaller: [ceil(M/128), ceil(N/128)].

    Otherwise as `quantize_rows`. Raises ValueError for fewer than two axes or an empty w.
    """
    if w.ndim < 2 or w.size == 0:
        raise ValueError(f"quantize_blocks: w has shape {w.shape}; it wants two axes and at least one entry")
    implementations = {"tpu": tpu.quantize_blocks, "gpu": gpu.quantize_blocks, "xla": reference.quantize_blocks}
    serve = choose("quantize_blocks", implementations, backend)
    return serve(jax.lax.stop_gradient(w), power_of_two)


def dequantize_rows(values: Float[Array, "*B X"], scale: Float[Array, "*B N"], dtype) -> Float[Array, "*B X"]:
    """values · scale in float32, then `dtype`. ValueError where scale is not one per 128 entries of the last axis."""
    want = (*values.shape[:-1], reference.blocks(values.shape[-1]))
    if scale.shape != want:
        raise ValueError(f"dequantize_rows: values {values.shape} want scale {want}, got {scale.shape}")
    return reference.dequantize_rows(values, scale, dtype)


def dequantize_blocks(values: Float[Array, "*B M N"], scale: Float[Array, "*B m n"], dtype) -> Float[Array, "*B M N"]:
    """values · scale in float32, then `dtype`. ValueError where scale is not one per 128 x 128 entries."""
    want = (*values.shape[:-2], *map(reference.blocks, values.shape[-2:]))
    if scale.shape != want:
        raise ValueError(f"dequantize_blocks: values {values.shape} want scale {want}, got {scale.shape}")
    return reference.dequantize_blocks(values, scale, dtype)
