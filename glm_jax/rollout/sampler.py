"""The sampling phase of a round: a loop of ticks, each of which refills free slots, prefills them and decodes once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from glm_jax.model import cache
from glm_jax.model.cache import Caches
from glm_jax.model.config import ModelConfig
from glm_jax.model.heads import unembed
from glm_jax.model.norms import wide
from glm_jax.model.weights import Transformer
from glm_jax.rollout import sampling, slots
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import GOES_ON, LENGTH, STOP, Log
from glm_jax.rollout.slots import Sampler, Slots


@struct.dataclass
class Usage:
    """How the ticks of a round were used, in slot-ticks and tokens."""

    decoded: Int[Array, ""]  # tokens sampled
    prefilled: Int[Array, ""]  # prompt tokens run
    idle: Int[Array, ""]  # slots without a token, in ticks in which a request was left waiting
    waiting: Int[Array, ""]  # all slots, in those ticks


class _Loop(NamedTuple):
    sampler: Sampler
    log: Log
    usage: Usage


def run(
    view: Transformer,
    model: ModelConfig,
    config: RolloutConfig,
    sampler: Sampler,
    version: Int[Array, ""],
    seed: Int[Array, ""],
) -> tuple[Sampler, Log, Usage]:
    """Samples until `config.ticks` are used, or no slot is live and the queue is empty.

    `view` are the policy's weights in the sample layout. A slot that ends its rollout takes the oldest request in the
    next tick.
    """

    def busy(loop: _Loop):
        work = jnp.any(loop.sampler.slots.live) | (loop.sampler.queue.requests.count > 0)
        return (loop.log.ticks < config.ticks) & work

    def tick(loop: _Loop) -> _Loop:
        live, queue = slots.admit(loop.sampler.slots, loop.sampler.queue)
        live, caches, prefilled = _prefill(view, model, config, live, loop.sampler.caches)
        ready = live.ready
        live, caches, token, logp, ending = _decode(view, model, live, caches, seed)
        n, log = loop.log.ticks, loop.log
        log = log.replace(
            token=log.token.at[n].set(token),
            logp=log.logp.at[n].set(logp),
            rollout=log.rollout.at[n].set(jnp.where(ready, live.rollout, -1)),
            ending=log.ending.at[n].set(ending),
            ticks=n + 1,
        )
        live = live.replace(rollout=jnp.where(ending == GOES_ON, live.rollout, -1))
        decoded, waits = jnp.sum(ready, dtype=jnp.int32), queue.requests.count > 0
        usage = Usage(
            decoded=loop.usage.decoded + decoded,
            prefilled=loop.usage.prefilled + prefilled,
            idle=loop.usage.idle + jnp.where(waits, config.slots - decoded, 0),
            waiting=loop.usage.waiting + jnp.where(waits, config.slots, 0),
        )
        return _Loop(Sampler(live, queue, caches), log, usage)

    zero = jnp.zeros((), jnp.int32)
    start = _Loop(sampler, _empty_log(config, version), Usage(zero, zero, zero, zero))
    return jax.lax.while_loop(busy, tick, start)


def _empty_log(config: RolloutConfig, version) -> Log:
    shape = (config.ticks, config.slots)
    return Log(
        token=jnp.zeros(shape, jnp.int32),
        logp=jnp.zeros(shape, jnp.float32),
        rollout=jnp.full(shape, -1, jnp.int32),
        ending=jnp.full(shape, GOES_ON, jnp.int32),
        version=version,
        ticks=jnp.zeros((), jnp.int32),
    )


def _prefill(view, model: ModelConfig, config: RolloutConfig, live: Slots, caches: Caches):
    """Runs the prompts of new slots through the model, all but their last token, a few slots and a chunk at a time.

    A loop, not a `cond`: its carry updates the caches in place.
    """
    chunk = config.prefill_chunk

    def step(carry):
        filled, caches, total = carry
        unfilled = live.replace(filled=filled).unfilled
        takes, slot = jax.lax.top_k(unfilled.astype(jnp.int32), config.prefill_slots)  # lowest slots first
        start = filled[slot]
        count = jnp.where(takes > 0, jnp.minimum(live.length[slot] - 1 - start, chunk), 0)
        column = jnp.minimum(start[:, None] + jnp.arange(chunk), config.window - 1)
        tokens = jnp.take_along_axis(live.tokens[slot], column, axis=1)
        _, caches = cache.extend(view, model, caches, tokens, start, count, slot)
        return filled.at[slot].add(count), caches, total + jnp.sum(count, dtype=jnp.int32)

    def unfinished(carry):
        return jnp.any(live.replace(filled=carry[0]).unfilled)

    carry = (live.filled, caches, jnp.zeros((), jnp.int32))
    filled, caches, total = jax.lax.while_loop(unfinished, step, carry)
    return live.replace(filled=filled), caches, total


def _decode(view, model: ModelConfig, live: Slots, caches: Caches, seed):
    """One token for every ready slot; returns the slots with it appended, and (token, logp, ending) per slot."""
    ready, last = live.ready, live.length - 1
    tokens = jnp.take_along_axis(live.tokens, last[:, None], axis=1)
    hidden, caches = cache.extend(view, model, caches, tokens, last, ready.astype(jnp.int32))
    logits = unembed(view, hidden[:, 0]).astype(wide(hidden.dtype))
    number = sampling.uniform(seed, live.rollout, live.length, sampling.SAMPLE)
    token, logp = sampling.sample(logits, live.temperature, live.top_p, number)
    rows, window = live.tokens.shape
    place = jnp.where(ready, live.length, window)
    appended = live.replace(
        tokens=live.tokens.at[jnp.arange(rows), place].set(token, mode="drop"),
        length=live.length + ready,
        filled=live.filled + ready,
    )
    stopped = jnp.any(token[:, None] == live.stop, axis=1)
    ending = jnp.where(stopped, STOP, jnp.where(appended.length >= live.limit, LENGTH, GOES_ON))
    return appended, caches, token, logp.astype(jnp.float32), jnp.where(ready, ending, GOES_ON).astype(jnp.int32)
