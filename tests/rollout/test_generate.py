"""`generate`: completions by prompt, and prompts that cannot be completed."""

from __future__ import annotations

import pytest

import glm_jax
from glm_jax.rollout import generate as module
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.pace import Pace
from tests.model.tiny import random_params, two_layers
from tests.rollout.driver import MODEL, params, prompts


def test_a_completion_does_not_depend_on_the_other_prompts_or_on_the_slots():
    asked = prompts(5)
    made = glm_jax.generate(params(), MODEL, asked, 6, temperature=1.0, seed=3, slots_at_once=2)
    assert [len(one.tokens) for one in made] == [6] * 5 and all(len(one.logp) == 6 for one in made)
    alone = glm_jax.generate(params(), MODEL, asked[:1], 6, temperature=1.0, seed=3)
    assert alone[0].tokens == made[0].tokens
    assert glm_jax.generate(params(), MODEL, asked[:1], 6, temperature=1.0, seed=4)[0].tokens != made[0].tokens
    stop = made[0].tokens[2]
    ended = glm_jax.generate(params(), MODEL, asked[:1], 6, temperature=1.0, seed=3, stop=[stop])
    assert ended[0].tokens == made[0].tokens[: made[0].tokens.index(stop) + 1]


def test_drafts_leave_greedy_completions_as_they_are():
    model = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
    weights, asked = random_params(model), prompts(5)
    plain = glm_jax.generate(weights, model, asked, 9, slots_at_once=2)
    made = glm_jax.generate(weights, model, asked, 9, slots_at_once=2, drafts=3, pace=Pace((3,), fixed=True))
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    assert all(one.passes <= one.passed <= len(one.tokens) for one in made) and any(one.passes for one in made)
    assert not any(one.passes for one in plain)


@pytest.mark.parametrize("drafts", [0, pytest.param(3, marks=pytest.mark.rollout)])
def test_a_stop_string_ends_a_completion_at_its_last_token(drafts):
    model = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True) if drafts else MODEL
    weights = random_params(model) if drafts else params()
    pace = Pace((drafts,), fixed=True) if drafts else None
    decode = lambda tokens: "".join(f"<{token}>" for token in tokens)
    settings = dict(slots_at_once=2, drafts=drafts, pace=pace)
    plain = glm_jax.generate(weights, model, prompts(5), 90, **settings)
    tokens = plain[1].tokens
    stop = decode(tokens[3:5])[1:-1]  # "a><b"
    made = glm_jax.generate(weights, model, prompts(5), 90, **settings, stop_strings=[stop, "no"], decode=decode)
    for before, after in zip(plain, made, strict=True):
        texts = [decode(before.tokens[: n + 1]) for n in range(90)]
        count = next((n for n, text in enumerate(texts, 1) if stop in text), 90)
        assert after.tokens == before.tokens[:count] and after.logp == before.logp[:count]
    assert len(made[1].tokens) <= 5


def test_a_completion_that_a_string_ended_leaves_its_slot_to_the_next_prompt(monkeypatch):
    ticks = []
    read = module.read_log
    monkeypatch.setattr(module, "read_log", lambda log, depth: ticks.append(int(log.ticks)) or read(log, depth))
    made = glm_jax.generate(params(), MODEL, prompts(5), 90, slots_at_once=2, stop_strings=[","], decode=str)
    assert [len(one.tokens) for one in made] == [2] * 5, "str puts a comma before the second token"
    assert sum(ticks) == 3 * module.STRING_TICKS, "two at a time, for one round each"


def test_no_prompts_give_no_completions():
    assert glm_jax.generate(params(), MODEL, [], 4) == []


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[[1, 64]]), r"prompt 0 holds tokens \[64\] outside the vocabulary of 64"),
        (dict(prompts=[[-1]]), "outside the vocabulary"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(stop=list(range(9))), "9 stop ids given, at most 8"),
        (dict(stop_strings=["a"]), r"stop_strings=\['a'\] are looked for in text: give decode"),
        (dict(stop_strings=["a", ""], decode=str), "stop string 1 is empty"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(drafts=-1), r"drafts=\(-1,\) must be ascending depths"),
        (dict(drafts=2), r"drafts=\(2,\) wants a model with a draft"),
        (dict(top_p=0.0), "top_p=0.0"),
    ],
)
def test_what_cannot_be_completed_is_told(change, told):
    with pytest.raises(ValueError, match=told):
        glm_jax.generate(params(), MODEL, **{**dict(prompts=[[1]], max_new_tokens=2), **change})


def test_sizes_that_cannot_work_are_all_told():
    wrong = RolloutConfig(slots=2, ticks=0, prefill_slots=3, temperature=-1.0, top_p=1.5).check()
    told = " ".join(wrong)
    assert len(wrong) == 4
    assert all(word in told for word in ("ticks=0", "prefill_slots=3 exceeds slots=2", "temperature=-1.0", "top_p=1.5"))
    assert RolloutConfig().check() == []
