"""The ledger: one fate per rollout, replay to the same state, and clear refusals of what cannot be."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from glm_jax.host.errors import LedgerError
from glm_jax.host.events import EventFile, read_events
from glm_jax.host.ledger import Ledger, replay


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.jsonl")


def opened(ledger, purpose="train"):
    return ledger.submit("task", 0, "family", purpose, [5, 6, 7])


def finished(ledger, reward=0.5):
    rollout = opened(ledger)
    ledger.tokens(rollout.id, [9, 2], [-0.1, -0.2], 3)
    ledger.end(rollout.id, "stop")
    ledger.reward(rollout.id, reward, True)
    return rollout


def test_log_probs_come_back_bit_by_bit(ledger):
    rollout = opened(ledger)
    logp = np.random.default_rng(0).standard_normal(500).astype(np.float32) * np.float32(1e-3)
    logp[:3] = [0.1, -1e-45, -3.4e38]
    ledger.tokens(rollout.id, list(range(500)), logp.tolist(), 7)
    ledger.file.flush()
    again = replay(ledger.file.path).live[rollout.id]
    assert np.asarray(again.logp).tobytes() == logp.tobytes()
    assert again.tokens.tolist() == list(range(500)) and set(again.version) == {7}
    assert again == rollout


def test_replay_of_any_prefix_accounts_for_every_rollout(tmp_path):
    rng, ledger, offsets = random.Random(0), Ledger(tmp_path / "ledger.jsonl"), []
    for _ in range(400):
        rollout = rng.choice([None, *ledger.live.values()])
        if rollout is None:
            opened(ledger, rng.choice(["train", "eval"]))
        elif rng.random() < 0.1:
            ledger.settle([rollout.id], rng.choice(["rejected", "failed", "unused", "invalid"]), cause="why")
        elif rollout.ending is None:
            ledger.tokens(rollout.id, [1], [-0.5], 0)
            if rng.random() < 0.5:
                ledger.end(rollout.id, rng.choice(["stop", "length", "turns", "wall_time", "cancelled"]))
        elif not rollout.scored:
            ledger.reward(rollout.id, rng.random(), None)
        else:
            ledger.settle([rollout.id], "trained", version=1)
        ledger.audit()
        offsets.append((ledger.file.offset, sorted(ledger.live), Counter(ledger.book.fates)))
    ledger.file.flush()
    for offset, live, fates in offsets[::7]:
        book = replay(ledger.file.path, offset)
        assert sorted(book.live) == live and book.fates == fates
        assert book.submitted == sum(fates.values()) + len(live)


def test_a_settled_rollout_leaves_memory(ledger):
    for _ in range(50):
        ledger.settle([finished(ledger).id], "trained", version=3)
    assert not ledger.live and ledger.book.fates == {"trained": 50}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda ledger, id: ledger.settle([id], "trained"), "event 'fate trained' for rollout 0, which has its fate"),
        (lambda ledger, id: ledger.settle([id], "rejected"), "event 'fate rejected' for rollout 0, which has its fate"),
        (lambda ledger, id: ledger.tokens(id, [1], [0.0], 0), "event 'tokens' for rollout 0, which has its fate"),
        (lambda ledger, id: ledger.end(7, "stop"), "rollout 7, which was never submitted"),
        (lambda ledger, id: ledger.end(opened(ledger).id, "tired"), "rollout 1 ended with 'tired'"),
        (lambda ledger, id: ledger.settle([opened(ledger).id], "lost"), "'lost' is no fate"),
        (lambda ledger, id: ledger.settle([opened(ledger).id], "trained"), "rollout 1 was trained before it had"),
        (
            lambda ledger, id: ledger.reward(opened(ledger).id, 1.0, None),
            "got a reward, but it has not ended",
        ),
        (lambda ledger, id: ledger.reward(finished(ledger).id, 1.0, None), "but it was scored already"),
        (lambda ledger, id: ledger.reward(opened(ledger).id, float("nan"), None), "got the reward nan"),
        (lambda ledger, id: ledger.tokens(finished(ledger).id, [1], [0.0], 3), "got tokens after it had ended"),
        (lambda ledger, id: ledger.tokens(opened(ledger).id, [1, 2], [0.0], 3), "got 2 tokens, 1 log-probs"),
        (lambda ledger, id: opened(ledger, "fun"), "purpose 'fun'"),
    ],
)
def test_what_cannot_be_is_refused_and_not_written(ledger, act, message):
    id = finished(ledger).id
    ledger.settle([id], "trained")
    with pytest.raises(LedgerError, match=message):
        act(ledger, id)
    ledger.file.flush()
    replay(ledger.file.path)  # what was written is still a whole


def test_versions_of_a_rollout_never_fall(ledger):
    rollout = opened(ledger)
    ledger.tokens(rollout.id, [1], [0.0], 4)
    with pytest.raises(LedgerError, match="version 3 after 4"):
        ledger.tokens(rollout.id, [1], [0.0], 3)


def test_the_audit_tells_how_many_are_missing(ledger):
    opened(ledger), opened(ledger)
    ledger.book.live.pop(1)
    with pytest.raises(LedgerError, match="2 rollouts were submitted.*1 are not accounted for"):
        ledger.audit()


def test_a_torn_last_line_is_passed_over_only_beyond_the_committed_offset(tmp_path):
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    for number in range(3):
        file.append({"event": number})
    committed = file.sync()
    file.append({"event": 3})
    file.close()
    path.write_bytes(path.read_bytes()[:-4])
    assert [event["event"] for event in read_events(path)] == [0, 1, 2]
    assert [event["event"] for event in read_events(path, committed)] == [0, 1, 2]
    with pytest.raises(LedgerError, match="line 4, is damaged within the committed"):
        list(read_events(path, committed + 5))
    path.write_bytes(path.read_bytes()[: committed - 3])
    with pytest.raises(LedgerError, match="line 3, is damaged|was cut"):
        list(read_events(path, committed))


def test_damage_in_the_midst_is_told_by_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":0}\n{"event"\n{"event":2}\n')
    with pytest.raises(LedgerError, match="line 2"):
        list(read_events(path))


def test_opening_cuts_what_came_after_the_checkpoint(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    kept, offset = opened(ledger), ledger.file.sync()
    ledger.settle([kept.id], "unused")
    opened(ledger)
    ledger.file.close()
    again = Ledger(tmp_path / "ledger.jsonl", offset)
    assert list(again.live) == [kept.id] and again.file.path.stat().st_size == offset
    again.file.close()
    with pytest.raises(LedgerError, match="was cut or"):
        EventFile(tmp_path / "ledger.jsonl", offset + 1000)
