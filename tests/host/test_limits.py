"""What ends a rollout: budgets over its whole life, stop strings, and cancellations; each has its own ending."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter

import pytest

from glm_jax.data.tokenizer import FIRST_BYTE, ByteTokenizer
from glm_jax.envs.attempts import GRADE
from glm_jax.host.environments import ToolConfig
from glm_jax.host.events import read_events
from glm_jax.host.ledger import replay
from glm_jax.host.limits import LimitConfig
from glm_jax.host.measure import rounds
from glm_jax.rollout.strings import StopStrings
from tests.host.acting import ANSWERED, OPEN, ROOM, TOKENIZER, Actor, FakeWorkers, bash, environments
from tests.host.doubles import CAPACITY, TASKS, FakePool, FakeProgram, MemorySaver, make_loop, plan

ENDLESS = dict(stop_share=10**9)


class Says(FakeProgram):
    """Says the same thing over and over."""

    text = "xyz ab"

    def token(self, job, digest):
        return FIRST_BYTE + ord(self.text[(len(job["tokens"]) - 2) % len(self.text)])


def desk(tmp_path, program, **changes):
    """A desk whose rollouts have prompts of two tokens, with these limits."""
    sampling = make_loop(tmp_path, plan(), program=program, pool=FakePool()).sampling
    sampling.encode = lambda text: [8, 8]
    sampling.draw = dataclasses.replace(sampling.draw, **changes)
    return sampling


def turn(sampling):
    """A round, back at once."""
    sampling.device.dispatch(sampling.next_requests(), sampling.next_cancellations(), None)
    return sampling.take(sampling.device.collect())


def strings(*texts):
    return StopStrings(texts, ByteTokenizer().decode)


def in_slots(sampling):
    return [job["rollout"] for job in sampling.device.state.sampler["slots"]]


def test_a_budget_of_tokens_ends_a_rollout_before_its_window(tmp_path):
    sampling = desk(tmp_path, FakeProgram(ticks=20, **ENDLESS), tokens=5)
    rollout = sampling.open(TASKS.train[0], 0, "train")
    assert turn(sampling) == [rollout.id]
    assert rollout.ending == "tokens" and rollout.count == 5 and not sampling.cancel


def test_a_budget_beyond_the_window_changes_nothing(tmp_path):
    sampling = desk(tmp_path, FakeProgram(ticks=20, **ENDLESS), tokens=500)
    rollout = sampling.open(TASKS.train[0], 0, "train")
    turn(sampling)
    assert rollout.ending == "length" and rollout.length == CAPACITY.window


def test_a_budget_counts_what_was_sampled_before_a_rollout_was_sent_again(tmp_path):
    sampling = desk(tmp_path, FakeProgram(ticks=2, **ENDLESS), tokens=5)
    rollout = sampling.open(TASKS.train[0], 0, "train")
    for _ in range(2):
        turn(sampling)
        sampling.device.reset_sampler()
        sampling.resume()
    assert rollout.count == 4 and rollout.ending is None
    turn(sampling)
    assert rollout.ending == "tokens" and rollout.count == 5


def test_a_budget_spans_turns_and_does_not_count_what_is_observed(tmp_path):
    call, workers = bash("a"), FakeWorkers()
    budget = 2 * len(call) + 3
    loop = make_loop(
        tmp_path,
        plan(0, 1, 2, eval_samples=0, shape=(4, 1, 200)),
        program=Actor(says=lambda rollout, turn: call, ticks=50),
        capacity=dataclasses.replace(ROOM, window=200),
        environments=environments(workers, ToolConfig(observation=4)),
    )
    loop.sampling.draw = dataclasses.replace(loop.sampling.draw, window=200, tokens=budget)
    loop.run()
    ends = [e for e in read_events(tmp_path / "ledger.jsonl") if e["event"] == "end"]
    assert {e["ending"] for e in ends} == {"tokens"}
    sampled, observed = Counter(), Counter()
    for event in read_events(tmp_path / "ledger.jsonl"):
        if event["event"] == "tokens":
            sampled[event["id"]] += len(event["tokens"])
        observed[event.get("id")] += event["event"] == "observation"
    assert set(sampled.values()) == {budget} and all(observed[e["id"]] == 2 for e in ends)
    assert GRADE not in {do for do, _, _ in workers.asked}, "one that was cut short gets 0 without"


def test_a_string_ends_a_rollout_at_its_last_token_and_frees_the_slot_in_the_next_round(tmp_path):
    sampling = desk(tmp_path, Says(ticks=3, **ENDLESS), strings=strings("z a"))
    rollout = sampling.open(TASKS.train[0], 0, "train")
    other = sampling.open(TASKS.train[0], 0, "train")
    sampling.cut(other.id)
    assert turn(sampling) == [] and in_slots(sampling) == [rollout.id]
    assert turn(sampling) == [rollout.id]
    assert rollout.ending == "stop_string" and ByteTokenizer().decode(rollout.tokens) == "xyz a"
    assert len(rollout.logp) == 5 and in_slots(sampling) == [rollout.id], "the device knows nothing of it yet"
    turn(sampling)
    assert in_slots(sampling) == [] and rollout.count == 5


def test_a_string_in_what_ended_otherwise_comes_first_and_needs_no_cancellation(tmp_path):
    sampling = desk(tmp_path, Says(ticks=20, **ENDLESS), strings=strings("y"))
    rollout = sampling.open(TASKS.train[0], 0, "train")
    turn(sampling)
    assert rollout.ending == "stop_string" and rollout.count == 2 and not sampling.cancel


def test_a_string_is_not_found_across_an_observation_and_a_parked_slot_is_given_up(tmp_path):
    says = lambda rollout, turn: [FIRST_BYTE + 97, *bash("a")] if turn == 0 else bash("b")
    sampling = make_loop(
        tmp_path,
        plan(shape=(4, 1, 90)),
        program=Actor(says=says, ticks=40),
        capacity=ROOM,
        environments=environments(FakeWorkers(delay=0), ToolConfig(observation=4)),
    ).sampling
    own = strings(*map(TOKENIZER.decode, ([ANSWERED, OPEN], bash("b"))))
    sampling.draw = dataclasses.replace(sampling.draw, strings=own)
    rollout = sampling.open(TASKS.train[0], 0, "train")
    turn(sampling)
    assert rollout.ending is None and rollout.id in sampling.parked
    sampling.observe()
    turn(sampling)
    assert rollout.ending == "stop_string" and rollout.observations == 1
    assert rollout.tokens[-len(bash("b")) :].tolist() == bash("b")
    assert rollout.id not in sampling.parked and sampling.next_cancellations() == [rollout.id]


def test_a_whole_run_by_strings_accounts_for_every_rollout(tmp_path):
    loop = make_loop(tmp_path, plan(rl=4), program=Says(slots=4, ticks=2, **ENDLESS))
    loop.sampling.draw = dataclasses.replace(loop.sampling.draw, strings=strings("b"))
    loop.run()
    endings = Counter(e["ending"] for e in read_events(tmp_path / "ledger.jsonl") if e["event"] == "end")
    assert endings["stop_string"] >= 16 and set(endings) <= {"stop_string", "cancelled"}
    assert replay(tmp_path / "ledger.jsonl").fates["trained"] == 16
    assert loop.device.shards.lengths.state(), "how long they became is known to the router"


def test_a_whole_run_by_a_budget_counts_its_rollouts_as_cut_short(tmp_path):
    loop = make_loop(tmp_path, plan(rl=2, eval_samples=1), program=FakeProgram(**ENDLESS))
    loop.sampling.draw = dataclasses.replace(loop.sampling.draw, tokens=3)
    loop.run()
    for name in ("rollout/truncated_share", "eval/truncated_share"):
        assert {values[name] for _, values in loop.reporter if name in values} == {1.0}


def test_wall_time_goes_on_where_a_resumed_run_left_it(tmp_path, monkeypatch):
    saver, now = MemorySaver(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    settings = plan(rl=4, checkpoint_every=1, wall_time=50.0, deterministic=False, eval_samples=0, tau=3)
    loop = make_loop(tmp_path, settings, program=FakeProgram(**ENDLESS), saver=saver)
    while loop.step < 1:
        loop.turn()
    now[0] += 40.0
    loop._save(finished=False)
    live = [id for id, rollout in loop.ledger.live.items() if rollout.ending is None]
    assert live
    loop.ledger.file.close()
    now[0] = 5.0  # another process on another machine
    again = make_loop(tmp_path, settings, program=FakeProgram(**ENDLESS), restored=saver.saved[1])
    assert again.sampling.cut_overdue(50.0) == []
    now[0] += 11.0
    assert set(again.sampling.cut_overdue(50.0)) == set(live)
    again.ledger.file.flush()
    ends = {e["id"]: e["ending"] for e in read_events(tmp_path / "ledger.jsonl") if e["event"] == "end"}
    assert {ends[id] for id in live} == {"wall_time"}


def test_an_evaluation_apart_from_a_run_keeps_to_wall_time(tmp_path):
    class Stuck(FakeProgram):
        def _sample(self, state, job, log, tick, slot):
            if len(job["tokens"]) < 5:
                super()._sample(state, job, log, tick, slot)

    sampling = desk(tmp_path, Stuck(**ENDLESS))
    opened = [sampling.open(task, 0, "eval") for task in TASKS.eval]
    for scored in rounds(sampling, 30.0, wall_time=0.1):
        sampling.ledger.settle([rollout.id for rollout in scored], "unused")
    assert {rollout.ending for rollout in opened} == {"wall_time"} and all(r.count == 3 for r in opened)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_cancelled_rollout_is_gone_after_the_next_round_wherever_it_stood(tmp_path, before):
    sampling = desk(tmp_path, FakeProgram(slots=1, ticks=2, **ENDLESS))
    both = [sampling.open(TASKS.train[0], n, "train") for n in range(2)]  # in the slot, and in the queue behind it
    for _ in range(before):
        turn(sampling)
    for rollout in both:
        sampling.cut(rollout.id)
    turn(sampling)
    left = sampling.device.state.sampler
    assert not left["slots"] and not left["queue"] and [r.ending for r in both] == ["cancelled"] * 2
    assert [r.count for r in both] == [2 * before, 0]


def test_limits_that_cannot_be_are_told():
    assert LimitConfig(tokens=0, strings=("a", "")).check() == [
        "stop string 1 is empty: it would end every rollout",
        "tokens is 0; it must be at least 1, or None",
    ]
