"""Where a run plays: task folders that passed their gates, as the tasks of a run, and their oracles' turns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from glm_jax.data import tasks as data
from glm_jax.data.errors import DataError
from glm_jax.data.sft import Example
from glm_jax.data.tasks import Task, TaskConfig, TaskSet
from glm_jax.data.tokenizer import Tokenizer
from glm_jax.envs.attempts import Place
from glm_jax.envs.gates.record import admitted
from glm_jax.envs.pool import Pool
from glm_jax.envs.tasks import family
from glm_jax.host import calls
from glm_jax.host.environments import ToolConfig, transcripts

ENVIRONMENTS = "environments"
_DRAWS = 8  # numbers that are tried per question that is wanted of a family


def make_tasks(config: TaskConfig) -> TaskSet:
    """The task set of a config; of environments those alone whose gates are passed by what is in their folders now.

    Raises UngatedTask for any other, with the remedy.
    """
    if config.source != ENVIRONMENTS:
        return data.make_tasks(config)
    most = _DRAWS * (config.train_size + config.eval_size)
    return data.deal(config, [_tasks(Path(folder), most) for folder in config.environments])


def places(tasks: Sequence[Task]) -> dict[str, Place]:
    """Where each task is played, by its id."""
    return {task.id: Place(task.entry["folder"], task.entry["bundle"], task.entry["index"]) for task in tasks}


def examples(
    tasks: Sequence[Task], pool: Pool, tokenizer: Tokenizer, config: ToolConfig, window: int, patience: float
) -> list[Example]:
    """The oracle's turns on the first tasks, as it would have sampled them, and what it would have observed.

    Each is played in a box and graded. Raises PoolError where one is not rewarded, DataError where the window is too
    small for one.
    """
    chosen = tasks[: config.transcripts]
    where = places(chosen)
    played = transcripts(pool, [where[task.id] for task in chosen], config.command_seconds, patience)
    found = []
    for task, turns in zip(chosen, played, strict=True):
        prompt, answer, own = tokenizer.encode(task.question), [], []
        for number, (name, arguments, text) in enumerate(turns):
            call = calls.write(name, json.loads(arguments), tokenizer)
            last = number == len(turns) - 1
            observed = [] if last else calls.response(text, tokenizer, config.observation)
            answer += [*call, *observed]
            own += [True] * len(call) + [False] * len(observed)
        if len(prompt) + len(answer) > window:
            raise DataError(
                f"the oracle's turns on task {task.id!r} have {len(prompt)} prompt and {len(answer)} other tokens, "
                f"more than the window of {window}; widen rollout.window"
            )
        ids = lambda values: np.asarray(values, np.int32)
        found.append(Example(task.id, ids(prompt), ids(answer), np.asarray(own, bool)))
    return found


def _tasks(folder: Path, most: int) -> Iterator[Task]:
    template = admitted(folder)
    if not family.is_family(template):
        yield _task(folder.name, folder, template.instruction, template.bundle, None)
        return
    bundle = template.bundle
    for index in itertools.islice(itertools.count(), most):
        yield _task(f"{folder.name}-{index}", folder, family.instance(template, index).instruction, bundle, index)


def _task(name: str, folder: Path, instruction: str, bundle: str, index: int | None) -> Task:
    entry: Mapping = {"question": instruction, "folder": str(folder), "bundle": bundle, "index": index}
    return Task(name, instruction, None, folder.name, dict(entry))
