"""In float64 the sampler's path and the trainer's differ by rounding alone: one algebra, written twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.learn.forward import token_logp
from glm_jax.model import cache as caches
from glm_jax.model.heads import log_probs, unembed
from glm_jax.model.weights import unstack
from tests.model.tiny import as_float64, random_params, random_tokens, three_layers

CONFIG = three_layers(dtype="float64")
ROWS, PREFILL, COLUMNS = 3, 6, 22


def test_prefill_and_decode_give_the_trainers_log_probs_to_the_twelfth_digit():
    tokens = random_tokens(CONFIG, ROWS, COLUMNS)
    with jax.enable_x64(True):
        params = as_float64(random_params(CONFIG))
        full = lambda value: jnp.full(ROWS, value, jnp.float64)

        @jax.jit
        def sampler(params, tokens):
            view = unstack(params, CONFIG)
            state = caches.init(CONFIG, ROWS, COLUMNS)
            start, count = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, PREFILL, jnp.int32)
            _, state = caches.extend(view, CONFIG, state, tokens[:, :PREFILL], start, count)

            def step(state, column):
                at = jnp.full(ROWS, column, jnp.int32)
                token = jax.lax.dynamic_slice_in_dim(tokens, column, 1, axis=1)
                hidden, state = caches.extend(view, CONFIG, state, token, at, jnp.ones_like(at))
                following = jax.lax.dynamic_index_in_dim(tokens, column + 1, axis=1, keepdims=False)
                return state, log_probs(unembed(view, hidden[:, 0]), full(0.8), full(0.9), following)[0]

            return jax.lax.scan(step, state, jnp.arange(PREFILL, COLUMNS - 1))[1].T

        documents = np.ones_like(tokens)
        trainer = jax.jit(lambda p: token_logp(p, CONFIG, tokens, documents, 0.8, 0.9)[0])(params)
        gap = np.abs(np.asarray(sampler(params, tokens)) - np.asarray(trainer)[:, PREFILL + 1 :])
    assert gap.shape == (ROWS, COLUMNS - PREFILL - 1) and CONFIG.index_topk < PREFILL + 1
    assert 0 < gap.max() <= 1e-12
