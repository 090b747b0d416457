"""Drawing a token: temperature and top-p, a random number per (seed, rollout, position), and the log-prob it had."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.heads import log_probs

# What a random number is for: each purpose has its own stream.
SAMPLE, DRAFT, ACCEPT = 0, 1, 2


def uniform(
    seed: Int[Array, ""], rollout: Int[Array, "B"], position: Int[Array, "B"], purpose: int
) -> Float[Array, "B"]:
    """One number in [0, 1) per row, a function of (seed, rollout, position, purpose) and of nothing else.

    Neither slot, tick, round nor mesh enters, so a rollout samples the same tokens wherever and whenever it runs.
    """
    root = jax.random.fold_in(jax.random.key(seed), purpose)
    draw = lambda r, t: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(root, r), t))
    return jax.vmap(draw)(rollout, position)


def best_of(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """The most probable token, the lowest id among equals; the last id where all logits are NaN."""
    # Two plain reductions where argmax is one that a CPU does not vectorise.
    column = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best, column, column[-1]), axis=-1)


def distribution(
    logits: Float[Array, "*B V"], temperature: Float[Array, "*B"], top_p: Float[Array, "*B"]
) -> Float[Array, "*B V"]:
    """Log-probs of every token under the distribution that is sampled from; at temperature 0 all on the best one."""
    best = best_of(logits)
    _, every = log_probs(logits, temperature, top_p, best)
    greedy = jnp.where(jnp.arange(logits.shape[-1]) == best[..., None], 0.0, -jnp.inf).astype(every.dtype)
    return jnp.where(temperature[..., None] > 0, every, greedy)


def invert(prob: Float[Array, "*B V"], number: Float[Array, "*B"]) -> Int[Array, "*B"]:
    """The token at which the cumulative sum of `prob` (of any total above 0) passes the share `number` of its total."""
    total = jnp.cumsum(prob, axis=-1)
    reached = jnp.sum(total <= number[..., None] * total[..., -1:], axis=-1, dtype=jnp.int32)
    last = jnp.max(jnp.where(prob > 0, jnp.arange(prob.shape[-1], dtype=jnp.int32), 0), axis=-1)
    return jnp.minimum(reached, last)  # rounding may reach beyond the last token


def sample(
    logits: Float[Array, "B V"], temperature: Float[Array, "B"], top_p: Float[Array, "B"], number: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """A token per row by inverting the cumulative distribution at `number`, and its log-prob under that distribution.

    Temperature 0 takes the most probable token (the lowest id among equals), which then has log-prob 0.
    """

    def draw():
        every = distribution(logits, temperature, top_p)
        token = invert(jnp.exp(every), number)
        return token, jnp.take_along_axis(every, token[:, None], axis=-1)[:, 0]

    def take_best():
        best = best_of(logits)
        return best, jnp.zeros_like(best, logits.dtype)

    return jax.lax.cond(jnp.any(temperature > 0), draw, take_best)
