"""How rollouts come by slots and pages, and lose them. With several devices each does this on its own share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from glm_jax.rollout import pages
from glm_jax.rollout.pages import Offer, Pages
from glm_jax.rollout.requests import Requests
from glm_jax.rollout.slots import Queue, Sampler, Slots
from glm_jax.sharding import manual


class Share(NamedTuple):
    """What one device holds of a Sampler, its caches apart."""

    slots: Slots
    queue: Queue
    pages: Pages | None
    pending: Int[Array, "B"] | None  # of Drafting


def on_each(run: Callable[..., Share], sampler: Sampler, mine: Any = (), known: Any = ()) -> Sampler:
    """`run(shard, share, mine, known)` by each device: `shard` [1] is its number, `known` what all of them know.

    `mine` are arrays of which each device has its rows, as it has of the sampler.
    """
    drafting = sampler.drafting
    share = Share(sampler.slots, sampler.queue, sampler.pages, drafting and drafting.pending)
    share = manual.on_each(run, share, mine, known)
    drafting = drafting and drafting.replace(pending=share.pending)
    return sampler.replace(slots=share.slots, queue=share.queue, pages=share.pages, drafting=drafting)


def cancel(sampler: Sampler, rollouts: Int[Array, "A"]) -> Sampler:
    """Frees the slots of these rollouts and strikes them from the queue; -1 names none."""

    def strike(rollout):
        named = jnp.any((rollout[:, None] == rollouts) & (rollouts >= 0), axis=1)
        return jnp.where(named, -1, rollout)

    slots = sampler.slots.replace(rollout=strike(sampler.slots.rollout))
    requests = sampler.queue.requests
    requests = requests.replace(rollout=strike(requests.rollout))
    return sampler.replace(slots=slots, queue=sampler.queue.replace(requests=requests))


def begin(sampler: Sampler, offer: Offer | None) -> Sampler:
    """A new round, in which the host's tree offers these pages."""
    if sampler.pages is None:
        return sampler

    def run(shard, share: Share, offer: Offer, known) -> Share:
        held = pages.release(share.pages, ~share.slots.live)
        return share._replace(pages=pages.begin(held, offer))

    return on_each(run, sampler, mine=offer)


def outdate(sampler: Sampler, when: Bool[Array, ""], rewrite: bool) -> Sampler:
    """What an update does (when there is one): queued requests go without pages that older weights filled.

    With `rewrite` live slots lose their rows too, so that their tokens are prefilled again.
    """

    def run(shard, share: Share, _, when) -> Share:
        slots, _, held, pending = share
        unless = lambda a: jnp.where(when, 0, a)
        if held is not None:
            requests = share.queue.requests
            held = pages.let_go(held, requests.pages, jnp.where(when, requests.shared, 0))
            requests = requests.replace(shared=unless(requests.shared))
            share = share._replace(queue=share.queue.replace(requests=requests))
        if rewrite:
            slots = slots.replace(filled=unless(slots.filled))
            held = held and pages.release(held, jnp.broadcast_to(when, slots.live.shape))
            pending = pending if pending is None else unless(pending)
        return share._replace(slots=slots, pages=held, pending=pending)

    return on_each(run, sampler, known=when)


def send(sampler: Sampler, new: Requests) -> Sampler:
    """Takes the `new.count` first rows: those of rollouts that are parked into their slots, the others into the queue.

    A rollout whose slot is gone is thus prefilled from its tokens like any other: nothing is lost with a slot.
    """

    page = sampler.caches.page

    def run(shard, share: Share, _, new: Requests) -> Share:
        sent = (jnp.arange(new.rollout.shape[0]) < new.count) & (new.shard == shard)
        slots, seen = observe(share.slots, new, sent)
        wanted, held = sent & ~seen, share.pages
        if held is not None:
            most = jnp.minimum(new.shared, (new.length - 1) // page)  # the last token has to run
            number, shared = pages.named(held, new.pages, jnp.where(wanted, most, 0))
            held = pages.hold(held, number, shared)
            new = new.replace(pages=number, shared=shared)
        return share._replace(slots=slots, queue=enqueue(share.queue, new, wanted), pages=held)

    return on_each(run, sampler, known=new)


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
    put = lambda a, b: a.at[place].set(b, mode="drop")
    rows = jax.tree.map(put, old.replace(count=None), new.replace(count=None))
    return queue.replace(requests=rows.replace(count=old.count + jnp.sum(wanted, dtype=jnp.int32)))


_OF_REQUEST = ("rollout", "tokens", "length", "limit", "temperature", "top_p", "stop", "park")  # in Slots as well


def admit(sampler: Sampler, version: Int[Array, ""] | int = 0, ahead: int = 0) -> Sampler:
    """Free slots take the oldest requests, in slot order, and every slot gets the pages that this tick wants.

    `ahead`: how many tokens this tick may sample beyond one. Where pages do not suffice, requests wait; after that the
    youngest rollouts go back to the head of the queue, with their tokens.
    """
    page = sampler.caches.page

    def run(shard, share: Share, _, version) -> Share:
        if share.pages is not None:
            share = share._replace(pages=pages.release(share.pages, ~share.slots.live))
        share = _fill(share, version, page)
        return share if share.pages is None else _grow(share, version, page, ahead)

    return on_each(run, sampler, known=jnp.asarray(version, jnp.int32))


def _fill(share: Share, version: Int[Array, ""], page: int) -> Share:
    """Free slots take the oldest requests, as far as there are pages for them."""
    slots, queue, held, pending = share
    size = queue.requests.rollout.shape[0]
    free = ~slots.live
    rank = jnp.cumsum(free) - 1
    takes = free & (rank < queue.requests.count)
    row = (queue.head + rank) % size
    old, new = slots, jax.tree.map(lambda a: a[row], queue.requests.replace(count=None))
    if held is not None:
        more = jnp.cumsum(jnp.where(takes, -(-new.length // page) - new.shared, 0))
        # A page for each running rollout to grow into, lest it costs the newest one its own at once.
        fits = more <= pages.available(held) - jnp.sum(slots.live)
        takes &= fits | ((rank == 0) & ~jnp.any(slots.awake))
        held = pages.start(held, takes, rank, new.pages, new.shared, version)

    def pick(old, new):
        return jnp.where(takes.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    slots = slots.replace(
        filled=jnp.where(takes, new.shared * page, old.filled),
        parked=old.parked & ~takes,
        **{name: pick(getattr(old, name), getattr(new, name)) for name in _OF_REQUEST},
    )
    taken = jnp.sum(takes, dtype=jnp.int32)
    gone = (jnp.arange(size) - queue.head) % size < taken
    requests = queue.requests.replace(
        shared=jnp.where(gone, 0, queue.requests.shared), count=queue.requests.count - taken
    )
    pending = pending if pending is None else jnp.where(takes, 0, pending)
    return Share(slots, Queue(requests, (queue.head + taken) % size), held, pending)


def _grow(share: Share, version: Int[Array, ""], page: int, ahead: int) -> Share:
    """Pages for what every slot runs in this tick."""

    def want(slots: Slots) -> Int[Array, "B"]:
        return jnp.where(slots.awake, -(-jnp.minimum(slots.length + ahead, slots.limit) // page), 0)

    def short(share: Share):
        return pages.short(share.pages, want(share.slots)) > 0

    def retract(share: Share) -> Share:
        """The youngest slot yields, but never the oldest of those that are not parked: somebody goes on.

        A parked rollout comes back with its observation, any other from the queue.
        """
        slots, queue, held, pending = share
        oldest = jnp.argmin(jnp.where(slots.awake, held.since, jnp.iinfo(jnp.int32).max))
        slot = jnp.argmax(jnp.where(slots.live, held.since, -1).at[oldest].set(-1))
        old, size = queue.requests, queue.requests.rollout.shape[0]
        back = jnp.where(slots.parked[slot], 0, 1)
        head = (queue.head - back) % size
        place = jnp.where(back > 0, head, size)
        put = lambda a, b: a.at[place].set(b, mode="drop")
        row = {name: put(getattr(old, name), getattr(slots, name)[slot]) for name in _OF_REQUEST}
        requests = old.replace(**row, shared=put(old.shared, 0), count=old.count + back)
        which = jnp.arange(slots.rollout.shape[0]) == slot
        held = pages.release(held, which)
        held = held.replace(retracted=held.retracted + 1)
        slots = slots.replace(rollout=jnp.where(which, -1, slots.rollout))
        return Share(slots, Queue(requests, head), held, pending)

    requests = share.queue.requests
    held, strip = pages.make_room(share.pages, want(share.slots), (requests.pages, requests.shared))
    requests = requests.replace(shared=jnp.where(strip, 0, requests.shared))
    share = share._replace(pages=held, queue=share.queue.replace(requests=requests))
    share = jax.lax.while_loop(short, retract, share)
    return share._replace(pages=pages.grow(share.pages, want(share.slots), version))


def tell(sampler: Sampler, which: Bool[Array, "B"], version: Int[Array, ""]) -> Sampler:
    """Tells the host's tree of the pages that these slots have filled."""
    if sampler.pages is None:
        return sampler
    page = sampler.caches.page

    def run(shard, share: Share, which, version) -> Share:
        return share._replace(pages=_told(share, which, version, page))

    return on_each(run, sampler, which, version)


def close(sampler: Sampler, version: Int[Array, ""]) -> Sampler:
    """The end of a round: also tells of the pages of live slots."""
    if sampler.pages is None:
        return sampler
    page = sampler.caches.page

    def run(shard, share: Share, _, version) -> Share:
        return share._replace(pages=pages.close(_told(share, share.slots.live, version, page)))

    return on_each(run, sampler, known=version)


def _told(share: Share, which: Bool[Array, "B"], version: Int[Array, ""], page: int) -> Pages:
    """Pages are whole when the draft layer's rows are there too."""
    slots, pending = share.slots, share.pending
    rows = slots.filled if pending is None else jnp.where(pending < 0, 0, slots.filled - pending)
    return pages.tell(share.pages, which, slots.rollout, rows // page, version)
