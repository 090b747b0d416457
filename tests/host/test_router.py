"""Where rollouts go: by what is expected of them, to pages of theirs, never beyond a queue, and in their turn."""

from __future__ import annotations

import dataclasses
import random

import pytest

from glm_jax.host.errors import RunError
from glm_jax.host.lengths import Lengths
from glm_jax.host.router import HORIZON, Job, Router
from glm_jax.rollout.config import RolloutConfig

SIZES = RolloutConfig(slots=4, window=1000, ticks=10, queue=80, requests=4, prefill_slots=2, prefill_chunk=5)
SHARDS, STEP = 2, 5  # prompt tokens that a shard runs in a step: one slot, a chunk


def router(sizes=SIZES, shards=SHARDS, **kinds):
    lengths = Lengths()
    for kind, length in kinds.items():
        lengths.add(kind, length)
    return Router(sizes, shards, lengths)


def job(number, kind="short", sampled=0, prompt=0):
    return Job(number, kind, sampled, most=900, prompt=prompt)


def place(router, *jobs, known=()):
    router.begin()
    return [router.place(job, dict(known)) for job in jobs]


def test_requests_go_where_least_is_left_to_sample_and_not_where_fewest_are():
    found = router(short=10, long=45)
    assert place(found, job(0, "long"), *map(job, range(1, 5))) == [0, 1, 1, 1, 1]
    assert place(found, job(5)) == [1]
    assert place(found, job(6), job(7)) == [0, 1], "50 and 45 are expected there"


def test_what_was_sampled_meanwhile_is_taken_into_account():
    found = router(long=60, short=20)
    assert place(found, job(0, "long"), job(1), job(2)) == [0, 1, 1]
    found.came_back([(0, 45), (1, 1)], [0, 0])
    assert place(found, job(3)) == [0], "15 are expected there, and 39 on the other"


def test_what_left_counts_no_more():
    found = router(long=60, short=20)
    place(found, job(0, "long"), job(1))
    found.came_back([(0, 1), (1, 1)], [0, 0])
    found.leave(0)
    assert place(found, job(2)) == [0]


def test_beyond_the_horizon_it_does_not_matter_how_long_a_rollout_takes():
    found, horizon = router(endless=800, short=HORIZON * SIZES.ticks // 2), HORIZON * SIZES.ticks
    assert 800 > horizon
    assert place(found, job(0, "endless"), job(1), job(2), job(3)) == [0, 1, 1, 0]


@pytest.mark.parametrize(("behind", "home"), [(1, 1), (2, 1), (3, 0)])
def test_a_prefix_draws_a_rollout_unless_its_shard_is_behind_by_more_than_that_saves(behind, home):
    # 100 tokens of a prompt take 20 steps, as do 40 tokens to sample on two slots.
    found = router(short=20)
    place(found, *(job(n) for n in range(2 * behind)))  # half of them on each
    for number in range(0, 2 * behind, 2):
        found.leave(number)
    assert place(found, job(99, prompt=150), known={1: 100}) == [home]


def test_a_prompt_is_work_too_but_only_what_of_it_is_to_run():
    found = router(short=20)
    assert place(found, job(0, prompt=100), known={1: 100}) == [1]
    assert place(found, job(1), job(2, prompt=100), job(3)) == [0, 0, 1], "nobody had to run the first one's prompt"
    assert place(found, job(4)) == [1], "and the other's is still to run"
    found.came_back([(2, 1)], [0, 0])
    assert place(found, job(5)) == [0], "which it is no more"


def test_no_queue_is_sent_more_than_it_has_room_for():
    found = router(dataclasses.replace(SIZES, queue=8), short=20)
    assert place(found, *(job(n) for n in range(4)), known={1: 900}) == [1] * 4
    assert found.room() == 4
    assert place(found, job(4), known={1: 900}) == [0], "its pages are on a shard without room"
    found.came_back([], [0, 2])  # the first round
    assert found.room() == 4 - 1 + 2
    place(found, *(job(n) for n in range(5, 10)))
    assert found.room() == 0
    with pytest.raises(RunError, match="rollout 10 was sent, but no queue has room"):
        place(found, job(10))


def test_queues_fill_evenly():
    found = router(RolloutConfig(slots=32, queue=64, ticks=10, window=1000), 8, short=20)
    places = place(found, *(job(n) for n in range(64)))
    assert {places.count(shard) for shard in range(8)} == {8}


def test_equal_calls_give_equal_places():
    def go() -> list[int]:
        rng, found, places = random.Random(3), router(long=80, short=20), []
        for number in range(0, 400, 4):
            jobs = [job(number + i, rng.choice(["long", "short"]), prompt=rng.randrange(90)) for i in range(4)]
            places += place(found, *jobs, known={rng.randrange(2): 40})
            found.came_back([(n, rng.randrange(10)) for n in range(number)], [0, 0])
            found.leave(rng.randrange(number + 4))
        return places

    assert go() == go() and len(set(go())) == 2
