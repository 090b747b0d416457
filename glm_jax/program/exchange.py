"""The inbox and the outbox of a round: everything that passes between the host and the one jitted program."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from glm_jax.learn.batch import LearnBatch
from glm_jax.rollout.pages import Offer, Told
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
    offer: Offer | None = None  # with RolloutConfig.page


@struct.dataclass
class PageNews:
    """What became of pages in a round; those of all devices stand side by side."""

    told: Told  # pages that the tree holds from now on
    lost: Int[Array, "P"]  # names of pages that it had to give up


@struct.dataclass
class Outbox:
    """What a round hands back: a log of tokens, and figures (float32 scalars by name)."""

    log: Log
    queued: Int[Array, "W"]  # requests that still wait on each device
    metrics: dict[str, Float[Array, ""]]
    weights: UInt32[Array, "2"]  # checksums: of the policy as it learns, and of what the round sampled with
    pages: PageNews | None = None  # with RolloutConfig.page
