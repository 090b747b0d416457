"""Rewards that come with the tasks, and exact match, which is another figure.

A reward is a function of (completion: str, task: dict) -> float, or a dict with it under `score`; `task` holds the
fields of data.tasks.Task. A config names it as module:function.
"""

from __future__ import annotations

from glm_jax.data.gym import COMPOSITE, load_gym, scorer


def reasoning_gym_score(completion: str, task: dict) -> float:
    """The family's own scorer on the completion, white space around it left out: in [0, 1], often partial credit."""
    family, entry = task["family"], task["entry"]
    family = entry["metadata"]["source_dataset"] if family == COMPOSITE else family
    return float(scorer(family)(completion.strip(), entry))


# A reward worker calls this once, before the first call and outside its time limit: the import takes seconds.
reasoning_gym_score.prepare = load_gym


def exact_and_partial(completion: str, task: dict) -> float:
    """Half for an exact match, half by the family's own scorer: partial credit guides, being right decides.

    reasoning-gym's scorers alone forgive what follows a right beginning, which teaches a policy not to stop.
    """
    return 0.5 * exact_match(completion, task["answer"]) + 0.5 * reasoning_gym_score(completion, task)


exact_and_partial.prepare = load_gym


def answer_score(completion: str, task: dict) -> float:
    """1 where the completion equals the task's answer, else 0. Raises ValueError for a task without an answer."""
    if task["answer"] is None:
        raise ValueError(f"task {task['id']!r} has no 'answer' to compare with")
    return float(exact_match(completion, task["answer"]))


def exact_match(completion: str, answer: str | None) -> bool:
    """Whether the completion is the answer, character by character but for white space around it; None never is."""
    return answer is not None and completion.strip() == answer.strip()
