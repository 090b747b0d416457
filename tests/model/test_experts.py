"""Routed experts against every expert computed densely, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import experts
from glm_jax.model.experts import routed_mlp
from glm_jax.model.target import tracing_for

DIM, WIDTH, COUNT = 6, 5, 4


def dense(x, expert, weight, valid, gate_up, down):
    """Every expert on every token, then a weighted choice."""
    hidden = jnp.einsum("nd,edgi->negi", x, gate_up)
    every = jnp.einsum("nei,eid->ned", jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1], down)
    share = jnp.sum(jnp.where(expert[..., None] == jnp.arange(gate_up.shape[0]), weight[..., None], 0.0), axis=1)
    return jnp.where(valid[:, None], jnp.einsum("ne,ned->nd", share, every), 0.0)


def case(tokens, k, seed, only=None):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    pick = [rng.permutation(COUNT if only is None else only)[:k] for _ in range(tokens)]
    arrays = normal(tokens, DIM), normal(tokens, k), normal(COUNT, DIM, 2, WIDTH), normal(COUNT, WIDTH, DIM)
    return arrays, jnp.asarray(np.array(pick, np.int32)), jnp.asarray(rng.random(tokens) < 0.8)


def compare(arrays, expert, valid):
    target = jnp.asarray(np.random.default_rng(9).standard_normal(arrays[0].shape, np.float32))

    def loss(f, arrays):
        x, weight, gate_up, down = arrays
        out = f(x, expert, weight, valid, gate_up, down)
        return jnp.sum(out * target), out

    got, want = (jax.jit(jax.grad(lambda a, f=f: loss(f, a), has_aux=True))(arrays) for f in (routed_mlp, dense))
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)
    assert not np.asarray(got[1])[~np.asarray(valid)].any()
    for name, a, b in zip(("x", "weight", "gate_up", "down"), got[0], want[0], strict=True):
        # A token that is not valid reaches nothing, so nothing reaches it.
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=f"gradient of {name}")


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # blocks, and ragged_dot as accelerators run it
@pytest.mark.parametrize("tokens, k", [(1, 2), (37, 2), (130, 3)])
def test_routed_experts_equal_dense_experts_in_value_and_gradient(tokens, k, backend):
    with tracing_for(backend):
        compare(*case(tokens, k, seed=tokens))


def test_all_tokens_at_one_expert_and_none_at_the_others():
    compare(*case(70, 1, seed=0, only=1))


def test_no_valid_token_gives_zeros_and_no_gradient():
    arrays, expert, _ = case(9, 2, seed=0)
    compare(arrays, expert, jnp.zeros(9, bool))


def test_layout_puts_each_valid_pair_in_a_block_of_its_expert():
    _, expert, valid = case(130, 3, seed=3)
    plan = experts.layout(expert, valid, COUNT, block=8)
    place, owner = np.asarray(plan.place), np.asarray(plan.expert)
    assert len(set(place[np.asarray(valid)].ravel())) == 3 * int(valid.sum()), "no two pairs share a row"
    assert (owner[place[np.asarray(valid)] // 8] == np.asarray(expert)[np.asarray(valid)]).all()
    assert (place[~np.asarray(valid)] == plan.token.shape[0]).all()
    assert int(plan.used) == sum(-(-int(n) // 8) for n in plan.count) and int(plan.count.sum()) == 3 * int(valid.sum())
