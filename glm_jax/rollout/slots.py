"""The sampler's state on the device: slots that hold live rollouts, and the queue that refills them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import cache, draft
from glm_jax.model.cache import Caches
from glm_jax.model.config import ModelConfig
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import STOP_IDS, Requests

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
    """A ring of waiting requests; `requests.count` of them, the oldest at row `head`."""

    requests: Requests
    head: Int[Array, ""]


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
    caches: Caches
    drafting: Drafting | None  # with config.drafts


def init(model: ModelConfig, config: RolloutConfig) -> Sampler:
    """No live slot, nothing queued."""
    slots, window, queue = config.slots, config.window, config.queue
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
                count=jnp.zeros((), jnp.int32),
            ),
            head=jnp.zeros((), jnp.int32),
        ),
        caches=cache.init(model, slots, window),
        drafting=_init_drafting(model, config) if config.drafts else None,
    )


def _init_drafting(model: ModelConfig, config: RolloutConfig) -> Drafting:
    if not model.num_nextn_predict_layers:
        raise ValueError(
            f"drafts={config.drafts} wants a model with a draft (MTP) layer, and num_nextn_predict_layers is 0"
        )
    held = max(HELD, 1 + max(config.drafts))
    return Drafting(
        caches=draft.init_cache(model, config.slots, config.window),
        hidden=jnp.zeros((config.slots, held, model.hidden_size), jnp.dtype(model.dtype)),
        pending=jnp.zeros((config.slots,), jnp.int32),
    )


def cancel(sampler: Sampler, rollouts: Int[Array, "A"]) -> Sampler:
    """Frees the slots of these rollouts and strikes them from the queue; -1 names none."""

    def strike(rollout):
        named = jnp.any((rollout[:, None] == rollouts) & (rollouts >= 0), axis=1)
        return jnp.where(named, -1, rollout)

    slots = sampler.slots.replace(rollout=strike(sampler.slots.rollout))
    requests = sampler.queue.requests
    requests = requests.replace(rollout=strike(requests.rollout))
    return sampler.replace(slots=slots, queue=sampler.queue.replace(requests=requests))


def forget(sampler: Sampler, when: Bool[Array, ""]) -> Sampler:
    """Empties the caches of live slots, so that their tokens are prefilled again; nothing else of them changes."""
    unless = lambda a: jnp.where(when, 0, a)
    drafting = sampler.drafting
    return sampler.replace(
        slots=sampler.slots.replace(filled=unless(sampler.slots.filled)),
        drafting=drafting and drafting.replace(pending=unless(drafting.pending)),
    )


def send(sampler: Sampler, new: Requests) -> Sampler:
    """Takes the `new.count` first rows: those of rollouts that are parked into their slots, the others into the queue.

    A rollout whose slot is gone is thus prefilled from its tokens like any other: nothing is lost with a slot.
    """
    sent = jnp.arange(new.rollout.shape[0]) < new.count
    slots, seen = observe(sampler.slots, new, sent)
    return sampler.replace(slots=slots, queue=enqueue(sampler.queue, new, sent & ~seen))


def observe(slots: Slots, new: Requests, sent: Bool[Array, "A"]) -> tuple[Slots, Bool[Array, "A"]]:
    """Parked rollouts go on with the tokens of their rows, `filled` kept: only what is new is prefilled.

    Also returns which rows were for a parked rollout.
    """
    match = (slots.rollout[:, None] == new.rollout) & sent & (slots.parked & slots.live)[:, None]
    takes, row = jnp.any(match, axis=1), jnp.argmax(match, axis=1)
    pick = lambda old, new: jnp.where(takes.reshape(-1, *[1] * (old.ndim - 1)), new[row], old)
    names = ("tokens", "length", "limit")
    changed = {name: pick(getattr(slots, name), getattr(new, name)) for name in names}
    return slots.replace(**changed, parked=slots.parked & ~takes), jnp.any(match, axis=0)


def enqueue(queue: Queue, new: Requests, wanted: Bool[Array, "A"]) -> Queue:
    """Appends the rows that are wanted, in their order. The host never sends more than there is room for."""
    old, size = queue.requests, queue.requests.rollout.shape[0]
    rank = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    place = jnp.where(wanted, (queue.head + old.count + rank) % size, size)
    count = old.count + jnp.sum(wanted, dtype=jnp.int32)
    put = lambda a, b: a if a.ndim == 0 else a.at[place].set(b, mode="drop")
    return queue.replace(requests=jax.tree.map(put, old, new).replace(count=count))


def admit(sampler: Sampler) -> Sampler:
    """Free slots take the oldest requests, in slot order."""
    slots, queue, drafting = sampler.slots, sampler.queue, sampler.drafting
    size = queue.requests.rollout.shape[0]
    free = ~slots.live
    rank = jnp.cumsum(free) - 1
    takes = free & (rank < queue.requests.count)
    row = (queue.head + rank) % size
    old, new = slots, jax.tree.map(lambda a: a if a.ndim == 0 else a[row], queue.requests)

    def pick(old, new):
        return jnp.where(takes.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    names = ("rollout", "tokens", "length", "limit", "temperature", "top_p", "stop", "park")
    slots = slots.replace(
        filled=jnp.where(takes, 0, old.filled),
        parked=old.parked & ~takes,
        **{k: pick(getattr(old, k), getattr(new, k)) for k in names},
    )
    taken = jnp.sum(takes, dtype=jnp.int32)
    requests = queue.requests.replace(count=queue.requests.count - taken)
    if drafting is not None:
        drafting = drafting.replace(pending=jnp.where(takes, 0, drafting.pending))
    return sampler.replace(slots=slots, queue=Queue(requests, (queue.head + taken) % size), drafting=drafting)
