"""The loop over a program in numpy: staleness, accounting, stages, evaluation, and resuming from any point."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from glm_jax.host.errors import DivergedError, PreemptedError, RunError, StallError
from glm_jax.host.events import EventFile, read_events
from glm_jax.host.ledger import replay
from glm_jax.learn.batch import RL, SFT, VALUE
from tests.host.doubles import FakePool, FakeProgram, MemorySaver, Rows, make_loop, plan


def final(saver: MemorySaver, step: int) -> bytes:
    policy, critic, _ = saver.saved[step]
    return policy.params["w"].tobytes() + critic.params["w"].tobytes()


def trained_lags(path) -> Counter:
    """How far each trained token lagged, read from the events alone."""
    versions, lags = {}, Counter()
    for event in read_events(path):
        if event["event"] == "tokens":
            versions.setdefault(event["id"], []).extend([event["version"]] * len(event["tokens"]))
        if event["event"] == "fate" and event["fate"] == "trained":
            for id in event["ids"]:
                lags.update(event["version"] - version for version in versions[id])
    return lags


@pytest.mark.parametrize("tau", [0, 1, 2, 4])
@pytest.mark.parametrize("on_exceed", ["wait", "drop"])
@pytest.mark.parametrize(
    ("batch", "program"),
    [
        (4, FakeProgram(slots=3, ticks=2, stop_share=3)),
        (4, FakeProgram(slots=3, ticks=2, stop_share=9)),
        (1, FakeProgram(slots=4, ticks=5, stop_share=4)),
    ],
)
def test_no_trained_token_lags_more_than_tau(tmp_path, tau, on_exceed, batch, program):
    rows = Rows()
    settings = plan(tau, 30, batch, on_exceed=on_exceed, eval_every=7, checkpoint_every=11, deterministic=False)
    make_loop(tmp_path, settings, program=program, pool=FakePool(delay=2), rows=rows).run()
    book = replay(tmp_path / "ledger.jsonl")
    lags = trained_lags(tmp_path / "ledger.jsonl")
    assert max(lags) <= tau and min(lags) >= 0
    assert max(lags) > 0 or tau == 0, "rollouts never overlapped an update"
    assert not book.live and book.fates["trained"] == 30 * batch
    assert book.fates["rejected"] == 0 or on_exceed == "drop"
    counted = Counter()
    for _, row in rows:
        counted.update({int(k[14:]): int(v) for k, v in row.items() if k.startswith("staleness/lag_") and v})
    assert counted == lags


def test_at_tau_0_nothing_is_in_flight_in_a_round_that_learns(tmp_path):
    program = FakeProgram()
    make_loop(tmp_path, plan(tau=0, rl=6), program=program).run()
    learning = [under_way for mode, under_way in program.rounds if mode == RL]
    assert learning == [0] * 6


def test_sampling_goes_on_in_rounds_that_learn(tmp_path):
    program = FakeProgram(slots=3)
    make_loop(tmp_path, plan(tau=2, rl=10), program=program).run()
    assert sum(under_way > 0 for mode, under_way in program.rounds if mode == RL) > 3


def test_stages_run_in_order_with_their_own_rates(tmp_path):
    program, rows, saver = FakeProgram(), Rows(), MemorySaver()
    make_loop(tmp_path, plan(sft=3, value=2, rl=4), program=program, rows=rows, saver=saver).run()
    modes = [mode for mode, _ in program.rounds if mode]
    assert modes == [SFT] * 3 + [VALUE] * 2 + [RL] * 4
    steps = {step: row for step, row in rows if "learn/policy_lr" in row}
    assert list(steps) == list(range(1, 10))
    assert [steps[s]["learn/policy_lr"] for s in (1, 2)] == pytest.approx([0.05, 0.1])
    assert steps[4]["learn/policy_lr"] == 0 and steps[4]["learn/critic_lr"] == pytest.approx(0.05)
    assert "critic/loss" not in steps[1] and "policy/loss" not in steps[4] and "critic/loss" in steps[9]
    assert steps[1]["learn/critic_lr"] == 0 and steps[9]["learn/policy_lr"] == pytest.approx(0.0)
    assert int(saver.saved[9][0].version) == 7, "value steps leave the policy's version as it is"


def test_evaluation_happens_before_and_within_and_after_rl_at_one_version(tmp_path):
    rows = Rows()
    make_loop(tmp_path, plan(sft=2, rl=5, tau=2), rows=rows).run()
    assert [step for step, row in rows if "eval/reward" in row] == [2, 4, 6, 7]
    versions, purpose = {}, {}
    for event in read_events(tmp_path / "ledger.jsonl"):
        if event["event"] == "submit":
            purpose[event["id"]] = event["purpose"]
        if event["event"] == "tokens" and purpose[event["id"]] == "eval":
            versions.setdefault(event["id"], set()).add(event["version"])
    assert len(versions) == 4 * 3 and all(len(found) == 1 for found in versions.values())
    assert Counter(v for found in versions.values() for v in found) == {2: 3, 4: 3, 6: 3, 7: 3}


def test_invalid_rewards_are_counted_by_cause_and_enter_no_mean(tmp_path):
    causes = {0: (None, "raised"), 1: (None, "nan"), 2: (None, "worker_died"), 3: (0.5, None), 4: (0.5, None)}
    rows = Rows()
    make_loop(tmp_path, plan(rl=6), pool=FakePool(lambda key: causes[key % 5]), rows=rows).run()
    book = replay(tmp_path / "ledger.jsonl")
    assert all(row["rollout/reward"] == 0.5 for _, row in rows if "rollout/reward" in row)
    assert all(row["eval/reward"] == 0.5 for _, row in rows if "eval/reward" in row)
    assert book.causes["raised"] + book.causes["nan"] == book.fates["invalid"] > 0
    assert book.causes["worker_died"] == book.fates["failed"] > 0
    assert book.fates["trained"] == 24


def test_what_a_reward_function_tells_beside_its_score_stands_in_the_rows(tmp_path):
    told = lambda key: (0.5, None, "", {"acc": 1.0, "odd": 3.0} if key % 2 else {"acc": 0.0})
    rows = Rows()
    make_loop(tmp_path, plan(rl=2, tau=0), pool=FakePool(told), rows=rows).run()
    learned = [row for _, row in rows if "rollout/reward" in row]
    evaluated = [row for _, row in rows if "eval/reward" in row]
    assert len(learned) == 2 and all(0 < row["rollout/score/acc"] < 1 for row in learned)
    assert all(row["rollout/score/odd"] == 3.0 for row in learned), "the mean of those that have it"
    assert evaluated and all(0 < row["eval/score/acc"] < 1 for row in evaluated)


def test_a_reward_that_never_works_stops_the_run_with_its_cause(tmp_path):
    with pytest.raises(RunError, match=r"last 32 rewards were all invalid; the latest of rollout \d+: raised \(why\)"):
        make_loop(tmp_path, plan(), pool=FakePool(lambda key: (None, "raised", "why"))).run()


def test_the_critic_starts_from_what_sft_left_of_the_policy(tmp_path):
    class Watched(FakeProgram):
        starts = ()

        def start_critic(self, state):
            self.starts += ((int(state.policy.version), len([mode for mode, _ in self.rounds if mode])),)
            return super().start_critic(state)

    for stages, starts in [(dict(sft=3, value=2), ((3, 3),)), (dict(sft=3), ((3, 3),)), (dict(value=2), ())]:
        program = Watched()
        make_loop(tmp_path / str(len(stages)) / str(starts), plan(**stages), program=program).run()
        assert program.starts == starts


def test_groups_are_trained_whole_and_lone_survivors_rejected(tmp_path):
    bad = lambda key: (None, "raised") if key % 5 == 0 else (key % 3 / 2, None)
    make_loop(tmp_path, plan(tau=1, rl=8, group=2), pool=FakePool(bad), kind="group").run()
    groups, members = {}, Counter()
    for event in read_events(tmp_path / "ledger.jsonl"):
        if event["event"] == "submit" and event["purpose"] == "train":
            groups[event["id"]] = event["group"]
        if event["event"] == "fate" and event["fate"] == "trained":
            found = Counter(groups[id] for id in event["ids"])
            assert set(found.values()) == {2} and len(found) == 2
            members.update(found)
    assert set(members.values()) == {2}
    assert replay(tmp_path / "ledger.jsonl").causes["alone_in_its_group"] > 0


def test_an_update_that_must_wait_names_the_rollouts(tmp_path, caplog):
    caplog.set_level("INFO", logger="glm_jax.host.loop")
    make_loop(tmp_path / "0", plan(tau=0, rl=2, eval_samples=0), program=FakeProgram(slots=6, ticks=1)).run()
    assert "waits for" not in caplog.text, "at tau = 0 a batch holds all there is"
    make_loop(tmp_path / "1", plan(tau=1, rl=12, eval_samples=0), program=FakeProgram(slots=8, ticks=1)).run()
    assert "waits for" in caplog.text and "tau = 1" in caplog.text


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path):
    saver = MemorySaver()
    program = FakeProgram(loss=lambda version: float("nan") if version == 4 else 0.1)
    with pytest.raises(DivergedError, match="step 4: policy/loss = nan"):
        make_loop(tmp_path, plan(rl=8), program=program, saver=saver).run()
    assert list(saver.saved) == [2]


def test_a_sampler_that_yields_nothing_is_told_with_names(tmp_path):
    class Dead(FakeProgram):
        def _sample(self, state, job, log, tick, slot):
            pass

    with pytest.raises(StallError, match=r"no token, no reward, no update. Rollouts on the device: 0, 1"):
        make_loop(tmp_path, plan(patience=0.2), program=Dead()).run()


def test_overdue_rollouts_end_with_wall_time_and_go_on_to_training(tmp_path):
    class Slow(FakeProgram):
        def _sample(self, state, job, log, tick, slot):
            if len(job["tokens"]) < 5:
                super()._sample(state, job, log, tick, slot)

    settings = plan(rl=2, wall_time=0.05, deterministic=False, eval_samples=0)
    make_loop(tmp_path, settings, program=Slow(slots=8, stop_share=10**6)).run()
    endings = Counter(e["ending"] for e in read_events(tmp_path / "ledger.jsonl") if e["event"] == "end")
    assert endings["wall_time"] >= 8
    assert replay(tmp_path / "ledger.jsonl").fates["trained"] == 8


def test_memory_holds_no_settled_rollout(tmp_path):
    most = 0

    class Watched(Rows):
        def write(self, step, values):
            nonlocal most
            most = max(most, len(loop.ledger.live))

    loop = make_loop(tmp_path, plan(tau=1, rl=40, eval_every=0), rows=Watched())
    loop.run()
    assert most <= 2 * 4 + 3 and loop.ledger.book.submitted > 160


class Killed(Exception):
    pass


SETTINGS = dict(sft=3, value=2, rl=5, checkpoint_every=2, eval_every=3)


def test_a_kill_at_any_event_resumes_to_the_same_bits(tmp_path, monkeypatch):
    settings, saver = plan(tau=2, **SETTINGS), MemorySaver()
    make_loop(tmp_path / "whole", settings, saver=saver, pool=FakePool(delay=3), kind="running_mean").run()
    wanted, path = final(saver, 10), tmp_path / "whole" / "ledger.jsonl"
    events = sum(1 for _ in read_events(path))
    append = EventFile.append

    for kill_at in [*range(0, events, 5), events - 1]:
        workdir, saver, left = tmp_path / str(kill_at), MemorySaver(), kill_at

        def dying(self, event):
            nonlocal left
            if left == 0:
                self.flush()  # what the operating system had seen of the file stays
                raise Killed
            left -= 1
            append(self, event)

        monkeypatch.setattr(EventFile, "append", dying)
        with pytest.raises(Killed):
            make_loop(workdir, settings, saver=saver, pool=FakePool(delay=3), kind="running_mean").run()
        monkeypatch.setattr(EventFile, "append", append)
        restored = json.loads(json.dumps(saver.saved[max(saver.saved)][2])) if saver.saved else None
        restored = restored and (*saver.saved[max(saver.saved)][:2], restored)
        pool = FakePool(delay=3)
        make_loop(workdir, settings, saver=saver, pool=pool, kind="running_mean", restored=restored).run()
        assert final(saver, 10) == wanted, f"killed at event {kill_at}"
        assert (workdir / "ledger.jsonl").read_bytes() == path.read_bytes()


def test_kill_after_kill_resumes_to_the_same_bits(tmp_path, monkeypatch):
    settings, saver = plan(tau=1, **SETTINGS), MemorySaver()
    make_loop(tmp_path / "whole", settings, saver=saver, pool=FakePool(delay=3)).run()
    wanted = final(saver, 10)
    append, rng = EventFile.append, np.random.default_rng(0)
    saver, kills = MemorySaver(), 0
    for _ in range(200):
        left = int(rng.integers(30, 90))

        def dying(self, event, budget=[left]):  # noqa: B006
            budget[0] -= 1
            if budget[0] < 0:
                self.flush()
                raise Killed
            append(self, event)

        monkeypatch.setattr(EventFile, "append", dying)
        restored = saver.saved[max(saver.saved)] if saver.saved else None
        try:
            make_loop(tmp_path / "torn", settings, saver=saver, restored=restored, pool=FakePool(delay=3)).run()
            break
        except Killed:
            kills += 1
    assert kills > 3 and final(saver, 10) == wanted


def test_without_deterministic_mode_a_resumed_run_keeps_its_accounts(tmp_path, monkeypatch):
    settings, saver = plan(tau=2, deterministic=False, **SETTINGS), MemorySaver()
    append = EventFile.append
    count = 0

    def dying(self, event):
        nonlocal count
        count += 1
        if count > 150:
            self.flush()
            raise Killed
        append(self, event)

    monkeypatch.setattr(EventFile, "append", dying)
    with pytest.raises(Killed):
        make_loop(tmp_path, settings, saver=saver, pool=FakePool(delay=3)).run()
    monkeypatch.setattr(EventFile, "append", append)
    loop = make_loop(tmp_path, settings, saver=saver, restored=saver.saved[max(saver.saved)])
    loop.run()
    book = replay(tmp_path / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 7 * 4
    assert max(trained_lags(tmp_path / "ledger.jsonl")) <= 2


def until_told(turns: int):
    """A `stop` that says no so many times."""
    left = iter(range(turns))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("deterministic", [True, False])
def test_told_to_stop_again_and_again_it_loses_nothing(tmp_path, deterministic):
    """In rounds of learning and in evaluations; it has a little longer each time, so that it gets on at all."""
    rows, saver = Rows(), MemorySaver()
    settings = plan(tau=2, deterministic=deterministic, **SETTINGS)
    make_loop(tmp_path / "whole", settings, saver=saver, pool=FakePool(delay=3)).run()
    whole, saver, steps = final(saver, 10), MemorySaver(), []
    for stops in range(60):
        restored = saver.saved[max(saver.saved)] if saver.saved else None
        stop = until_told(3 + stops)
        settings_of_loop = dict(saver=saver, rows=rows, restored=restored, stop=stop, pool=FakePool(delay=3))
        loop = make_loop(tmp_path / "torn", settings, **settings_of_loop)
        try:
            loop.run()
            break
        except PreemptedError as told:
            kept = loop.saved
            assert f"at step {loop.step}; " + (f"step {kept} is kept" if kept else "nothing") in str(told)
            assert deterministic or kept == loop.step
            steps.append(kept)
    assert steps == sorted(steps) and len(set(steps)) > 2, "it stopped at several steps"
    book = replay(tmp_path / "torn" / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 7 * 4
    if deterministic:
        assert final(saver, 10) == whole
        assert (tmp_path / "torn/ledger.jsonl").read_bytes() == (tmp_path / "whole/ledger.jsonl").read_bytes()


def test_checkpoints_after_evaluations_carry_their_reward_and_others_none(tmp_path):
    saver, rows = MemorySaver(), Rows()
    pool = FakePool(lambda key: ((key * 7 % 11) / 10, None))
    settings = plan(sft=1, rl=6, eval_every=2, checkpoint_every=2, checkpoint_evaluated=True)
    make_loop(tmp_path, settings, saver=saver, rows=rows, pool=pool).run()
    rewards = {step: row["eval/reward"] for step, row in rows if "eval/reward" in row}
    assert list(rewards) == [1, 3, 5, 7] and len(set(rewards.values())) > 1
    assert {step: host["score"] for step, (_, _, host) in saver.saved.items()} == {
        **dict.fromkeys((2, 4, 6)),
        **rewards,
    }


def test_an_evaluation_that_was_given_up_is_made_again(tmp_path):
    settings = plan(sft=1, rl=4, eval_every=2, checkpoint_every=0, deterministic=False)
    for turns in range(2, 40):
        workdir, saver, rows = tmp_path / str(turns), MemorySaver(), Rows()
        loop = make_loop(workdir, settings, saver=saver, rows=rows, stop=until_told(turns))
        with pytest.raises(PreemptedError):
            loop.run()
        made = [s for s, row in rows if "eval/reward" in row]
        if replay(workdir / "ledger.jsonl").fates["unused"] > 3 * len(made):
            break
    else:
        pytest.fail("it was never stopped in the midst of an evaluation")
    step = max(saver.saved)
    assert saver.saved[step][2]["evaluated"] < step and step not in made
    make_loop(workdir, settings, saver=saver, rows=rows, restored=saver.saved[step]).run()
    assert [s for s, row in rows if "eval/reward" in row] == [1, 3, 5]
    assert all(row["eval/invalid"] == 0 for _, row in rows if "eval/reward" in row), "no answer of the one given up"


@pytest.mark.parametrize("resume_at", [None, 3, 14])
def test_sft_ends_once_its_smoothed_loss_is_low_enough(tmp_path, resume_at):
    """The fake's loss falls by 0.01 a step from 0.5: the mean of the last ten first lies below 0.4 at step 15."""
    falling = FakeProgram(loss=lambda version: 0.5 - 0.01 * version)
    settings = plan(0, rl=4, sft=40, value=2, checkpoint_every=1, eval_every=0)
    sft, *rest = settings.stages
    settings = replace(settings, stages=(replace(sft, config=replace(sft.config, until=0.4)), *rest))
    saver, rows = MemorySaver(), Rows()
    make_loop(tmp_path, settings, program=falling, saver=saver, rows=rows).run()
    if resume_at is not None:
        whole = final(saver, settings.steps)
        rows = Rows((step, row) for step, row in rows if step <= resume_at)
        restored = saver.saved[resume_at]
        make_loop(tmp_path, settings, program=falling, saver=saver, rows=rows, restored=restored).run()
        assert final(saver, settings.steps) == whole
    trained = [step for step, row in rows if "policy/loss" in row and step <= 40]
    assert trained == list(range(1, len(trained) + 1))
    assert len(trained) in (15, 16)  # one more may be under way when the loss comes back
    assert max(step for step, _ in rows) == settings.steps


def test_a_resumed_run_expects_the_lengths_that_the_unbroken_one_does(tmp_path):
    saver = MemorySaver()
    first = make_loop(tmp_path, plan(rl=2), saver=saver)
    first.run()
    first.ledger.file.close()
    known = first.device.shards.lengths
    assert {kind.split("/")[0] for kind in known.state()} == {"train", "eval"}
    again = make_loop(tmp_path, plan(rl=2), restored=saver.saved[2]).device.shards.lengths
    assert again.state() == known.state()
    assert again.remaining("train/fake", 1, 99) == known.remaining("train/fake", 1, 99) < 99
