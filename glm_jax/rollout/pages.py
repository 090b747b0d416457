"""Pages: who holds which part of the caches. Slots, requests in the queue and the host's prefix tree share them.

A page is free when nobody holds it. A slot gets pages as its rollout grows; those at its start it may share with others
that began with the same tokens, and then only reads. What a slot leaves behind is told to the host, whose tree holds
it for later requests to name, until the pages are wanted (or the tree gives them up).

Everything here is for one device: with several, each has its own pages, and their arrays stand side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class Told:
    """Pages that the tree holds from now on: those of `rollout` from its page `first` on, `count` of them."""

    rollout: Int[Array, "R"]  # -1: an empty row
    first: Int[Array, "R"]
    count: Int[Array, "R"]
    name: Int[Array, "R N"]  # -1: had to be given up in the same round


@struct.dataclass
class Offer:
    """What the tree gives up, by name: the first `drop` at once, the others in this order when pages are wanted.

    Pages that it does not name, because it has not heard of them yet, go after those.
    """

    name: Int[Array, "P"]  # -1: none
    drop: Int[Array, "1"]


@struct.dataclass
class Pages:
    """P pages of G columns, and the tables of B slots.

    A page's name is its number + P · how often it was handed out: one that was given to somebody else has another name.
    """

    name: Int[Array, "P"]
    holders: Int[Array, "P"]
    kept: Bool[Array, "P"]  # the tree is one of them
    rank: Int[Array, "P"]  # of those that the tree holds: the lowest are given up first
    lost: Int[Array, "P"]  # the name under which the tree lost a page in this round; -1: it did not
    table: Int[Array, "B N"]  # P where a slot has no page
    held: Int[Array, "B"]  # pages in a slot's table
    told: Int[Array, "B"]  # how many of them the tree knows
    since: Int[Array, "B"]  # when the slot took its rollout: the youngest yields first
    version: Int[Array, "B"]  # of the weights that began to fill the pages
    clock: Int[Array, "1"]
    news: Told
    retracted: Int[Array, "1"]  # rollouts that had to yield their pages in this round


def no_offer(pages: int, ways: int = 1) -> Offer:
    """As numpy arrays, which the host fills in place."""
    return Offer(np.full((pages,), -1, np.int32), np.zeros((ways,), np.int32))


def init(slots: int, pages: int, per_slot: int, ways: int = 1) -> Pages:
    """Of `slots` and `pages` in all, on `ways` devices; every page free."""
    here, rows = pages // ways, 2 * slots
    none = lambda *shape: jnp.full(shape, -1, jnp.int32)
    zero = lambda *shape: jnp.zeros(shape, jnp.int32)
    return Pages(
        name=jnp.tile(jnp.arange(here, dtype=jnp.int32), ways),
        holders=zero(pages),
        kept=jnp.zeros((pages,), bool),
        rank=zero(pages),
        lost=none(pages),
        table=jnp.full((slots, per_slot), here, jnp.int32),
        held=zero(slots),
        told=zero(slots),
        since=zero(slots),
        version=zero(slots),
        clock=zero(ways),
        news=Told(none(rows), zero(rows), zero(rows), none(rows, per_slot)),
        retracted=zero(ways),
    )


def _count(holders: Int[Array, "P"], page: Int[Array, "..."], which: Bool[Array, "..."], by: int) -> Int[Array, "P"]:
    """Holders, `by` more or fewer of each of these pages."""
    return holders.at[jnp.where(which, page, holders.shape[0])].add(by, mode="drop")


def _within(count: Int[Array, "B"], width: int) -> Bool[Array, "B N"]:
    return jnp.arange(width) < count[:, None]


def begin(pages: Pages, offer: Offer) -> Pages:
    """A new round: what was told has reached the host, and it makes a new offer."""
    total, width = pages.name.shape[0], pages.table.shape[1]
    number, position = jnp.maximum(offer.name, 0) % total, jnp.arange(total)
    # It may name what it does not know to be lost.
    known = (pages.name[number] == offer.name) & pages.kept[number]
    pages = _lose(pages, number, known & (position < offer.drop))
    new = pages.rank > total + width  # see `tell`
    rank = jnp.where(new, pages.rank - width, pages.rank)
    rank = rank.at[jnp.where(known, number, total)].set(position, mode="drop")
    return pages.replace(
        rank=rank,
        lost=jnp.full_like(pages.lost, -1),
        news=pages.news.replace(rollout=jnp.full_like(pages.news.rollout, -1)),
        retracted=jnp.zeros((1,), jnp.int32),
    )


def _lose(pages: Pages, number: Int[Array, "..."], which: Bool[Array, "..."]) -> Pages:
    """The tree is no holder of these pages any more."""
    place = jnp.where(which, number, pages.kept.shape[0])
    return pages.replace(
        holders=_count(pages.holders, number, which, -1),
        kept=pages.kept.at[place].set(False, mode="drop"),
        lost=pages.lost.at[place].max(jnp.where(pages.lost[number] < 0, pages.name[number], -1), mode="drop"),
    )


def named(pages: Pages, name: Int[Array, "A N"], most: Int[Array, "A"]) -> tuple[Int[Array, "A N"], Int[Array, "A"]]:
    """The numbers of named pages, and how many of each row, from the first, still hold what they were named for."""
    number = jnp.maximum(name, 0) % pages.name.shape[0]
    same = (pages.name[number] == name) & (pages.holders[number] > 0) & _within(most, name.shape[1])
    return number, jnp.sum(jnp.cumprod(same, axis=1), axis=1, dtype=jnp.int32)


def hold(pages: Pages, number: Int[Array, "A N"], count: Int[Array, "A"]) -> Pages:
    """One holder more of the first `count` pages of each row."""
    return pages.replace(holders=_count(pages.holders, number, _within(count, number.shape[1]), 1))


def let_go(pages: Pages, number: Int[Array, "A N"], count: Int[Array, "A"]) -> Pages:
    return pages.replace(holders=_count(pages.holders, number, _within(count, number.shape[1]), -1))


def release(pages: Pages, which: Bool[Array, "B"]) -> Pages:
    """These slots hold nothing any more."""
    pages = let_go(pages, pages.table, jnp.where(which, pages.held, 0))
    none = lambda a: jnp.where(which, 0, a)
    table = jnp.where(which[:, None], pages.name.shape[0], pages.table)
    return pages.replace(table=table, held=none(pages.held), told=none(pages.told))


def available(pages: Pages) -> Int[Array, ""]:
    """Pages that are free, or would be if the tree gave up all that it holds."""
    return jnp.sum((pages.holders == 0) | (pages.kept & (pages.holders == 1)))


def start(
    pages: Pages,
    takes: Bool[Array, "B"],
    rank: Int[Array, "B"],
    number: Int[Array, "B N"],
    shared: Int[Array, "B"],
    version: Int[Array, ""],
) -> Pages:
    """Slots take rollouts, in the order of `rank`, and the holds of their requests on `shared` pages."""
    width = pages.table.shape[1]
    pick = lambda new, old: jnp.where(takes, new, old)
    table = jnp.where(_within(shared, width), number, pages.name.shape[0])
    return pages.replace(
        table=jnp.where(takes[:, None], table, pages.table),
        held=pick(shared, pages.held),
        told=pick(shared, pages.told),
        since=pick(pages.clock + rank, pages.since),
        version=pick(version, pages.version),
        clock=pages.clock + jnp.sum(takes, dtype=jnp.int32),
    )


def short(pages: Pages, want: Int[Array, "B"]) -> Int[Array, ""]:
    """How many pages more slots want, beyond what they hold, than are free."""
    return jnp.sum(jnp.maximum(want - pages.held, 0)) - jnp.sum(pages.holders == 0)


def make_room(
    pages: Pages, want: Int[Array, "B"], queued: tuple[Int[Array, "Q N"], Int[Array, "Q"]]
) -> tuple[Pages, Bool[Array, ""]]:
    """Frees what is wanted, as far as that costs no running rollout its pages.

    First the tree gives up pages, by rank; then requests in the queue (their pages, and how many) go without those that
    they named: the last result says whether they have to.
    """

    def give_up(pages: Pages) -> Pages:
        last = jnp.iinfo(jnp.int32).max
        number = jnp.argsort(jnp.where(pages.kept, pages.rank, last))
        freed = jnp.cumsum(pages.kept[number] & (pages.holders[number] == 1))
        enough = jnp.searchsorted(freed, short(pages, want)) + 1
        return _lose(pages, number, pages.kept[number] & (jnp.arange(number.shape[0]) < enough))

    when_short = lambda pages, do: jax.lax.cond(short(pages, want) > 0, do, lambda pages: pages, pages)
    pages = when_short(pages, give_up)
    strip = short(pages, want) > 0
    return when_short(pages, lambda pages: let_go(pages, *queued)), strip


def grow(pages: Pages, want: Int[Array, "B"], version: Int[Array, ""]) -> Pages:
    """Free pages for slots that want more than they hold; there are enough. The lowest numbers go first."""
    total, width = pages.name.shape[0], pages.table.shape[1]
    more = jnp.maximum(want - pages.held, 0)
    free = pages.holders == 0
    nth = jnp.where(free, jnp.cumsum(free) - 1, total)
    numbers = jnp.zeros((total,), jnp.int32).at[nth].set(jnp.arange(total, dtype=jnp.int32), mode="drop")
    which = _within(jnp.maximum(want, pages.held), width) & ~_within(pages.held, width)
    nth_of_slot = (jnp.cumsum(more) - more - pages.held)[:, None] + jnp.arange(width)
    table = jnp.where(which, numbers[jnp.clip(nth_of_slot, 0, total - 1)], pages.table)
    place = jnp.where(which, table, total)
    # The last name that fits an integer is followed by the first.
    renamed = jnp.where(pages.name > jnp.iinfo(jnp.int32).max - total, pages.name % total, pages.name + total)
    return pages.replace(
        name=pages.name.at[place].set(renamed.at[place].get(mode="clip"), mode="drop"),
        holders=pages.holders.at[place].set(1, mode="drop"),
        table=table,
        held=pages.held + more,
        version=jnp.where((pages.held == 0) & (more > 0), version, pages.version),
    )


def tell(
    pages: Pages, which: Bool[Array, "B"], rollout: Int[Array, "B"], whole: Int[Array, "B"], version: Int[Array, ""]
) -> Pages:
    """Tells of the `whole` first pages of these slots, as far as the tree does not know them and there is room.

    Not of slots that began under older weights: what they hold is for no later request.
    """
    news, count, total = pages.news, whole - pages.told, pages.name.shape[0]
    wanted = which & (rollout >= 0) & (pages.version == version) & (count > 0)
    used = jnp.sum(news.rollout >= 0)
    place = jnp.where(wanted, used + jnp.cumsum(wanted) - 1, news.rollout.shape[0])
    wanted &= place < news.rollout.shape[0]
    width = pages.table.shape[1]
    column = jnp.minimum(pages.told[:, None] + jnp.arange(width), width - 1)
    number = jnp.take_along_axis(pages.table, column, axis=1)
    name = pages.name.at[number].get(mode="clip")
    put = lambda old, new: old.at[place].set(new, mode="drop")
    which = _within(jnp.where(wanted, count, 0), width)
    place_of_page = jnp.where(which, number, total)
    return pages.replace(
        holders=_count(pages.holders, number, which, 1),
        kept=pages.kept.at[place_of_page].set(True, mode="drop"),
        # After all that the tree can offer and what it was told before; what follows a page goes before it.
        rank=pages.rank.at[place_of_page].set(total + 2 * width - column, mode="drop"),
        told=jnp.where(wanted, whole, pages.told),
        news=Told(
            put(news.rollout, rollout), put(news.first, pages.told), put(news.count, count), put(news.name, name)
        ),
    )


def close(pages: Pages) -> Pages:
    """The end of a round: the news are of pages that are still held."""
    news = pages.news
    number = jnp.maximum(news.name, 0) % pages.name.shape[0]
    held = (pages.name[number] == news.name) & pages.kept[number]
    return pages.replace(news=news.replace(name=jnp.where(held, news.name, -1)))
