"""The engine: what begins alike is computed once, and nobody's tokens hang on that."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import numpy as np
import pytest

from glm_jax.host.engine import Engine
from glm_jax.host.errors import RunError
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.generate import generate
from tests.model.tiny import random_params, two_layers

pytestmark = pytest.mark.rollout

MODEL = two_layers()
SIZES = RolloutConfig(slots=4, window=48, ticks=8, queue=8, requests=8, prefill_slots=2, prefill_chunk=4, page=4)


@cache
def params():
    return random_params(MODEL)


def run(engine: Engine) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for _ in range(300):
        if not engine.busy:
            return found
        for part in engine.round():
            found.setdefault(part.rollout, []).extend(part.tokens)
    raise AssertionError("the engine goes on for ever")


def greedily(prompts, new):
    return [c.tokens for c in generate(params(), MODEL, prompts, new)]


@pytest.mark.parametrize("pages", [48, 13])
def test_turns_of_conversations_run_only_what_is_new_and_answer_as_if_sent_whole(pages):
    """Six conversations of four turns under one system prompt, with pages for all of them and for hardly one."""
    rng = random.Random(0)
    some = lambda count: [rng.randrange(1, MODEL.vocab_size) for _ in range(count)]
    engine = Engine(params(), MODEL, dataclasses.replace(SIZES, pages=pages))
    system = some(9)
    talks = [system + some(3) for _ in range(6)]
    asked = 0
    for turn in range(4):
        want = greedily(talks, 4)
        numbers = [engine.submit(talk, 4) for talk in talks]
        asked += sum(len(talk) - 1 for talk in talks)
        found = run(engine)
        assert [found[number] for number in numbers] == want, turn
        talks = [talk + answer + some(2) for talk, answer in zip(talks, want, strict=True)]
    usage = engine.usage
    assert usage["decoded"] == 6 * 4 * 4
    if pages == 48:
        assert usage["prefilled"] + usage["reused"] == asked, "every prompt token is run or was there"
        # Of each later turn all but the last, unfilled page is there.
        assert usage["reused"] >= asked - 6 * 4 * (4 + 4 + 2) - len(system) * 5
    else:
        assert usage["prefilled"] + usage["reused"] >= asked, "some yielded and were run again"


def test_a_cancelled_request_ends_at_once_and_its_number_is_heard_no_more():
    engine = Engine(params(), MODEL, SIZES)
    first, second = engine.submit([1, 2, 3], 40), engine.submit([4, 5], 6)
    waiting = [engine.submit([7], 3) for _ in range(12)]
    assert {part.rollout for part in engine.round(ticks=2)} == {first, second, *waiting[:2]}
    engine.cancel(first)
    engine.cancel(waiting[-1])
    found = run(engine)
    assert first not in found and waiting[-1] not in found
    assert len(found[second]) == 4 and not engine.busy
    engine.round()
    assert not engine.state.slots.live.any() and int((engine.state.pages.holders > 0).sum()) == engine.shards.kept


def test_what_does_not_fit_is_refused_with_its_numbers():
    engine = Engine(params(), MODEL, SIZES)
    with pytest.raises(RunError, match="40 tokens and 9 new ones.*window of 48"):
        engine.submit([1] * 40, 9)
    with pytest.raises(RunError, match="pages=3 of 4 columns cannot hold .* window=48 tokens: 12 pages can"):
        Engine(params(), MODEL, dataclasses.replace(SIZES, pages=3))


def test_the_host_holds_no_more_after_many_rounds():
    """Trees, tables and books stay as large as the pool, however much was sampled."""
    engine = Engine(params(), MODEL, dataclasses.replace(SIZES, pages=20))
    rng = np.random.default_rng(0)
    for _ in range(60):
        for _ in range(4):
            engine.submit(rng.integers(1, MODEL.vocab_size, rng.integers(1, 30)).tolist(), 8)
        run(engine)
    (tree,) = engine.shards._trees
    assert len(tree) <= 20 and len(tree._drop) <= 20
    assert not engine.shards._tokens and not engine.shards._router._of and not engine.running
    kept = {int(n) for n, k in zip(engine.state.pages.name, engine.state.pages.kept, strict=True) if k}
    assert {*tree._nodes, *tree._drop} >= kept >= {*tree._nodes}
