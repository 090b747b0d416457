"""The critic's updates: K optimiser steps towards the return, on values and advantages computed before the first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm_jax.learn import masked, optimizer
from glm_jax.learn.accumulate import Setup, accumulate, micro
from glm_jax.learn.advantage import explained_variance, gae, policy_lambda
from glm_jax.learn.batch import LearnBatch
from glm_jax.learn.forward import state_values
from glm_jax.learn.optimizer import MAIN, Learner
from glm_jax.model.norms import wide

METRICS = ("critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/value_mean")


def update(
    critic: Learner, batch: LearnBatch, lr: Float[Array, ""], setup: Setup
) -> tuple[Learner, Float[Array, "M R C"], dict[str, Float[Array, ""]]]:
    """Returns the critic after K steps, the policy's advantages, and figures (of the values before the first step)."""
    config = setup.learn
    names = optimizer.labels(critic.params, config.freeze_critic_attention)
    value = values(critic.params, batch, setup)
    estimate = jax.vmap(gae, in_axes=(0, 0, 0, 0, 0, None))
    lam = jax.vmap(policy_lambda, in_axes=(0, 0, None))(batch.trainable, batch.rollout, config.lambda_alpha)
    advantage = estimate(batch.reward, value, batch.trainable, batch.rollout, lam, config.gamma)
    lam = jnp.full_like(lam, config.lambda_critic)
    returns = value + estimate(batch.reward, value, batch.trainable, batch.rollout, lam, config.gamma)

    def loss(params, i):
        b = micro(batch, i)
        error = state_values(params, setup.model, b.tokens, b.document_ids) - returns[i]
        return 0.5 * masked.total(jnp.square(error), b.trainable)

    count = jnp.maximum(jnp.sum(batch.trainable), 1)

    def one_step(_, carry):
        critic, _, _ = carry
        none = (jnp.zeros((), value.dtype), jax.tree.map(jnp.zeros_like, critic.params))
        total, grads = accumulate(batch.used, lambda i: jax.value_and_grad(loss)(critic.params, i), none)
        grads = jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
        critic, norm = optimizer.step(critic, grads, names, config.critic, lr, (MAIN,))
        return critic.replace(version=critic.version + 1), total / count, norm

    zero = jnp.zeros((), value.dtype)
    critic, last_loss, norm = jax.lax.fori_loop(0, config.critic_updates, one_step, (critic, zero, zero))
    metrics = {
        "critic/loss": last_loss,
        "critic/grad_norm": norm,
        "critic/explained_variance": explained_variance(returns, value, batch.trainable),
        "critic/value_mean": masked.mean(value, batch.trainable),
    }
    return critic, advantage, {k: v.astype(jnp.float32) for k, v in metrics.items()}


def values(params, batch: LearnBatch, setup: Setup) -> Float[Array, "M R C"]:
    """V before every token of the batch; 0 in unused micro-batches."""

    def of(i):
        b = micro(batch, i)
        v = state_values(params, setup.model, b.tokens, b.document_ids)
        return none.at[i].set(v)

    none = jnp.zeros(batch.tokens.shape, wide(setup.model.dtype))
    return accumulate(batch.used, of, none)
