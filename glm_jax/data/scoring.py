"""Rewards that come with the tasks, and exact match, which is another figure.

A reward is a function of (completion: str, task: dict) -> float; `task` holds the fields of data.tasks.Task. A config
names it as module:function.
"""

from __future__ import annotations

from glm_jax.data.gym import load_gym, scorer


def reasoning_gym_score(completion: str, task: dict) -> float:
    """The family's own scorer on the completion, white space around it left out: in [0, 1], often partial credit."""
    return float(scorer(task["family"])(completion.strip(), task["entry"]))


# A reward worker calls this once, before the first call and outside its time limit: the import takes seconds.
reasoning_gym_score.prepare = load_gym


def answer_score(completion: str, task: dict) -> float:
    """1 where the completion equals the task's answer, else 0. Raises ValueError for a task without an answer."""
    if task["answer"] is None:
        raise ValueError(f"task {task['id']!r} has no 'answer' to compare with")
    return float(exact_match(completion, task["answer"]))


def exact_match(completion: str, answer: str | None) -> bool:
    """Whether the completion is the answer, character by character but for white space around it; None never is."""
    return answer is not None and completion.strip() == answer.strip()
