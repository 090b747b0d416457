"""Speculative decoding: the draft layer proposes tokens, the target checks them all in one pass.

Rejection sampling leaves the target's distribution as it is: draft d, drawn from q, is kept with probability
min(1, p(d) / q(d)); the first one that is not gives way to a draw from max(p - q, 0), and where all are kept one more
token is drawn from p. At temperature 0 both distributions are one token, so the tokens are those of greedy decoding.
Source: Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import draft
from glm_jax.model.cache import Caches
from glm_jax.model.config import ModelConfig
from glm_jax.model.draft import Drafts
from glm_jax.model.norms import wide
from glm_jax.model.weights import Transformer
from glm_jax.rollout import sampling
from glm_jax.rollout.sampling import ACCEPT, DRAFT, SAMPLE
from glm_jax.rollout.slots import Drafting, Slots
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows


def prefill(
    view: Transformer,
    model: ModelConfig,
    drafting: Drafting,
    live: Slots,
    slot: tuple[Int[Array, "P"], Int[Array, "P N"]],
    hidden: Float[Array, "P S D"],
    start: Int[Array, "P"],
    count: Int[Array, "P"],
) -> Drafting:
    """Draft rows of a chunk of prompts, given the target's states. The last row of a prompt is left pending too.

    `slot`: the prompts' slots, counted over all devices, and the pages of each.
    """
    slot, table = slot
    tokens = _tokens(live.tokens[slot], start + 1, hidden.shape[1])
    caches = _extend(view, model, drafting.caches, tokens, hidden, start, count, table)
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    known = drafting.pending[slot] >= 0
    ends = (count > 0) & known & (start + count == live.length[slot] - 1)
    place = jnp.where(ends, slot, live.rollout.shape[0])
    return drafting.replace(
        caches=caches,
        hidden=drafting.hidden.at[place, 0].set(last, mode="drop"),
        pending=drafting.pending.at[place].set(1, mode="drop"),
    )


def skip(drafting: Drafting, hidden: Float[Array, "B D"], ready: Bool[Array, "B"]) -> Drafting:
    """Keeps the states of a tick without drafts, while there is room for them."""
    rows, room = drafting.hidden.shape[:2]
    kept = ready & (drafting.pending >= 0) & (drafting.pending < room)
    place = jnp.where(kept, drafting.pending, room)
    return drafting.replace(
        hidden=drafting.hidden.at[jnp.arange(rows), place].set(hidden, mode="drop"),
        pending=jnp.where(ready, jnp.where(kept, drafting.pending + 1, -1), drafting.pending),
    )


def run_pending(
    view: Transformer,
    model: ModelConfig,
    drafting: Drafting,
    live: Slots,
    table: Int[Array, "B N"] | None,
    which: Bool[Array, "B"],
    width: int,
    leave: int,
) -> Drafting:
    """Runs pending rows of these slots, `width` at a time, until at most `leave` are left."""

    def behind(drafting: Drafting):
        return which & (drafting.pending > leave)

    def step(drafting: Drafting) -> Drafting:
        tokens, hidden, start = _pending(drafting, live, width)
        count = jnp.where(behind(drafting), jnp.minimum(drafting.pending, width), 0)
        caches = _extend(view, model, drafting.caches, tokens, hidden, start, count, table)
        held = drafting.hidden
        left = jnp.minimum(jnp.arange(held.shape[1]) + count[:, None], held.shape[1] - 1)
        return Drafting(caches, jnp.take_along_axis(held, left[..., None], axis=1), drafting.pending - count)

    return jax.lax.while_loop(lambda drafting: jnp.any(behind(drafting)), step, drafting)


class Proposal(NamedTuple):
    """Drafts to be verified: the first `offered` of each slot."""

    drafts: Drafts
    offered: Int[Array, "B"]


def propose(
    view: Transformer,
    model: ModelConfig,
    drafting: Drafting,
    live: Slots,
    table: Int[Array, "B N"] | None,
    depth: int,
    seed: Int[Array, ""],
) -> tuple[Proposal, Drafting]:
    """Runs the pending draft rows of every ready slot, and drafts as far as its limit and `depth` allow."""
    width = depth + 1
    ready = live.ready & (drafting.pending > 0)
    drafting = run_pending(view, model, drafting, live, table, ready, width, leave=width)

    def run(view, caches, tokens, hidden, start, count, number, temperature, top_p, table=None):
        def pick(step: int, logits):
            return sampling.sample(logits.astype(wide(logits.dtype)), temperature, top_p, number[:, step])[0]

        return draft.propose(view, model, caches, tokens, hidden, start, count, depth, table, pick)

    number = _numbers(seed, live, depth, DRAFT)
    rows = (*_pending(drafting, live, width), jnp.where(ready, drafting.pending, 0))
    rows = (*rows, number, live.temperature, live.top_p, *([] if table is None else [table]))
    on_rows = each_on_its_rows(run, view, model, layout.SAMPLE, (1, *[0] * len(rows)), (0, 1))
    drafts, caches = on_rows(drafting.caches, *rows)
    offered = jnp.where(ready, jnp.clip(live.limit - live.length - 1, 0, depth), 0)
    return Proposal(drafts, offered), drafting.replace(caches=caches)


def verify(
    logits: Float[Array, "B W V"], proposal: Proposal, live: Slots, seed: Int[Array, ""]
) -> tuple[Int[Array, "B W"], Float[Array, "B W"], Int[Array, "B"]]:
    """Tokens, their log-probs under the target, and how many of them count: the drafts that were kept and one more.

    `logits[:, i]` are the target's after i drafts. Random numbers are those of the token's position, so what a rollout
    samples hangs on nothing but its own tokens and on where its passes began.
    """
    drafted, (batch, width) = proposal.drafts.token, logits.shape[:2]
    among = jnp.arange(width - 1) < proposal.offered[:, None]
    leading = lambda kept: jnp.sum(jnp.cumprod(kept & among, axis=1), axis=1, dtype=jnp.int32)

    def draw():
        per_row = lambda count: jax.tree.map(
            lambda a: jnp.repeat(a[:, None], count, axis=1), (live.temperature, live.top_p)
        )
        log_p = sampling.distribution(logits, *per_row(width))
        q = jnp.exp(sampling.distribution(proposal.drafts.logits.astype(logits.dtype), *per_row(width - 1)))
        p = jnp.exp(log_p)
        of = lambda prob: jnp.take_along_axis(prob, drafted[..., None], axis=-1)[..., 0]
        kept = leading(_numbers(seed, live, width - 1, ACCEPT) * of(q) < of(p[:, :-1]))
        at_end = lambda a: jnp.take_along_axis(a, kept[:, None, None], axis=1)[:, 0]
        # A draft layer that has diverged offers NaN: its drafts are never kept, and p is all that is left.
        rest = jnp.where(jnp.isnan(q), p[:, :-1], jnp.maximum(p[:, :-1] - q, 0))
        rest = at_end(jnp.pad(rest, ((0, 0), (0, 1), (0, 0))))
        # All drafts kept: p itself. A rest of nothing is a rejection by rounding, of a draft as likely as it should be.
        whole = (kept == proposal.offered) | (jnp.sum(rest, axis=-1) <= 0)
        last = jnp.where(whole[:, None], at_end(p), rest)
        drawn = sampling.invert(last, sampling.uniform(seed, live.rollout, live.length + kept, SAMPLE))
        token = jnp.where(jnp.arange(width) == kept[:, None], drawn[:, None], jnp.pad(drafted, ((0, 0), (0, 1))))
        return token, jnp.take_along_axis(log_p, token[..., None], axis=-1)[..., 0], kept + 1

    def take_best():
        best = sampling.best_of(logits)
        return best, jnp.zeros((batch, width), logits.dtype), leading(best[:, :-1] == drafted) + 1

    return jax.lax.cond(jnp.any(live.temperature > 0), draw, take_best)


def hold(drafting: Drafting, hidden: Float[Array, "B W D"], count: Int[Array, "B"]) -> Drafting:
    """Keeps the states of the `count` tokens that a verified pass ran and kept: their draft rows are next."""
    ran = count > 0
    held = drafting.hidden.at[:, : hidden.shape[1]].set(hidden)
    return drafting.replace(
        hidden=jnp.where(ran[:, None, None], held, drafting.hidden),
        pending=jnp.where(ran & (drafting.pending >= 0), count, drafting.pending),
    )


def _extend(view: Transformer, model: ModelConfig, caches: Caches, *rows: Array | None) -> Caches:
    """draft.extend by each device on its slots; the caches alone."""
    rows = [row for row in rows if row is not None]
    run = lambda view, caches, *rows: draft.extend(view, model, caches, *rows)[1]
    return each_on_its_rows(run, view, model, layout.SAMPLE, (1, *[0] * len(rows)), 1)(caches, *rows)


def _numbers(seed: Int[Array, ""], live: Slots, count: int, purpose: int) -> Float[Array, "B N"]:
    """Random numbers of the next `count` positions."""
    at = lambda step: sampling.uniform(seed, live.rollout, live.length + step, purpose)
    return jax.vmap(at, out_axes=1)(jnp.arange(count))


def _pending(drafting: Drafting, live: Slots, width: int):
    """The first `width` pending rows of each slot: the tokens after them, their states, and the first one's column."""
    start = live.filled - drafting.pending
    return _tokens(live.tokens, start + 1, width), drafting.hidden[:, :width], start


def _tokens(tokens: Int[Array, "B C"], start: Int[Array, "B"], count: int) -> Int[Array, "B S"]:
    column = jnp.clip(start[:, None] + jnp.arange(count), 0, tokens.shape[1] - 1)
    return jnp.take_along_axis(tokens, column, axis=1)
