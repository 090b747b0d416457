"""GPU kernels (Pallas by way of Triton): a program reads its blocks once, for their scales and their values."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.gpu import want_float8
from pallas_kernels.products import product
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.reference import BLOCK, FP8, blocks, scale_of

ROWS = 64  # of a program


def quantize_rows(x, power_of_two: bool, rotate: bool, interpret: bool = False):
    """See `pallas_kernels.quantize.quantize_rows`. bfloat16, float16 or float32, any shape."""
    want_float8("quantize_rows")
    if rotate and x.shape[-1] != BLOCK:  # the kernel rotates a block by itself
        x, rotate = reference.hadamard(x.astype(jnp.float32)), False
    *lead, width = x.shape
    rows = math.prod(lead)
    signs = [reference.signs(BLOCK, x.dtype)] if rotate else []

    def kernel(x_ref, *refs):
        *signs_ref, values_ref, scale_ref = refs
        row = pl.program_id(0) * ROWS + jnp.arange(ROWS)
        tile, at, inside = _load(x_ref, row, pl.program_id(1) * BLOCK + jnp.arange(BLOCK))
        if signs_ref:
            tile = product(tile, signs_ref[0][...], (1, 0)) * BLOCK**-0.5
        tile = tile.astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.abs(tile), axis=1), power_of_two)
        plt.store(values_ref.at[at], (tile / scale[:, None]).astype(FP8), mask=inside)
        plt.store(scale_ref.at[row, pl.program_id(1)], scale, mask=row < rows)

    values, scale = pl.pallas_call(
        kernel,
        name="quantize_rows",
        grid=(pl.cdiv(rows, ROWS), blocks(width)),
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), FP8),
            jax.ShapeDtypeStruct((rows, blocks(width)), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(x.reshape(rows, width), *signs)
    return values.reshape(x.shape), scale.reshape(*lead, blocks(width))


def quantize_blocks(w, power_of_two: bool, interpret: bool = False):
    """See `pallas_kernels.quantize.quantize_blocks`. bfloat16, float16 or float32, any shape."""
    want_float8("quantize_blocks")
    *lead, rows, columns = w.shape
    grid = math.prod(lead), blocks(rows), blocks(columns)

    def kernel(w_ref, values_ref, scale_ref):
        matrix, down, across = (pl.program_id(axis) for axis in range(3))
        row, column = (n * BLOCK + jnp.arange(BLOCK) for n in (down, across))
        tile, at, inside = _load(w_ref, row, column, matrix)
        tile = tile.astype(jnp.float32)
        scale = scale_of(jnp.max(jnp.max(jnp.abs(tile), axis=1), axis=0), power_of_two)
        plt.store(values_ref.at[at], (tile / scale).astype(FP8), mask=inside)
        scale_ref[matrix, down, across] = scale

    values, scale = pl.pallas_call(
        kernel,
        name="quantize_blocks",
        grid=grid,
        out_shape=[
            jax.ShapeDtypeStruct((grid[0], rows, columns), FP8),
            jax.ShapeDtypeStruct(grid, jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(w.reshape(-1, rows, columns))
    return values.reshape(w.shape), scale.reshape(*lead, *grid[1:])


def _load(ref, row, column, *of):
    """A tile with zeros beyond the edges, where it lies, and what of it is inside."""
    rows, columns = ref.shape[-2:]
    at = *of, row[:, None], column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return plt.load(ref.at[at], mask=inside, other=0), at, inside
