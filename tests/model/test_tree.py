"""The declared tree: its size for the released model, and what initialisation draws from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import tree, weights
from glm_jax.model.config import glm52_744b
from glm_jax.model.tree import Leaf
from tests.model.tiny import named_leaves, random_params, three_layers


def test_the_released_model_has_743_billion_parameters_in_21_computing_layers():
    leaves = weights.abstract(glm52_744b())
    assert tree.size(leaves) == pytest.approx(743e9, rel=2e-3)
    stacks = {g: [layer.attn.indexer is not None for layer in layers] for g, layers in enumerate(leaves.groups)}
    assert stacks == {0: [True], 1: [False], 2: [True, False, False, False]}
    repeats = [group.repeats for group in glm52_744b().groups]
    assert sum(r * sum(stacks[g]) for g, r in enumerate(repeats)) == 21


def test_the_released_models_weights_are_bfloat16_but_for_router_and_bias():
    shapes = named_leaves(tree.shapes(weights.abstract(glm52_744b()), "bfloat16"))
    wide = {name.rpartition(".")[2] for name, leaf in shapes.items() if leaf.dtype == jnp.float32}
    assert wide == {"router", "bias"}


def test_a_leafs_numbers_depend_on_its_place_and_the_seed_alone():
    leaf = lambda: Leaf((40, 30), ("embed", None), fan_in=40)
    draw = lambda tree_, seed: tree.initialise(tree_, jax.random.key(seed), "float32", None)
    small, large = draw({"a": leaf()}, 0), draw({"b": leaf(), "a": leaf()}, 0)
    np.testing.assert_array_equal(small["a"], large["a"])
    assert np.abs(large["a"] - large["b"]).max() > 0.1
    assert np.abs(draw({"a": leaf()}, 1)["a"] - small["a"]).max() > 0.1


def test_matrices_are_drawn_at_the_scale_asked_for_and_constants_are_constant():
    leaves = {
        "w": Leaf((200, 100), (None, None), fan_in=200),
        "n": Leaf((9,), (None,), value=1.0),
        "z": Leaf((9,), (None,)),
    }
    for scale, want in ((None, 200**-0.5), (0.02, 0.02)):
        drawn = tree.initialise(leaves, jax.random.key(0), "float32", scale)
        assert float(jnp.std(drawn["w"])) == pytest.approx(want, rel=0.03)
        assert abs(float(jnp.mean(drawn["w"]))) < 0.03 * want
        assert (drawn["n"] == 1).all() and (drawn["z"] == 0).all()


def test_a_critic_starts_as_the_policy_with_a_value_head_at_zero():
    config = three_layers()
    policy = random_params(config)
    critic = weights.critic_from_policy(policy, config)
    declared = tree.shapes(weights.abstract(config, critic=True), "float32")
    assert jax.tree.map(lambda a: a.shape, critic) == jax.tree.map(lambda a: a.shape, declared)
    assert critic.head is None and not critic.value.any()
    np.testing.assert_array_equal(critic.groups[1][0].mlp.experts.down, policy.groups[1][0].mlp.experts.down)


def test_a_leaf_names_an_axis_for_each_dimension():
    with pytest.raises(ValueError, match="as many axes"):
        Leaf((2, 3), ("embed",))
