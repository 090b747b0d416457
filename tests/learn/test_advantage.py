"""Advantages against a plain numpy reference that gathers the sampled tokens, and the identities they obey."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn.advantage import explained_variance, gae, policy_lambda, rollout_sum

jitted = jax.jit(gae)


def reference(reward, value, trainable, rollout, lam, gamma):
    """Per row and rollout: A_i = Σ_k (γλ)^k δ_{i+k} over the trainable tokens alone, in float64."""
    out = np.zeros(value.shape)
    for row in range(value.shape[0]):
        for number in set(rollout[row][trainable[row]]):
            at = np.flatnonzero(trainable[row] & (rollout[row] == number))
            v = np.append(value[row, at].astype(np.float64), 0.0)
            delta = reward[row, at] + gamma * v[1:] - v[:-1]
            for i, column in enumerate(at):
                decay = (gamma * np.broadcast_to(lam, value.shape)[row, column]) ** np.arange(len(at) - i)
                out[row, column] = decay @ delta[i:]
    return out


def rows(seed: int, count: int = 6, columns: int = 30):
    """Rows of several rollouts, each with prompt, observations and sampled tokens, then padding."""
    rng = np.random.default_rng(seed)
    rollout = np.sort(rng.integers(0, 5, (count, columns)), axis=1)[:, ::-1]
    trainable = (rng.random((count, columns)) < 0.5) & (rollout > 0)
    reward = np.where(trainable, rng.standard_normal((count, columns)), 0)
    value = rng.standard_normal((count, columns))
    return reward.astype(np.float32), value.astype(np.float32), trainable, rollout.astype(np.int32)


@pytest.mark.parametrize("lam, gamma", [(0.95, 1.0), (0.7, 0.9), (1.0, 1.0), (0.0, 1.0)])
def test_gae_skips_what_was_not_sampled_and_keeps_rollouts_apart(lam, gamma):
    for seed in range(3):
        made = rows(seed)
        np.testing.assert_allclose(jitted(*made, lam, gamma), reference(*made, lam, gamma), atol=1e-5)


def test_each_rollout_decays_at_its_own_lambda():
    reward, value, trainable, rollout = rows(7)
    lam = np.asarray(policy_lambda(trainable, rollout, 1.5))
    np.testing.assert_allclose(
        jitted(reward, value, trainable, rollout, lam),
        reference(reward, value, trainable, rollout, lam, 1.0),
        atol=1e-5,
    )


def test_inserting_and_editing_observations_changes_no_advantage():
    rng = np.random.default_rng(0)
    sampled = 9
    value, reward = rng.standard_normal(sampled).astype(np.float32), np.zeros(sampled, np.float32)
    reward[-1] = 1.0
    ones = np.ones((1, sampled), np.int32)
    plain = np.asarray(jitted(reward[None], value[None], ones > 0, ones, 0.9))[0]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        at = np.sort(rng.choice(25, sampled, replace=False))
        wide = {k: rng.standard_normal((1, 25)).astype(np.float32) for k in ("reward", "value")}
        wide["reward"][0, at], wide["value"][0, at] = reward, value
        trainable = np.isin(np.arange(25), at)[None]
        got = np.asarray(jitted(wide["reward"], wide["value"], trainable, np.ones((1, 25), np.int32), 0.9))
        np.testing.assert_allclose(got[0, at], plain, atol=1e-6)
        assert not got[~trainable].any()


def test_with_lambda_and_gamma_one_the_advantage_is_return_minus_value():
    reward, value, trainable, rollout = rows(3)
    reward = np.zeros_like(reward)
    for row in range(len(value)):
        for number in set(rollout[row][trainable[row]]):
            reward[row, np.flatnonzero(trainable[row] & (rollout[row] == number))[-1]] = number
    got = jitted(reward, value, trainable, rollout, 1.0)
    np.testing.assert_allclose(got, np.where(trainable, rollout - value, 0), atol=1e-5)


def test_nan_where_nothing_was_sampled_reaches_no_advantage():
    reward, value, trainable, rollout = rows(4)
    want = jitted(reward, value, trainable, rollout, 0.9)
    spoilt = [np.where(trainable, a, np.nan).astype(np.float32) for a in (reward, value)]
    np.testing.assert_array_equal(jitted(*spoilt, trainable, rollout, 0.9), want)


def test_lambda_counts_the_sampled_tokens_of_a_rollout():
    rollout = np.array([[1] * 6 + [2] * 3 + [0] * 3], np.int32)
    trainable = np.array([[0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0]], bool)
    lam = np.asarray(policy_lambda(trainable, rollout, 1.5))[0]
    np.testing.assert_allclose(lam[:6], 1 - 1 / (1.5 * 4), atol=1e-6)
    np.testing.assert_allclose(lam[6:9], 1 - 1 / 1.5, atol=1e-6)
    assert (np.asarray(policy_lambda(trainable, rollout, 0.05)) == 0).all(), "never negative"


def test_credit_over_a_whole_rollout_decays_to_e_to_the_minus_two_thirds():
    length = 1000
    ones = np.ones((1, length), np.int32)
    lam = float(policy_lambda(ones > 0, ones, 1.5)[0, 0])
    assert lam**length == pytest.approx(0.5133, abs=1e-3)
    assert lam**length == pytest.approx(np.exp(-2 / 3), abs=1e-3)


def test_a_rollouts_sum_stands_at_each_of_its_columns():
    x = np.arange(8, dtype=np.float32)[None]
    rollout = np.array([[3, 3, 1, 1, 1, 0, 2, 0]], np.int32)
    np.testing.assert_array_equal(rollout_sum(x, rollout), [[1, 1, 9, 9, 9, 12, 6, 12]])


def test_explained_variance_in_closed_form():
    rng = np.random.default_rng(0)
    returns, noise = rng.standard_normal((2, 4, 50)).astype(np.float32)
    mask = rng.random((4, 50)) < 0.7
    want = 1 - noise[mask].var() / returns[mask].var()
    spoilt = np.where(mask, returns - noise, np.nan)
    assert explained_variance(returns, spoilt, mask) == pytest.approx(want, abs=1e-5)
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0)
    assert explained_variance(returns, jnp.full_like(returns, 5.0), mask) == pytest.approx(0.0, abs=1e-5)
