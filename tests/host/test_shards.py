"""Requests among several shards: to the pages that hold their first tokens, or to where their slot is."""

from __future__ import annotations

import numpy as np

from glm_jax.host.router import Job
from glm_jax.host.shards import Place, Shards
from glm_jax.program.exchange import PageNews
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled
from glm_jax.rollout.pages import Told
from glm_jax.rollout.requests import GOES_ON, PARKED

SIZES = RolloutConfig(slots=4, window=24, ticks=4, queue=8, page=4, prefill_slots=2, prefill_chunk=4)
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]  # two pages


def send(shards, **requests):
    """Places of rollouts, named r0, r1, ..., with these tokens."""
    rows = [(Job(int(name[1:]), "a", 0, most=8, prompt=len(tokens)), tokens) for name, tokens in requests.items()]
    return shards.send(rows, cancel=())


def back(shards, *sampled, told=None):
    """A round comes back; `told`: (shard, rollout, names of its first pages)."""
    rollout, count, name = np.full(4, -1), np.zeros(4, int), np.full((4, SIZES.per_slot), -1)
    if told:
        row = 2 * told[0]
        rollout[row], count[row], name[row, : len(told[2])] = told[1], len(told[2]), told[2]
    news = PageNews(Told(rollout, np.zeros(4, int), count, name), np.full(SIZES.pool, -1))
    parts = [Sampled(rollout, tokens, [0.0] * len(tokens), 0, ending) for rollout, tokens, ending in sampled]
    shards.came_back(parts, [0, 0], news, current=True)


def test_rollouts_that_begin_alike_share_the_shard_that_holds_their_pages_until_it_is_behind():
    shards = Shards(SIZES, 2)
    assert send(shards, r0=[9] * 5, r1=[*SYSTEM, 10]) == [Place(0), Place(1)]
    back(shards, (1, [3], GOES_ON), told=(1, 1, [40, 41]))
    assert send(shards, r2=[*SYSTEM, 11]) == [Place(1, [40, 41])]
    assert send(shards, r3=[9] * 9) == [Place(0)]
    # In ticks 11.5 are to do at the first, 7.75 at the second; another rollout is 4, its pages save 2 for the prompt.
    places = send(shards, **{f"r{n}": [*SYSTEM, n] for n in range(14, 17)})
    assert places == [Place(1, [40, 41]), Place(1, [40, 41]), Place(0)]


def test_a_parked_rollout_goes_on_where_its_slot_is_however_much_there_is_to_do():
    shards = Shards(SIZES, 2)
    send(shards, r0=[9] * 5, r1=[9] * 5)
    back(shards, (1, [3], PARKED))
    send(shards, r2=[7] * 5, r3=[8] * 5, r4=[6] * 5)
    back(shards)
    room = shards.room()
    assert send(shards, r1=[9] * 5 + [3, 4]) == [Place(1)]
    assert shards.room() == room, "it needs no place in a queue"


def test_a_reset_forgets_places_and_keeps_what_is_known_of_lengths():
    shards = Shards(SIZES, 2)
    shards.lengths.add("a", 5)
    assert send(shards, r0=[9] * 5, r1=[9] * 5) == [Place(0), Place(1)]
    back(shards, (0, [3], PARKED), (1, [3], GOES_ON))
    shards.reset()
    assert send(shards, r1=[9] * 6, r0=[9] * 6) == [Place(0), Place(1)]
    assert shards.lengths.state() == {"a": [5]} and shards.room() == SIZES.queue - 2
