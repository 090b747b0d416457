"""The queue's ring and the slots against a plain list, over many random steps."""

from __future__ import annotations

import random

import jax
import numpy as np

from glm_jax.rollout import admission, slots
from glm_jax.rollout.requests import empty_requests
from tests.rollout.driver import MODEL, SIZES, WINDOW


def request_rows(ids: list[int]):
    rows = empty_requests(SIZES.requests, WINDOW)
    for i, id in enumerate(ids):
        rows.rollout[i], rows.length[i], rows.limit[i], rows.tokens[i, 0] = id, 1 + id % 5, 10 + id % 7, id
        rows.temperature[i], rows.top_p[i], rows.stop[i] = id / 7, 1 / (1 + id), id
    return rows.replace(count=np.int32(len(ids)))


def test_ring_and_slots_behave_as_a_list_would_through_wrap_around_and_cancellations():
    admit, send, cancel = jax.jit(admission.admit), jax.jit(admission.send), jax.jit(admission.cancel)
    rng, state = random.Random(0), slots.init(MODEL, SIZES)
    waiting: list[int] = []
    held: list[int] = [-1] * SIZES.slots
    for step in range(120):
        struck = [r for r in (*waiting, *held) if r >= 0 and rng.random() < 0.15][: SIZES.requests]
        state = cancel(state, np.array([*struck, *[-1] * (SIZES.requests - len(struck))], np.int32))
        waiting = [-1 if r in struck else r for r in waiting]  # a struck row keeps its place until its turn
        held = [-1 if r in struck else r for r in held]

        new = list(range(100 * step, 100 * step + rng.randrange(SIZES.queue - len(waiting) + 1)))
        state = send(state, request_rows(new))
        waiting += new

        ended = [rng.random() < 0.3 for _ in held]
        held = [-1 if gone else r for gone, r in zip(ended, held, strict=True)]
        state = state.replace(slots=state.slots.replace(rollout=np.array(held, np.int32)))

        state = admit(state)
        live, queue = state.slots, state.queue
        held = [r if r >= 0 else waiting.pop(0) if waiting else -1 for r in held]
        assert live.rollout.tolist() == held and int(queue.requests.count[0]) == len(waiting)
        for slot, id in enumerate(held):
            if id >= 0:
                assert (int(live.length[slot]), int(live.limit[slot])) == (1 + id % 5, 10 + id % 7)
                assert int(live.tokens[slot, 0]) == id and live.stop[slot].tolist() == [id] * 8
                np.testing.assert_allclose(
                    [live.temperature[slot], live.top_p[slot]], [id / 7, 1 / (1 + id)], rtol=1e-6
                )


def test_a_slot_with_a_new_owner_starts_with_nothing_filled():
    state = slots.init(MODEL, SIZES)
    queue = admission.send(state, request_rows([4, 5])).queue
    before = state.slots.replace(filled=np.full(3, 9, np.int32), rollout=np.array([-1, 8, -1], np.int32))
    live = admission.admit(state.replace(slots=before, queue=queue)).slots
    assert live.filled.tolist() == [0, 9, 0] and live.rollout.tolist() == [4, 8, 5]
    assert live.ready.tolist() == [False, False, True] and live.unfilled.tolist() == [True, False, False]
