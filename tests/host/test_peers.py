"""Processes that stay in step: what they exchange, how calls are divided, and loops whose rewards come at odd times."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from glm_jax.envs.pool import WORKER_DIED, Answer
from glm_jax.envs.rewards import Score
from glm_jax.host.divided import Divided
from glm_jax.host.errors import PreemptedError, RunError, StallError
from glm_jax.host.peers import ALONE, Peers
from tests.host.doubles import CAPACITY, FakePool, FakeProgram, MemorySaver, make_loop, plan
from tests.host.service import Service, together


def test_all_get_what_each_gave_in_the_order_of_their_numbers():
    def run(peers):
        time.sleep(0.02 * (3 - peers.index))
        first = peers.exchange({"number": peers.index, "value": np.float32(0.1)})
        return first, peers.of_first(f"of {peers.index}"), peers.any(peers.index == 2, 7), peers.any(False, 7)

    found = together(3, run)
    assert found[0] == found[1] == found[2]
    exact = float(np.float32(0.1))
    assert found[0] == ([{"number": n, "value": exact} for n in range(3)], "of 0", True, False)
    assert ALONE.exchange("mine") == ["mine"] and ALONE.of_first("mine") == "mine" and not ALONE.any(False, 7)


def test_the_service_keeps_no_more_than_the_last_exchange():
    peers = Peers(0, 1, Service(1))
    peers.count = 2  # two by number; the service waits for one, and the other's value is put in by hand
    for turn in range(1, 5):
        peers.client.values[f"exchange/{turn}/1"] = "0"
        peers.exchange(turn)
    assert [key for key in peers.client.values if key.endswith("/0")] == ["exchange/4/0"]


def test_who_waits_in_vain_says_so():
    peers = Peers(0, 2, Service(2), limit=0.05)
    with pytest.raises(StallError, match="process 0 waited 0.05 s for the other 1.*raise config.patience"):
        peers.exchange(1)


def test_processes_that_differ_are_told_apart():
    with pytest.raises(RunError, match="out of step: their ledgers are 10, 11 bytes long"):
        together(2, lambda peers: peers.any(False, 10 + peers.index))
    config = lambda peers: {"rl.steps": 5, "seed": peers.index, "reward.low": 0.0}
    with pytest.raises(RunError, match="different configs:\n  seed: 0, 1$"):
        together(2, lambda peers: peers.check_same(config(peers)))


FUNCTION = """
import os, time

def serve(word):
    if word == "die":
        os._exit(9)
    if word == "slow":
        time.sleep(0.5)
    return {"word": word, "pid": os.getpid()}
"""


def test_calls_are_divided_and_all_learn_every_answer(tmp_path, monkeypatch):
    (tmp_path / "served.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(peers):
        with Divided("served:serve", 1, noun="call", remedy="", peers=peers) as pool:
            for key, word in enumerate(["a", "b", "c", "die"]):
                pool.ask(key, (word,), 20.0)
            for home, word in ((4, "homed"), (7, "slow")):
                pool.ask(f"call {home}", (word,), 20.0, home=home)
            assert pool.wait(20.0, lambda asked, answers: answers >= 1)
            early = pool.wait(0.0)
            missing = set(pool.outstanding)
            assert pool.wait(20.0)
            return early, missing, dict(pool.take()), pool.take()

    (early, missing, answers, rest), other = together(2, run)
    assert (early, missing, answers, rest) == other and not early and "call 7" in missing and rest == []
    assert answers.keys() == {0, 1, 2, 3, "call 4", "call 7"}
    assert answers[3].cause == WORKER_DIED and answers[2] == Answer({"word": "c", "pid": answers[0].value["pid"]})
    even, odd = ({answers[key].value["pid"] for key in keys} for keys in ((0, 2, "call 4"), (1,)))
    assert len(even) == len(odd) == 1 and even != odd


class Shared(FakePool):
    """A FakePool for each process, with delays of its own; each scores the rollouts of its number."""

    def __init__(self, peers: Peers):
        super().__init__(delay=3)
        self.peers = peers

    def submit(self, key, completion, task):
        if key % self.peers.count == self.peers.index:
            super().submit(key, completion, task)

    def poll(self):
        own = [[key, score.value] for key, score in super().poll()]
        return [(key, Score(value)) for part in self.peers.exchange(own) for key, value in part]

    def wait(self, timeout):
        found = self.poll()
        while any(self.peers.exchange(bool(self.jobs))):
            found += self.poll()
        return found


class Slow(FakeProgram):
    """Drafting costs time in process 0, and saves time in the others."""

    def __init__(self, index: int):
        super().__init__()
        self.index, self.depths = index, []

    def round(self, state, inbox):
        self.depths.append(int(inbox.depth))
        time.sleep(0.003 if (self.index == 0) == (inbox.depth > 0) else 0.0)
        return super().round(state, inbox)


def loop_of(tmp_path, peers, program=None, capacity=CAPACITY, **changes):
    folder = tmp_path / str(peers.index)
    saver, program = MemorySaver(), program or FakeProgram()
    stop = changes.pop("stop", lambda loop: False)
    settings = plan(tau=2, rl=12, deterministic=False, eval_every=4, **changes)
    loop = make_loop(folder, settings, program=program, pool=Shared(peers), saver=saver, peers=peers, capacity=capacity)
    loop.told_to_stop = lambda: peers.any(stop(loop), loop.ledger.file.offset)
    return loop, saver, folder


@pytest.mark.parametrize("wall_time", [None, 0.01])
def test_loops_stay_in_step_whenever_rewards_come(tmp_path, wall_time):
    def run(peers):
        loop, saver, folder = loop_of(tmp_path, peers, wall_time=wall_time)
        loop.run()
        policy, critic, _ = saver.saved[12]
        return policy.params["w"].tolist(), critic.params["w"].tolist(), (folder / "ledger.jsonl").read_bytes()

    first, *others = together(3, run)
    assert all(first == other for other in others)
    assert (b'"wall_time"' in first[2]) == (wall_time is not None)


def test_all_draft_to_the_same_depth_whatever_the_time_it_takes_them(tmp_path):
    def run(peers):
        program = Slow(peers.index)
        loop_of(tmp_path, peers, program, replace(CAPACITY, drafts=(2,)))[0].run()
        return program.depths

    first, other = together(2, run)
    assert first == other and set(first) == {0, 2}


def test_told_in_one_process_all_stop_at_the_same_step(tmp_path):
    def run(peers):
        loop, saver, _ = loop_of(tmp_path, peers, stop=lambda loop: peers.index == 1 and loop.step >= 5)
        with pytest.raises(PreemptedError):
            loop.run()
        return max(saver.saved)

    assert together(2, run) == [5, 5]
