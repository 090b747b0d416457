"""One learning step: values, advantages, K critic updates and one policy update on a batch, as one function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.learn import critic_step, draft_step, policy_step
from glm_jax.learn.accumulate import Setup, zeros
from glm_jax.learn.advantage import rollout_sum
from glm_jax.learn.batch import DRAFT, RL, SFT, VALUE, LearnBatch
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

    DRAFT: the draft layer alone; with `draft_depth` it also learns in SFT, by cross-entropy.

    `mode` and the learning rates are traced, so one compiled program serves every stage. Values and advantages are
    computed once, before the critic moves. A figure that a mode does not make is 0.
    """
    advantage, judged = _rollout_reward(batch).astype(wide(setup.model.dtype)), {}
    if critic is not None:
        critic, advantage, judged = jax.lax.cond(
            (mode == VALUE) | (mode == RL),
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

    drafting = {}
    if setup.learn.draft_depth:

        def with_loss(kind):
            return lambda policy: draft_step.update(policy, batch, policy_lr, setup, kind)

        def leave(policy):
            return policy, zeros(draft_step.METRICS)

        # Before the backbone moves.
        branches = [leave, with_loss("ce"), with_loss(setup.learn.draft_loss)]
        policy, drafting = jax.lax.switch(_index(mode, SFT, DRAFT), branches, policy)
    policy, learned = jax.lax.switch(_index(mode, SFT, RL), [skip, sft, rl], policy)
    return policy, critic, {**judged, **drafting, **learned}


def _index(mode: Int[Array, ""], *modes: int) -> Int[Array, ""]:
    """1 + the place of `mode` among `modes`; 0 where it is none of them."""
    return sum(jnp.where(mode == each, i, 0) for i, each in enumerate(modes, 1))


def metric_names(critic: bool, drafting: bool = False) -> tuple[str, ...]:
    """What `learn` measures."""
    names = policy_step.METRICS + (draft_step.METRICS if drafting else ())
    return names + (critic_step.METRICS if critic else ())


def _rollout_reward(batch: LearnBatch) -> Float[Array, "M R C"]:
    """Each rollout's reward at every trainable token: the advantage, where the host has taken a baseline off it."""
    reward = jnp.where(batch.trainable, batch.reward, 0.0)
    return jnp.where(batch.trainable, jax.vmap(rollout_sum)(reward, batch.rollout), 0.0)
