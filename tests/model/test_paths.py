"""Every way of computing attention gives one result: chunks of queries, gathered keys, remat, stacked layers."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import attention, indexer, rows, transformer, weights
from glm_jax.model import cache as caches
from glm_jax.model.heads import unembed
from tests.model.tiny import named_leaves, random_params, random_tokens, three_layers, tiny_config

CONFIG = three_layers()
DOCUMENTS = np.array([[0] * 2 + [1] * 11 + [2] * 6, [1] * 16 + [0] * 3], np.int32)


def loss_and_gradient(config, params):
    """Of the logits and of the indexer's loss together, so that no path's gradient goes unseen."""
    target = np.random.default_rng(5).standard_normal((*DOCUMENTS.shape, config.vocab_size), np.float32)
    tokens = random_tokens(config, *DOCUMENTS.shape)

    def loss(params):
        hidden, carried, _ = transformer.hidden_states(params, config, tokens, DOCUMENTS, train_indexer=True)
        logits = jnp.where(DOCUMENTS[..., None] > 0, unembed(params, hidden), 0)
        return jnp.sum(logits * target) + 10 * carried.kl, (logits, carried.kl)

    grads, seen = jax.jit(jax.grad(loss, has_aux=True))(params)
    return {**named_leaves(grads), "logits": seen[0], "kl": seen[1]}


@cache
def plain():
    return loss_and_gradient(CONFIG, random_params(CONFIG))


@pytest.mark.parametrize(
    "name, chunk, dense_columns, remat",
    [("chunks under remat", 8, 1024, True), ("gathered in chunks", 8, 4, False)],
)
def test_every_path_gives_the_same_logits_loss_and_gradients(name, chunk, dense_columns, remat, monkeypatch):
    want = plain()  # before the constants change
    monkeypatch.setattr(rows, "QUERY_CHUNK", chunk)
    monkeypatch.setattr(rows, "DENSE_COLUMNS", dense_columns)
    monkeypatch.setattr(indexer, "FEWEST_COLUMNS", 4)  # chunks that reach half of the columns score no more
    got = loss_and_gradient(dataclasses.replace(CONFIG, remat=remat), random_params(CONFIG))
    for leaf, value in want.items():
        scale = float(jnp.max(jnp.abs(value))) + 1e-3
        np.testing.assert_allclose(got[leaf] / scale, value / scale, atol=2e-5, err_msg=f"{name}: {leaf}")
    assert all(np.abs(want[leaf]).max() > 0 for leaf in want if not leaf.endswith(".mlp.bias"))


def decode(config, view, tokens, prefill: int, chunk: int, table=None, page: int = 0):
    """Logits of every column from `prefill` on, the first `prefill` columns run in chunks."""
    rows, columns = tokens.shape
    step = jax.jit(lambda c, t, s, n: caches.extend(view, config, c, t, s, n, table))
    state, logits = caches.init(config, rows, columns) if table is None else caches.init(config, 11, page), []
    at = np.zeros(rows, np.int32)
    while at[0] < columns:
        size = min(chunk, prefill - at[0]) if at[0] < prefill else 1
        width = chunk if at[0] < prefill else 1
        piece = np.pad(tokens, ((0, 0), (0, chunk)))[:, at[0] : at[0] + width]
        hidden, state = step(state, piece, at, np.full(rows, size, np.int32))
        if at[0] >= prefill:
            logits.append(unembed(view, hidden)[:, 0])
        at = at + size
    return np.stack(logits, 1)


@pytest.mark.parametrize("topk", [6, 8, 64])  # keys gathered, scored under a mask, and all of them
def test_decode_equals_the_full_forward_pass_with_layers_one_by_one_and_stacked(topk, monkeypatch):
    config = tiny_config(index_topk=topk)
    params, tokens = random_params(config), random_tokens(config, 2, 14)
    want = np.asarray(jax.jit(lambda t: transformer.forward(params, config, t).logits)(tokens))[:, 7:]
    one_by_one = decode(config, weights.unstack(params, config), tokens, 7, 4)
    np.testing.assert_allclose(one_by_one, want, atol=2e-5)
    if topk == 6:
        # Prefill that gathers, and scores half of the columns while it reaches no further, as long windows do.
        monkeypatch.setattr(caches, "DENSE_COLUMNS", 4)
        monkeypatch.setattr(indexer, "FEWEST_COLUMNS", 4)
        np.testing.assert_allclose(decode(config, params, tokens, 7, 4), want, atol=2e-5)
        monkeypatch.setattr(caches, "APART", 4)  # keys scored slot by slot, as decode steps in long windows do
        np.testing.assert_allclose(decode(config, params, tokens, 7, 4), want, atol=2e-5)


@pytest.mark.parametrize("topk, apart", [(6, 2048), (6, 4), (64, 2048)])
def test_pages_in_any_order_give_what_columns_in_one_piece_give(topk, apart, monkeypatch):
    config = tiny_config(index_topk=topk)
    params, tokens = random_params(config), random_tokens(config, 2, 14)
    view = weights.unstack(params, config)
    want = decode(config, view, tokens, 7, 4)
    monkeypatch.setattr(caches, "APART", apart)
    table = jnp.array([[9, 2, 7, 0, 5], [1, 10, 3, 8, 4]], jnp.int32)
    np.testing.assert_allclose(decode(config, view, tokens, 7, 4, table, page=3), want, atol=2e-6)


def test_what_a_cache_held_before_changes_no_result():
    config = tiny_config()
    view, tokens = weights.unstack(random_params(config), config), random_tokens(config, 2, 9)
    step = jax.jit(lambda c, s, n: caches.extend(view, config, c, tokens[:, 3:4], s, n))
    fill = jax.jit(lambda c: caches.extend(view, config, c, tokens[:, :3], jnp.zeros(2, int), jnp.full(2, 3)))
    results = []
    for junk in (0.0, 1e3):
        state = jax.tree.map(lambda a, junk=junk: jnp.full_like(a, junk), caches.init(config, 2, 9))
        results.append(step(fill(state)[1], jnp.full(2, 3), jnp.ones(2, int)))
    np.testing.assert_array_equal(results[0][0], results[1][0])


def test_one_token_beyond_the_last_column_is_dropped():
    config = tiny_config()
    view, tokens = weights.unstack(random_params(config), config), random_tokens(config, 1, 1)
    state = jax.tree.map(lambda a: jnp.full_like(a, 7.0), caches.init(config, 1, 9))
    _, after = jax.jit(lambda c, s: caches.extend(view, config, c, tokens, s, jnp.ones(1, int)))(state, jnp.array([9]))
    assert all((leaf == 7).all() for leaf in jax.tree.leaves(after))


def test_tokens_beyond_count_and_rows_without_any_write_nothing():
    config = tiny_config()
    view, tokens = weights.unstack(random_params(config), config), random_tokens(config, 3, 4)
    state = jax.tree.map(lambda a: jnp.full_like(a, 7.0), caches.init(config, 3, 9))
    start, count = jnp.array([2, 0, 7]), jnp.array([3, 0, 2])
    _, after = jax.jit(lambda c: caches.extend(view, config, c, tokens, start, count))(state)
    written = np.any(np.asarray(after.row) != 7.0, axis=(0, 3))
    want = np.zeros((3, 9), bool)
    want[0, 2:5], want[2, 7:9] = True, True
    np.testing.assert_array_equal(written, want)
    np.testing.assert_array_equal(np.any(np.asarray(after.index_key) != 7.0, axis=(0, 3)), want)


def test_a_query_that_sees_nothing_gets_zeros():
    config = tiny_config()
    p = random_params(config).groups[0][0].attn
    normal = lambda *shape: jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    mask = np.arange(5) < np.array([3, 0])[:, None]
    heads, kv = config.num_attention_heads, normal(1, 5, config.row_dim)
    q = normal(1, 2, heads, config.qk_nope_head_dim), normal(1, 2, heads, config.qk_rope_head_dim)
    for out, prob in (
        attention.expanded(p, config, *q, kv, mask[None]),
        attention.absorbed(p, config, *q, mask[None], lambda seen: (kv, seen)),
    ):
        np.testing.assert_allclose(jnp.sum(prob, -1)[0], [[1, 0]] * heads, atol=1e-6)
        assert np.abs(out[0, 0]).min() > 0 and not np.asarray(out)[0, 1].any()
