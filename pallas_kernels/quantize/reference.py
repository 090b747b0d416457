"""XLA's formulation: maxima per block, a scale from their bits, a cast."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BLOCK = 128  # entries of a row, or rows and columns of a matrix, that share a scale
LARGEST = 448.0  # of float8_e4m3fn
FP8 = jnp.float8_e4m3fn
UP = 0x1FFFFF  # carries a float32 beyond 448/256 = 1.75 times a power of two into the next exponent
SMALLEST = 2.0**-126  # of float32 without subnormals, which devices flush to zero


def quantize_rows(x, power_of_two: bool, rotate: bool):
    """See `pallas_kernels.quantize.quantize_rows`."""
    x = x.astype(jnp.float32)
    if rotate:
        x = hadamard(x)
    width = x.shape[-1]
    tiles = _pad(x, 0, -width % BLOCK).reshape(*x.shape[:-1], blocks(width), BLOCK)
    scale = scale_of(jnp.max(jnp.abs(tiles), axis=-1), power_of_two)
    values = (tiles / scale[..., None]).astype(FP8)
    return values.reshape(*x.shape[:-1], -1)[..., :width], scale


def quantize_blocks(w, power_of_two: bool):
    """See `pallas_kernels.quantize.quantize_blocks`."""
    *lead, rows, columns = w.shape
    tiles = _pad(w.astype(jnp.float32), -rows % BLOCK, -columns % BLOCK)
    tiles = tiles.reshape(*lead, blocks(rows), BLOCK, blocks(columns), BLOCK)
    scale = scale_of(jnp.max(jnp.abs(tiles), axis=(-3, -1)), power_of_two)
    values = (tiles / scale[..., :, None, :, None]).astype(FP8)
    return values.reshape(*lead, blocks(rows) * BLOCK, -1)[..., :rows, :columns], scale


def dequantize_rows(values, scale, dtype):
    """See `pallas_kernels.quantize.dequantize_rows`."""
    return (values.astype(jnp.float32) * _spread(scale, -1, values.shape[-1])).astype(dtype)


def dequantize_blocks(values, scale, dtype):
    """See `pallas_kernels.quantize.dequantize_blocks`."""
    spread = _spread(_spread(scale, -1, values.shape[-1]), -2, values.shape[-2])
    return (values.astype(jnp.float32) * spread).astype(dtype)


def hadamard(x: Float[Array, "*B X"]) -> Float[Array, "*B X"]:
    """x · H with H[i,j] = (-1)^popcount(i & j) · X^-1/2, in Sylvester's order: symmetric and its own inverse.

    In x's dtype, summed in float32 (float64 for float64 x). X is a power of two, or ValueError. One product for every
    128 entries, the width of a matrix unit's tile, and one between them where X is larger: a butterfly's seven passes
    of additions per 128 would keep the vector units busy and leave the matrix units idle.
    """
    width = x.shape[-1]
    check_width("hadamard", width)
    inner = min(width, BLOCK)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    tiles = x.reshape(*x.shape[:-1], width // inner, inner)
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": wide}
    out = jnp.einsum("...ni,ij->...nj", tiles, signs(inner, x.dtype), **exact)
    if width > inner:  # H of a product of sizes is the Kronecker product of theirs
        out = jnp.einsum("...nj,nm->...mj", out, signs(width // inner, wide), **exact)
    return (out * width**-0.5).astype(x.dtype).reshape(x.shape)


def check_width(name: str, width: int) -> None:
    if width < 1 or width & (width - 1):
        raise ValueError(f"{name} wants a last axis that is a power of two, got {width}")


def signs(size: int, dtype) -> Array:
    """[size, size] of 1 and -1, exact in every dtype: the Hadamard matrix without its factor."""
    i = np.arange(size)
    return jnp.asarray(1 - 2 * (np.bitwise_count(i[:, None] & i) & 1).astype(np.int8), dtype)


def scale_of(peak: Float[Array, "*B"], power_of_two: bool) -> Float[Array, "*B"]:
    """The scale of a block whose largest magnitude is `peak`, float32."""
    if power_of_two:
        # ceil(log2(peak / 448)) from the bits: a logarithm would round.
        exponent = (jax.lax.bitcast_convert_type(peak, jnp.int32) + UP) >> 23
        scale = jax.lax.bitcast_convert_type(jnp.maximum(exponent - 8, 1) << 23, jnp.float32)
    else:
        scale = jnp.maximum(peak * (1 / LARGEST), SMALLEST)  # as compilers divide by a constant
    return jnp.where(peak == 0, 1.0, scale)


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def _pad(a, rows: int, columns: int):
    widths = [(0, rows), (0, columns)][-a.ndim :]
    return jnp.pad(a, [(0, 0)] * (a.ndim - len(widths)) + widths)


def _spread(scale, axis: int, size: int):
    return jax.lax.slice_in_dim(jnp.repeat(scale, BLOCK, axis=axis), 0, size, axis=axis % scale.ndim)
