"""The stream of supervised examples: tasks' prompts and answers as ids, shuffled anew in each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from glm_jax.data.errors import DataError
from glm_jax.data.tasks import Task
from glm_jax.data.tokenizer import Tokenizer


class Example(NamedTuple):
    """One supervised document: int32 ids of the prompt, and of the answer with eos at its end.

    In a transcript of tool calls the answer also holds what came back of them, which is not to be learnt.
    """

    task: str
    prompt: np.ndarray
    answer: np.ndarray
    own: np.ndarray  # bool per token of the answer: to be learnt


def examples(tasks: Sequence[Task], tokenizer: Tokenizer, window: int) -> list[Example]:
    """The examples of `tasks` in their order.

    Raises DataError when there are none, when a task has no answer, or when prompt and answer exceed `window` tokens.
    """
    if not tasks:
        raise DataError("there is no task to make supervised examples of; raise tasks.train_size")
    found = []
    for task in tasks:
        if task.answer is None:
            raise DataError(f"task {task.id!r} has no answer to learn from; give it one, or leave the stage sft out")
        prompt = np.asarray(tokenizer.encode(task.question), np.int32)
        answer = np.asarray([*tokenizer.encode(task.answer), tokenizer.eos_id], np.int32)
        if len(prompt) + len(answer) > window:
            raise DataError(
                f"task {task.id!r} has {len(prompt)} prompt and {len(answer)} answer tokens, more than the window of "
                f"{window}; widen rollout.window, or narrow the tasks"
            )
        found.append(Example(task.id, prompt, answer, np.ones(len(answer), bool)))
    return found


def stream(found: Sequence[Example], seed: int) -> grain.DatasetIterator:
    """An endless iterator over `found`, each epoch in another order that hangs on `seed` alone.

    `get_state()` is a small dict for a checkpoint; a new stream of the same arguments goes on after `set_state` of it.
    """
    dataset = grain.MapDataset.source(found).seed(seed).shuffle().repeat()
    # Examples lie in memory: reading threads would only cost.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
