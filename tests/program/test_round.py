"""The one jitted program: compiled once, its state donated, its tokens stamped, sampler and trainer in agreement."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from glm_jax.learn.optimizer import MAIN
from glm_jax.rollout.requests import LENGTH
from glm_jax.sharding.mesh import LayoutError
from tests.model.tiny import named_leaves, three_layers
from tests.program.runs import LEARN, MODEL, MODES, ROLLOUT, inbox, on_one_device, program, prompts, sampled

ROUNDS = ["sampling", "still sampling", "rl", "sampling with new weights", "sft", "value", "rl again", "end"]


def test_every_mode_runs_in_one_compiled_program_and_donates_its_state():
    run = on_one_device()
    assert run.program.round._cache_size() == 1
    assert run.kept == []
    assert len(run.logs) == len(ROUNDS) == len(MODES)


def test_the_tokens_of_a_round_carry_the_version_before_its_update():
    run = on_one_device()
    assert [int(log.version) for log in run.logs] == [0, 0, 0, 1, 1, 2, 2, 3]
    assert [int(run.seen[name].policy.version) for name in ROUNDS] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert int(run.logs[2].ticks) > 0, "the first RL round samples too"


def test_a_round_that_learns_samples_what_it_would_have_sampled_without_learning():
    run = on_one_device()
    assert int(run.twin.ticks) > 0
    for learning, idle in zip(*map(jax.tree.leaves, (run.logs[ROUNDS.index("rl")], run.twin)), strict=True):
        np.testing.assert_array_equal(learning, idle)


def test_each_mode_moves_its_learner_alone():
    run = on_one_device()
    states = [run.seen["start"], *(run.seen[name] for name in ROUNDS[:5]), run.seen["new critic"]]
    states += [run.seen["value"], run.seen["reset"], run.seen["rl again"], run.seen["end"]]
    moves = []
    for before, after in zip(states, states[1:], strict=False):
        same = [
            all(a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, pair), strict=True))
            for pair in ((before.policy, after.policy), (before.critic, after.critic))
        ]
        moves.append("".join(letter for letter, kept in zip("pc", same, strict=True) if not kept))
    assert moves == ["", "", "pc", "", "p", "c", "c", "", "pc", ""]
    assert run.seen["rl"].critic.opt_state[MAIN][0].count == 2 * run.seen["rl"].policy.opt_state[MAIN][0].count == 2


def test_attention_of_the_critic_and_indexer_of_the_policy_are_bit_identical_after_rl():
    run = on_one_device()
    for side, part in (("critic", ".attn."), ("policy", ".indexer.")):
        start, end = (named_leaves(getattr(run.seen[name], side).params) for name in ("start", "rl"))
        kept = {name for name in start if start[name].tobytes() == end[name].tobytes()}
        assert kept == {name for name in start if part in name or name.endswith(".mlp.bias")}, side


def test_a_new_critic_starts_from_the_policy_as_it_is():
    run = on_one_device()
    state = run.seen["new critic"]
    policy, critic = named_leaves(state.policy.params), named_leaves(state.critic.params)
    assert set(policy) - set(critic) == {".head"} and set(critic) - set(policy) == {".value"}
    for name in critic.keys() - {".value"}:
        assert critic[name].tobytes() == policy[name].tobytes()
    assert not critic[".value"].any() and state.critic.version == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(state.critic.opt_state))
    assert any(a.any() for a in jax.tree.leaves(run.seen["sft"].critic.opt_state)), "the old one had learned"


def test_a_reset_sampler_holds_nothing_and_learners_are_kept():
    run = on_one_device()
    state = run.seen["reset"]
    assert (state.sampler.slots.rollout == -1).all() and state.sampler.queue.requests.count == 0
    assert state.policy.version == run.seen["value"].policy.version


def test_rollouts_end_at_their_limits_across_rounds():
    logs = on_one_device().logs[:2]
    found = sampled(logs)
    assert {r: len(t) for r, t in found.items()} == {r: limit - len(p) for r, p, limit in prompts()}
    endings = np.concatenate([log.ending[log.ending > 0] for log in logs])
    assert len(endings) == 12 and set(endings) == {LENGTH}
    assert int(logs[0].ticks) == ROLLOUT.ticks > int(logs[1].ticks), "the second round ends when nothing is left"


def test_sampler_and_trainer_agree_on_log_probs_at_staleness_zero():
    """After temperature and top-p, from a cache with absorbed attention on one side, a whole row on the other."""
    metrics = on_one_device().metrics[ROUNDS.index("rl")]
    assert 0 < metrics["rollout/logprob_gap_mean"] <= 1e-6
    assert metrics["rollout/logprob_gap_max"] <= 1e-4
    assert metrics["policy/dis_masked_share"] == 0 and abs(metrics["rollout/k3"]) < 1e-6
    stale = on_one_device().metrics[ROUNDS.index("rl again")]
    assert stale["rollout/logprob_gap_mean"] > 1e-3, "two updates later the same tokens have other log-probs"


def test_no_operation_of_the_program_copies_a_whole_cache():
    """Neither the decode loop nor the learning phase beside it: a copy would cost more than a token does."""
    run = on_one_device()
    text = run.program.round.lower(run.state, inbox()).compile().as_text()
    caches = run.state.sampler.caches
    shapes = [",".join(map(str, a.shape)) for a in (caches.row, caches.index_key)]
    assert all(re.search(rf"= f32\[{shape}\]\S* (fusion|scatter)\(", text) for shape in shapes), (
        "the caches are in there"
    )
    for shape in shapes:
        assert not re.findall(rf"%\S+ = f32\[{shape}\]\S* (?:copy|copy-start|transpose)\(.*", text)


def test_metrics_say_what_was_sampled_and_are_zero_for_what_was_not_learned():
    run = on_one_device()
    for log, metrics, mode in zip(run.logs, run.metrics, MODES, strict=True):
        assert metrics["sample/decoded"] == (log.rollout >= 0).sum() and metrics["sample/ticks"] == log.ticks
        assert (metrics["policy/grad_norm"] > 0) == (mode in ("sft", "rl"))
        assert (metrics["critic/grad_norm"] > 0) == (mode in ("value", "rl"))


@pytest.mark.parametrize(
    "change, told",
    [
        (
            dict(rollout=replace(ROLLOUT, slots=12)),
            "rollout.slots=12 does not divide over data × stage × fsdp × expert × context",
        ),
        (dict(config=replace(LEARN, rows=6)), "learn.rows=6 does not divide"),
        (dict(config=replace(LEARN, length=25)), "learn.length=25 does not divide over context = 2 devices: change it"),
        (dict(model=three_layers(n_routed_experts=6)), "dimension of 6 that does not divide over expert"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh_are_refused_before_anything_is_compiled(change, told):
    with pytest.raises(LayoutError, match=told):
        program(dict(expert=4, context=2), **change)


def test_optimizer_state_lies_where_its_parameters_lie():
    built = program(dict(fsdp=4, tensor=2))
    for learner in (built.shardings.policy, built.shardings.critic):
        where = named_leaves(learner.params)
        for moments in (learner.opt_state[MAIN][0].mu, learner.opt_state[MAIN][0].nu):
            found = named_leaves(moments)
            assert len(found) > 10 and all(where[name] == sharding for name, sharding in found.items())
    assert MODEL.num_hidden_layers == 3
