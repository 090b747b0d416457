"""The policy's update: one optimiser step on the token mean of a batch, for SFT and for RL."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm_jax.learn import masked, optimizer, sao
from glm_jax.learn.accumulate import Setup, accumulate, micro
from glm_jax.learn.batch import LearnBatch
from glm_jax.learn.forward import token_logp
from glm_jax.learn.optimizer import INDEXER, MAIN, Learner

METRICS = (
    "policy/loss",  # SFT: cross-entropy; RL: -mean of w·logπ, whose value means little and whose gradient is SAO's
    "policy/grad_norm",
    "policy/entropy",
    "policy/indexer_kl",
    "policy/advantage_mean",
    "policy/dis_masked_share",  # tokens outside the window
    "rollout/logprob_gap_mean",  # |logπ of the trainer - logπ of the sampler|
    "rollout/logprob_gap_max",
    "rollout/k3",  # mean of r - 1 - log r, an estimate of KL(sampler ‖ trainer)
)


def update(
    policy: Learner, batch: LearnBatch, advantage: Float[Array, "M R C"] | None, lr: Float[Array, ""], setup: Setup
) -> tuple[Learner, dict[str, Float[Array, ""]]]:
    """With `advantage`, SAO's step; without, cross-entropy on the trainable tokens, and the indexer's own loss."""
    config = setup.learn
    supervised = advantage is None
    train_indexer = supervised and config.indexer_kl > 0

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
        weight, seen = 1.0, {}
        if not supervised:
            a = advantage[i]
            low, high = (config.clip_low, config.clip_high) if config.window else (jnp.inf, jnp.inf)
            weight = sao.weights(logp, b.behaviour_logp, a, low, high)
            seen = _compare(jax.lax.stop_gradient(logp), b, a, low, high)
        objective = masked.total(weight * logp, b.trainable)
        seen |= {
            "count": jnp.sum(b.trainable, dtype=jnp.float32),
            "policy/loss": -objective,
            "policy/entropy": masked.total(entropy, b.trainable),
            "policy/indexer_kl": kl,
        }
        return config.indexer_kl * kl - objective, jax.lax.stop_gradient(seen)

    def of_micro_batch(i):
        grads, seen = jax.grad(loss, has_aux=True)(policy.params, i)
        top = {"rollout/logprob_gap_max": seen.pop("rollout/logprob_gap_max")} if not supervised else {}
        return grads, seen, {k: jnp.zeros((batch.tokens.shape[0],), v.dtype).at[i].set(v) for k, v in top.items()}

    grads, sums, tops = accumulate(batch.used, of_micro_batch)
    count = jnp.maximum(sums.pop("count"), 1.0)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
    metrics = {k: v / count for k, v in sums.items()} | {k: jnp.max(v) for k, v in tops.items()}
    parts = (MAIN, INDEXER) if train_indexer else (MAIN,)
    names = optimizer.labels(policy.params)
    policy, metrics["policy/grad_norm"] = optimizer.step(policy, grads, names, config.policy, lr, parts)
    metrics = {k: jnp.asarray(metrics.get(k, 0.0), jnp.float32) for k in METRICS}
    return policy.replace(version=policy.version + 1), metrics


def _compare(logp, b: LearnBatch, advantage, low: float, high: float) -> dict[str, Float[Array, ""]]:
    """Sums over the trainable tokens that compare trainer and sampler."""
    gap = jnp.abs(logp - b.behaviour_logp)
    r = sao.ratio(logp, b.behaviour_logp)
    return {
        "policy/advantage_mean": masked.total(advantage, b.trainable),
        "policy/dis_masked_share": masked.total(1.0 - sao.in_window(r, low, high), b.trainable),
        "rollout/logprob_gap_mean": masked.total(gap, b.trainable),
        "rollout/logprob_gap_max": masked.maximum(gap, b.trainable),
        "rollout/k3": masked.total(r - 1.0 - (logp - b.behaviour_logp), b.trainable),
    }
