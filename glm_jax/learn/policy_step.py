"""The policy's update: one optimiser step on the token mean of a batch, for SFT and for RL."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm_jax.learn import masked, optimizer, sao
from glm_jax.learn.accumulate import Setup, accumulate, micro, zeros
from glm_jax.learn.batch import LearnBatch
from glm_jax.learn.forward import token_logp
from glm_jax.learn.optimizer import INDEXER, MAIN, Learner

METRICS = (
    "policy/loss",  # SFT: cross-entropy; RL: -mean of w·logπ, whose value means little and whose gradient is SAO's
    "policy/grad_norm",
    "policy/entropy",
    "policy/indexer_kl",  # mean over all tokens
    "policy/advantage_mean",
    "policy/dis_masked_share",  # tokens outside the window
    "rollout/logprob_gap_mean",  # |logπ of the trainer - logπ of the sampler|
    "rollout/logprob_gap_max",
    "rollout/k3",  # mean of r - 1 - log r, an estimate of KL(sampler ‖ trainer)
)
_COUNT, _GAP_MAX = "count", "rollout/logprob_gap_max"


def update(
    policy: Learner, batch: LearnBatch, advantage: Float[Array, "M R C"] | None, lr: Float[Array, ""], setup: Setup
) -> tuple[Learner, dict[str, Float[Array, ""]]]:
    """With `advantage`, SAO's step; without, cross-entropy on the trainable tokens, and the indexer's own loss."""
    config = setup.learn
    supervised = advantage is None
    train_indexer = supervised and config.indexer_kl > 0
    # The indexer learns from every token, the rest of the model from trainable ones; all is divided by the latter.
    trainable_share = jnp.sum(batch.trainable) / jnp.maximum(jnp.sum(batch.document_ids > 0), 1)

    def loss(params, i):
        b = micro(batch, i)
        logp, entropy, kl = token_logp(
            params,
            setup.model,
            b.tokens,
            b.document_ids,
            temperature=1.0 if supervised else setup.temperature,
            top_p=1.0 if supervised else setup.top_p,
            train_indexer=train_indexer,
        )
        weight, seen = 1.0, zeros((_COUNT, *METRICS))
        if not supervised:
            a = advantage[i]
            low, high = (config.clip_low, config.clip_high) if config.window else (jnp.inf, jnp.inf)
            weight = sao.weights(logp, b.behaviour_logp, a, low, high)
            seen |= _compare(jax.lax.stop_gradient(logp), b, a, low, high)
        objective = masked.total(weight * logp, b.trainable)
        kl = kl * trainable_share.astype(kl.dtype)
        seen |= {
            _COUNT: jnp.sum(b.trainable, dtype=jnp.float32),
            "policy/loss": -objective,
            "policy/entropy": masked.total(entropy, b.trainable),
            "policy/indexer_kl": kl,
        }
        seen = {k: jax.lax.stop_gradient(v).astype(jnp.float32) for k, v in seen.items()}
        return config.indexer_kl * kl - objective, seen

    def of_micro_batch(i):
        grads, seen = jax.grad(loss, has_aux=True)(policy.params, i)
        # A maximum does not add up: each micro-batch writes its own.
        return grads, seen, no_gap.at[i].set(seen[_GAP_MAX])

    no_gap = jnp.zeros(batch.tokens.shape[0], jnp.float32)
    nothing = (jax.tree.map(jnp.zeros_like, policy.params), zeros((_COUNT, *METRICS)), no_gap)
    grads, sums, gap = accumulate(batch.used, of_micro_batch, nothing)
    count = jnp.maximum(sums.pop(_COUNT), 1.0)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
    metrics = {k: v / count for k, v in sums.items()} | {_GAP_MAX: jnp.max(gap)}
    parts = (MAIN, INDEXER) if train_indexer else (MAIN,)
    names = optimizer.labels(policy.params)
    policy, metrics["policy/grad_norm"] = optimizer.step(policy, grads, names, config.policy, lr, parts)
    return policy.replace(version=policy.version + 1), {k: v.astype(jnp.float32) for k, v in metrics.items()}


def _compare(logp, b: LearnBatch, advantage, low: float, high: float) -> dict[str, Float[Array, ""]]:
    """Sums over the trainable tokens that compare trainer and sampler."""
    gap = jnp.abs(logp - b.behaviour_logp)
    r = sao.ratio(logp, b.behaviour_logp)
    return {
        "policy/advantage_mean": masked.total(advantage, b.trainable),
        "policy/dis_masked_share": masked.total(1.0 - sao.in_window(r, low, high), b.trainable),
        "rollout/logprob_gap_mean": masked.total(gap, b.trainable),
        _GAP_MAX: masked.maximum(gap, b.trainable),
        "rollout/k3": masked.total(r - 1.0 - (logp - b.behaviour_logp), b.trainable),
    }
