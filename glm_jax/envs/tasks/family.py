"""Families: a task folder with blanks, which stands for as many tasks as there are ways to fill them.

In task.toml, `[metadata.glm_jax.family]` names the blanks and what fills them:

    word = {alphabet = "abcdefgh", length = [2, 3]}

and `{{word}}` stands in instruction, start files, tests, solution, partials, attacks, artifacts, or in names of files.
Values are letters and digits, different from each other within an instance.

How instances inherit the gates: an instance is a function of the folder's content and a number, and of nothing else, so
the hash that gates.json is bound to covers them all, and whatever changes an instance changes the hash. The gates run
on instances whose numbers that hash draws, which no author can choose. That the others would pass too is inferred from
these: blanks are for what the verifier treats alike.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from glm_jax.envs.sandbox.files import File
from glm_jax.envs.tasks.task import Task, TaskError

GATED = 3  # instances that the gates run on
_BLANK = re.compile(r"\{\{(\w+)\}\}")
_FILLED = ("name", "instruction", "start", "tests", "solution", "partials", "attacks", "artifacts")
_TRIES = 1000  # draws of a value that differs from the others


def is_family(task: Task) -> bool:
    return "family" in _own(task)


def instance(task: Task, index: int) -> Task:
    """Instance number `index` of a family. Raises TaskError where its blanks are not laid out as above."""
    rng = random.Random(f"{task.name} {index}")
    values: dict[str, str] = {}
    for name, (alphabet, low, high) in _blanks(task).items():
        values[name] = _draw(task, name, rng, alphabet, (low, high), values)
    fill = lambda text: _BLANK.sub(lambda blank: values.get(blank[1], blank[0]), text)
    return replace(task, **{name: _filled(getattr(task, name), fill) for name in _FILLED})


def gated(task: Task, bundle: str) -> Iterator[tuple[str, Task]]:
    """(name, task) of what the gates of a folder with this bundle hash run on: instances of a family, or the task."""
    if not is_family(task):
        yield "", task
        return
    for index in random.Random(bundle).sample(range(1 << 31), GATED):
        yield f"instance {index}: ", instance(task, index)


def _own(task: Task) -> Mapping[str, Any]:
    own = task.metadata.get("glm_jax", {})
    return own if isinstance(own, dict) else {}


def _blanks(task: Task) -> dict[str, tuple[str, int, int]]:
    """Alphabet, least and greatest length by name."""
    found = {}
    where = f"{task.folder / 'task.toml'}: metadata.glm_jax.family"
    for name, blank in _own(task)["family"].items():
        match blank:
            case {"alphabet": str(alphabet), "length": [int(low), int(high)]} if (
                re.fullmatch("[A-Za-z0-9]+", alphabet) and 0 < low <= high
            ):
                found[name] = (alphabet, low, high)
            case _:
                raise TaskError(
                    f'{where}.{name} is {blank}; it looks like {{alphabet = "abc", length = [2, 3]}}, of letters and '
                    "digits"
                )
    return found


def _draw(task: Task, name: str, rng: random.Random, alphabet: str, length: tuple[int, int], used: Mapping) -> str:
    for _ in range(_TRIES):
        value = "".join(rng.choices(alphabet, k=rng.randint(*length)))
        if value not in used.values():
            return value
    raise TaskError(f"{task.folder / 'task.toml'}: blank {name!r} finds no value that differs from {dict(used)}")


def _filled(value: Any, fill: Any) -> Any:
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, File):
        # Latin-1 maps every byte to one character and back, so files that are no text pass unchanged.
        return File(fill(value.data.decode("latin-1")).encode("latin-1"), value.mode)
    if isinstance(value, Mapping):
        return {fill(key): _filled(one, fill) for key, one in value.items()}
    return tuple(_filled(one, fill) for one in value)
