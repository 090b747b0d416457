"""Advantages over trainable tokens: generalised advantage estimation that skips what the policy did not sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.learn import masked


def rollout_sum(x: Float[Array, "R C"], rollout: Int[Array, "R C"]) -> Float[Array, "R C"]:
    """Σ of x over each row's rollout, written at every one of its columns."""
    columns = rollout.shape[1]
    sums = jax.vmap(lambda x, r: jax.ops.segment_sum(x, r, num_segments=columns + 1))(x, rollout)
    return jnp.take_along_axis(sums, rollout, axis=1)


def policy_lambda(trainable: Bool[Array, "R C"], rollout: Int[Array, "R C"], alpha: float) -> Float[Array, "R C"]:
    """λ = 1 - 1 / (α l), l the trainable tokens of the rollout (SAO §3.2: α = 1.5); 0 where α l ≤ 1."""
    length = rollout_sum(trainable.astype(jnp.float32), rollout)
    return jnp.maximum(1.0 - 1.0 / jnp.maximum(alpha * length, 1.0), 0.0)


def gae(
    reward: Float[Array, "R C"],
    value: Float[Array, "R C"],
    trainable: Bool[Array, "R C"],
    rollout: Int[Array, "R C"],
    lam: Float[Array, "R C"] | float,
    gamma: float = 1.0,
) -> Float[Array, "R C"]:
    """Skip-observation GAE (SAO §3.2, Eq. 4-5), zero where not trainable.

    Over each rollout's trainable tokens t_1 < t_2 < … alone: δ_i = r_i + γ V_{i+1} - V_i and A_i = δ_i + γ λ A_{i+1},
    where V of the state after the last one is 0. `value` at column t is that of the state before token t.
    """
    lam = jnp.broadcast_to(lam, value.shape)

    def step(carry, column):
        next_value, next_advantage, owner = carry
        r, v, on, who, decay = column
        follows = owner == who
        next_v, next_a = jnp.where(follows, next_value, 0.0), jnp.where(follows, next_advantage, 0.0)
        a = r + gamma * next_v - v + gamma * decay * next_a
        carry = (jnp.where(on, v, next_value), jnp.where(on, a, next_advantage), jnp.where(on, who, owner))
        return carry, jnp.where(on, a, 0.0)

    rows = value.shape[0]
    start = (jnp.zeros(rows, value.dtype), jnp.zeros(rows, value.dtype), jnp.full(rows, -1, rollout.dtype))
    columns = jax.tree.map(
        lambda a: a.T, (reward.astype(value.dtype), value, trainable, rollout, lam.astype(value.dtype))
    )
    return jax.lax.scan(step, start, columns, reverse=True)[1].T


def explained_variance(returns, value, mask):
    """1 - Var(R - V) / Var(R) over the mask: 1 is a perfect critic, 0 no better than the mean return."""
    return 1.0 - masked.variance(returns - value, mask) / jnp.maximum(masked.variance(returns, mask), 1e-8)
