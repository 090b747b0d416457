"""The inbox and the outbox of a round: everything that passes between the host and the one jitted program."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float, Int

from glm_jax.learn.batch import LearnBatch
from glm_jax.rollout.requests import Log, Requests


@struct.dataclass
class Inbox:
    """What the host hands to a round. Shapes are fixed by the config, so the round compiles once."""

    requests: Requests
    cancel: Int[Array, "A"]  # rollout ids to drop before sampling, wherever they stand (queue or slot); -1 = none
    batch: LearnBatch
    mode: Int[Array, ""]  # of learn.batch
    policy_lr: Float[Array, ""]
    critic_lr: Float[Array, ""]
    depth: Int[Array, ""]  # 0, or one of RolloutConfig.drafts: drafts of each tick


@struct.dataclass
class Outbox:
    """What a round hands back: a log of tokens, and figures (float32 scalars by name)."""

    log: Log
    queued: Int[Array, ""]  # requests that still wait on the device
    metrics: dict[str, Float[Array, ""]]
