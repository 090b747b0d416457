"""Adam against a few lines of numpy, clipping, and leaves that are nobody's business."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn import optimizer
from glm_jax.learn.config import LearnConfig, OptimizerConfig
from glm_jax.learn.optimizer import FROZEN, INDEXER, MAIN
from tests.model.tiny import named_leaves, random_params, two_layers

CONFIG = OptimizerConfig(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, clip_norm=2.0)
NAMES = {"w": MAIN, "v": MAIN, "i": INDEXER, "f": FROZEN}


def numpy_adam(w, gradients, lr):
    m = v = np.zeros_like(w)
    for n, g in enumerate(gradients, 1):
        m, v = CONFIG.b1 * m + (1 - CONFIG.b1) * g, CONFIG.b2 * v + (1 - CONFIG.b2) * g * g
        step = m / (1 - CONFIG.b1**n) / (np.sqrt(v / (1 - CONFIG.b2**n)) + CONFIG.eps)
        w = w - lr * (step + CONFIG.weight_decay * w)
    return w


def test_steps_are_adams_with_decoupled_decay_and_each_part_clipped_by_its_own_norm():
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(5).astype(np.float32) for name in NAMES}
    gradients = [{name: (scale * rng.standard_normal(5)).astype(np.float32) for name in NAMES} for scale in (9, 0.1, 3)]
    learner = optimizer.init(params, NAMES, CONFIG, (MAIN, INDEXER))
    clipped = []
    for g in gradients:
        learner, norm = optimizer.step(learner, g, NAMES, CONFIG, jnp.float32(0.05), (MAIN, INDEXER))
        main = float(np.sqrt(np.sum(g["w"] ** 2) + np.sum(g["v"] ** 2)))
        assert norm == pytest.approx(main, rel=1e-5)
        norms = {"w": main, "v": main, "i": float(np.linalg.norm(g["i"]))}
        clipped.append({name: g[name] * min(1, CONFIG.clip_norm / norms[name]) for name in norms})
    for name in ("w", "v", "i"):
        want = numpy_adam(params[name], [g[name] for g in clipped], 0.05)
        np.testing.assert_allclose(learner.params[name], want, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(learner.params["f"], params["f"])
    assert learner.version == 0, "only the caller knows what counts as an update"


def test_parts_that_are_not_stepped_keep_weights_and_state():
    params = {name: np.ones(3, np.float32) for name in NAMES}
    learner = optimizer.init(params, NAMES, CONFIG, (MAIN, INDEXER))
    after, _ = optimizer.step(learner, params, NAMES, CONFIG, jnp.float32(0.1), (MAIN,))
    assert after.opt_state[INDEXER] is learner.opt_state[INDEXER]
    assert (np.asarray(after.params["i"]) == 1).all() and (np.asarray(after.params["w"]) < 1).all()


def test_labels_of_a_policy_and_of_a_critic_with_frozen_attention():
    config = two_layers(attention_bias=True)
    policy = named_leaves(optimizer.labels(random_params(config)))
    for name, label in policy.items():
        router_bias = name.endswith(".mlp.bias")
        assert label == (INDEXER if ".indexer." in name else FROZEN if router_bias else MAIN), name
    assert sum(label == INDEXER for label in policy.values()) == 5
    critic = named_leaves(optimizer.labels(random_params(config, critic=True), frozen_attention=True))
    trained = {name for name, label in critic.items() if label == MAIN}
    assert not any(".attn." in name for name in trained)
    for wanted in (".embed", ".norm", ".value", ".groups[0][0].attn_norm", ".groups[0][0].mlp.down"):
        assert wanted in trained
    assert {".groups[1][0].mlp.router", ".groups[1][0].mlp.experts.gate_up"} <= trained


def test_no_state_is_held_for_leaves_that_are_not_trained():
    params = random_params(two_layers(), critic=True)
    names = optimizer.labels(params, frozen_attention=True)
    learner = optimizer.init(params, names, CONFIG, (MAIN,))
    moments = named_leaves(learner.opt_state[MAIN][0].mu)
    assert set(moments) == {name for name, label in named_leaves(names).items() if label == MAIN}
    assert set(learner.opt_state) == {MAIN}
    held = sum(leaf.size for leaf in jax.tree.leaves(learner.opt_state))
    assert held == 2 * sum(leaf.size for leaf in moments.values()) + 1


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(critic_updates=0), "critic_updates=0"),
        (dict(clip_low=1.5), "must hold 1"),
        (dict(clip_high=0.0), "must hold 1"),
    ],
)
def test_learning_settings_that_cannot_work_are_told(change, told):
    (problem,) = LearnConfig(**change).check()
    assert told in problem
    assert LearnConfig().check() == []
