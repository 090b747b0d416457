"""What the host remembers of pages: which rollouts left them, and when those stop to count."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from glm_jax.host.router import Job
from glm_jax.host.shards import Shards
from glm_jax.program.exchange import PageNews
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled
from glm_jax.rollout.pages import Told
from glm_jax.rollout.requests import GOES_ON, STOP

SIZES = RolloutConfig(slots=4, window=16, queue=8, page=4, pages=16)
SAYS = list(range(20, 29))
NOTHING = MappingProxyType({})


def news(
    shards: Shards, told: Mapping[int, tuple[int, list[int]]] = NOTHING, lost: Mapping[int, int] = NOTHING
) -> PageNews:
    """told: of a rollout, the shard and the names of its first pages; lost: a name by shard."""
    rows = 2 * SIZES.slots
    empty = Told(np.full(rows, -1), np.zeros(rows, int), np.zeros(rows, int), np.full((rows, 4), -1))
    for rollout, (shard, names) in told.items():
        row = shard * rows // shards.count
        empty.rollout[row], empty.count[row], empty.name[row, : len(names)] = rollout, len(names), names
    gone = np.full(SIZES.pool, -1)
    for shard, name in lost.items():
        gone[shard * SIZES.pool // shards.count] = name
    return PageNews(empty, gone)


def part(rollout: int, ending: int = GOES_ON, count: int = 3) -> Sampled:
    return Sampled(rollout, [7] * count, [0.0] * count, 0, ending)


def job(rollout: int, tokens: list[int]) -> Job:
    return Job(rollout, "", 0, most=4, prompt=len(tokens))


def begun(count: int = 1) -> Shards:
    """Rollout 1 has ended, and left two pages of SAYS."""
    shards = Shards(SIZES, count)
    (place,) = shards.send([(job(1, SAYS), SAYS)], [])
    assert place.pages == []
    shards.offer()
    told = news(shards, {1: (place.shard, [3, 5])})
    shards.came_back([part(1, STOP)], [0] * count, told, current=True)
    return shards


def ask(shards: Shards, rollout: int, tokens: list[int]):
    (place,) = shards.send([(job(rollout, tokens), tokens)], [])
    return place


def test_a_later_turn_names_what_an_earlier_one_left():
    shards = begun()
    assert ask(shards, 2, [*SAYS, 7, 7, 7, 1]).pages == [3, 5] and shards.kept == 2
    assert ask(shards, 3, SAYS[:6]).pages == [3]


def test_an_update_ends_it_also_for_news_that_were_under_way():
    shards = begun()
    ask(shards, 2, [1] * 9)
    shards.offer()
    shards.updated()  # by that round, which sampled before
    assert ask(shards, 3, [*SAYS, 1]).pages == []
    offer = shards.offer()
    assert offer.name[:2].tolist() == [3, 5] and offer.drop.tolist() == [2]
    shards.came_back([part(2)], [0], news(shards, {2: (0, [9, 8])}), current=False)
    assert ask(shards, 4, [1] * 10).pages == []
    offer = shards.offer()
    assert offer.name[:2].tolist() == [9, 8] and offer.drop.tolist() == [2]


def test_what_the_device_lost_is_named_no_more():
    shards = begun()
    ask(shards, 2, [1] * 9)
    shards.came_back([part(2)], [0], news(shards, lost={0: 5}), current=True)
    assert ask(shards, 3, [*SAYS, 1]).pages == [3]


def test_pages_of_a_cancelled_rollout_are_dropped():
    shards = begun()
    ask(shards, 2, [1] * 9)
    shards.send([], [2])
    shards.came_back([part(2)], [0], news(shards, {2: (0, [9])}), current=True)
    offer = shards.offer()
    assert offer.name[0] == 9 and offer.drop.tolist() == [1]


def test_a_request_goes_where_its_prefix_is_and_each_shard_has_names_of_its_own():
    shards = begun(count=2)
    place = ask(shards, 2, [*SAYS, 1])
    assert place.pages == [3, 5]
    other = 1 - place.shard
    shards.came_back([part(2, STOP)], [0, 0], news(shards, lost={other: 3}), current=True)
    assert ask(shards, 3, [*SAYS, 2]).pages == [3, 5], "the other shard lost its own page 3"


def test_without_reuse_nothing_is_named():
    shards = Shards(SIZES, 1, reuse=False)
    ask(shards, 1, SAYS)
    shards.came_back([part(1, STOP)], [0], news(shards, {1: (0, [3, 5])}), current=True)
    assert ask(shards, 2, [*SAYS, 7]).pages == []
