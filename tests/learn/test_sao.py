"""The double-sided window: which tokens it keeps, what gradient they have, and what it becomes on policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn import masked, sao

WINDOWS = {"math": (0.3, 5.0), "code": (0.8, 3.0)}


def objective(logp, behaviour, advantage, low, high):
    return jnp.sum(sao.weights(logp, behaviour, advantage, low, high) * logp)


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_outside_the_window_the_gradient_is_zero_for_both_signs_and_inside_it_is_ratio_times_advantage(name, sign):
    low, high = WINDOWS[name]
    ratio = np.array(
        [0.01, 0.5, 1 - low - 1e-3, 1 - low + 1e-3, 0.95, 1.0, 2.5, 1 + high - 1e-2, 1 + high + 1e-2, 50.0]
    )
    behaviour = np.float32(-2.0) * np.ones(10, np.float32)
    logp = jnp.asarray(behaviour + np.log(ratio), jnp.float32)
    advantage = jnp.full(10, sign * 0.7)
    gradient = jax.grad(objective)(logp, behaviour, advantage, low, high)
    inside = (ratio > 1 - low) & (ratio < 1 + high)
    assert 0 < inside.sum() < 10
    np.testing.assert_allclose(gradient, np.where(inside, ratio * sign * 0.7, 0), rtol=1e-5)


def test_the_window_is_open_at_both_ends():
    r = jnp.array([0.5, np.nextafter(np.float32(0.5), np.float32(1)), 3.0, np.nextafter(np.float32(3), np.float32(0))])
    assert sao.in_window(r, 0.5, 2.0).tolist() == [False, True, False, True]


def test_on_policy_it_is_reinforce_with_a_baseline():
    rng = np.random.default_rng(0)
    logits, advantage = jnp.asarray(rng.standard_normal((12, 5))), jnp.asarray(rng.standard_normal(12))
    token = jnp.asarray(rng.integers(0, 5, 12))
    logp = lambda logits: jax.nn.log_softmax(logits)[jnp.arange(12), token]
    behaviour = logp(logits)
    got = jax.grad(lambda x: objective(logp(x), behaviour, advantage, 0.3, 5.0))(logits)
    want = jax.grad(lambda x: jnp.sum(advantage * logp(x)))(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # ∇ Σ A log π in closed form: A (1[token] - π)
    closed = advantage[:, None] * (jax.nn.one_hot(token, 5) - jax.nn.softmax(logits))
    np.testing.assert_allclose(got, closed, atol=1e-6)


def test_no_window_keeps_every_token():
    behaviour = jnp.zeros(5)
    logp = jnp.log(jnp.array([1e-4, 0.5, 1.0, 20.0, 1e4]))
    weights = sao.weights(logp, behaviour, jnp.ones(5), jnp.inf, jnp.inf)
    np.testing.assert_allclose(weights, jnp.exp(logp), rtol=1e-5)


def test_absurd_log_probs_make_neither_nan_nor_infinity():
    behaviour = jnp.array([0.0, -1e9, jnp.nan, -jnp.inf, -1.0])
    logp = jnp.array([-1e9, 0.0, -1.0, -1.0, -1.0])
    value, gradient = jax.value_and_grad(objective)(logp, behaviour, jnp.ones(5), 0.3, 5.0)
    assert np.isfinite(value) and gradient.tolist() == [0, 0, 0, 0, 1]
    assert np.isfinite(jax.grad(objective)(logp, behaviour, jnp.ones(5), jnp.inf, jnp.inf)).all()


def test_masked_reductions_select():
    x, mask = (
        jnp.array([[1.0, jnp.nan, 4.0], [jnp.inf, 7.0, jnp.nan]]),
        jnp.array([[True, False, True], [False, True, False]]),
    )
    assert masked.total(x, mask) == 12 and masked.mean(x, mask) == 4 and masked.variance(x, mask) == 6
    assert masked.maximum(x, mask) == 7 and masked.maximum(-x, mask) == -1
    nothing = jnp.zeros_like(mask)
    assert [float(f(x, nothing)) for f in (masked.total, masked.mean, masked.variance, masked.maximum)] == [0] * 4
    gradient = jax.grad(lambda x: masked.mean(3 * x, mask) + masked.variance(x, mask))(x)
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[~np.asarray(mask)].any()
