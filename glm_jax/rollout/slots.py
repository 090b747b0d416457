"""The sampler's state on the device: slots that hold live rollouts, and the queue that refills them."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import cache, draft
from glm_jax.model.cache import Caches
from glm_jax.model.config import ModelConfig
from glm_jax.rollout import pages
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.pages import Pages
from glm_jax.rollout.requests import STOP_IDS, Requests
from glm_jax.sharding import manual

HELD = 32  # states of a slot that may wait for their draft rows: so many ticks may pass without drafts


@struct.dataclass
class Slots:
    """B slots. A slot whose rollout is -1 is free; what else it holds then means nothing."""

    rollout: Int[Array, "B"]
    tokens: Int[Array, "B C"]  # the rollout so far: prompt and sampled tokens
    length: Int[Array, "B"]  # tokens so far
    filled: Int[Array, "B"]  # tokens whose cache rows are written; decode wants length - 1
    limit: Int[Array, "B"]
    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    stop: Int[Array, "B 8"]
    park: Int[Array, "B"]
    parked: Bool[Array, "B"]  # waits for an observation, and keeps its cache

    @property
    def live(self) -> Bool[Array, "B"]:
        return self.rollout >= 0

    @property
    def awake(self) -> Bool[Array, "B"]:
        """Slots that there is something to do for."""
        return self.live & ~self.parked

    @property
    def ready(self) -> Bool[Array, "B"]:
        """Slots whose next token can be sampled."""
        return self.awake & (self.filled == self.length - 1)

    @property
    def unfilled(self) -> Bool[Array, "B"]:
        """Slots that still need prefill."""
        return self.awake & (self.filled < self.length - 1)


@struct.dataclass
class Queue:
    """A ring of waiting requests per device; `requests.count` [1] of them, the oldest at row `head`.

    It has room for what the config says and for all slots: one that yields its pages goes back to the queue.
    """

    requests: Requests
    head: Int[Array, "1"]


@struct.dataclass
class Drafting:
    """What the draft layer holds of each slot.

    A slot of n tokens has draft rows 0 .. n - 2, of which the last `pending` are not run yet: they want the target's
    states held in `hidden`, oldest first. -1: states were lost, and nothing can be drafted for this rollout any more.
    """

    caches: Caches
    hidden: Float[Array, "B H D"]
    pending: Int[Array, "B"]


@struct.dataclass
class Sampler:
    """Everything the device holds for sampling. Never saved: live rollouts are prefilled again from their tokens."""

    slots: Slots
    queue: Queue
    pages: Pages | None  # with config.page
    caches: Caches
    drafting: Drafting | None  # with config.drafts

    @property
    def table(self) -> Int[Array, "B N"] | None:
        """The pages of each slot; None where slot b has page b to itself."""
        return self.pages and self.pages.table


def init(model: ModelConfig, config: RolloutConfig) -> Sampler:
    """No live slot, nothing queued."""
    slots, window, ways = config.slots, config.window, manual.ways()
    queue = -(-config.queue // ways) * ways + slots
    number, columns = (config.pool, config.page) if config.page else (slots, window)
    return Sampler(
        slots=Slots(
            rollout=jnp.full((slots,), -1, jnp.int32),
            tokens=jnp.zeros((slots, window), jnp.int32),
            length=jnp.ones((slots,), jnp.int32),
            filled=jnp.zeros((slots,), jnp.int32),
            limit=jnp.full((slots,), window, jnp.int32),
            temperature=jnp.ones((slots,), jnp.float32),
            top_p=jnp.ones((slots,), jnp.float32),
            stop=jnp.full((slots, STOP_IDS), -1, jnp.int32),
            park=jnp.full((slots,), -1, jnp.int32),
            parked=jnp.zeros((slots,), jnp.bool_),
        ),
        queue=Queue(
            requests=Requests(
                tokens=jnp.zeros((queue, window), jnp.int32),
                length=jnp.ones((queue,), jnp.int32),
                limit=jnp.full((queue,), window, jnp.int32),
                rollout=jnp.full((queue,), -1, jnp.int32),
                temperature=jnp.ones((queue,), jnp.float32),
                top_p=jnp.ones((queue,), jnp.float32),
                stop=jnp.full((queue, STOP_IDS), -1, jnp.int32),
                park=jnp.full((queue,), -1, jnp.int32),
                shard=jnp.zeros((queue,), jnp.int32),
                pages=jnp.zeros((queue, config.per_slot), jnp.int32),
                shared=jnp.zeros((queue,), jnp.int32),
                count=jnp.zeros((ways,), jnp.int32),
            ),
            head=jnp.zeros((ways,), jnp.int32),
        ),
        pages=pages.init(slots, config.pool, config.per_slot, ways) if config.page else None,
        caches=cache.init(model, number, columns),
        drafting=_init_drafting(model, config) if config.drafts else None,
    )


def _init_drafting(model: ModelConfig, config: RolloutConfig) -> Drafting:
    if not model.num_nextn_predict_layers:
        raise ValueError(
            f"drafts={config.drafts} wants a model with a draft (MTP) layer, and num_nextn_predict_layers is 0"
        )
    held = max(HELD, 1 + max(config.drafts))
    number, columns = (config.pool, config.page) if config.page else (config.slots, config.window)
    return Drafting(
        caches=draft.init_cache(model, number, columns),
        hidden=jnp.zeros((config.slots, held, model.hidden_size), jnp.dtype(model.dtype)),
        pending=jnp.zeros((config.slots,), jnp.int32),
    )
