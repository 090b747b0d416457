"""Rollouts of several turns through the loop: accounting, limits, the monitor, and resuming in the middle of a call."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from glm_jax.envs.pool import WORKER_DIED, Answer
from glm_jax.host import calls
from glm_jax.host.batches import pack, rollout_document
from glm_jax.host.device import Outcome, Sampled
from glm_jax.host.environments import ToolConfig
from glm_jax.host.errors import LedgerError, RunError
from glm_jax.host.events import read_events
from glm_jax.host.ledger import Book, replay
from glm_jax.host.monitor import DUMMY, RuleConfig
from glm_jax.host.rollouts import Rollout
from glm_jax.rollout.requests import PARKED
from tests.host.acting import ANSWERED, CLOSE, ROOM, TOKENIZER, Actor, FakeWorkers, bash, environments
from tests.host.doubles import EOS, TASKS, MemorySaver, make_loop, plan
from tests.host.test_loop import final

TOOLS = ToolConfig(turns=3, observation=8)
SHAPE = dict(shape=(4, 2, 180), patience=5.0)


def run(tmp_path, settings, *, program=None, workers=None, tools=TOOLS, **rest):
    workers = workers or FakeWorkers()
    loop = make_loop(
        tmp_path,
        settings,
        program=program or Actor(),
        capacity=rest.pop("capacity", ROOM),
        environments=environments(workers, tools),
        **rest,
    )
    loop.run()
    return workers, replay(tmp_path / "ledger.jsonl")


def events(tmp_path, kind: str) -> list[dict]:
    return [event for event in read_events(tmp_path / "ledger.jsonl") if event["event"] == kind]


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize("room", [ROOM, replace(ROOM, slots=1, queue=1, requests=1)])
def test_every_rollout_gets_its_fate_whatever_its_turns_come_to(tmp_path, tau, room):
    settings = plan(tau, 6, 4, eval_every=3, deterministic=False, **SHAPE)
    workers, book = run(tmp_path, settings, program=Actor(slots=room.slots), capacity=room)
    assert not book.live and book.fates["trained"] == 24
    endings = Counter(event["ending"] for event in events(tmp_path, "end"))
    assert endings["stop"] and endings["turns"] and set(endings) <= {"stop", "turns", "length"}
    assert len(events(tmp_path, "observation")) > 20
    assert not workers.jobs
    ended = {event["id"]: event["ending"] for event in events(tmp_path, "end")}
    rewards = {event["id"]: event["reward"] for event in events(tmp_path, "reward")}
    assert {rewards[id] for id, ending in ended.items() if ending in ("turns", "length")} == {0.0}
    judged = {rollout for do, rollout, _ in workers.asked if do == "grade"}
    assert judged == {id for id, ending in ended.items() if ending == "stop"}


def test_what_is_recorded_is_what_was_said_and_seen_in_that_order(tmp_path):
    workers, _ = run(tmp_path, plan(0, 3, 4, eval_samples=0, **SHAPE))
    last: dict[int, str] = {}
    made = Counter(rollout for do, rollout, _ in workers.asked if do == "call")
    for event in read_events(tmp_path / "ledger.jsonl"):
        if event["event"] == "tokens":
            assert CLOSE not in event["tokens"][:-1], "a turn ends with the tag that closes its call"
            last[event["id"]] = "call" if event["tokens"][-1] == CLOSE else "tokens"
        elif event["event"] == "observation":
            assert last[event["id"]] == "call" and event["tokens"][-1] == ANSWERED
            last[event["id"]] = "observation"
    assert sum(made.values()) > 10
    for do, rollout, calls_so_far in workers.asked:
        if do == "call":
            before = [len(m) for d, r, m in workers.asked if (d, r) == (do, rollout)]
            assert before == list(range(1, len(before) + 1)), "each request names every call so far"
            assert len(calls_so_far) <= TOOLS.turns


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_ends_with_the_same_bits_as_an_unbroken_one(tmp_path, step):
    settings = plan(1, 6, 4, eval_every=3, checkpoint_every=2, **SHAPE)
    whole, again = MemorySaver(), MemorySaver()
    run(tmp_path, settings, saver=whole)
    acting = [r for r in replay(tmp_path / "ledger.jsonl", whole.saved[step][2]["offset"]).live.values() if r.tokens]
    assert any(r.observations for r in acting), "no rollout was between two turns at the checkpoint"
    run(tmp_path, settings, saver=again, restored=whole.saved[step])
    assert final(again, 6) == final(whole, 6)


def test_a_call_that_was_under_way_is_made_again_by_a_resumed_run_and_by_no_other(tmp_path):
    first, second = FakeWorkers(), FakeWorkers()
    loop = make_loop(tmp_path, plan(**SHAPE), capacity=ROOM, environments=environments(first, TOOLS))
    rollout = loop.sampling.open(TASKS.train[0], 0, "train")
    loop.sampling.next_requests()
    turn = bash("a")
    loop.sampling.take(Outcome(0, [Sampled(rollout.id, turn, [-1.0] * len(turn), 0, PARKED)], None, {}))
    assert [do for do, *_ in first.asked] == ["call"]
    loop.sampling.resume()  # as after a checkpoint of an unbroken run
    assert len(first.asked) == 1 and loop.sampling.waiting == []
    state = Actor().init(0)
    again = make_loop(
        tmp_path,
        plan(**SHAPE),
        capacity=ROOM,
        environments=environments(second, TOOLS),
        restored=(state.policy, state.critic, loop._host(False)),
    )
    assert second.asked == first.asked and again.sampling.waiting == []


def test_an_observation_that_does_not_fit_the_window_ends_the_rollout_there(tmp_path):
    room = replace(ROOM, window=22)
    actor = Actor(says=lambda rollout, turn: bash("a"))
    run(tmp_path, plan(0, 1, 4, eval_samples=0, **SHAPE), program=actor, capacity=room)
    assert {event["ending"] for event in events(tmp_path, "end")} == {"length"}
    assert not events(tmp_path, "observation")


def test_wall_time_ends_a_rollout_whose_call_never_comes_back_and_grades_it(tmp_path):
    workers = FakeWorkers(answer=lambda do, rollout, made: None)
    hang = lambda key: key.startswith("call")
    take = workers.take
    workers.take = lambda: [pair for pair in take() if not hang(pair[0])]
    workers.wait = lambda timeout, done: True
    actor = Actor(says=lambda rollout, turn: bash("a"))
    settings = plan(0, 1, 2, eval_samples=0, wall_time=0.3, deterministic=False, **SHAPE)
    _, book = run(tmp_path, settings, program=actor, workers=workers)
    assert {event["ending"] for event in events(tmp_path, "end")} == {"wall_time"} and book.fates["trained"] == 2


@pytest.mark.parametrize("turn", [bash("a"), [105, CLOSE]])
def test_what_a_call_comes_to_after_its_rollout_ended_is_nobodys(tmp_path, turn):
    workers = FakeWorkers(delay=0)
    loop = make_loop(tmp_path, plan(**SHAPE), capacity=ROOM, environments=environments(workers, TOOLS))
    sampling = loop.sampling
    rollout = sampling.open(TASKS.train[0], 0, "train")
    sampling.next_requests()
    sampling.take(Outcome(0, [Sampled(rollout.id, turn, [-1.0] * len(turn), 0, PARKED)], None, {}))
    sampling.cut(rollout.id, "wall_time")
    assert sampling.next_cancellations() == [rollout.id], "its slot is to be freed"
    assert sampling.observe() == 0 and rollout.ending == "wall_time" and not rollout.observations
    assert [scored.id for scored in sampling.scorer.wait(1.0)] == [rollout.id], "what it did is judged"


def test_environments_that_never_work_end_the_run_with_their_cause(tmp_path):
    broken = lambda do, rollout, made: Answer(None, "raised", "TaskError: RUN failed")
    actor = Actor(says=lambda rollout, turn: bash("a"))
    with pytest.raises(RunError, match=r"raised \(TaskError: RUN failed\).*environments in tasks.environments"):
        run(tmp_path, plan(0, 1, 4, eval_samples=0, **SHAPE), program=actor, workers=FakeWorkers(answer=broken))


def test_a_malformed_call_is_answered_with_what_is_wrong(tmp_path):
    wrong = [*bash("a")[:4], CLOSE]  # <tool_call>bas</tool_call>
    actor = Actor(says=lambda rollout, turn: [[105, CLOSE], wrong, [EOS]][turn])
    tools = replace(TOOLS, observation=60)
    workers, _ = run(tmp_path, plan(0, 1, 4, eval_samples=0, **SHAPE), program=actor, tools=tools)
    first, *_ = events(tmp_path, "observation")
    assert TOKENIZER.decode(first["tokens"]).startswith("error: </tool_call> closes no <tool_call>")
    # What is a call, of a tool that is none, is the worker's to answer.
    assert {made[0].name for do, _, made in workers.asked if do == "call"} == {"bas"}


def test_a_blocked_call_gets_a_dummy_a_flagged_one_is_counted_and_a_dropped_one_ends_its_rollout(tmp_path):
    rules = (RuleConfig("b", "^x$", action="block"), RuleConfig("f", "^y$"), RuleConfig("d", "^z$", "bash", "drop"))
    turns = {"x": ["x", "a"], "y": ["y", "a"], "z": ["z", "a"]}
    who = lambda rollout: "xyz"[rollout % 3]
    actor = Actor(says=lambda rollout, turn: bash(turns[who(rollout)][turn]) if turn < 2 else [EOS])
    tools = replace(TOOLS, observation=60, monitor=rules)
    workers, book = run(tmp_path, plan(0, 1, 4, eval_samples=0, **SHAPE), program=actor, tools=tools)
    made = {json_command(call) for _, _, made in workers.asked for call in made}
    assert made == {"y", "a"}, "neither a blocked nor a dropped call is ever carried out"
    dummies = [e["id"] for e in events(tmp_path, "observation") if TOKENIZER.decode(e["tokens"]).startswith(DUMMY)]
    assert dummies and {who(id) for id in dummies} == {"x"}
    counts = Counter(who(event["id"]) for event in events(tmp_path, "submit"))
    assert book.monitored == {"block/b": counts["x"], "flag/f": counts["y"], "drop/d": counts["z"]}
    assert book.causes == {"monitor_d": counts["z"]} and book.fates["rejected"] == counts["z"]


def json_command(call) -> str:
    return call.arguments.split('"')[-2]


def test_a_rollout_whose_environment_is_gone_fails_with_the_cause(tmp_path):
    def answer(do, rollout, made):
        if do == "call" and rollout % 3 == 0:
            return Answer(None, WORKER_DIED, "2 workers died in this call")
        return Answer({"failed": "a box ended by itself"}) if do == "call" and rollout % 3 == 1 else None

    actor = Actor(says=lambda rollout, turn: bash("a") if turn < 1 else [EOS])
    workers = FakeWorkers(answer=answer)
    _, book = run(tmp_path, plan(0, 2, 4, eval_samples=0, **SHAPE), program=actor, workers=workers)
    assert book.fates["trained"] == 8 and book.fates["failed"] == sum(book.causes.values()) > 4
    assert book.causes["worker_died"] and book.causes["box_died"]


def test_a_verifier_in_error_is_no_reward(tmp_path):
    broken = lambda do, rollout, made: Answer({"reward": None, "why": "it crashed"}) if rollout % 2 else None
    actor = Actor(says=lambda rollout, turn: [EOS])
    workers = FakeWorkers(answer=broken)
    _, book = run(tmp_path, plan(0, 1, 4, eval_samples=0, **SHAPE), program=actor, workers=workers)
    assert book.causes["verifier_error"] == book.fates["invalid"] > 0 and book.fates["trained"] == 4


def test_observed_tokens_are_in_the_batch_and_trained_by_nothing():
    rollout = Rollout(1, "t", 0, "f", "train", array("i", [9, 9]))
    book = Book()
    book.live[1] = rollout
    book.submitted = 2
    with pytest.raises(LedgerError, match="made no call"):
        book.apply({"event": "observation", "id": 1, "tokens": [5]})
    book.apply({"event": "tokens", "id": 1, "tokens": [11, CLOSE], "logp": [-1.0, -2.0], "version": 3})
    book.apply({"event": "observation", "id": 1, "tokens": [21, 22, 23]})
    book.apply({"event": "tokens", "id": 1, "tokens": [12, EOS], "logp": [-3.0, -4.0], "version": 4})
    assert (rollout.count, rollout.length, book.tokens) == (4, 9, 4)
    batch, _ = pack([rollout_document(rollout, 0.5)], (1, 1, 10))
    row = lambda x: x[0, 0].tolist()
    assert row(batch.tokens) == [9, 9, 11, CLOSE, 21, 22, 23, 12, EOS, 0]
    assert row(batch.trainable) == [False, False, True, True, False, False, False, True, True, False]
    assert row(batch.behaviour_logp) == [0, 0, -1, -2, 0, 0, 0, -3, -4, 0]
    assert row(batch.version) == [0, 0, 3, 3, 3, 3, 3, 4, 4, 0]
    assert row(batch.reward) == [0] * 8 + [0.5, 0]
    book.apply({"event": "tokens", "id": 1, "tokens": [CLOSE], "logp": [-1.0], "version": 4})
    book.apply({"event": "observation", "id": 1, "tokens": [21]})
    batch, _ = pack([rollout_document(rollout, 0.5)], (1, 1, 12))
    assert np.flatnonzero(batch.reward[0, 0]).tolist() == [9], "the reward stands at the last token that was sampled"


def test_calls_that_are_counted_as_turns_are_those_between_observations():
    tokens = [*bash("a"), 20, ANSWERED, 30, *bash("b")]
    own = [1] * len(bash("a")) + [0, 0] + [1] * (1 + len(bash("b")))
    found = list(calls.turns(tokens, own, TOKENIZER))
    assert found == [bash("a"), [30, *bash("b")]]
