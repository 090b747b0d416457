"""Drawing a token: temperature and top-p, a random number per (seed, rollout, position), and the log-prob it had."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.heads import log_probs

# What a random number is for: each purpose has its own stream.
SAMPLE = 0


def uniform(
    seed: Int[Array, ""], rollout: Int[Array, "B"], position: Int[Array, "B"], purpose: int
) -> Float[Array, "B"]:
    """One number in [0, 1) per row, a function of (seed, rollout, position, purpose) and of nothing else.

    Neither slot, tick, round nor mesh enters, so a rollout samples the same tokens wherever and whenever it runs.
    """
    root = jax.random.fold_in(jax.random.key(seed), purpose)
    draw = lambda r, t: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(root, r), t))
    return jax.vmap(draw)(rollout, position)


def sample(
    logits: Float[Array, "B V"], temperature: Float[Array, "B"], top_p: Float[Array, "B"], number: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """A token per row by inverting the cumulative distribution at `number`, and its log-prob under that distribution.

    Temperature 0 takes the most probable token (the lowest id among equals), which then has log-prob 0.
    """
    column = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # Two plain reductions where argmax is one that a CPU does not vectorise; all NaN gives the last id.
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    best = jnp.min(jnp.where(is_best, column, column[-1]), axis=-1)

    def draw():
        _, every = log_probs(logits, temperature, top_p, best)
        prob = jnp.exp(every)
        total = jnp.cumsum(prob, axis=-1)
        reached = jnp.sum(total <= number[:, None] * total[:, -1:], axis=-1)
        last = jnp.max(jnp.where(prob > 0, column, 0), axis=-1)  # rounding may reach beyond it
        token = jnp.where(temperature > 0, jnp.minimum(reached, last), best).astype(jnp.int32)
        logp = jnp.take_along_axis(every, token[:, None], axis=-1)[:, 0]
        return token, jnp.where(temperature > 0, logp, 0.0)

    return jax.lax.cond(jnp.any(temperature > 0), draw, lambda: (best, jnp.zeros_like(best, logits.dtype)))
