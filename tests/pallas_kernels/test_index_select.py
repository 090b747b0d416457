"""Index scoring with selection: the reference against brute force, the kernels interpreted against the same."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select import gpu, index_select, index_select_paged, tpu, tpu_decode

pytestmark = pytest.mark.kernels
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def example(seed=0, batch=1, queries=8, heads=4, width=128, keys=300, dtype=jnp.float32, whole=True):
    """Small integers, so that products are exact in every dtype and many scores tie."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (
        jnp.asarray(rng.integers(-2, 3, shape), dtype) if whole else jnp.asarray(rng.standard_normal(shape), dtype)
    )
    w = jnp.asarray(rng.integers(-2, 3, (batch, queries, heads)), jnp.float32)
    return draw(batch, queries, heads, width), w, draw(batch, keys, width)


def causal(batch, queries, keys):
    last = jnp.broadcast_to(jnp.arange(keys - queries, keys) + 1, (batch, queries))
    return jnp.zeros_like(last), last


def brute_force(q, w, k, first, last, top_k):
    q, w, k = (np.asarray(a, np.float64) for a in (q, w, k))
    keys = k.shape[1]
    index = np.zeros((*w.shape[:2], min(top_k, keys)), np.int32)
    count = np.zeros(w.shape[:2], np.int32)
    for b, s in np.ndindex(count.shape):
        score = w[b, s] @ np.maximum(q[b, s] @ k[b].T, 0)
        visible = [t for t in range(keys) if first[b, s] <= t < last[b, s]]
        best = sorted(sorted(visible, key=lambda t: (-score[t], t))[:top_k])
        index[b, s, : len(best)], count[b, s] = best, len(best)
    return index, count


def check(inputs, first, last, top_k, run):
    index, count = run(*inputs, first, last, top_k)
    want = brute_force(*inputs, np.asarray(first), np.asarray(last), top_k)
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index, want[0])


def interpreted(q, w, k, first, last, top_k, k_scale=None):
    return tpu.index_select(q, w, k, first, last, min(top_k, k.shape[1]), k_scale, interpret=STRICT)


def on_gpu(q, w, k, first, last, top_k, k_scale=None):
    return gpu.index_select(q, w, k, first, last, min(top_k, k.shape[1]), k_scale, interpret=True)


def xla(*args):
    return index_select(*args, backend="xla")


def in_float8(seed, *shape):
    """Rows of float8 and the powers of two that bring them back, as a cache keeps them; each number has two bits."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 4, shape) * 2.0 ** rng.integers(-6, 7, (*shape[:-1], 1))
    scale = 2.0 ** rng.integers(-9, 10, shape[:-1])
    return jnp.asarray(rows, jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_selects_the_best_visible_keys_and_ties_go_to_the_lower(run, dtype):
    inputs = example(dtype=dtype)
    check(inputs, *causal(1, 8, 300), 64, run)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
@pytest.mark.parametrize("q_dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
def test_float8_keys_score_by_what_they_stand_for(run, q_dtype):
    q, q_scale = in_float8(11, 1, 8, 4, 128)
    k, k_scale = in_float8(12, 1, 300, 128)
    w = example()[1]
    first, last = causal(1, 8, 300)
    index, count = run(q.astype(q_dtype), w * q_scale, k, first, last, 64, k_scale)
    exact = [np.asarray(a, np.float64) for a in (q, q_scale, k, k_scale)]
    want = brute_force(
        exact[0] * exact[1][..., None], w, exact[2] * exact[3][..., None], *map(np.asarray, (first, last)), 64
    )
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index, want[0])


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
@pytest.mark.parametrize(
    ("queries", "heads", "keys", "top_k"),
    [(1, 1, 5, 3), (9, 2, 2049, 7), (20, 4, 4100, 300), (3, 128, 130, 130), (17, 3, 200, 2048)],
)
def test_shapes_that_fill_no_block(run, queries, heads, keys, top_k):
    dtype = jnp.bfloat16 if run is on_gpu else jnp.float32  # float32 has no room for 128 heads there
    inputs = example(1, queries=queries, heads=heads, keys=keys, dtype=dtype, whole=False)
    w = jnp.asarray(np.random.default_rng(2).standard_normal(inputs[1].shape), jnp.float32)
    q, _, k = inputs
    last = jnp.broadcast_to(jnp.maximum(keys - jnp.arange(queries) * 3, 0), (1, queries))
    check((q, w, k), jnp.zeros_like(last), last, top_k, run)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
def test_documents_packed_in_a_row_see_their_own_keys_and_some_queries_see_none(run):
    rng = np.random.default_rng(3)
    inputs = example(3, batch=2, queries=16, keys=2300)
    first = jnp.asarray(rng.integers(0, 2300, (2, 16)), jnp.int32)
    last = jnp.asarray(first + rng.integers(-2, 900, (2, 16)), jnp.int32)
    first, last = first.at[0, :2].set((2000, 2250)), last.at[0, :2].set((1990, 2790))  # none; beyond the last key
    check(inputs, first, last, 300, run)


@pytest.mark.parametrize("run", [xla, interpreted, on_gpu])
def test_equal_scores_are_the_first_keys(run):
    q, w, k = example(4, queries=8, keys=2500)
    index, count = run(jnp.zeros_like(q), w, k, *causal(1, 8, 2500), 100)
    np.testing.assert_array_equal(index, np.broadcast_to(np.arange(100), (1, 8, 100)))
    np.testing.assert_array_equal(count, 100)


@pytest.mark.parametrize("rising", [True, False])
def test_on_a_gpu_keys_stream_by_and_a_queue_is_pruned_when_it_is_full(rising):
    """Rising scores fill it anew every 256 keys; queries of a block that see other keys fill theirs at other times."""
    q, w, k = example(16, queries=4, width=16, keys=2000, dtype=jnp.bfloat16, whole=False)
    w, k = jnp.abs(w) + 1, jnp.abs(k) * (jnp.arange(2000)[:, None] if rising else jnp.arange(2000, 0, -1)[:, None])
    first = jnp.array([[0, 900, 1990, 300]], jnp.int32)
    last = jnp.array([[2000, 2000, 2000, 301]], jnp.int32)
    check((jnp.abs(q), w, k.astype(jnp.bfloat16)), first, last, 100, on_gpu)


def test_on_a_gpu_programs_share_the_keys_of_few_queries(monkeypatch):
    """Sixteen programs' candidates are merged eight by eight; many tie, and the last programs have no keys."""
    monkeypatch.setattr(gpu, "LEAST", 128)
    q, w, k = example(17, queries=2, width=16, keys=2200, dtype=jnp.bfloat16)
    check((q, w, k), jnp.array([[0, 700]]), jnp.array([[2100, 1100]]), 150, on_gpu)


def test_a_shape_that_no_kernel_serves_is_refused_by_name_and_served_by_xla():
    q, w, k = example(5, width=64)
    first, last = causal(1, 8, 300)
    with pytest.raises(NotImplementedError, match="multiple of 128, got 64"):
        index_select(q, w, k, first, last, 10, backend="tpu")
    with pytest.raises(NotImplementedError, match="no backend 'cuda'"):
        index_select(q, w, k, first, last, 10, backend="cuda")
    with pytest.raises(NotImplementedError, match="got 48, 4 in float32 and 10"):
        index_select(q[..., :48], w, k[..., :48], first, last, 10, backend="gpu")
    check((q, w, k), first, last, 10, index_select)


def test_shapes_that_do_not_fit_together_are_named():
    q, w, k = example(6)
    first, last = causal(1, 8, 300)
    with pytest.raises(ValueError, match=r"got w \(1, 8, 3\)"):
        index_select(q, w[..., :3], k, first, last, 10)
    with pytest.raises(ValueError, match=r"wants k_scale \(1, 300\), got \(1, 3\)"):
        index_select(q, w, k, first, last, 10, jnp.ones((1, 3)))
    with pytest.raises(NotImplementedError, match="got float32 and bfloat16"):
        index_select(q, w, k.astype(jnp.bfloat16), first, last, 10, backend="tpu")


def paged(k, page, seed=0, garbage=None):
    """Pages of every sequence's keys in random places of a pool, and the table; `garbage` fills two more entries."""
    rng = np.random.default_rng(seed)
    k = np.asarray(k)
    batch, keys, width = k.shape
    each = -(-keys // page)
    place = rng.permutation(batch * each + 3)[: batch * each].reshape(batch, each)
    pages = np.full((batch * each + 3, page, width), np.nan, np.float32)
    pages[place] = np.pad(k.astype(np.float32), [(0, 0), (0, each * page - keys), (0, 0)]).reshape(
        batch, each, page, -1
    )
    table = place if garbage is None else np.concatenate([place, np.full((batch, 2), garbage)], axis=1)
    return jnp.asarray(pages, k.dtype), jnp.asarray(table, jnp.int32)


@functools.partial(jax.jit, static_argnums=6)
def paged_interpreted(q, w, pages, table, first, last, top_k, page_scale=None):
    """With a ring of two tiles, or one in float32, which every example fills more than once."""
    with mock.patch.object(tpu_decode, "RING_BYTES", 2 * tpu_decode.TILE * 128 * 2):
        most = table.shape[1] * pages.shape[1]
        return tpu_decode.index_select_paged(
            q, w, pages, table, first, last, min(top_k, most), page_scale, interpret=STRICT
        )


@functools.partial(jax.jit, static_argnums=6)
def paged_on_gpu(q, w, pages, table, first, last, top_k, page_scale=None):
    most = table.shape[1] * pages.shape[1]
    return gpu.index_select_paged(q, w, pages, table, first, last, min(top_k, most), page_scale, interpret=True)


def paged_xla(*args):
    return index_select_paged(*args, backend="xla")


@pytest.mark.parametrize("run", [paged_xla, paged_interpreted, paged_on_gpu])
@pytest.mark.parametrize(
    ("batch", "queries", "heads", "keys", "page", "top_k", "dtype"),
    [
        (11, 1, 4, 300, 64, 40, jnp.float32),  # eight sequences a step, and a step that is not full
        (3, 4, 8, 2500, 128, 300, jnp.bfloat16),  # draft rows of two sequences a step
        (2, 6, 3, 90, 16, 4096, jnp.float32),  # fewer keys than top_k
    ],
)
def test_paged_keys_are_found_through_a_permuted_table(run, batch, queries, heads, keys, page, top_k, dtype):
    q, w, k = example(7, batch, queries, heads, keys=keys, dtype=dtype)
    lengths = np.random.default_rng(8).integers(queries, keys + 1, batch)
    lengths[0] = keys
    last = jnp.asarray(lengths[:, None] - queries + 1 + np.arange(queries), jnp.int32)  # a draft row sees those before
    first = jnp.zeros_like(last).at[-1].set(5)
    pages, table = paged(k, page)
    index, count = run(q, w, pages, table, first, last, top_k)
    want = brute_force(q, w, k, np.asarray(first), np.asarray(last), min(top_k, table.shape[1] * page))
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index[..., :keys], want[0][..., : index.shape[-1]])
    assert not index[..., keys:].any()


@pytest.mark.parametrize("run", [paged_xla, paged_interpreted, paged_on_gpu])
@pytest.mark.parametrize("garbage", [-7, 1 << 30])
def test_what_stands_beyond_a_sequence_in_the_table_is_not_followed(run, garbage):
    q, w, k = example(9, batch=3, queries=2, keys=200)
    last = jnp.asarray([[200, 200], [0, 0], [70, 71]], jnp.int32)  # the second sequence is empty
    pages, table = paged(k, 64, garbage=garbage)
    table = table.at[1].set(garbage).at[2, 2:].set(garbage)
    index, count = run(q, w, pages, table, jnp.zeros_like(last), last, 30)
    want = brute_force(q, w, k, np.zeros((3, 2)), np.asarray(last), 30)
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index, want[0])


@pytest.mark.parametrize("run", [paged_xla, paged_interpreted, paged_on_gpu])
def test_paged_float8_keys_score_by_what_they_stand_for(run):
    q, q_scale = in_float8(13, 2, 2, 4, 128)
    k, k_scale = in_float8(14, 2, 300, 128)
    w = example(15, batch=2, queries=2)[1]
    last = jnp.asarray([[299, 300], [130, 131]], jnp.int32)
    pages, table = paged(k, 128)
    scales, _ = paged(k_scale[..., None], 128)
    index, count = run(q, w * q_scale, pages, table, jnp.zeros_like(last), last, 50, scales[..., 0])
    exact = [np.asarray(a, np.float64) for a in (q, q_scale, k, k_scale)]
    want = brute_force(
        exact[0] * exact[1][..., None], w, exact[2] * exact[3][..., None], 0 * last, np.asarray(last), 50
    )
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index, want[0])


def test_a_batch_whose_table_is_too_large_is_served_in_parts(monkeypatch):
    q, w, k = example(10, batch=2, queries=1, keys=150)
    pages, table = paged(k, 32)
    last = jnp.full((2, 1), 150, jnp.int32)
    args = (q, w, pages, table, jnp.zeros_like(last), last, 20)
    monkeypatch.setattr(tpu_decode, "TABLE_ENTRIES", tpu_decode.SPAN // 32)
    for got, want in zip(paged_interpreted(*args), paged_xla(*args), strict=True):
        np.testing.assert_array_equal(got, want)


def test_pages_and_tables_that_do_not_fit_are_named():
    q, w, k = example(6)
    first, last = causal(1, 8, 300)
    pages, table = paged(k, 32)
    with pytest.raises(ValueError, match="pages has 24"):
        index_select_paged(q, w, pages[:, :24], table, first, last, 10)
    with pytest.raises(ValueError, match=r"table \(2, 10\)"):
        index_select_paged(q, w, pages, jnp.tile(table, (2, 1)), first, last, 10)
    with pytest.raises(NotImplementedError, match="got 9 and 32"):
        nine = [jnp.concatenate([a, a[:, :1]], axis=1) for a in (q, w, first, last)]
        index_select_paged(*nine[:2], pages, table, *nine[2:], 10, backend="tpu")
