"""The host's view of the device: logs by rollout, room in the queue, and waits that end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from glm_jax.host.device import Device
from glm_jax.host.errors import RunError
from glm_jax.host.requests import Request
from glm_jax.rollout.log import read_log
from glm_jax.rollout.requests import Log
from tests.host.doubles import CAPACITY, FakeProgram


def log(rollout, ending, ticks=None):
    owner = np.asarray(rollout, np.int32)
    return Log(
        token=np.arange(owner.size, dtype=np.int32).reshape(*owner.shape, 1),
        logp=-np.arange(owner.size, dtype=np.float32).reshape(*owner.shape, 1) / 3,
        count=(owner >= 0).astype(np.int32),
        drafted=np.zeros(owner.shape, np.int32),
        rollout=owner,
        ending=np.asarray(ending, np.int32),
        version=np.int32(5),
        ticks=np.int32(len(owner) if ticks is None else ticks),
    )


def test_a_slot_that_changes_owner_in_mid_round_gives_each_its_tokens_in_order():
    found = read_log(log([[4, 2], [4, 2], [-1, 9], [7, 9]], [[0, 0], [1, 2], [0, 0], [0, 0]]))
    assert [(part.rollout, part.tokens, part.ending) for part in found] == [
        (2, [1, 3], 2),
        (4, [0, 2], 1),
        (7, [6], 0),
        (9, [5, 7], 0),
    ]
    assert found[0].version == 5 and found[0].logp == [np.float32(-1 / 3).item(), -1.0]


def test_rows_beyond_the_ticks_used_are_not_read():
    assert [part.rollout for part in read_log(log([[1], [2]], [[0], [0]], ticks=1))] == [1]
    assert read_log(log([[-1], [2]], [[0], [0]], ticks=1)) == []


@pytest.fixture
def device():
    program = FakeProgram(slots=2, ticks=1, stop_share=10**9)
    return Device(program, program.init(0), CAPACITY, (1, 1, 4), 30.0)


def request(rollout, tokens=(1, 2), limit=12):
    return Request(rollout, tokens, limit, 1.0, 1.0, (2,))


def test_the_device_is_never_sent_more_than_its_queue_holds(device):
    number = 0
    for _ in range(12):
        sent = [request(number + i) for i in range(device.room())]
        number += len(sent)
        device.dispatch(sent, (), None)
        assert len(device.state.sampler["queue"]) <= CAPACITY.queue
        if len(device.pending) > 1:
            device.collect()
    assert number > CAPACITY.queue


def test_a_request_that_leaves_no_room_for_a_token_is_refused(device):
    with pytest.raises(RunError, match="rollout 3 has 12 tokens and a limit of 12 in a window of 12"):
        device.dispatch([request(3, range(12))], (), None)


def test_a_log_of_another_version_than_was_sent_is_an_error(device):
    device.version = 3
    device.dispatch([request(0)], (), None)
    with pytest.raises(RunError, match="round 0 sampled with version 0, not 3"):
        device.collect()


def test_weights_that_changed_on_their_way_to_the_sampler_end_the_run(device):
    device.dispatch([request(0)], (), None)
    sent = device.pending[0]
    device.pending[0] = replace(sent, outbox=sent.outbox.replace(weights=np.array([7, 8], np.uint32)))
    with pytest.raises(RunError, match="checksum 0x00000008, and version 0 has 0x00000007"):
        device.collect()


def test_tokens_that_have_not_come_back_are_no_older_than_the_oldest_round_under_way(device):
    assert device.oldest_version == 0
    device.dispatch([request(0)], (), None)
    device.version = 2
    assert device.oldest_version == 0
    device.collect()
    assert device.oldest_version == 2
