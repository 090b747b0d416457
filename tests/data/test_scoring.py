"""The rewards that come with the tasks, and exact match beside them."""

from __future__ import annotations

import dataclasses

import pytest

from glm_jax.data.scoring import answer_score, exact_and_partial, exact_match, reasoning_gym_score
from glm_jax.data.tasks import FamilyConfig, TaskConfig, make_tasks


def test_the_familys_scorer_gives_partial_credit_where_exact_match_gives_none():
    config = TaskConfig(families=(FamilyConfig("spell_backward", 1.0, {"min_word_len": 4, "max_word_len": 4}),))
    task = make_tasks(dataclasses.replace(config, train_size=3, eval_size=1)).train[0]
    asked = dataclasses.asdict(task)
    assert reasoning_gym_score(f" {task.answer}\n", asked) == 1.0 and exact_match(f"{task.answer}\n", task.answer)
    near = task.answer[:-1] + ("x" if task.answer[-1] != "x" else "y")
    assert reasoning_gym_score(near, asked) == pytest.approx(0.75) and not exact_match(near, task.answer)
    assert reasoning_gym_score("", asked) == 0.0
    assert exact_and_partial(task.answer, asked) == 1.0
    assert exact_and_partial(near, asked) == pytest.approx(0.375)
    assert exact_and_partial(task.answer + "x", asked) <= 0.5 < reasoning_gym_score(task.answer + "x", asked)


def test_exact_match_knows_case_and_a_missing_answer_is_never_matched():
    assert not exact_match("Abc", "abc")
    assert not exact_match("", None)


def test_answer_score_wants_an_answer():
    task = {"id": "a:1", "answer": "4"}
    assert (answer_score("4 ", task), answer_score("5", task)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="task 'a:1' has no 'answer'"):
        answer_score("4", {"id": "a:1", "answer": None})
