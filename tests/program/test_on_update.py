"""What an update does to live rollouts: they go on from old rows, or from rows that the new weights write."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from glm_jax.learn.batch import IDLE, SFT, VALUE
from tests.program.runs import LEARN, ROLLOUT, inbox, program, prompts, sampled, to_batch

pytestmark = pytest.mark.rollout

FIRST = 4  # ticks of a round: none of the rollouts is done after one


@cache
def built(on_update: str):
    learn = replace(LEARN, advantage="running_mean")  # compiles no critic
    return program({}, rollout=replace(ROLLOUT, ticks=FIRST, on_update=on_update), config=learn)


@cache
def rounds(on_update: str, mode: int, anew: bool = False) -> list[dict]:
    """Tokens and log-probs by rollout of two rounds, the first of which learns.

    `anew`: between them the sampler is emptied, and every rollout sent again with what it sampled.
    """
    run, some = built(on_update), prompts()[:8]
    state = run.init(0)
    batch = to_batch({rollout: [(1, -1.0)] * 3 for rollout, *_ in prompts()})
    state, out = run.round(state, inbox(some, batch, mode))
    first = sampled([jax.device_get(out.log)])
    again = []
    if anew:
        state = run.reset_sampler(state)
        again = [(r, prompt + [token for token, _ in first[r]], limit) for r, prompt, limit in some]
    _, out = run.round(state, inbox(again))
    return [first, sampled([jax.device_get(out.log)])]


def same(a: dict, b: dict) -> bool:
    tokens = lambda found: {rollout: [token for token, _ in pairs] for rollout, pairs in found.items()}
    logp = lambda found: np.concatenate([[p for _, p in found[rollout]] for rollout in sorted(found)])
    return tokens(a) == tokens(b) and np.allclose(logp(a), logp(b), atol=1e-5)


def test_recomputed_rollouts_go_on_as_if_they_had_been_sent_again():
    assert same(rounds("recompute", SFT)[1], rounds("keep", SFT, anew=True)[1])


def test_kept_rows_are_those_of_the_old_weights():
    assert same(rounds("keep", SFT)[0], rounds("recompute", SFT)[0])
    assert not same(rounds("keep", SFT)[1], rounds("recompute", SFT)[1])


@pytest.mark.parametrize("mode", [IDLE, VALUE])
def test_without_an_update_of_the_policy_nothing_is_recomputed(mode):
    assert same(rounds("recompute", mode)[1], rounds("keep", mode)[1])
