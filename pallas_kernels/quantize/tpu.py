"""Mosaic kernels: a tile of 128 x 128 entries finds its maxima, its scales and its values in one visit.

Rows. A maximum over lanes for every row would take seven rotations of a register each. A transposed tile has a row per
lane, so that maxima are taken from register to register, and the bits of 1024 scales are worked on in one register. A
product with rows of ones brings the scales back to where the entries are: the matrix units idle here otherwise.

Blocks. One maximum per tile.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import reference
from pallas_kernels.quantize.reference import BLOCK, FP8, blocks, scale_of

TILES = 8  # whose scales fill a register
ENTRIES = 1 << 18  # of x that a grid step holds


def quantize_rows(x, power_of_two: bool, rotate: bool, *, interpret=False):
    """See `pallas_kernels.quantize.quantize_rows`. bfloat16 or float32, any shape."""
    _check("quantize_rows", x.dtype)
    if rotate and x.shape[-1] != BLOCK:  # the kernel rotates a tile by itself
        x, rotate = reference.hadamard(x.astype(jnp.float32)), False
    *lead, width = x.shape
    rows = math.prod(lead)
    across = min(blocks(width), TILES)
    turn = TILES // across * BLOCK  # rows of one turn of the kernel's loop
    step = min(max(turn, ENTRIES // (across * BLOCK) // turn * turn), -(-rows // turn) * turn)
    # Columns that fill no step are padded, a copy of x: what lies beyond its end would count in a block's maximum.
    padded = -(-width // (across * BLOCK)) * across * BLOCK
    flat = x.reshape(rows, width)
    flat = flat if padded == width else jnp.pad(flat, [(0, 0), (0, padded - width)])
    grid = (-(-rows // step), padded // (across * BLOCK))
    tile, whole = pl.BlockSpec((step, across * BLOCK), lambda i, j: (i, j)), lambda i, j: (0, 0)
    values, scale = pl.pallas_call(
        functools.partial(_rows_kernel, turn=turn, power_of_two=power_of_two, rotate=rotate),
        grid=grid,
        in_specs=[tile, pl.BlockSpec((BLOCK, BLOCK), whole), pl.BlockSpec((TILES, TILES * BLOCK), whole)],
        out_specs=[tile, pl.BlockSpec((across, step), lambda i, j: (j, i))],
        out_shape=[
            jax.ShapeDtypeStruct((rows, padded), FP8),
            jax.ShapeDtypeStruct((padded // BLOCK, rows), jnp.float32),  # rows in lanes, as the kernel has them
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * rows * padded + 2 * rows * padded * BLOCK * rotate,
            bytes_accessed=rows * padded * (x.dtype.itemsize + 1) + 4 * rows * padded // BLOCK,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantize_rows",
    )(flat, reference.signs(BLOCK, x.dtype), jnp.repeat(jnp.eye(TILES), BLOCK, axis=1))
    return values[:, :width].reshape(x.shape), scale[: blocks(width)].T.reshape(*lead, blocks(width))


def quantize_blocks(w, power_of_two: bool, *, interpret=False):
    """See `pallas_kernels.quantize.quantize_blocks`. bfloat16 or float32, any shape."""
    _check("quantize_blocks", w.dtype)
    *lead, rows, columns = w.shape
    matrices = math.prod(lead)
    across = min(blocks(columns), ENTRIES // BLOCK**2)
    grid = (matrices, blocks(rows), -(-blocks(columns) // across))
    tile = pl.BlockSpec((1, BLOCK, across * BLOCK), lambda e, i, j: (e, i, j))
    values, scale = pl.pallas_call(
        functools.partial(_blocks_kernel, rows=rows, columns=columns, power_of_two=power_of_two),
        grid=grid,
        in_specs=[tile],
        out_specs=[tile, pl.BlockSpec((1, 1, across, BLOCK), lambda e, i, j: (e, i, j, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((matrices, rows, columns), FP8),
            jax.ShapeDtypeStruct((matrices, blocks(rows), blocks(columns), BLOCK), jnp.float32),  # repeated over lanes
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * w.size, bytes_accessed=w.size * (w.dtype.itemsize + 1) + w.size // 32, transcendentals=0
        ),
        interpret=interpret,
        name="quantize_blocks",
    )(w.reshape(matrices, rows, columns))
    return values.reshape(w.shape), scale[..., 0].reshape(*lead, blocks(rows), blocks(columns))


def _check(name: str, dtype) -> None:
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{name} on tpu takes bfloat16 or float32, got {dtype}")


def _rows_kernel(x, signs, spread, values, scale, *, turn, power_of_two, rotate):
    step, columns = x.shape
    one_pass = jax.lax.Precision.DEFAULT  # of products whose operands bfloat16 holds
    exact = jax.lax.Precision.HIGHEST

    def rows_of_a_turn(g, _):
        start = pl.multiple_of(g * turn, turn)
        some = x[pl.ds(start, turn)]
        tiles = [
            (slice(down, down + BLOCK), slice(left, left + BLOCK))
            for down in range(0, turn, BLOCK)
            for left in range(0, columns, BLOCK)
        ]

        def entries(rows, lanes):
            tile = some[rows, lanes]
            if not rotate:
                return tile
            precision = exact if tile.dtype == jnp.float32 else one_pass
            tile = jnp.dot(tile, signs[...], precision=precision, preferred_element_type=jnp.float32)
            return tile * BLOCK**-0.5

        found = [entries(*tile) for tile in tiles]
        peaks = [jnp.max(jnp.abs(tile.T.astype(jnp.float32)), axis=0, keepdims=True) for tile in found]
        peaks += [jnp.zeros_like(peaks[0])] * (TILES - len(peaks))
        scales = scale_of(jnp.concatenate(peaks), power_of_two)
        for n, (rows, lanes) in enumerate(tiles):
            block = lanes.start // BLOCK
            scale[block : block + 1, pl.ds(start + rows.start, BLOCK)] = scales[n : n + 1]
        # Rows beyond the last hold anything, also NaN, which the product would spread.
        factor = _inverse(scales) if power_of_two else jnp.where(scales < jnp.inf, scales, 1)
        # A row of ones per tile picks its scales out of the eight, repeats them over the lanes and turns them upright.
        upright = jax.lax.dot_general(
            factor.astype(jnp.bfloat16 if power_of_two else jnp.float32),
            spread[...].astype(jnp.bfloat16 if power_of_two else jnp.float32),
            (((0,), (0,)), ((), ())),
            precision=one_pass if power_of_two else exact,
            preferred_element_type=jnp.float32,
        )
        for n, (tile, (rows, lanes)) in enumerate(zip(found, tiles, strict=True)):
            own = upright[:, n * BLOCK : (n + 1) * BLOCK]
            tile = tile.astype(jnp.float32)
            values[pl.ds(start + rows.start, BLOCK), lanes] = (tile * own if power_of_two else tile / own).astype(FP8)
        return 0

    jax.lax.fori_loop(0, step // turn, rows_of_a_turn, 0)


def _blocks_kernel(w, values, scale, *, rows, columns, power_of_two):
    across = w.shape[2]
    for left in range(0, across, BLOCK):
        tile = w[0, :, left : left + BLOCK].astype(jnp.float32)
        if rows % BLOCK or columns % across:  # beyond the edges lies anything
            row, column = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in range(2))
            inside = pl.program_id(1) * BLOCK + row < rows
            inside &= pl.program_id(2) * across + left + column < columns
            tile = jnp.where(inside, tile, 0)
        peak = jnp.max(jnp.max(jnp.abs(tile), axis=0, keepdims=True), axis=1, keepdims=True)
        own = scale_of(jnp.broadcast_to(peak, (1, BLOCK)), power_of_two)
        block = left // BLOCK
        scale[0, 0, block : block + 1, :] = own
        values[0, :, left : left + BLOCK] = (tile * _inverse(own) if power_of_two else tile / own).astype(FP8)


def _inverse(scale):
    """1 / scale of powers of two, from their bits."""
    bits = (254 << 23) - jax.lax.bitcast_convert_type(scale, jnp.int32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
