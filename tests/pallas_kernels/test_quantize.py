"""FP8 with a scale per block, and the Hadamard transform: against numpy in float64 and ml_dtypes' cast."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import (
    dequantize_blocks,
    dequantize_rows,
    gpu,
    hadamard,
    quantize_blocks,
    quantize_rows,
    tpu,
)

pytestmark = pytest.mark.kernels
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
FP8 = ml_dtypes.float8_e4m3fn
xla_rows, xla_blocks = (partial(quantize, backend="xla") for quantize in (quantize_rows, quantize_blocks))


def interpreted_rows(x, power_of_two=True, rotate=False):
    return tpu.quantize_rows(x, power_of_two, rotate, interpret=STRICT)


def interpreted_blocks(w, power_of_two=True):
    return tpu.quantize_blocks(w, power_of_two, interpret=STRICT)


on_gpu_rows = partial(gpu.quantize_rows, power_of_two=True, rotate=False, interpret=True)
on_gpu_blocks = partial(gpu.quantize_blocks, power_of_two=True, interpret=True)


def example(*shape, dtype=jnp.float32, seed=0):
    """Normal numbers whose size differs from row to row and block to block by powers of two, with zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (*shape[:-1], 1)))
    spread = np.exp2(rng.integers(-6, 6, -(-shape[-1] // 128))).repeat(128)[: shape[-1]]
    return jnp.asarray(x * spread * (rng.random(shape) < 0.9), dtype)


def scale_by_hand(peak, power_of_two):
    """In float64: ceil(log2) by search among the powers."""
    if not power_of_two:
        return np.where(peak == 0, 1, np.maximum(np.float32(peak) * np.float32(1 / 448), np.float32(2.0**-126)))
    powers = np.exp2(np.arange(-126.0, 128))
    return np.where(peak == 0, 1, powers[np.searchsorted(powers, peak / 448)])


def by_hand(x, power_of_two, block):
    """Values and scale of blocks of `block` rows and 128 columns, one after the other."""
    x = np.asarray(x, np.float64)
    rows, columns = x.shape
    values = np.zeros(x.shape, FP8)
    scale = np.zeros((-(-rows // block), -(-columns // 128)), np.float64)
    for i, j in np.ndindex(scale.shape):
        part = np.s_[i * block : (i + 1) * block, j * 128 : (j + 1) * 128]
        scale[i, j] = scale_by_hand(np.abs(x[part]).max(), power_of_two)
        values[part] = (x[part] / scale[i, j]).astype(np.float32).astype(FP8)
    return values, scale


def check(found, want):
    values, scale = (np.asarray(a) for a in found)
    assert values.dtype == FP8 and scale.dtype == np.float32
    np.testing.assert_array_equal(scale, want[1].astype(np.float32))
    np.testing.assert_array_equal(values.view(np.uint8), want[0].view(np.uint8))


@pytest.mark.parametrize("run", [xla_rows, interpreted_rows, on_gpu_rows])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 128), jnp.bfloat16),
        ((1100, 128), jnp.float32),
        ((130, 1500), jnp.bfloat16),
        ((3, 100), jnp.float32),
        ((7, 384), jnp.bfloat16),
    ],
)
def test_rows_are_what_float64_and_a_correct_cast_give(run, shape, dtype):
    x = example(*shape, dtype=dtype)
    check(run(x), by_hand(x, True, 1))


@pytest.mark.parametrize("run", [xla_rows, interpreted_rows, on_gpu_rows])
def test_rows_whose_scales_are_no_powers_of_two(run):
    x = example(40, 1100)
    check(run(x, power_of_two=False), by_hand(x, False, 1))


@pytest.mark.parametrize("run", [xla_blocks, interpreted_blocks, on_gpu_blocks])
@pytest.mark.parametrize(
    ("shape", "dtype", "power_of_two"),
    [
        ((256, 384), jnp.float32, True),
        ((200, 300), jnp.float32, False),
        ((130, 2200), jnp.bfloat16, True),
        ((1, 1), jnp.bfloat16, True),
    ],
)
def test_blocks_are_what_float64_and_a_correct_cast_give(run, shape, dtype, power_of_two):
    w = example(*shape, dtype=dtype)
    check(run(w, power_of_two=power_of_two), by_hand(w, power_of_two, 128))


@pytest.mark.parametrize("run", [xla_rows, interpreted_rows, on_gpu_rows])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_largest_and_smallest_numbers_stay_finite_and_within_the_bound(run, power_of_two):
    extremes = [3.4028235e38, 1.2e-38, 0.0, 448.0, 448 * (1 + 2.0**-23), 1.75, 1.7500001, 2.0**-126 * 447, 1e-30]
    x = example(len(extremes), 128) / 2.0**26
    x = jnp.asarray([[peak] for peak in extremes], jnp.float32) * jnp.clip(x, -1, 1).at[:, 0].set(1)
    values, scale = run(x, power_of_two=power_of_two)
    np.testing.assert_array_equal(scale[:, 0], scale_by_hand(np.abs(np.float64(x)).max(axis=1), power_of_two))
    wide = np.asarray(values, np.float64)
    assert np.isfinite(wide).all() and (np.asarray(scale) > 0).all() and scale[2] == 1
    error = np.abs(wide * np.asarray(scale, np.float64) - np.asarray(x, np.float64))
    slack = 1 if power_of_two else 1 + 2.0**-20  # x / scale is rounded to float32 first
    assert (error <= slack * np.maximum(2.0**-4 * np.abs(np.float64(x)), 2.0**-10 * np.float64(scale))).all()


@pytest.mark.parametrize("run", [xla_rows, interpreted_rows, on_gpu_rows])
def test_what_fp8_holds_comes_back_unchanged(run):
    every = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    rows = np.nan_to_num(every, nan=448).reshape(2, 128) * np.exp2(np.arange(-30, 31, 10.0))[:, None, None]
    x = jnp.asarray(rows, jnp.float32)
    values, scale = run(x)
    np.testing.assert_array_equal(dequantize_rows(values, scale, jnp.float32), x)
    again = run(dequantize_rows(values, scale, jnp.bfloat16))
    check(again, (np.asarray(values), np.asarray(scale)))


def test_leading_axes_and_neighbours_change_nothing():
    x, w = example(2, 3, 200), example(3, 150, 200)
    for run in (xla_rows, interpreted_rows, on_gpu_rows):
        values, scale = run(x)
        assert values.shape == x.shape and scale.shape == (2, 3, 2)
        check((values[1, 2], scale[1, 2]), tuple(a[0] for a in by_hand(x[1, 2][None], True, 1)))
    for run in (xla_blocks, interpreted_blocks, on_gpu_blocks):
        values, scale = run(w)
        assert values.shape == w.shape and scale.shape == (3, 2, 2)
        check((values[2], scale[2]), by_hand(w[2], True, 128))


def test_dequantised_blocks_are_values_times_the_scale_of_their_block():
    w = example(200, 300)
    values, scale = quantize_blocks(w)
    want = np.asarray(values, np.float64) * np.asarray(scale).repeat(128, 0)[:200].repeat(128, 1)[:, :300]
    np.testing.assert_array_equal(dequantize_blocks(values, scale, jnp.float32), want)
    assert dequantize_blocks(values, scale, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("width", [1, 2, 64, 128, 1024])
def test_hadamard_is_sylvesters_and_its_own_inverse(width):
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    np.testing.assert_allclose(hadamard(jnp.eye(width)), matrix * width**-0.5, atol=1e-7)
    x = example(6, width) / 2.0**10
    scale = np.abs(np.asarray(x)).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(hadamard(hadamard(x)) / scale, x / scale, atol=2e-6)


def test_a_product_of_rotated_rows_is_that_of_the_rows():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((9, 128)), jnp.float32) for _ in range(2))
    exact = partial(jnp.matmul, precision="highest")
    np.testing.assert_allclose(exact(hadamard(q), hadamard(k).T), exact(q, k.T), atol=1e-4)
    gradient = jax.grad(lambda q: jnp.sum(exact(hadamard(q), hadamard(k).T)))(q)
    np.testing.assert_allclose(gradient, np.broadcast_to(np.sum(k, axis=0), q.shape), atol=1e-4)


@pytest.mark.parametrize("run", [xla_rows, interpreted_rows, on_gpu_rows])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 20, 128), jnp.bfloat16), ((9, 128), jnp.float32), ((5, 256), jnp.float32)]
)
def test_rotation_before_the_rounding_of_whole_numbers_is_exact(run, shape, dtype):
    x = np.random.default_rng(0).integers(-8, 9, shape)  # sums of which no order rounds
    width = shape[-1]
    signs = (-1.0) ** np.array([[(i & j).bit_count() for j in range(width)] for i in range(width)])
    rotated = ((x @ signs).astype(np.float32) * np.float32(width**-0.5)).reshape(-1, width)
    values, scale = run(jnp.asarray(x, dtype), rotate=True)
    check((values.reshape(rotated.shape), scale.reshape(len(rotated), -1)), by_hand(rotated, True, 1))


def test_no_gradient_passes_a_rounding():
    x = example(4, 128)
    assert not jax.grad(lambda x: jnp.sum(dequantize_rows(*quantize_rows(x), jnp.float32)))(x).any()


def test_what_cannot_be_served_is_named():
    with pytest.raises(ValueError, match="power of two, got 96"):
        quantize_rows(example(2, 96), rotate=True)
    with pytest.raises(ValueError, match=r"has shape \(0, 128\)"):
        quantize_rows(jnp.zeros((0, 128)))
    with pytest.raises(ValueError, match=r"want scale \(2, 2\), got \(2, 1\)"):
        dequantize_rows(jnp.zeros((2, 200), FP8), jnp.ones((2, 1)), jnp.float32)
    with pytest.raises(ValueError, match=r"want scale \(2, 2\), got \(1, 2\)"):
        dequantize_blocks(jnp.zeros((200, 200), FP8), jnp.ones((1, 2)), jnp.float32)
    with pytest.raises(NotImplementedError, match="got float16"):
        quantize_rows(jnp.zeros((2, 128), jnp.float16), backend="tpu")
