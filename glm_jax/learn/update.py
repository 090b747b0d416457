"""One learning step: values, advantages, K critic updates and one policy update on a batch, as one function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.learn import critic_step, policy_step
from glm_jax.learn.accumulate import Setup, zeros
from glm_jax.learn.advantage import rollout_sum
from glm_jax.learn.batch import RL, SFT, LearnBatch
from glm_jax.learn.optimizer import Learner
from glm_jax.model.norms import wide

Metrics = dict[str, Float[Array, ""]]


def learn(
    policy: Learner,
    critic: Learner | None,
    batch: LearnBatch,
    mode: Int[Array, ""],
    policy_lr: Float[Array, ""],
    critic_lr: Float[Array, ""],
    setup: Setup,
) -> tuple[Learner, Learner | None, Metrics]:
    """SFT: cross-entropy on trainable tokens. VALUE: critic updates alone. RL: critic updates, then one of the policy.

    `mode` and the learning rates are traced, so one compiled program serves every stage. Values and advantages are
    computed once, before the critic moves. A figure that a mode does not make is 0.
    """
    advantage, judged = _rollout_reward(batch).astype(wide(setup.model.dtype)), {}
    if critic is not None:
        critic, advantage, judged = jax.lax.cond(
            mode > SFT,
            lambda critic: critic_step.update(critic, batch, critic_lr, setup),
            lambda critic: (critic, advantage, zeros(critic_step.METRICS)),
            critic,
        )

    def sft(policy):
        return policy_step.update(policy, batch, None, policy_lr, setup)

    def rl(policy):
        return policy_step.update(policy, batch, advantage, policy_lr, setup)

    def skip(policy):
        return policy, zeros(policy_step.METRICS)

    branch = jnp.where(mode == SFT, 1, jnp.where(mode == RL, 2, 0))
    policy, learned = jax.lax.switch(branch, [skip, sft, rl], policy)
    return policy, critic, {**judged, **learned}


def metric_names(critic: bool) -> tuple[str, ...]:
    """What `learn` measures."""
    return policy_step.METRICS + (critic_step.METRICS if critic else ())


def _rollout_reward(batch: LearnBatch) -> Float[Array, "M R C"]:
    """Each rollout's reward at every trainable token: the advantage, where the host has taken a baseline off it."""
    reward = jnp.where(batch.trainable, batch.reward, 0.0)
    return jnp.where(batch.trainable, jax.vmap(rollout_sum)(reward, batch.rollout), 0.0)
