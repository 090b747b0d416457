"""The whole model's gradients in float64 against finite differences, and which loss may move which parameter."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import transformer
from glm_jax.model.heads import unembed
from tests.model.tiny import as_float64, named_leaves, random_params, random_tokens, three_layers

CONFIG = three_layers(attention_bias=True, n_group=2, topk_group=1, dtype="float64")
DOCUMENTS = np.array([[0] * 2 + [1] * 8 + [2] * 4, [1] * 14], np.int32)
EPSILON = 3e-6


@cache
def computed():
    """Gradients of both losses by leaf, and finite differences of both along a random direction in every leaf."""
    tokens = random_tokens(CONFIG, *DOCUMENTS.shape)

    def losses(params):
        hidden, carried, _ = transformer.hidden_states(params, CONFIG, tokens, DOCUMENTS, train_indexer=True)
        logp = jax.nn.log_softmax(unembed(params, hidden), axis=-1)
        picked = jnp.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        language = -jnp.sum(jnp.where(DOCUMENTS[:, 1:] > 0, picked, 0))
        return jnp.stack([language, carried.kl])

    with jax.enable_x64(True):
        params = as_float64(random_params(CONFIG))
        _, pullback = jax.vjp(jax.jit(losses), params)
        gradients = [named_leaves(pullback(jnp.eye(2)[i])[0]) for i in range(2)]
        evaluate = jax.jit(losses)
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        along, differences = {}, {}
        for n, (path, leaf) in enumerate(leaves):
            direction = np.random.default_rng(n).standard_normal(leaf.shape)
            moved = [[v for _, v in leaves] for _ in range(2)]
            moved[0][n], moved[1][n] = leaf + EPSILON * direction, leaf - EPSILON * direction
            up, down = (evaluate(jax.tree.unflatten(structure, m)) for m in moved)
            name = jax.tree_util.keystr(path)
            differences[name] = np.asarray(up - down) / (2 * EPSILON)
            along[name] = [float(np.sum(np.asarray(g[name]) * direction)) for g in gradients]
        return [jax.device_get(g) for g in gradients], along, differences


def test_the_language_loss_has_the_gradient_that_finite_differences_show():
    _, along, differences = computed()
    for name, (got, _) in along.items():
        assert got == pytest.approx(differences[name][0], rel=1e-6, abs=1e-7), name


def test_the_indexers_loss_has_the_gradient_that_finite_differences_show():
    _, along, differences = computed()
    seen = [name for name in along if ".indexer." in name]
    assert len(seen) == 5
    for name in seen:
        assert along[name][1] == pytest.approx(differences[name][1], rel=1e-6, abs=1e-7), name
        assert abs(along[name][1]) > 1e-3, name


def test_the_language_loss_never_moves_the_indexer_and_the_indexers_loss_nothing_else():
    (language, indexer_loss), _, differences = computed()
    for name in language:
        if ".indexer." in name:
            assert not language[name].any(), name
            assert indexer_loss[name].any(), name
        else:
            assert not indexer_loss[name].any(), name
            # The router's bias chooses experts and never weighs them.
            assert language[name].any() != name.endswith(".mlp.bias"), name
    # The indexer's loss does depend on the model, so that zero is the work of stop_gradient.
    assert abs(differences[".groups[0][0].attn.q_a"][1]) > 1e-3
