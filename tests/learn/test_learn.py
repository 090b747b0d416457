"""One learning step: its gradients against independent objectives, what it may touch, and how batches are cut up."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
from glm_jax.learn import critic_step, forward
from glm_jax.learn.batch import IDLE, RL, SFT, VALUE, LearnBatch
from glm_jax.learn.optimizer import INDEXER, MAIN
from glm_jax.learn.update import _rollout_reward
from glm_jax.model.transformer import hidden_states
from tests.learn.batches import (
    IN_FOUR,
    IN_TWO,
    LEARN,
    MODEL,
    SETUP,
    gradient,
    learn,
    learners,
    pack,
    rollouts,
)
from tests.learn.test_advantage import reference as numpy_gae
from tests.model.tiny import named_leaves


@jax.jit
def _outputs(policy, critic, tokens, documents):
    """Logits and values column by column, from the public forward pass and the critic's final states."""
    states, _, _ = hidden_states(critic, MODEL, tokens, documents)
    return glm_jax.forward(policy, MODEL, tokens, documents).logits, states @ critic.value[:-1] + critic.value[-1]


@cache
def outputs():
    policy, critic = learners()
    return evaluate(policy.params, critic.params)


def evaluate(policy, critic):
    """log-probs (at both temperatures) and values of the tokens of `rollouts()`, as lists by rollout."""
    made = rollouts()
    tokens, documents = np.zeros((6, 24), np.int32), np.zeros((6, 24), np.int32)
    for row, one in enumerate(made):
        tokens[row, : len(one.tokens)], documents[row, : len(one.tokens)] = one.tokens, 1
    with jax.enable_x64(True):
        logits, value = jax.device_get(_outputs(policy, critic, tokens, documents))

    def logp(temperature):
        x = logits / temperature
        x = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        return np.take_along_axis(x[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]  # column t stands for token t + 1

    return {"sft": logp(1.0), "rl": logp(SETUP.temperature), "value": value[:, :-1]}


@cache
def off_policy():
    """The rollouts with behaviour near the policy (some tokens outside the window), and their advantages."""
    made, rng = rollouts(), np.random.default_rng(3)
    for row, one in enumerate(made):
        drift = rng.normal(0, 0.6, len(one.tokens))
        one.behaviour = np.append(0.0, outputs()["rl"][row, : len(one.tokens) - 1]) - drift
    return made


def sums(f):
    """Σ over all trainable tokens of f(row, number of the token), and how many there are."""
    terms = [f(row, t) for row, one in enumerate(off_policy()) for t in np.flatnonzero(one.trainable)]
    return np.sum(terms, axis=0), len(terms)


@cache
def advantages() -> list[np.ndarray]:
    """Per rollout from the numpy reference: λ = 1 - 1 / (1.5 l), values of the critic as it was before its updates."""
    found = []
    for row, one in enumerate(off_policy()):
        value = np.append(0.0, outputs()["value"][row, : len(one.tokens) - 1])[None]
        reward = np.zeros_like(value)
        reward[0, -1] = np.float32(one.reward)
        lam = 1 - 1 / (1.5 * one.trainable.sum())
        found.append(numpy_gae(reward, value, one.trainable[None], np.ones((1, value.shape[1]), int), lam, 1.0)[0])
    return found


@cache
def stepped(mode: int):
    return learn(pack(off_policy()), mode)


def directional(of: str, objective, part: str = MAIN, epsilon: float = 1e-5):
    """(name, gradient · direction, finite difference of the objective along it) for some leaves of a learner."""
    which = 0 if of == "policy" else 1
    learner = learners()[which]
    found = gradient(stepped(RL)[which] if of == "policy" else first_critic_step()[0])
    names = [
        n for n in found if n.rpartition(".")[2] in ("embed", "q_b", "o", "router", "gate_up", "head", "value", "norm")
    ]
    assert len(names) >= 5
    for n, name in enumerate(names):
        direction = np.random.default_rng(n).standard_normal(found[name].shape)

        def moved(step, name=name, direction=direction):
            return jax.tree_util.tree_map_with_path(
                lambda p, a: a + step * direction if jax.tree_util.keystr(p) == name else a, learner.params
            )

        with jax.enable_x64(True):
            up, down = moved(epsilon), moved(-epsilon)
        yield name, float(np.sum(found[name] * direction)), (objective(up) - objective(down)) / (2 * epsilon)


def test_the_rl_gradient_is_that_of_ratio_times_advantage_over_the_tokens_inside_the_window():
    """SAO as published, from its parts: plain log-probs, numpy GAE, and finite differences of the surrogate."""
    other = learners()[1].params
    low, high = 1 - LEARN.clip_low, 1 + LEARN.clip_high

    def surrogate(params):
        now = evaluate(params, other)["rl"]

        def term(row, t):
            behaviour = np.float32(off_policy()[row].behaviour[t])
            inside = low < np.exp(outputs()["rl"][row, t - 1] - behaviour) < high
            return -np.exp(now[row, t - 1] - behaviour) * advantages()[row][t] if inside else 0.0

        total, count = sums(term)
        return total / count

    for name, got, want in directional("policy", surrogate):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-8), name


def test_the_critics_gradient_is_that_of_half_the_squared_error_to_the_monte_carlo_return():
    other = learners()[0].params

    def loss(params):
        value = evaluate(other, params)["value"]
        total, count = sums(lambda row, t: 0.5 * (value[row, t - 1] - np.float32(off_policy()[row].reward)) ** 2)
        return total / count

    assert first_critic_step()[2]["critic/loss"] == pytest.approx(loss(learners()[1].params), rel=1e-6)
    for name, got, want in directional("critic", loss):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-8), name


def test_the_sft_loss_is_the_cross_entropy_of_the_trainable_tokens():
    total, count = sums(lambda row, t: -outputs()["sft"][row, t - 1])
    metrics = stepped(SFT)[2]
    assert metrics["policy/loss"] == pytest.approx(total / count, rel=1e-6)
    assert 0 < metrics["policy/entropy"] < np.log(MODEL.vocab_size)


def test_the_figures_of_a_step_are_those_of_its_tokens():
    metrics, shift = stepped(RL)[2], lambda row, t: outputs()["rl"][row, t - 1] - off_policy()[row].behaviour[t]
    mean = lambda f: np.divide(*sums(f))
    outside = lambda r: not 1 - LEARN.clip_low < r < 1 + LEARN.clip_high
    share = mean(lambda row, t: float(outside(np.exp(shift(row, t)))))
    assert 0.05 < share < 0.9
    want = {
        "policy/dis_masked_share": share,
        "rollout/logprob_gap_mean": mean(lambda row, t: abs(shift(row, t))),
        "rollout/logprob_gap_max": max(
            abs(shift(r, t)) for r, one in enumerate(off_policy()) for t in np.flatnonzero(one.trainable)
        ),
        "rollout/k3": mean(lambda row, t: np.exp(shift(row, t)) - 1 - shift(row, t)),
        "policy/advantage_mean": mean(lambda row, t: advantages()[row][t]),
        "critic/value_mean": mean(lambda row, t: outputs()["value"][row, t - 1]),
    }
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name
    every = [
        (off_policy()[r].reward, outputs()["value"][r, t - 1])
        for r in range(6)
        for t in np.flatnonzero(off_policy()[r].trainable)
    ]
    returns, value = np.array(every).T
    assert metrics["critic/explained_variance"] == pytest.approx(
        1 - np.var(returns - value) / np.var(returns), rel=1e-5
    )


@pytest.mark.parametrize("mode", [SFT, RL], ids=["sft", "rl"])
def test_one_two_and_four_micro_batches_in_any_packing_give_one_gradient_and_one_update(mode):
    want = stepped(mode)
    for plan in (IN_TWO, IN_FOUR):
        got = learn(pack(off_policy(), plan), mode)
        assert got[2].keys() == want[2].keys()
        for name, value in want[2].items():
            assert got[2][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        for side in range(2):
            a, b = gradient(got[side]), gradient(want[side])
            difference = np.sqrt(sum(np.sum((a[k] - b[k]) ** 2) for k in b))
            assert difference <= 1e-10 * np.sqrt(sum(np.sum(g**2) for g in b.values()))
            for name, leaf in named_leaves(want[side].params).items():
                np.testing.assert_allclose(named_leaves(got[side].params)[name], leaf, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("mode", [SFT, VALUE, RL], ids=["sft", "value", "rl"])
def test_nan_in_masked_places_changes_nothing(mode):
    got, want = learn(pack(off_policy(), junk=np.nan), mode), stepped(mode)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_nan_embedding_of_the_padding_token_reaches_no_gradient():
    spoilt = []
    for learner in learners():
        with jax.enable_x64(True):
            embed = learner.params.embed.at[0].set(jnp.nan)
        spoilt.append(learner.replace(params=learner.params.replace(embed=embed)))
    got, want = learn(pack(off_policy()), RL, *spoilt), stepped(RL)
    for side in range(2):
        for name, value in gradient(want[side]).items():
            np.testing.assert_array_equal(gradient(got[side])[name], value, err_msg=name)


def unchanged(after, before) -> set[str]:
    a, b = named_leaves(after.params), named_leaves(before.params)
    return {name for name in b if np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes()}


def test_each_mode_touches_what_it_trains_and_nothing_else():
    policy, critic = learners()
    every = {"policy": set(named_leaves(policy.params)), "critic": set(named_leaves(critic.params))}
    indexer = {n for n in every["policy"] if ".indexer." in n}
    bias = {n for n in every["policy"] if n.endswith(".mlp.bias")}
    attention = {n for n in every["critic"] if ".attn." in n}
    assert len(indexer) == 5 and len(bias) == 1 and len(attention) > 15
    want = {
        IDLE: (every["policy"], every["critic"], 0, 0),
        SFT: (bias, every["critic"], 1, 0),
        VALUE: (every["policy"], attention | bias, 0, 2),
        RL: (bias | indexer, attention | bias, 1, 2),
    }
    for mode, (policy_keeps, critic_keeps, policy_steps, critic_steps) in want.items():
        after = stepped(mode)
        assert unchanged(after[0], policy) == policy_keeps, mode
        assert unchanged(after[1], critic) == critic_keeps, mode
        assert (after[0].version, after[1].version) == (policy_steps, critic_steps), mode
        assert after[0].opt_state[MAIN][0].count == policy_steps and after[1].opt_state[MAIN][0].count == critic_steps
        assert after[0].opt_state[INDEXER][0].count == (mode == SFT)


def test_the_critic_holds_no_state_for_its_frozen_attention():
    moments = gradient(stepped(RL)[1])
    assert not any(".attn." in name or name.endswith(".mlp.bias") for name in moments)
    assert ".value" in moments and ".groups[0][0].attn_norm" in moments


@partial(jax.jit, static_argnums=2)
def _critic_update(critic, batch, setup):
    return critic_step.update(critic, batch, jnp.asarray(1e-3, jnp.float64), setup)


ONE_UPDATE = SETUP._replace(learn=dataclasses.replace(LEARN, critic_updates=1))


@cache
def first_critic_step():
    with jax.enable_x64(True):
        return jax.device_get(_critic_update(learners()[1], pack(off_policy()), ONE_UPDATE))


def test_two_critic_updates_are_two_steps_towards_the_same_returns():
    with jax.enable_x64(True):
        second, _, _ = _critic_update(first_critic_step()[0], pack(off_policy()), ONE_UPDATE)
    for mode in (VALUE, RL):
        for name, leaf in named_leaves(stepped(mode)[1].params).items():
            np.testing.assert_allclose(named_leaves(second.params)[name], leaf, atol=1e-12, err_msg=name)


def test_rows_beyond_the_logits_that_may_exist_at_once_give_the_same_log_probs_and_gradient(monkeypatch):
    batch = pack(off_policy())
    rng = np.random.default_rng(0)
    states, head = rng.standard_normal((3, 24, 32)), rng.standard_normal((32, 64))
    carried = SimpleNamespace(kl=0.0)

    def of(states, head):
        monkeypatch.setattr(forward, "hidden_states", lambda *_, **__: (states, carried, []))
        params = SimpleNamespace(head=head)
        logp, entropy, _ = forward.token_logp(params, MODEL, batch.tokens[0], batch.document_ids[0], 0.8, 0.9)
        return jnp.sum(jnp.where(batch.trainable[0], logp, 0)), (logp, entropy)

    found = []
    for limit in (1 << 24, 24 * 64):
        monkeypatch.setattr(forward, "LOGITS_AT_ONCE", limit)
        with jax.enable_x64(True):
            found.append(jax.jit(jax.grad(lambda *a: of(*a), argnums=(0, 1), has_aux=True))(states, head))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)
    assert np.abs(found[0][0][0]).max() > 0.1


def test_without_a_critic_a_rollouts_reward_is_the_advantage_of_each_of_its_trainable_tokens():
    batch: LearnBatch = pack(off_policy(), IN_TWO, junk=np.nan)
    got = np.asarray(_rollout_reward(batch))
    assert not got[~batch.trainable].any()
    for m, rows in enumerate(IN_TWO):
        for r, row in enumerate(rows):
            for number, index in enumerate(row, 1):
                mine = (batch.rollout[m, r] == number) & batch.trainable[m, r]
                np.testing.assert_allclose(got[m, r][mine], off_policy()[index].reward, rtol=1e-6)
