"""Which depth the pace chooses, against machines of known speeds."""

from __future__ import annotations

from collections import Counter

import pytest

from glm_jax.rollout.pace import TRIAL, Pace


def used(pace: Pace, speed, rounds: int) -> Counter:
    """How often each depth runs on a machine that samples speed(depth, round) tokens per second."""
    seen: Counter[int] = Counter()
    for n in range(rounds):
        depth = pace.next()
        seen[depth] += 1
        pace.add(depth, int(1000 * speed(depth, n)), 1000.0)
    return seen


@pytest.mark.parametrize("best", [0, 2, 5])
def test_it_settles_on_the_fastest_and_seldom_tries_the_others(best):
    seen = used(Pace((2, 5)), lambda depth, n: 10 - abs(depth - best), 1000)
    assert seen[best] >= 0.96 * 1000 and all(seen[depth] >= 1000 // (2 * TRIAL) for depth in (0, 2, 5))


def test_drafts_that_are_hardly_faster_are_not_made():
    speeds = {0: 100, 2: 103, 5: 104}
    assert used(Pace((2, 5)), lambda depth, n: speeds[depth], 200)[0] > 190
    assert used(Pace((2, 5)), lambda depth, n: speeds[depth] + 2 * (depth == 5), 200)[5] > 190


def test_it_follows_a_machine_that_changes():
    pace = Pace((5,))
    assert used(pace, lambda depth, n: 2 if depth else 1, 200)[5] > 190
    assert used(pace, lambda depth, n: 1 if depth else 2, 400)[0] > 300


def test_the_first_round_drafts_deepest_and_is_tried_again_while_unmeasured():
    pace = Pace((2, 5))
    assert [pace.next(), pace.next()] == [5, 5] and not pace.knows
    pace.add(5, 0, 1.0)  # nothing was sampled
    assert pace.next() == 5
    pace.add(5, 10, 1.0)
    assert pace.next() == 2


def test_fixed_is_the_deepest_and_without_drafts_there_is_nothing_to_choose():
    assert used(Pace((2, 5), fixed=True), lambda depth, n: 10 - depth, 100) == {5: 100}
    assert used(Pace(()), lambda depth, n: 1, 100) == {0: 100}


def test_a_guess_stands_until_the_depth_was_measured():
    pace = Pace((2, 5))
    for depth, speed in ((5, 30), (2, 20), (0, 10)):
        assert pace.next() == depth and not pace.knows
        pace.guess(depth, speed, 1.0)
    assert pace.knows and not pace.settled and pace.best == 5
    for depth, speed in ((5, 3), (2, 2), (0, 1)):  # on the whole all are slower, and 5 is still the best
        assert pace.next() == depth
        pace.add(depth, speed, 1.0)
    assert pace.settled and pace.speed == {5: 3, 2: 2, 0: 1} and pace.next() == 5
