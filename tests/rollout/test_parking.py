"""Rollouts that wait for an observation: they keep slot and cache, hold up nobody, and then go on unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from glm_jax.rollout.requests import LENGTH, STOP
from tests.rollout.driver import SIZES, Driver, prompts, some_requests

OBSERVED = [3, 1, 4, 1, 5]


def free(requests: list[tuple]) -> Driver:
    return Driver().finish(requests)


def parking(rollout: int, at: int) -> tuple[tuple, list[int]]:
    """A request whose token number `at` is the one that parks it, and what it samples up to there."""
    request = next(r for r in some_requests() if r[0] == rollout)
    tokens = free([request]).tokens[rollout]
    at = tokens.index(tokens[at])
    settings = request[3] | {"park": tokens[at]}
    return (rollout, request[1], 20, settings), tokens[: at + 1]


@pytest.mark.parametrize("slot_is_kept", [True, False])
def test_an_observation_is_prefilled_onto_the_kept_cache_as_if_all_had_been_sent_at_once(slot_is_kept):
    request, sampled = parking(100, 2)
    rollout, prompt, limit, settings = request
    done = Driver()
    done.round([request])
    assert done.parked == {rollout} and done.tokens[rollout] == sampled and not done.busy
    before = int(done.usages[-1].prefilled)
    assert before == len(prompt) - 1
    if not slot_is_kept:
        done.round(cancel=[rollout])
        done.parked.clear()
    whole = prompt + sampled + OBSERVED
    settings = settings | {"park": -1}
    want = free([(rollout, whole, limit, settings)])
    done.finish([(rollout, whole, limit, settings)])
    # The last token of a prompt is decoded, not prefilled; so is the one that parked the rollout.
    new = len(OBSERVED) if slot_is_kept else len(whole) - 1
    assert sum(int(u.prefilled) for u in done.usages) == before + new
    assert done.tokens[rollout] == sampled + want.tokens[rollout] and done.ending[rollout] == LENGTH
    np.testing.assert_allclose(done.logp[rollout][len(sampled) :], want.logp[rollout], atol=2e-6)


def test_parked_slots_hold_up_neither_the_round_nor_other_rollouts():
    request, sampled = parking(100, 2)
    others = [(i, p, 19, {}) for i, p in enumerate(prompts(5, seed=3))]
    want = free(others)
    done = Driver()
    done.round([request, *others])
    for _ in range(40):
        done.round()
    assert done.parked == {100} and done.tokens[100] == sampled
    assert {i: done.tokens[i] for i in range(5)} == {i: want.tokens[i] for i in range(5)}


def test_with_every_slot_parked_a_round_ends_at_once_and_requests_wait():
    request, _ = parking(100, 0)
    rollouts = [(100, *request[1:])]
    # The same rollout's numbers hang on its id: others park at the first token that they sample themselves.
    for i in range(SIZES.slots - 1):
        first = free([(i, [i + 1], 19, {"temperature": 1.0})]).tokens[i][0]
        rollouts.append((i, [i + 1], 19, {"temperature": 1.0, "park": first}))
    waiting = (50, [9], 12, {})
    done = Driver()
    done.round([*rollouts, waiting])
    assert len(done.parked) == SIZES.slots and not done.tokens[50]
    assert done.round().ticks == 0, "nothing can be sampled, so no tick is used"
    done.round(cancel=[100])
    assert done.tokens[50] == free([waiting]).tokens[50][: SIZES.ticks]


def test_stop_ids_and_the_limit_come_before_parking():
    request, sampled = parking(100, 2)
    rollout, prompt, _, settings = request
    stops = settings | {"stop": np.array([settings["park"], *[-1] * 7])}
    assert Driver().finish([(rollout, prompt, 20, stops)]).ending == {rollout: STOP}
    short = len(prompt) + len(sampled)
    assert Driver().finish([(rollout, prompt, short, settings)]).ending == {rollout: LENGTH}
