"""What the losses read of a model: log-probs of a row's tokens, and values of the states before them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model import context
from glm_jax.model.chunks import chunked
from glm_jax.model.config import ModelConfig
from glm_jax.model.heads import log_probs, unembed, values
from glm_jax.model.norms import wide
from glm_jax.model.transformer import hidden_states
from glm_jax.model.weights import Transformer
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows

LOGITS_AT_ONCE = 1 << 24  # elements of [R, C, V] that exist at once on a device


def _before(x: Float[Array, "R C *D"]) -> Float[Array, "R C *D"]:
    """Moves each column one to the right: what the model says at column t - 1 is about the token at column t."""
    return jnp.pad(x[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))


def token_logp(
    params: Transformer,
    config: ModelConfig,
    tokens: Int[Array, "R C"],
    document_ids: Int[Array, "R C"],
    temperature: float,
    top_p: float,
    train_indexer: bool = False,
) -> tuple[Float[Array, "R C"], Float[Array, "R C"], Float[Array, ""]]:
    """Log-prob of each token under the distribution that the sampler draws from, its entropy, and the indexer's KL sum.

    A document's first token has no state before it: its log-prob means nothing and is never trainable. Where several
    devices share rows, each unembeds the states of its own columns, and log-probs and entropies are gathered.
    """

    def run(params, tokens, document_ids):
        hidden, carried, _ = hidden_states(params, config, tokens, document_ids, train_indexer=train_indexer)

        def of_columns(args):
            hidden, following = args
            logits = unembed(params, hidden).astype(wide(hidden.dtype))
            full = lambda value: jnp.full(following.shape, value, logits.dtype)
            logp, every = log_probs(logits, full(temperature or 1.0), full(top_p), following)
            every = jax.lax.stop_gradient(every)
            return logp, -jnp.sum(jnp.where(every > -jnp.inf, jnp.exp(every) * every, 0.0), axis=-1)

        at_once = max(1, LOGITS_AT_ONCE // (tokens.shape[0] * config.vocab_size))
        following = context.own(jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))))
        said = chunked(of_columns, (hidden, following), at_once)
        logp, entropy = (_before(context.whole(x)) for x in said)
        return logp, entropy, jnp.reshape(context.total(carried.kl), 1)

    on_rows = each_on_its_rows(run, params, config, layout.LEARN, (0, 0), (0, 0, 0))
    logp, entropy, kl = on_rows(tokens, document_ids)
    return logp, entropy, jnp.sum(kl)


def state_values(
    params: Transformer, config: ModelConfig, tokens: Int[Array, "R C"], document_ids: Int[Array, "R C"]
) -> Float[Array, "R C"]:
    """V of the state before each token."""

    def run(params, tokens, document_ids):
        hidden, _, _ = hidden_states(params, config, tokens, document_ids)
        return _before(context.whole(values(params, hidden)))

    return each_on_its_rows(run, params, config, layout.LEARN, (0, 0), 0)(tokens, document_ids)
