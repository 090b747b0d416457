"""The sampling phase of a round: who gets a slot when, how rollouts end, and that nothing else changes their tokens."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
from glm_jax.rollout.requests import GOES_ON, LENGTH, STOP
from glm_jax.rollout.sampling import SAMPLE, uniform
from tests.rollout.driver import MODEL, SIZES, WINDOW, Driver, params, prompts, some_requests
from tests.rollout.test_sampling import cut, softmax


@cache
def finished() -> Driver:
    return Driver().finish(some_requests())


def test_every_token_is_drawn_at_its_own_number_from_the_full_forward_pass():
    """The whole chain (prefill, cache, decode, sampling) against the plain model and a numpy inversion."""
    done = finished()
    tokens, documents = np.zeros((10, WINDOW), np.int32), np.zeros((10, WINDOW), np.int32)
    for row, (rollout, prompt, limit, _) in enumerate(some_requests()):
        whole = prompt + done.tokens[rollout]
        assert len(whole) == limit and done.ending[rollout] == LENGTH
        tokens[row, : len(whole)], documents[row, : len(whole)] = whole, 1
    logits = jax.jit(lambda p, t, d: glm_jax.forward(p, MODEL, t, d).logits)(params(), tokens, documents)
    for row, (rollout, prompt, _, settings) in enumerate(some_requests()):
        for n, (token, logp) in enumerate(zip(done.tokens[rollout], done.logp[rollout], strict=True)):
            position = len(prompt) + n
            scores = np.asarray(logits[row, position - 1], np.float64)
            if settings["temperature"] == 0:
                assert (token, logp) == (scores.argmax(), 0.0)
                continue
            prob = softmax(scores / settings["temperature"])
            prob = np.where(cut(prob, settings["top_p"]), prob, 0) if settings["top_p"] < 1 else prob
            prob /= prob.sum()
            number = float(uniform(jnp.int32(11), jnp.array([rollout]), jnp.array([position]), SAMPLE)[0])
            assert token == np.searchsorted(np.cumsum(prob), number, side="right"), (rollout, position)
            assert logp == pytest.approx(np.log(prob[token]), abs=2e-5)


@pytest.mark.parametrize(
    "slots, ticks, prefill_slots, prefill_chunk, queue", [(3, 64, 3, 8, 16), (2, 1, 1, 2, 3), (7, 5, 5, 1, 8)]
)
def test_slots_ticks_rounds_prefill_sizes_and_order_change_no_token(slots, ticks, prefill_slots, prefill_chunk, queue):
    sizes = dataclasses.replace(
        SIZES,
        slots=slots,
        ticks=ticks,
        prefill_slots=prefill_slots,
        prefill_chunk=prefill_chunk,
        queue=queue,
        requests=10,
    )
    other = Driver(sizes).finish(reversed(some_requests()))
    assert (len(other.logs) == 1) == (ticks == 64)
    assert other.tokens == finished().tokens and other.ending == finished().ending
    for rollout, logp in other.logp.items():
        np.testing.assert_allclose(logp, finished().logp[rollout], atol=2e-6)


def test_prompts_run_in_pieces_between_the_tokens_of_others_change_nothing():
    sizes = dataclasses.replace(SIZES, prefill_steps=2, prefill_slots=1, prefill_chunk=1, ticks=64)
    other = Driver(sizes).finish(some_requests())
    assert other.tokens == finished().tokens and other.ending == finished().ending
    log = other.logs[0]
    first = lambda rollout: int(np.argwhere(log.rollout == rollout)[0, 0])
    waits = [first(rollout) for rollout, prompt, *_ in some_requests()[:3] if len(prompt) > 3]
    assert waits and min(waits) > 0, "a long prompt takes more than one tick"
    assert any((row >= 0).sum() not in (0, 3) for row in log.rollout[: max(waits)]), "others sample meanwhile"
    assert sum(int(u.idle) for u in other.usages) == 0, "a slot that is being filled is not idle"


def test_a_rollout_that_is_prefilled_again_from_its_tokens_goes_on_as_before():
    sampled = dict(zip((rollout for rollout, *_ in some_requests()), [1, 3] * 5, strict=True))
    again = Driver()
    again.finish((r, p + finished().tokens[r][: sampled[r]], limit, s) for r, p, limit, s in some_requests())
    for rollout, n in sampled.items():
        assert again.tokens[rollout] == finished().tokens[rollout][n:]


def test_a_slot_that_frees_takes_the_oldest_request_in_the_next_tick_of_the_same_round():
    done = Driver()
    log = done.round([(i, [i + 1], 3 + i % 3) for i in range(8)])
    owners, ends = log.rollout[: log.ticks], log.ending[: log.ticks] != GOES_ON
    first_seen = list(dict.fromkeys(owners[owners >= 0].tolist()))
    assert len(first_seen) >= 6 and first_seen == list(range(len(first_seen))), "first in, first out"
    assert ends[:-1].sum() >= 4
    for tick, slot in np.argwhere(ends[:-1]):
        before, after = owners[tick, slot], owners[tick + 1, slot]
        assert after > before, f"slot {slot} stands idle in tick {tick + 1}"
    assert (owners >= 0).all(), "no slot is idle while a request waits"
    assert done.usages[0].idle == 0 and done.usages[0].waiting > 0


def test_free_slots_sample_nothing_and_a_round_ends_when_nothing_is_left():
    done = Driver()
    log = done.round([(5, [1, 2, 3, 4, 5], 8)])
    assert log.ticks == 3 and not done.busy
    assert (log.rollout >= 0).sum() == 3 and (log.rollout[:3, 0] == 5).all()
    assert not log.ending[:, 1:].any() and log.ending[:3, 0].tolist() == [GOES_ON, GOES_ON, LENGTH]
    assert (done.usages[0].decoded, done.usages[0].prefilled) == (3, 4)
    assert done.round().ticks == 0, "an idle round uses no tick"


def test_usage_counts_every_token_and_every_prompt_token_once():
    done = finished()
    assert sum(int(u.decoded) for u in done.usages) == sum(map(len, done.tokens.values()))
    assert sum(int(u.prefilled) for u in done.usages) == sum(len(p) - 1 for _, p, *_ in some_requests())
    assert all(log.version == 4 for log in done.logs)


def test_a_stop_id_ends_a_rollout_is_kept_and_comes_before_the_limit():
    (rollout, prompt, _, settings), *_ = some_requests()
    free = finished().tokens[rollout]
    stop = free[5]
    length = free.index(stop) + 1
    for limit, ids in ((20, [stop]), (len(prompt) + length, [stop]), (20, [63, 63, 63, 63, 63, 63, 63, stop])):
        done = Driver().finish(
            [(rollout, prompt, limit, settings | dict(stop=np.pad(ids, (0, 8 - len(ids)), constant_values=-1)))]
        )
        if 63 not in free[:length]:
            assert done.tokens[rollout] == free[:length] and done.ending[rollout] == STOP
    done = Driver().finish([(rollout, prompt, len(prompt) + 1, settings)])
    assert done.tokens[rollout] == free[:1] and done.ending[rollout] == LENGTH


def test_cancelled_rollouts_leave_slot_and_queue_and_the_rest_go_on_unchanged():
    requests = [(i, p, 19, dict(temperature=1.0)) for i, p in enumerate(prompts(6, seed=3))]
    want = Driver().finish(requests)
    done = Driver()
    done.round(requests)
    live, queued = [0, 1, 2], [3, 4, 5]
    assert done.state.slots.rollout.tolist() == live and int(done.state.queue.requests.count[0]) == 3
    log = done.round(cancel=[1, 4, 77])
    assert not np.isin(log.rollout, [1, 4]).any()
    assert log.rollout[0].tolist() == [0, 3, 2], "the freed slot is refilled at once"
    done.finish()
    assert set(done.ending) == {0, 2, 3, 5} and len(done.tokens[1]) == SIZES.ticks and not done.tokens[4]
    for rollout in done.ending:
        assert done.tokens[rollout] == want.tokens[rollout]
    done.round(cancel=queued)
    assert not done.busy


def test_cancelling_everything_empties_the_device():
    done = Driver()
    done.round([(i, [1], 19) for i in range(8)])
    done.round(cancel=list(range(8)))
    assert not done.busy and not done.ending
    assert done.finish([(20, [1], 5)]).ending == {20: LENGTH}
