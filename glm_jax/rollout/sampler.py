"""The sampling phase of a round: a loop of ticks, each of which refills free slots, prefills them and decodes once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from glm_jax.model.config import ModelConfig
from glm_jax.model.heads import unembed
from glm_jax.model.norms import wide
from glm_jax.model.weights import Transformer
from glm_jax.rollout import admission, drafting, sampling
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import GOES_ON, LENGTH, PARKED, STOP, Log
from glm_jax.rollout.slots import Sampler, Slots
from glm_jax.sharding import manual


@struct.dataclass
class Usage:
    """How the ticks of a round were used, in slot-ticks and tokens."""

    decoded: Int[Array, ""]  # tokens sampled
    prefilled: Int[Array, ""]  # prompt tokens run
    reused: Int[Array, ""]  # prompt tokens whose rows were there already, in pages that a request named
    drafted: Int[Array, ""]  # drafts verified
    idle: Int[Array, ""]  # free slots of a device, in ticks in which a request was left waiting for one of them
    waiting: Int[Array, ""]  # all slots of such devices, in those ticks


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
    depth: Int[Array, ""] | int = 0,
    ticks: Int[Array, ""] | int | None = None,
) -> tuple[Sampler, Log, Usage]:
    """Samples until `config.ticks` are used (or `ticks`, if that is less), or no more can be sampled.

    That is when no slot is awake, and none is free or the queue is empty. `view` are the policy's weights in the sample
    layout. A slot that ends its rollout takes the oldest request in the next tick; one that is parked keeps it, and is
    not waited for. `depth` is one of `config.drafts`, or 0: how many tokens the draft layer proposes in each tick, as
    long as there is a rollout that it can draft for.
    """

    most = config.ticks if ticks is None else jnp.minimum(ticks, config.ticks)

    def busy(loop: _Loop):
        held, waiting = loop.sampler.slots, loop.sampler.queue.requests.count
        free = jnp.any(~held.live.reshape(waiting.shape[0], -1), axis=1)
        return (loop.log.ticks < most) & (jnp.any(held.awake) | jnp.any((waiting > 0) & free))

    def drafts(loop: _Loop):
        known = loop.sampler.slots.awake & (loop.sampler.drafting.pending >= 0)
        return jnp.any(known) | jnp.any(loop.sampler.queue.requests.count > 0)

    zero = jnp.zeros((), jnp.int32)
    loop = _Loop(sampler, _empty_log(config, version), Usage(zero, zero, zero, zero, zero, zero))
    # A loop per depth: a choice within one loop would copy the caches.
    for each in config.drafts:
        chosen = jnp.asarray(depth) == each
        tick = partial(_tick, view, model, config, seed, each)
        loop = jax.lax.while_loop(lambda loop, chosen=chosen: chosen & busy(loop) & drafts(loop), tick, loop)
    loop = jax.lax.while_loop(busy, partial(_tick, view, model, config, seed, 0), loop)
    return loop._replace(sampler=admission.close(loop.sampler, version))


def _tick(view: Transformer, model: ModelConfig, config: RolloutConfig, seed, depth: int, loop: _Loop) -> _Loop:
    state = admission.admit(loop.sampler, loop.log.version, depth)
    new = state.slots.live & (state.slots.rollout != loop.sampler.slots.rollout)
    reused = jnp.sum(jnp.where(new, state.slots.filled, 0))
    with jax.named_scope("prefill"):
        state, prefilled = _prefill(view, model, config, depth > 0, state)
    ready = state.slots.ready
    if depth:
        state, sampled, drafted = _decode_drafts(view, model, depth, state, seed)
    else:
        state, sampled = _decode(view, model, state, seed)
        drafted = jnp.zeros_like(sampled.count)
    live, ending = _append(state.slots, sampled)
    log = _write(loop.log, sampled, drafted, jnp.where(ready, live.rollout, -1), ending)
    stays = (ending == GOES_ON) | (ending == PARKED)
    state = admission.tell(state.replace(slots=live), ~stays, loop.log.version)
    live = live.replace(rollout=jnp.where(stays, live.rollout, -1), parked=live.parked | (ending == PARKED))
    waits = state.queue.requests.count > 0
    free = jnp.sum(~state.slots.live.reshape(waits.shape[0], -1), axis=1, dtype=jnp.int32)
    usage = Usage(
        decoded=loop.usage.decoded + jnp.sum(sampled.count),
        prefilled=loop.usage.prefilled + prefilled,
        reused=loop.usage.reused + reused,
        drafted=loop.usage.drafted + jnp.sum(drafted),
        idle=loop.usage.idle + jnp.sum(jnp.where(waits, free, 0)),
        waiting=loop.usage.waiting + jnp.sum(waits, dtype=jnp.int32) * (config.slots // waits.shape[0]),
    )
    return _Loop(state.replace(slots=live), log, usage)


def _empty_log(config: RolloutConfig, version) -> Log:
    shape = (config.ticks, config.slots)
    width = 1 + max(config.drafts, default=0)
    return Log(
        token=jnp.zeros((*shape, width), jnp.int32),
        logp=jnp.zeros((*shape, width), jnp.float32),
        count=jnp.zeros(shape, jnp.int32),
        drafted=jnp.zeros(shape, jnp.int32),
        rollout=jnp.full(shape, -1, jnp.int32),
        ending=jnp.full(shape, GOES_ON, jnp.int32),
        version=version,
        ticks=jnp.zeros((), jnp.int32),
    )


def _prefill(view, model: ModelConfig, config: RolloutConfig, drafts: bool, state: Sampler):
    """Runs the prompts of new slots through the model, all but their last token, a few slots and a chunk at a time.

    At most `config.prefill_steps` steps, so that the slots that are ready wait no longer. With `drafts` also through
    the draft layer. A step that serves many slots costs as much for one: where few are left they go one by one. Loops,
    not a `cond`: their carry updates the caches in place.
    """
    chunk, ways, live = config.prefill_chunk, manual.ways(), state.slots
    many = -(-config.prefill_slots // ways)
    few = many // 4

    def step(at_once: int, carry):
        filled, caches, drafted, total, steps = carry
        unfilled = live.replace(filled=filled).unfilled
        # Of every device's slots the lowest ones first.
        by_device = unfilled.astype(jnp.int32).reshape(ways, -1)
        takes, slot = jax.lax.top_k(by_device, at_once)
        takes, local = takes.reshape(-1), slot.reshape(-1)
        slot = (slot + jnp.arange(ways)[:, None] * by_device.shape[1]).reshape(-1)
        start = filled[slot]
        count = jnp.where(takes > 0, jnp.minimum(live.length[slot] - 1 - start, chunk), 0)
        column = jnp.minimum(start[:, None] + jnp.arange(chunk), config.window - 1)
        tokens = live.tokens[slot[:, None], column]
        table = local[:, None] if state.pages is None else state.pages.table[slot]
        hidden, caches = manual.extend(view, model, caches, tokens, start, count, table)
        if drafts:
            drafted = drafting.prefill(view, model, drafted, live, (slot, table), hidden, start, count)
        elif drafted is not None:
            place = jnp.where(count > 0, slot, config.slots)
            drafted = drafted.replace(pending=drafted.pending.at[place].set(-1, mode="drop"))
        return filled.at[slot].add(count), caches, drafted, total + jnp.sum(count, dtype=jnp.int32), steps + 1

    def goes_on(least: int, carry):
        filled, *_, steps = carry
        by_device = live.replace(filled=filled).unfilled.reshape(ways, -1)
        unfinished = jnp.any(jnp.sum(by_device, axis=1) > least)
        return unfinished & (steps < config.prefill_steps) if config.prefill_steps else unfinished

    zero, drafted = jnp.zeros((), jnp.int32), state.drafting
    if drafts:
        # An observation stands behind rows that its rollout's last pass left pending.
        width = 1 + max(config.drafts)
        drafted = drafting.run_pending(view, model, drafted, live, state.table, live.unfilled, width, leave=0)
    carry = (live.filled, state.caches, drafted, zero, zero)
    carry = jax.lax.while_loop(partial(goes_on, few), partial(step, many), carry)
    if few:
        carry = jax.lax.while_loop(partial(goes_on, 0), partial(step, 1), carry)
    filled, caches, drafted, total, _ = carry
    return state.replace(slots=live.replace(filled=filled), caches=caches, drafting=drafted), total


class _Sampled(NamedTuple):
    """The tokens of a tick."""

    token: Int[Array, "B W"]
    logp: Float[Array, "B W"]
    count: Int[Array, "B"]  # 0 where the slot is not ready


def _decode(view, model: ModelConfig, state: Sampler, seed) -> tuple[Sampler, _Sampled]:
    """One token for every ready slot."""
    live = state.slots
    ready, last = live.ready, live.length - 1
    tokens = jnp.take_along_axis(live.tokens, last[:, None], axis=1)
    hidden, caches = manual.extend(view, model, state.caches, tokens, last, ready.astype(jnp.int32), state.table)
    logits = unembed(view, hidden[:, 0]).astype(wide(hidden.dtype))
    number = sampling.uniform(seed, live.rollout, live.length, sampling.SAMPLE)
    token, logp = sampling.sample(logits, live.temperature, live.top_p, number)
    state = state.replace(caches=caches)
    if state.drafting is not None:
        state = state.replace(drafting=drafting.skip(state.drafting, hidden[:, 0], ready))
    return state, _Sampled(token[:, None], logp[:, None], ready.astype(jnp.int32))


def _decode_drafts(view, model: ModelConfig, depth: int, state: Sampler, seed):
    """Up to depth + 1 tokens for every ready slot, and how many drafts were verified for that."""
    live = state.slots
    proposal, drafted = drafting.propose(view, model, state.drafting, live, state.table, depth, seed)
    last = jnp.take_along_axis(live.tokens, live.length[:, None] - 1, axis=1)
    tokens = jnp.concatenate([last, proposal.drafts.token], axis=1)
    count = jnp.where(live.ready, proposal.offered + 1, 0)
    hidden, caches = manual.extend(view, model, state.caches, tokens, live.length - 1, count, state.table)
    logits = unembed(view, hidden).astype(wide(hidden.dtype))
    token, logp, kept = drafting.verify(logits, proposal, live, seed)
    sampled = _Sampled(token, logp, jnp.where(live.ready, _up_to_halt(live, token, kept), 0))
    drafted = drafting.hold(drafted, hidden, sampled.count)
    return state.replace(caches=caches, drafting=drafted), sampled, proposal.offered


def _up_to_halt(live: Slots, token: Int[Array, "B W"], count: Int[Array, "B"]) -> Int[Array, "B"]:
    """How many of the first `count` tokens there are up to the first that stops or parks the rollout."""
    step = jnp.arange(token.shape[1])
    halts = jnp.any(token[..., None] == live.stop[:, None], axis=-1) | (token == live.park[:, None])
    return jnp.min(jnp.where(halts & (step < count[:, None]), step + 1, count[:, None]), axis=1)


def _append(live: Slots, sampled: _Sampled) -> tuple[Slots, Int[Array, "B"]]:
    """The slots with what was sampled, and how each rollout ended."""
    rows, window = live.tokens.shape
    step, count = jnp.arange(sampled.token.shape[1]), sampled.count
    place = jnp.where(step < count[:, None], live.length[:, None] + step, window)
    appended = live.replace(
        tokens=live.tokens.at[jnp.arange(rows)[:, None], place].set(sampled.token, mode="drop"),
        length=live.length + count,
        filled=live.filled + count,
    )
    last = jnp.take_along_axis(sampled.token, jnp.maximum(count - 1, 0)[:, None], axis=1)
    goes_on = jnp.where(last[:, 0] == live.park, PARKED, GOES_ON)
    ending = jnp.where(appended.length >= live.limit, LENGTH, goes_on)
    ending = jnp.where(jnp.any(last == live.stop, axis=1), STOP, ending)
    return appended, jnp.where(count > 0, ending, GOES_ON).astype(jnp.int32)


def _write(log: Log, sampled: _Sampled, drafted, rollout, ending) -> Log:
    """The log with one more tick."""
    n, width = log.ticks, sampled.token.shape[1]
    return log.replace(
        token=log.token.at[n, :, :width].set(sampled.token),
        logp=log.logp.at[n, :, :width].set(sampled.logp.astype(jnp.float32)),
        count=log.count.at[n].set(sampled.count),
        drafted=log.drafted.at[n].set(drafted),
        rollout=log.rollout.at[n].set(rollout),
        ending=log.ending.at[n].set(ending),
        ticks=n + 1,
    )
