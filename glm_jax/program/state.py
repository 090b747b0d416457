"""The state of a run on the device: two learners, the sampler, and the seed that all randomness comes from."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Int

from glm_jax.learn.optimizer import Learner
from glm_jax.rollout.slots import Sampler


@struct.dataclass
class RunState:
    policy: Learner
    critic: Learner | None  # with advantage = sao
    sampler: Sampler
    seed: Int[Array, ""]
