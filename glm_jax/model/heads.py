"""The two ends of a model: embeddings in; logits, the distribution sampled from, and the critic's values out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.norms import linear, wide


def embed(params, tokens: Int[Array, "B S"], valid: Bool[Array, "B S"], dtype: str) -> Float[Array, "B S D"]:
    """Zero where a token is not valid, so that whatever stands there (NaN included) reaches nobody."""
    return jnp.where(valid[..., None], params.embed[tokens].astype(dtype), 0)


def unembed(params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Logits in the model's dtype; through the embedding where it is tied."""
    return hidden @ params.embed.T.astype(hidden.dtype) if params.head is None else linear(hidden, params.head)


def values(params, hidden: Float[Array, "... D"]) -> Float[Array, "..."]:
    """The critic's value of each state, in float32."""
    weight = params.value.astype(wide(hidden.dtype))
    return hidden.astype(weight.dtype) @ weight[:-1] + weight[-1]


def nucleus(prob: Float[Array, "*B V"], top_p: Float[Array, "*B"]) -> Bool[Array, "*B V"]:
    """The smallest set of most probable tokens whose probabilities reach top_p; equal probabilities go in together.

    The threshold is found by bisection over the bits of a positive float32 (31 sums), so nothing is sorted and the set
    does not depend on the order of equals.
    """
    prob = prob.astype(jnp.float32)
    goal = jnp.minimum(top_p, jnp.sum(prob, axis=-1))[..., None]

    def halve(_, bounds):
        low, high = bounds  # the sum over prob >= low reaches the goal; over prob >= high it does not
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        reaches = jnp.sum(jnp.where(prob >= threshold, prob, 0.0), axis=-1, keepdims=True) >= goal
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, middle)

    low = jnp.zeros(goal.shape, jnp.int32)
    high = jnp.full(goal.shape, 0x3F800001, jnp.int32)  # the float after 1.0
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return prob >= jax.lax.bitcast_convert_type(low, jnp.float32)


def log_probs(
    logits: Float[Array, "*B V"], temperature: Float[Array, "*B"], top_p: Float[Array, "*B"], token: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B V"]]:
    """Log-prob of `token`, and of every token, under softmax(logits / temperature) cut to its nucleus.

    The one definition of the sampled distribution, for sampler and trainer. `token` always counts as inside the
    nucleus: a trainer's rounding must not turn a token that was sampled into an impossible one.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)[..., None]
    every = jax.nn.log_softmax(scaled, axis=-1)

    def cut(every):
        kept = nucleus(jnp.exp(jax.lax.stop_gradient(every)), top_p)
        kept = kept | (jnp.arange(logits.shape[-1]) == token[..., None])
        kept = kept | (top_p >= 1.0)[..., None]
        return jax.nn.log_softmax(jnp.where(kept, every, -jnp.inf), axis=-1)

    every = jax.lax.cond(jnp.any(top_p < 1.0), cut, lambda every: every, every)
    return jnp.take_along_axis(every, token[..., None], axis=-1)[..., 0], every
