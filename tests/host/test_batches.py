"""Packing, baselines and the order of what is learnt."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from glm_jax.host.baselines import Baseline
from glm_jax.host.batches import example_document, pack, rollout_document
from glm_jax.host.errors import RunError
from glm_jax.host.material import Examples, Prompts
from glm_jax.host.rollouts import Rollout
from glm_jax.host.stages import RL, SFT, VALUE, ScheduleConfig, StageConfig, lay_out, learning_rate, stage_at
from tests.host.doubles import TASKS, Stream


def rollout(id: int, prompt: int, sampled: int, reward: float = 0.0, group: int = 0) -> Rollout:
    made = Rollout(id, "t", group, "f", "train", array("i", range(100 * id, 100 * id + prompt)))
    made.tokens = array("i", range(1000 * id, 1000 * id + sampled))
    made.logp = array("f", [-(id + i / 10) for i in range(sampled)])
    made.version = array("i", [id] * sampled)
    made.sampled = array("b", [1] * sampled)
    made.ending, made.scored, made.reward = "stop", True, reward
    return made


def test_every_document_is_found_whole_in_one_row():
    rng = np.random.default_rng(0)
    rollouts = [rollout(i + 1, int(rng.integers(1, 6)), int(rng.integers(1, 9))) for i in range(40)]
    batch, waiting = pack([rollout_document(r, r.id / 100) for r in rollouts], (3, 4, 20))
    left = {document.key for document in waiting}
    found = {}
    for m, r in np.ndindex(3, 4):
        for number in range(1, batch.rollout[m, r].max() + 1):
            at = np.flatnonzero(batch.rollout[m, r] == number)
            assert (np.diff(at) == 1).all()
            reward = batch.reward[m, r, at]
            assert (reward[:-1] == 0).all() and reward[-1] > 0 and batch.trainable[m, r, at[-1]]
            found[round(float(reward[-1]) * 100)] = (m, r, at)
    assert set(found) | left == set(range(1, 41)) and not set(found) & left and left
    for one in rollouts:
        if one.id in found:
            m, r, at = found[one.id]
            split = len(one.prompt)
            assert batch.tokens[m, r, at].tolist() == [*one.prompt, *one.tokens]
            assert batch.trainable[m, r, at].tolist() == [False] * split + [True] * len(one.tokens)
            assert batch.behaviour_logp[m, r, at[split:]].tobytes() == one.logp.tobytes()
            assert (batch.behaviour_logp[m, r, at[:split]] == 0).all()
            assert batch.version[m, r, at[split:]].tolist() == one.version.tolist()
            assert (batch.document_ids[m, r, at] == batch.rollout[m, r, at]).all()
    padding = batch.document_ids == 0
    assert not batch.trainable[padding].any() and not batch.tokens[padding].any() and not batch.reward[padding].any()


def test_used_counts_the_micro_batches_that_hold_anything():
    documents = [rollout_document(rollout(i + 1, 2, 3), 1.0) for i in range(5)]
    assert [int(pack(documents[:n], (3, 2, 5))[0].used) for n in range(6)] == [0, 1, 1, 2, 2, 3]


def test_what_fits_no_row_or_has_nothing_to_train_is_refused():
    with pytest.raises(RunError, match="document 1 has 11 tokens; a row of the batch holds 10"):
        pack([rollout_document(rollout(1, 5, 6), 0.0)], (1, 1, 10))
    with pytest.raises(RunError, match="document 2 has 4 prompt tokens of 4"):
        pack([rollout_document(rollout(2, 4, 0), 0.0)], (1, 1, 10))
    with pytest.raises(RunError, match="document 3 has 0 prompt tokens of 4"):
        pack([rollout_document(rollout(3, 0, 4), 0.0)], (1, 1, 10))


def test_examples_train_on_what_is_their_own_of_an_answer_alone():
    batch, _ = pack([example_document(0, [5, 6], [7, 9, 2], [True, False, True])], (1, 1, 6))
    assert batch.tokens.tolist() == [[[5, 6, 7, 9, 2, 0]]]
    assert batch.trainable.tolist() == [[[False, False, True, False, True, False]]]


def test_the_running_mean_is_of_earlier_batches_and_of_128_rewards_at_most():
    baseline = Baseline("running_mean")
    assert baseline.advantages([rollout(1, 1, 1, 1.0), rollout(2, 1, 1, 0.0)]) == [0.5, -0.5]
    assert baseline.advantages([rollout(1, 1, 1, 1.0)]) == [0.5]
    assert Baseline("running_mean", baseline.state()).advantages([rollout(1, 1, 1, 1.0)]) == [1 - 2 / 3]
    for _ in range(128):
        baseline.advantages([rollout(1, 1, 1, 0.25)])
    assert baseline.advantages([rollout(1, 1, 1, 1.0)]) == [0.75] and len(baseline.state()) == 128


def test_a_group_is_the_rollouts_of_one_prompt_and_never_the_batch():
    batch = [rollout(1, 1, 1, 1.0, group=7), rollout(2, 1, 1, 0.0, group=9), rollout(3, 1, 1, 0.0, group=7)]
    batch.append(rollout(4, 1, 1, 0.5, group=9))
    assert Baseline("group").advantages(batch) == [0.5, -0.25, -0.5, 0.25]


def test_prompts_visit_every_task_once_per_epoch_in_an_order_of_the_seed():
    prompts = Prompts(TASKS.train, seed=3)
    first, second = ([prompts.next()[1].id for _ in TASKS.train] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(task.id for task in TASKS.train) and first != second
    assert prompts.epoch == 2
    resumed = Prompts(TASKS.train, seed=3, position=len(first))
    assert [resumed.next()[1].id for _ in TASKS.train] == second
    other = Prompts(TASKS.train, seed=4)
    assert [other.next()[1].id for _ in TASKS.train] != first


def test_examples_that_did_not_fit_come_first_and_survive_a_resume():
    examples = Examples(Stream, count=5)
    documents = examples.next(4)
    examples.keep(documents[2:])
    resumed = Examples(Stream, count=5, state=examples.state())
    for one in (examples, resumed):
        found = one.next(4)
        assert [d.tokens.tolist() for d in found[:2]] == [d.tokens.tolist() for d in documents[2:]]
        assert one.taken == 6
    assert examples.state() == resumed.state()


def test_a_schedule_warms_up_and_then_falls_to_its_end():
    cosine = ScheduleConfig(peak=1.0, warmup=4, shape="cosine", end=0.1)
    rates = [learning_rate(cosine, step, 14) for step in range(14)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0]) and rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False))
    assert [learning_rate(ScheduleConfig(peak=2.0), step, 3) for step in range(3)] == [2.0] * 3


def test_stages_without_steps_are_left_out():
    stages = lay_out({RL: StageConfig(4), SFT: StageConfig(2), VALUE: StageConfig(0)})
    assert [(stage.name, stage.start) for stage in stages] == [(SFT, 0), (RL, 2)]
    assert [stage_at(stages, step).name for step in range(6)] == [SFT] * 2 + [RL] * 4 and stage_at(stages, 6) is None
