"""The indexer's loss against its formula in float64, its gradient against the formula's and finite differences."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_loss import gpu, index_loss, reference, sparse_index_loss, tpu, tpu_sparse

pytestmark = pytest.mark.kernels
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
SCALE = 0.3


def example(seed=0, batch=1, queries=12, heads=8, width=128, keys=40, attention=8, deep=24, dtype=jnp.float32):
    """q, w, k, a, c."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape, size=1.0: jnp.asarray(rng.standard_normal(shape) * size, dtype)
    q, k = draw(batch, queries, heads, width, size=width**-0.25), draw(batch, keys, width, size=width**-0.25)
    w = jnp.asarray(rng.standard_normal((batch, queries, heads)), jnp.promote_types(dtype, jnp.float32))
    return q, w, k, draw(batch, queries, attention, deep), draw(batch, keys, deep)


def causal(batch, queries, keys):
    last = jnp.broadcast_to(jnp.arange(keys - queries, keys) + 1, (batch, queries))
    return jnp.zeros_like(last), last


def stretch(first, last, keys):
    column = np.arange(keys)
    return (np.asarray(first)[..., None] <= column) & (column < np.asarray(last)[..., None])


def by_formula(q, w, k, a, c, seen):
    """Straight from the definition, nothing blockwise; differentiable where every query sees a key."""
    i = jnp.einsum("bsjt,bsj->bst", jax.nn.relu(jnp.einsum("bsjx,btx->bsjt", q, k)), w)
    log_q = jax.nn.log_softmax(jnp.where(seen, i, -jnp.inf), axis=-1)
    logits = jnp.where(seen[:, :, None], SCALE * jnp.einsum("bshd,btd->bsht", a, c), -jnp.inf)
    p = jnp.mean(jax.nn.softmax(logits, axis=-1), axis=2)
    return jnp.sum(jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1)) - jnp.where(seen, log_q, 0)), 0), axis=-1)


def lse_of(a, c, seen):
    dots = SCALE * np.einsum("bshd,btd->bsht", np.float64(a), np.float64(c))
    dots = np.where(seen[:, :, None], dots, -np.inf)
    top = dots.max(axis=-1, keepdims=True, initial=-1e30)
    with np.errstate(divide="ignore"):
        return np.maximum(top[..., 0] + np.log(np.exp(dots - top).sum(axis=-1)), -1e30)


def wide(*arrays):
    return [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]


@partial(jax.jit, static_argnums=0)
def value_and_gradients(run, inputs, lse, first, last, weight):
    """The losses, and the gradient of their weighted sum by q, w and k."""
    q, w, k, a, c = inputs

    def total(q, w, k):
        losses = run(q, w, k, a, c, lse, SCALE, first, last)
        return jnp.sum(jnp.where(weight != 0, weight * losses, 0)), losses

    (_, losses), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(q, w, k)
    return losses, gradients


def check(run, inputs, first, last, tolerance, seed=0):
    """Against the formula and its gradient in float64, that within `tolerance` of its largest entry.

    Queries that see nothing are taken out of the formula.
    """
    keys = inputs[2].shape[1]
    seen = stretch(first, last, keys)
    lse = jnp.asarray(lse_of(*inputs[3:], seen), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(seed).standard_normal(first.shape), jnp.float32)
    found = value_and_gradients(run, inputs, lse, first, last, weight)
    some = seen.any(axis=-1)
    with jax.enable_x64(True):
        formula = lambda q, w, k, a, c, *_: by_formula(q, w, k, a, c, seen | ~some[..., None])
        wanted = value_and_gradients(formula, wide(*inputs), None, None, None, jnp.asarray(np.float64(weight) * some))
    np.testing.assert_allclose(found[0], np.where(some, wanted[0], 0), atol=2e-5, rtol=2e-5)
    for name, got, want in zip("qwk", found[1], wanted[1], strict=True):
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max(), err_msg=f"d{name}")
    return found


def xla(*args):
    return index_loss(*args, backend="xla")


def interpreted(*args):
    return tpu.index_loss(*args, STRICT)


def in_sixteens(x):
    """Attention's features, filled up with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])


def on_gpu(q, w, k, a, c, *which):
    return gpu.index_loss(q, w, k, in_sixteens(a), in_sixteens(c), *which, True)


def sparse_on_gpu(q, w, k, a, c, *which):
    return gpu.sparse_index_loss(q, w, k, in_sixteens(a), in_sixteens(c), *which, True)


def sparse_on_tpu(*args):
    return tpu_sparse.sparse_index_loss(*args, 8, STRICT)


def sparse_xla(*args):
    return sparse_index_loss(*args, backend="xla")


RUNS = [xla, interpreted, on_gpu]


@pytest.fixture(autouse=True)
def blocks_of_few_queries(monkeypatch):
    monkeypatch.setattr(reference, "ENTRIES", 5 * 8 * 40)  # five of `example`'s at once, of which it has twelve


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 1e-2)])
def test_loss_and_gradients_are_the_formulas(run, dtype, tolerance):
    check(run, example(dtype=dtype), *causal(1, 12, 40), tolerance)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("queries", "keys", "batch"), [(1, 1, 1), (70, 600, 1), (130, 140, 1)])
def test_shapes_that_fill_no_block(run, queries, keys, batch):
    check(run, example(1, batch=batch, queries=queries, keys=keys), *causal(batch, queries, keys), 2e-5)


@pytest.mark.parametrize("run", RUNS)
def test_documents_packed_in_a_row_and_queries_that_see_nothing(run):
    rng = np.random.default_rng(3)
    first = jnp.asarray(rng.integers(0, 900, (2, 20)), jnp.int32)
    last = first + jnp.asarray(rng.integers(1, 400, (2, 20)), jnp.int32)
    first, last = first.at[0, :2].set((700, 5)), last.at[0, :2].set((690, 5))
    losses, (dq, dw, _) = check(run, example(3, batch=2, queries=20, keys=900), first, last, 2e-5)
    assert not np.asarray(losses)[0, :2].any() and not dq[0, :2].any() and not dw[0, :2].any()
    assert np.asarray(losses)[0, 2:].all()


def test_blocks_of_queries_that_see_other_tiles_of_keys_and_a_tile_that_none_sees():
    query = jnp.arange(200)[None]
    first = jnp.where(query < 70, 0, 530)
    last = jnp.where(query < 70, 1 + query, 540 + query)
    check(interpreted, example(14, queries=200, keys=1300), first, last, 2e-5)


@pytest.mark.parametrize("run", RUNS)
def test_what_nobody_sees_may_be_nan(run):
    """Keys beyond the visible ones and queries that see nothing, in every operand."""
    inputs, weight = example(4, queries=20, keys=700), jnp.ones((1, 20))
    first, last = causal(1, 20, 600)
    first, last = first.at[0, 7].set(3), last.at[0, 7].set(3)
    lse = jnp.asarray(lse_of(*inputs[3:], stretch(first, last, 700)), jnp.float32)
    q, w, k, a, c = inputs
    spoiled = [x.at[:, 7].set(jnp.nan) for x in (q, w)] + [k.at[:, 600:].set(jnp.nan)]
    spoiled += [a.at[:, 7].set(jnp.nan), c.at[:, 600:].set(jnp.nan)]
    want = value_and_gradients(run, inputs, lse, first, last, weight)
    found = value_and_gradients(run, tuple(spoiled), lse.at[:, 7].set(jnp.nan), first, last, weight)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert np.isfinite(np.concatenate([np.ravel(x) for x in jax.tree.leaves(want)])).all()


@pytest.mark.parametrize("run", RUNS)
def test_an_error_that_the_heads_logsumexps_share_changes_nothing(run):
    inputs, (first, last) = example(5), causal(1, 12, 40)
    lse = jnp.asarray(lse_of(*inputs[3:], stretch(first, last, 40)), jnp.float32)
    one, other = (value_and_gradients(run, inputs, lse + off, first, last, jnp.ones((1, 12))) for off in (0, 3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, other)


@pytest.mark.parametrize("run", RUNS)
def test_an_indexer_that_scores_as_attention_looks_has_no_loss_and_no_gradient(run):
    """All heads are one, of index and of attention, and their products positive: softmax(I) = p."""
    q, w, k, _, _ = example(6)
    q, k, w = jnp.broadcast_to(abs(q[:, :, :1]), q.shape), abs(k), jnp.full_like(w, SCALE / 8)
    first, last = causal(1, 12, 40)
    lse = jnp.asarray(lse_of(q, k, stretch(first, last, 40)), jnp.float32)
    losses, gradients = value_and_gradients(run, (q, w, k, q, k), lse, first, last, jnp.ones((1, 12)))
    np.testing.assert_allclose(losses, 0, atol=2e-6)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=2e-5)


def test_the_target_learns_nothing():
    q, w, k, a, c = example(7)
    first, last = causal(1, 12, 40)
    lse = jnp.asarray(lse_of(a, c, stretch(first, last, 40)), jnp.float32)
    loss = lambda a, c, lse: jnp.sum(xla(q, w, k, a, c, lse, SCALE, first, last))
    assert not any(np.asarray(x).any() for x in jax.grad(loss, argnums=(0, 1, 2))(a, c, lse))


def selections(queries, keys, top_k, seed=0):
    """Random keys of each query in ascending order, zeros from count on."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, top_k + 1, (1, queries))
    index = np.zeros((1, queries, top_k), np.int32)
    for s in range(queries):
        index[0, s, : count[0, s]] = np.sort(rng.choice(keys, count[0, s], replace=False))
    return jnp.asarray(index), jnp.asarray(count, jnp.int32)


@pytest.mark.parametrize("run", [sparse_xla, sparse_on_gpu, sparse_on_tpu])
def test_over_selected_keys_both_distributions_are_normalised_among_them(run):
    inputs, (index, count) = example(8), selections(12, 40, 9)
    count = count.at[0, 0].set(0)
    seen = np.zeros((1, 12, 40), bool)
    for s in range(12):
        seen[0, s, np.asarray(index)[0, s, : int(count[0, s])]] = True
    lse = jnp.asarray(lse_of(*inputs[3:], seen), jnp.float32)
    weight = jnp.asarray(np.random.default_rng(8).standard_normal((1, 12)), jnp.float32)
    found = value_and_gradients(run, inputs, lse, index, count, weight)
    some = seen.any(axis=-1)
    with jax.enable_x64(True):
        formula = lambda q, w, k, a, c, *_: by_formula(q, w, k, a, c, seen | ~some[..., None])
        want = value_and_gradients(formula, wide(*inputs), None, None, None, jnp.asarray(np.float64(weight) * some))
    np.testing.assert_allclose(found[0], np.where(some, want[0], 0), atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found[1], want[1])


def test_selections_of_several_tiles_over_several_chunks_of_keys(monkeypatch):
    """On a TPU: 40 keys in chunks of 16, up to 20 of them selected, in tiles of 8, by queries of two grid steps."""
    monkeypatch.setattr(tpu_sparse, "CHUNK", 16)
    inputs, (index, count) = example(16, queries=9, heads=4, attention=4, dtype=jnp.bfloat16), selections(9, 40, 20)
    lse, weight = jnp.zeros((1, 9, 4)), jnp.arange(1.0, 10)[None]
    found, wanted = (value_and_gradients(run, inputs, lse, index, count, weight) for run in (sparse_on_tpu, sparse_xla))
    np.testing.assert_allclose(found[0], wanted[0], atol=2e-5, rtol=2e-5)
    for got, want in zip(found[1], wanted[1], strict=True):
        got, want = (np.asarray(x, np.float64) for x in (got, want))
        np.testing.assert_allclose(got, want, atol=1e-2 * np.abs(want).max())


def test_a_selection_of_everything_is_the_dense_loss():
    inputs, first = example(9), jnp.zeros((1, 12), jnp.int32)
    index, count = jnp.broadcast_to(jnp.arange(40), (1, 12, 40)), jnp.full((1, 12), 40)
    lse = jnp.asarray(lse_of(*inputs[3:], np.ones((1, 12, 40), bool)), jnp.float32)
    dense = value_and_gradients(xla, inputs, lse, first, count, jnp.ones((1, 12)))
    sparse = value_and_gradients(sparse_index_loss, inputs, lse, index, count, jnp.ones((1, 12)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), dense, sparse)


@pytest.mark.parametrize("run", [on_gpu, sparse_on_gpu])
def test_gradients_on_a_gpu_do_not_depend_on_the_blocks_of_queries(run, monkeypatch):
    """Up to the last bit, which the compiler decides for each number of blocks; over 70 keys, which fill no program."""
    inputs = example(15, batch=2, queries=7, keys=70)
    which = causal(2, 7, 70)
    if run is sparse_on_gpu:
        index, count = selections(14, 70, 40)
        which = index.reshape(2, 7, 40), count.reshape(2, 7)
    lse, weight = jnp.zeros((2, 7, 8)), jnp.ones((2, 7))
    whole = value_and_gradients(run, inputs, lse, *which, weight)
    monkeypatch.setattr(gpu, "ENTRIES", 2 * 2 * 70)
    jax.clear_caches()
    found = value_and_gradients(run, inputs, lse, *which, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, whole)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_finite_differences_in_float64(sparse):
    with jax.enable_x64(True):
        inputs = wide(*example(10, queries=4, keys=9, width=8, heads=2, attention=3, deep=5))
        which = selections(4, 9, 5, seed=1) if sparse else (jnp.zeros((1, 4), int), jnp.asarray([[1, 4, 0, 9]]))
        lse = jnp.zeros((1, 4, 3))
        run = sparse_index_loss if sparse else xla
        loss = lambda q, w, k: jnp.sum(jnp.arange(1, 5) * run(q, w, k, *inputs[3:], lse, SCALE, *which))
        gradients = jax.grad(loss, argnums=(0, 1, 2))(*inputs[:3])
        rng = np.random.default_rng(0)
        for n, gradient in enumerate(gradients):
            assert gradient.dtype == jnp.float64
            step = 1e-6 * rng.standard_normal(gradient.shape)
            ahead, back = ([x + sign * step if m == n else x for m, x in enumerate(inputs[:3])] for sign in (1, -1))
            difference = (loss(*ahead) - loss(*back)) / 2
            np.testing.assert_allclose(jnp.sum(gradient * step), difference, rtol=1e-6)


def test_the_mean_over_layers_learns_as_from_the_mean_of_their_targets():
    """The heads of two layers side by side over one key row that holds both layers' keys: p is the mean of theirs."""
    (q, w, k, a, c), (_, _, _, other_a, other_c) = example(12), example(13)
    first, last = causal(1, 12, 40)
    weight, seen = jnp.ones((1, 12)), stretch(first, last, 40)
    layers = []
    for a_, c_ in [(a, c), (other_a, other_c)]:
        lse = jnp.asarray(lse_of(a_, c_, seen), jnp.float32)
        layers.append(value_and_gradients(xla, (q, w, k, a_, c_), lse, first, last, weight)[1])
    none = jnp.zeros_like(a)
    both = jnp.concatenate([jnp.concatenate([a, none], -1), jnp.concatenate([none, other_a], -1)], 2)
    c_both = jnp.concatenate([c, other_c], -1)
    lse = jnp.asarray(lse_of(both, c_both, seen), jnp.float32)
    want = value_and_gradients(xla, (q, w, k, both, c_both), lse, first, last, weight)[1]
    found = jax.tree.map(lambda x, y: (x + y) / 2, *layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, want)


@pytest.mark.parametrize("sparse", [False, True])
def test_nothing_as_large_as_the_scores_is_kept(monkeypatch, sparse):
    """At GLM-5.2's widths; the operands alone take 690 MiB."""
    monkeypatch.undo()
    queries, keys = 4096, 16384
    shape = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((1, *shape), dtype)
    arguments = [shape(queries, 32, 128), shape(queries, 32), shape(keys, 128)]
    arguments += [shape(queries, 64, 576), shape(keys, 576), shape(queries, 64)]
    row, selected = shape(queries, dtype=jnp.int32), shape(queries, 2048, dtype=jnp.int32)
    run, which = (sparse_index_loss, (selected, row)) if sparse else (xla, (row, row))
    loss = lambda *x: jnp.sum(run(*x[:6], SCALE, *x[6:]))
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*arguments, *which).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < queries * keys * 4 / 4


def test_what_cannot_be_served_is_named():
    q, w, k, a, c = example(11)
    first, last = causal(1, 12, 40)
    lse = jnp.zeros((1, 12, 8))
    for spoiled, match in [
        ((q, w[..., 1:], k, a, c, lse, SCALE, first, last), r"got w \(1, 12, 7\)"),
        ((q, w, k, a, c[:, 1:], lse, SCALE, first, last), r"c \(1, 39, 24\)"),
        ((q, w, k, a, c, lse[..., 1:], SCALE, first, last), r"lse \(1, 12, 7\)"),
        ((q, w, k, a, c, lse, SCALE, first[:, 1:], last), r"first wants \(1, 12\).* got \(1, 11\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            index_loss(*spoiled)
    with pytest.raises(NotImplementedError, match="float32 would fill the registers"):
        index_loss(q, w, k, a, c, lse, SCALE, first, last, backend="gpu")
    with pytest.raises(NotImplementedError, match="got float32, float32 and 64"):
        narrow = q[..., :64], w, k[..., :64]
        sparse_index_loss(*narrow, a, c, lse, SCALE, jnp.zeros((1, 12, 3), int), last, backend="tpu")
