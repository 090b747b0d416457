"""Rollouts of ragged lengths, packed into learning batches in any way, and one learning step on them in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.learn import optimizer, update
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.batch import LearnBatch, empty_batch
from glm_jax.learn.config import LearnConfig, OptimizerConfig
from glm_jax.learn.optimizer import INDEXER, MAIN, Learner
from tests.model.tiny import as_float64, random_params, two_layers

MODEL = two_layers(dtype="float64")
NO_CLIP = OptimizerConfig(clip_norm=1e9)
# indexer_kl, so that the indexer has something to learn in SFT and nothing in RL.
LEARN = LearnConfig(micro_batches=4, rows=3, length=24, indexer_kl=0.5, policy=NO_CLIP, critic=NO_CLIP)
SETUP = Setup(MODEL, LEARN, temperature=0.8)
LR = 1e-3


@dataclass
class Rollout:
    tokens: np.ndarray
    trainable: np.ndarray  # prompt and observations are not
    behaviour: np.ndarray  # log-prob when it was sampled
    reward: float


def rollouts(seed: int = 0) -> list[Rollout]:
    """Six rollouts of 5 to 19 tokens with prompts and observations; their behaviour is set by `with_behaviour`."""
    rng = np.random.default_rng(seed)
    made = []
    for length in (5, 19, 9, 14, 12, 11):
        trainable = rng.random(length) < 0.7
        trainable[:2], trainable[-1] = False, True
        tokens = rng.integers(1, MODEL.vocab_size, length).astype(np.int32)
        made.append(Rollout(tokens, trainable, -rng.exponential(2.0, length), float(rng.standard_normal())))
    return made


# Which rollouts stand in which row of which micro-batch.
IN_ONE = [[[0, 1], [2, 3], [4, 5]]]
IN_TWO = [[[5, 4], [0]], [[1], [3, 2]]]
IN_FOUR = [[[3]], [[0, 2], [4]], [[1]], [[5]]]


def pack(made: list[Rollout], plan=IN_ONE, junk: float = 0.0) -> LearnBatch:
    """A batch laid out as the plan says. `junk` stands wherever nothing is to be read."""
    batch = empty_batch(LEARN.micro_batches, LEARN.rows, LEARN.length)
    batch.reward[:], batch.behaviour_logp[:] = junk, junk
    for m, rows in enumerate(plan):
        for r, row in enumerate(rows):
            at = 0
            for number, index in enumerate(row, 1):
                one = made[index]
                here = (m, r, slice(at, at + len(one.tokens)))
                batch.tokens[here], batch.document_ids[here], batch.rollout[here] = one.tokens, number, number
                batch.trainable[here] = one.trainable
                batch.behaviour_logp[here] = np.where(one.trainable, one.behaviour, junk)
                batch.reward[here] = np.where(one.trainable, 0.0, junk)
                at += len(one.tokens)
                batch.reward[m, r, at - 1] = one.reward
    return batch.replace(used=np.int32(len(plan)))


def learners(setup: Setup = SETUP) -> tuple[Learner, Learner]:
    with jax.enable_x64(True):
        policy, critic = as_float64(random_params(MODEL)), as_float64(random_params(MODEL, seed=1, critic=True))
        of_critic = optimizer.labels(critic, setup.learn.freeze_critic_attention)
        return (
            optimizer.init(policy, optimizer.labels(policy), setup.learn.policy, (MAIN, INDEXER)),
            optimizer.init(critic, of_critic, setup.learn.critic, (MAIN,)),
        )


@partial(jax.jit, static_argnums=4)
def _learn(policy, critic, batch, mode, setup):
    lr = jnp.asarray(LR, jnp.float64)
    return update.learn(policy, critic, batch, mode, lr, lr, setup)


def learn(batch: LearnBatch, mode: int, policy: Learner | None = None, critic: Learner | None = None, setup=SETUP):
    """One learning step from fresh learners (or from these); everything comes back as numpy."""
    fresh = learners(setup)
    with jax.enable_x64(True):
        return jax.device_get(_learn(policy or fresh[0], critic or fresh[1], batch, jnp.int32(mode), setup))


def gradient(learner: Learner, part: str = MAIN, config: OptimizerConfig = NO_CLIP) -> dict[str, np.ndarray]:
    """The gradient of a first step, read off Adam's first moment."""
    moments = jax.tree_util.tree_leaves_with_path(learner.opt_state[part][0].mu)
    return {jax.tree_util.keystr(path): np.asarray(m) / (1 - config.b1) for path, m in moments}
