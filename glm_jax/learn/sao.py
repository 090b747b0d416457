"""The policy's loss: SAO's double-sided window on single rollouts (arXiv 2607.07508 §3.1), and what it reduces to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_RATIO_LIMIT = 20.0  # of |log r|, before exp: a branch that is masked out must not overflow into NaN gradients


def ratio(logp: Float[Array, "R C"], behaviour_logp: Float[Array, "R C"]) -> Float[Array, "R C"]:
    """r = exp(logπ_θ - logπ_behaviour)."""
    return jnp.exp(jnp.clip(logp - behaviour_logp, -_RATIO_LIMIT, _RATIO_LIMIT))


def in_window(r: Float[Array, "R C"], low: float, high: float):
    """Double-sided clipping keeps a token iff 1 - low < r < 1 + high, whatever the sign of its advantage."""
    return (r > 1.0 - low) & (r < 1.0 + high)


def weights(
    logp: Float[Array, "R C"],
    behaviour_logp: Float[Array, "R C"],
    advantage: Float[Array, "R C"],
    low: float,
    high: float,
) -> Float[Array, "R C"]:
    """w = stop_gradient(f(r) · A): the policy maximises the token mean of w · logπ, whose gradient is r·A·∇logπ."""
    r = ratio(logp, behaviour_logp)
    return jax.lax.stop_gradient(jnp.where(in_window(r, low, high), r * advantage, 0.0))
