"""Sparse MLA: the reference against a loop over queries in float64, the kernels interpreted against the same."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import dequantize_rows, quantize_rows
from pallas_kernels.sparse_mla import (
    gpu,
    gpu_backward,
    pack_rows,
    put_rows,
    reference,
    sparse_mla,
    sparse_mla_paged,
    tpu,
    tpu_backward,
)
from pallas_kernels.sparse_mla.rows import unpack

pytestmark = pytest.mark.kernels
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SCALE = 0.11
LATENT, ROPE = 256, 64


def example(seed=0, batch=2, queries=5, heads=4, keys=300, top_k=40, dtype=jnp.float32, counts=None):
    """Queries [B,S,H,C+R], rows [B,T,C+R], an ascending selection without repetition, counts up to top_k."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, dtype)
    index = np.zeros((batch, queries, top_k), np.int32)
    count = (
        rng.integers(1, top_k + 1, (batch, queries)) if counts is None else np.broadcast_to(counts, (batch, queries))
    )
    for b, s in np.ndindex(batch, queries):
        index[b, s, : count[b, s]] = np.sort(rng.choice(keys, count[b, s], replace=False))
    q, rows = draw(batch, queries, heads, LATENT + ROPE), draw(batch, keys, LATENT + ROPE)
    return q, rows, jnp.asarray(index), jnp.asarray(count, jnp.int32)


def naive(q, rows, index, count, latent=LATENT):
    """The formula, query by query."""
    q, rows = np.asarray(q, np.float64), np.asarray(rows, np.float64)
    out, logsumexp = np.zeros((*q.shape[:3], latent)), np.full(q.shape[:3], -np.inf)
    for b, s in np.ndindex(*count.shape):
        if count[b, s]:
            keys = rows[b, np.asarray(index[b, s, : count[b, s]])]
            score = SCALE * q[b, s] @ keys.T
            logsumexp[b, s] = np.log(np.exp(score).sum(axis=-1))
            out[b, s] = np.exp(score - logsumexp[b, s][:, None]) @ keys[:, :latent]
    return out, logsumexp


def parts(a):
    return a[..., :LATENT], a[..., LATENT:]


def interpreted(q, rows, index, count, tile=16):
    return tpu.forward(*parts(q), *parts(rows), index, count, SCALE, tile=tile, interpret=STRICT)


def on_gpu(q, rows, index, count):
    return gpu.forward(*parts(q), *parts(rows), index, count, SCALE, interpret=True)


def xla(q, rows, index, count):
    return sparse_mla(*parts(q), *parts(rows), index, count, SCALE, backend="xla")


def check(inputs, run):
    """float32 to 1e-5; bfloat16 to what rounding weights and results to 8 bits leaves: 2^-7."""
    tolerance = 2e-5 if inputs[0].dtype == jnp.float32 else 2**-7
    for found, wanted in zip(run(*inputs), naive(*inputs), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attends_what_is_selected(run, dtype):
    check(example(dtype=dtype), run)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
@pytest.mark.parametrize(("queries", "heads", "keys", "top_k"), [(1, 1, 3, 3), (9, 17, 90, 70), (2, 128, 40, 33)])
def test_shapes_that_fill_no_block(run, queries, heads, keys, top_k):
    check(example(1, batch=1, queries=queries, heads=heads, keys=keys, top_k=top_k), run)


def test_the_tile_of_a_tpu():
    inputs = example(1, batch=1, queries=2, heads=2, keys=700, top_k=300, counts=[300, 129])
    check(inputs, functools.partial(interpreted, tile=tpu.TILE))


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
def test_what_is_not_selected_is_never_read(run):
    counts = np.array([[0, 1, 16, 17, 32], [33, 40, 0, 5, 31]])
    q, rows, index, count = example(2, keys=60, counts=counts)
    index = jnp.where(jnp.arange(40) < count[..., None], jnp.maximum(index, 1), 0)  # 0 stands beyond every count
    read = np.zeros((2, 60), bool)
    for b, s in np.ndindex(2, 5):
        read[b, index[b, s, : count[b, s]]] = True
    assert not read.all()
    poisoned = jnp.where(read[..., None], rows, jnp.nan)
    for found, wanted in zip(run(q, poisoned, index, count), naive(q, poisoned, index, count), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "tpu", "gpu"])
def test_pages_in_any_order_are_the_rows_in_theirs(backend, monkeypatch):
    """Four draft rows of two sequences; the table's unused entries point nowhere."""
    monkeypatch.setattr(tpu, "paged", functools.partial(tpu.paged, tile=16, interpret=STRICT))
    monkeypatch.setattr(gpu, "paged", functools.partial(gpu.paged, interpret=True))
    rng = np.random.default_rng(3)
    q, rows, index, count = example(3, queries=4, keys=96, counts=[7, 40, 0, 25])
    table = rng.permutation(12).reshape(2, 6)
    pages = jnp.full((12, 16, 1, LATENT + 128), 0xFFFFFFFF, jnp.uint32)
    pages = pages.at[table].set(pack_rows(*parts(rows)).reshape(2, 6, 16, 1, -1))
    table = jnp.asarray(np.pad(table, [(0, 0), (0, 2)], constant_values=2**30))
    found = sparse_mla_paged(*parts(q), pages, table, index, count, SCALE, backend=backend)
    for got, wanted in zip(found, naive(q, rows, index, count), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "tpu"])
@pytest.mark.parametrize("number", [1, 9, 40])
def test_rows_are_put_where_they_belong_and_others_stay(number, backend, monkeypatch):
    """In blocks of 16; every fourth belongs nowhere: before the pool, or behind it."""
    monkeypatch.setattr(tpu, "PACKED", 16)
    monkeypatch.setattr(tpu, "put_rows", functools.partial(tpu.put_rows, interpret=STRICT))
    rng = np.random.default_rng(14)
    pool, rows = (rng.integers(0, 2**32, (n, 1, 256), np.uint32) for n in (60, number))
    at = rng.permutation(60)[:number]
    at[2::8], at[6::8] = -3, 60
    wanted = pool.copy()
    for row, place in zip(rows, at, strict=True):
        if 0 <= place < 60:
            wanted[place] = row
    found = put_rows(*map(jnp.asarray, (pool, rows, at)), backend=backend)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_packed_row_holds_every_bit(dtype):
    _, rows, _, _ = example(4, dtype=dtype)
    packed = pack_rows(*parts(rows))
    np.testing.assert_array_equal(tpu.packed(*parts(rows), interpret=STRICT)[:, :300], packed)
    assert packed.shape == (2, 300, 1, (LATENT if dtype == jnp.float32 else LATENT // 2) + 128)
    found = unpack(packed[..., 0, :], dtype, LATENT)
    np.testing.assert_array_equal(found[..., : LATENT + ROPE], rows)
    np.testing.assert_array_equal(found[..., LATENT + ROPE :], 0)


@pytest.mark.parametrize("backend", ["xla", "tpu", "gpu"])
def test_fp8_rows_are_attended_as_the_values_they_hold(backend, monkeypatch):
    monkeypatch.setattr(tpu, "paged", functools.partial(tpu.paged, tile=16, interpret=STRICT))
    monkeypatch.setattr(gpu, "paged", functools.partial(gpu.paged, interpret=True))
    rng = np.random.default_rng(11)
    q, rows = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((1, 3, 4, 576), (1, 64, 576)))
    index = jnp.asarray([np.sort(rng.permutation(64)[:20]) for _ in range(3)], jnp.int32)[None]
    count = jnp.array([[20, 0, 17]], jnp.int32)
    latent, rope = rows[..., :512], rows[..., 512:]
    pages = pack_rows(latent, rope, fp8=True).reshape(4, 16, 1, -1)
    assert pages.shape[-1] == 256  # two thirds of the bfloat16 row
    value, scale = quantize_rows(latent)
    held = jnp.concatenate([dequantize_rows(value, scale, jnp.float32), rope.astype(jnp.float32)], axis=-1)
    found = sparse_mla_paged(
        q[..., :512], q[..., 512:], pages, jnp.arange(4)[None], index, count, SCALE, backend=backend
    )
    for got, wanted in zip(found, naive(q, held, index, count, 512), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=2**-7, rtol=2**-7)


def test_an_fp8_row_holds_every_finite_value():
    """Each block of 128 has 448 in it, so that its scale is 1: all 254 codes, subnormals too, come back."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    values = np.zeros((1, 512), np.float32)
    values[0, :254] = codes.view(jnp.float8_e4m3fn).astype(np.float32)
    values[0, 127::128] = 448
    rope = jnp.asarray(np.random.default_rng(12).standard_normal((1, 64)), jnp.bfloat16)
    row = unpack(pack_rows(jnp.asarray(values, jnp.bfloat16), rope, fp8=True)[:, 0], jnp.bfloat16, 512)
    np.testing.assert_array_equal(row[:, :512], values)
    np.testing.assert_array_equal(row[:, 512:576], rope)
    np.testing.assert_array_equal(row[:, 576:], 0)


def test_gradients_are_those_of_finite_differences():
    """In float64, along random directions, of both results; with an empty query and a row that no query selects."""
    with jax.enable_x64(True):
        q, rows, index, count = example(5, keys=30, top_k=12, dtype=jnp.float64, counts=[0, 1, 12, 5, 3])
        pull = jnp.asarray(np.random.default_rng(6).standard_normal((2, 5, 4, LATENT)))

        def value(q, rows):
            out, logsumexp = sparse_mla(*parts(q), *parts(rows), index, count, SCALE)
            return jnp.sum(out * pull) + jnp.sum(jnp.sin(jnp.where(count[..., None] > 0, logsumexp, 0)))

        gradients = jax.grad(value, (0, 1))(q, rows)
        rng = np.random.default_rng(7)
        for _ in range(3):
            along = [jnp.asarray(rng.standard_normal(a.shape)) for a in (q, rows)]
            step = 1e-6
            ahead, behind = (value(q + e * along[0], rows + e * along[1]) for e in (step, -step))
            slope = sum(jnp.vdot(g, d) for g, d in zip(gradients, along, strict=True))
            np.testing.assert_allclose((ahead - behind) / (2 * step), slope, rtol=1e-6)


def pulled_back(inputs, seed=0):
    """Cotangents of both results, and those of q and rows by the reference in float64."""
    rng = np.random.default_rng(seed)
    q, rows, index, count = inputs
    d_out = jnp.asarray(rng.standard_normal((*q.shape[:3], LATENT)), q.dtype)
    d_logsumexp = jnp.where(count[..., None] > 0, jnp.asarray(rng.standard_normal(q.shape[:3]), jnp.float32), 0)
    with jax.enable_x64(True):
        double = lambda a: a.astype(jnp.float64)
        exact = *parts(double(q)), *parts(double(rows)), index, count
        results = reference.forward(*exact, SCALE)
        wanted = reference.backward(*exact, *results, double(d_out), double(d_logsumexp), SCALE)
    return (results[0].astype(q.dtype), results[1].astype(jnp.float32)), (d_out, d_logsumexp), wanted


def backward_interpreted(inputs, results, cotangents, tile=16, chunk=32):
    q, rows, index, count = inputs
    sizes = {"tile": tile, "chunk": chunk, "interpret": STRICT}
    return tpu_backward.backward(*parts(q), *parts(rows), index, count, *results, *cotangents, SCALE, **sizes)


def backward_on_gpu(inputs, results, cotangents):
    q, rows, index, count = inputs
    kept = *parts(q), *parts(rows), index, count, *results, *cotangents
    return gpu_backward.backward(*kept, SCALE, interpret=True)


@pytest.mark.parametrize("run", [backward_interpreted, backward_on_gpu])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("queries", "heads", "keys", "top_k", "counts"),
    [(3, 4, 70, 40, None), (1, 1, 3, 3, None), (10, 17, 40, 18, [0, 1, 16, 17, 18] * 2), (1, 128, 40, 33, None)],
)
def test_backward_kernels_pull_back_as_the_formula(run, dtype, queries, heads, keys, top_k, counts):
    """Of the largest entry float32 leaves 1e-5; bfloat16, which rounds p and ds as well, 2^-6."""
    inputs = example(
        9, batch=1 + (queries < 9), queries=queries, heads=heads, keys=keys, top_k=top_k, dtype=dtype, counts=counts
    )
    results, cotangents, wanted = pulled_back(inputs)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-6
    for found, exact in zip(run(inputs, results, cotangents), wanted, strict=True):
        assert found.shape == exact.shape
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=tolerance * np.abs(exact).max())


def test_cotangents_do_not_depend_on_the_chunks_nor_change_between_runs():
    inputs = example(10, batch=1, queries=4, keys=70)
    results, cotangents, _ = pulled_back(inputs)
    first, again, whole = (backward_interpreted(inputs, results, cotangents, chunk=n) for n in (32, 32, 8192))
    for a, b, c in zip(first, again, whole, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=2e-5)


def test_cotangents_on_a_gpu_do_not_depend_on_the_blocks_of_queries(monkeypatch):
    """Each row's sum runs over queries in their order, however many are contributing at once: the same bits."""
    inputs = example(10, batch=2, queries=5, keys=70, dtype=jnp.bfloat16)
    results, cotangents, _ = pulled_back(inputs)
    whole = backward_on_gpu(inputs, results, cotangents)
    monkeypatch.setattr(gpu_backward, "CONTRIBUTIONS", 2 * 2 * 40 * (LATENT + ROPE))
    for a, b in zip(backward_on_gpu(inputs, results, cotangents), whole, strict=True):
        np.testing.assert_array_equal(a, b)


def test_programs_that_share_a_query_attend_as_one():
    """A selection of 1100 is parted into four; the last parts of the shorter one are empty."""
    check(example(13, batch=1, queries=2, heads=3, keys=1200, top_k=1100, counts=[1100, 300]), on_gpu)


def test_shapes_that_do_not_fit_are_named():
    q, rows, index, count = example(8)
    with pytest.raises(ValueError, match=r"count is \(2, 4\)"):
        sparse_mla(*parts(q), *parts(rows), index, count[:, :4], SCALE)
    narrow = q[..., :100], q[..., -ROPE:], rows[..., :100], rows[..., -ROPE:]
    with pytest.raises(NotImplementedError, match="multiple of 128.*got 100"):
        sparse_mla(*narrow, index, count, SCALE, backend="tpu")
    with pytest.raises(NotImplementedError, match="power of two of latent features from 16, got 100"):
        sparse_mla(*(a.astype(jnp.bfloat16) for a in narrow), index, count, SCALE, backend="gpu")
    with pytest.raises(NotImplementedError, match="float32 would fill the registers"):
        sparse_mla(*parts(q), *parts(rows), index, count, SCALE, backend="gpu")
    sparse_mla(*narrow, index, count, SCALE)
    with pytest.raises(ValueError, match=r"rows is \(3, 1, 128\), .* want \(3, 1, 256\)"):
        put_rows(*(jnp.zeros((n, 1, width), jnp.uint32) for n, width in ((9, 256), (3, 128))), jnp.arange(3))
