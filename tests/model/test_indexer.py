"""Top-k selection by brute force, ties included, and the indexer's loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model import indexer, selection
from glm_jax.model.selection import Bits


def chosen(score, visible, top_k) -> list[list[int]]:
    """Through the mask, its packing and its indices: all must say the same."""
    mask = selection.select(jnp.asarray(score)[None], jnp.asarray(visible)[None], top_k)
    np.testing.assert_array_equal(selection.mask_of(Bits(selection.pack(mask)), mask.shape[-1]), mask)
    index, count = selection.indices(mask, top_k)
    assert not np.asarray(index)[0][np.arange(index.shape[-1]) >= np.asarray(count)[0][:, None]].any()
    rows = [np.asarray(row)[:n].tolist() for row, n in zip(index[0], count[0], strict=True)]
    assert rows == [np.flatnonzero(row).tolist() for row in mask[0]]
    return rows


def brute(score, visible, top_k) -> list[list[int]]:
    def best(s, v):
        return sorted(sorted(np.flatnonzero(v).tolist(), key=lambda t: (-s[t], t))[:top_k])

    return [best(s, v) for s, v in zip(score, visible, strict=True)]


def test_all_equal_scores_select_the_lowest_visible_columns():
    visible = np.tril(np.ones((12, 12), bool))
    visible[9, [0, 2]] = False
    got = chosen(np.zeros((12, 12), np.float32), visible, 4)
    assert got[2] == [0, 1, 2] and got[8] == [0, 1, 2, 3] and got[9] == [1, 3, 4, 5]


def test_selection_equals_brute_force_with_many_ties_and_any_visibility():
    rng = np.random.default_rng(0)
    for top_k in (1, 3, 8, 20):
        score = rng.integers(-2, 3, (40, 16)).astype(np.float32)
        visible = rng.random((40, 16)) < rng.random((40, 1))
        visible[0] = False
        assert chosen(score, visible, top_k) == brute(score, visible, top_k)


def test_selection_orders_all_floats():
    """Tiny, huge, infinite and negative ones; -0 ties with 0."""
    rng = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype == np.float64):
            score = (rng.standard_normal((64, 40)) * 10.0 ** rng.integers(-30, 30, (64, 40))).astype(dtype)
            score[:, ::5] *= 0.0
            score[:, 3], score[:, 7] = np.inf, -np.inf
            visible = rng.random((64, 40)) < 0.8
            assert chosen(score, visible, 15) == brute(score, visible, 15)


def test_hidden_keys_are_never_selected_however_high_they_score():
    score = np.full((1, 6), -1e30, np.float32)
    score[0, [1, 4]] = 1e30
    visible = np.array([[True, False, True, False, False, True]])
    assert chosen(score, visible, 2) == [[0, 2]]


def test_scores_of_one_query_and_of_many_agree():
    rng = np.random.default_rng(0)
    for heads in (3, 11):  # unrolled, and in a scan
        q, w, k = (rng.standard_normal(s, np.float32) for s in ((2, 5, heads, 8), (2, 5, heads), (2, 7, 8)))
        want = np.einsum("bsj,bsjt->bst", w, np.maximum(np.einsum("bsjx,btx->bsjt", q, k), 0))
        np.testing.assert_allclose(indexer.scores(q, w, k), want, atol=1e-5)
        for s in range(5):
            one = indexer.scores(q[:, s : s + 1], w[:, s : s + 1], k)
            np.testing.assert_allclose(one[:, 0], want[:, s], atol=1e-5)


def distributions(rng, *shape):
    p = rng.random(shape, np.float32)
    return jnp.asarray(p / p.sum(-1, keepdims=True))


def test_gradient_of_the_mean_of_kls_is_that_of_the_kl_to_the_mean_attention():
    rng = np.random.default_rng(0)
    index, count = jnp.arange(6)[None, None].repeat(4, 1), jnp.array([[6, 6, 3, 1]])
    attention = distributions(rng, 3, 1, 4, 6)  # of three layers that share the selection
    attention = jnp.where(selection.live(index, count), attention, 0)
    attention = attention / attention.sum(-1, keepdims=True)

    def loss(score, targets):
        masked = jnp.where(selection.live(index, count), score, -jnp.inf)
        log_q = jax.nn.log_softmax(masked, axis=-1)
        return jnp.mean(jnp.stack([jnp.sum(indexer.kl(log_q, p)) for p in targets]))

    score = jnp.asarray(rng.standard_normal((1, 4, 6), np.float32))
    mean_of_kls = jax.grad(loss)(score, list(attention))
    kl_to_mean = jax.grad(loss)(score, [attention.mean(0)])
    np.testing.assert_allclose(mean_of_kls, kl_to_mean, atol=1e-6)
    assert np.abs(mean_of_kls[0, 0]).max() > 1e-2 and not np.isnan(mean_of_kls).any()
    assert not np.asarray(mean_of_kls)[0, 2, 3:].any(), "no gradient at keys that are not selected"


def test_kl_is_zero_where_the_indexer_agrees_and_for_queries_that_select_nothing():
    p = distributions(np.random.default_rng(1), 1, 2, 5)
    np.testing.assert_allclose(indexer.kl(jnp.log(p), p), 0, atol=1e-6)
    nothing = jnp.zeros_like(p)
    assert not indexer.kl(jnp.full_like(p, -jnp.inf), nothing).any()
