"""The running estimate of lengths, against means taken by hand."""

from __future__ import annotations

import random

import pytest

from glm_jax.host.lengths import KEPT, Lengths


def known(lengths, kind="a"):
    found = Lengths()
    for length in lengths:
        found.add(kind, length)
    return found


def test_what_a_rollout_has_sampled_already_is_taken_into_account():
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(4, 1)) + 1 for _ in range(100)]
    found = known(lengths)
    for sampled in (0, 5, 50, 54, 200, max(lengths) - 1):
        longer = [length - sampled for length in lengths if length > sampled]
        assert found.remaining("a", sampled, 10**6) == pytest.approx(sum(longer) / len(longer))
    assert found.remaining("a", max(lengths), 10**6) == max(lengths), "as many again where none was longer"


def test_the_estimate_lies_between_one_and_what_is_left():
    assert known([100]).remaining("a", 0, 7) == 7
    assert known([100]).remaining("a", 0, 700) == 100
    assert Lengths().remaining("a", 3, 50) == 50, "nothing is known yet"
    assert known([0, 0]).remaining("a", 0, 50) == 1


def test_kinds_are_apart_and_an_unknown_one_goes_by_all():
    found = known([10, 20])
    found.add("b", 60)
    assert (found.remaining("a", 0, 99), found.remaining("b", 0, 99)) == (15, 60)
    assert found.remaining("c", 0, 99) == 30
    found.add("c", 3)
    assert found.remaining("c", 0, 99) == 3


def test_it_follows_a_policy_whose_answers_grow():
    found = known([10] * KEPT + [40] * KEPT)
    assert found.remaining("a", 0, 99) == 40


def test_a_restored_estimate_goes_on_as_the_one_that_was_saved():
    found, again = known([3, 9, 30] * 100), Lengths()
    again.restore(found.state())
    for one in (found, again):
        one.add("a", 70)
    assert [again.remaining("a", n, 99) for n in range(80)] == [found.remaining("a", n, 99) for n in range(80)]
