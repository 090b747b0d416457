"""A task as values: what an agent gets, what a verifier gets, and the limits of both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm_jax import text
from glm_jax.envs.sandbox.files import File, digest, read_tree
from glm_jax.envs.sandbox.limits import Limits

GATES_FILE = "gates.json"  # the one file of a task's folder that is no part of it
_LONGEST = 1 << 20  # bytes of a text that a person or a model is to read


class TaskError(ValueError):
    """A task folder that cannot be read. The message names the file, what is wrong with it and what would be right."""


class NeedsContainer(TaskError):
    """A task that wants what a box without Docker has not. The message names the file and the line."""

    def __init__(self, path: Path, line: int | None, what: str) -> None:
        where = f"{path}:{line}" if line else str(path)
        super().__init__(f"{where}: needs a container: {what}")
        self.path, self.line, self.what = path, line, what


@dataclass(frozen=True)
class Step:
    """A command that prepares the start state, in a shell, and where and with what environment it runs."""

    command: str
    cwd: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """A Harbor task. Trees hold paths relative to the folders that they are copied to, `start` absolute ones."""

    folder: Path
    name: str
    instruction: str
    workdir: str
    env: Mapping[str, str]
    start: Mapping[str, File]  # files of the work folder before anything ran, by absolute path
    steps: tuple[Step, ...]  # what else makes the start state
    tests: Mapping[str, File]  # to /tests, of the verifier alone
    solution: Mapping[str, File]  # to /solution, of the oracle alone
    partials: Mapping[str, Mapping[str, File]]  # like solution: leave the work unfinished
    attacks: Mapping[str, Mapping[str, File]]  # like solution: try to pass without solving
    artifacts: tuple[str, ...]  # what the verifier is handed
    collect: tuple[str, ...]  # commands that run in the agent's box when the agent has ended
    separate: bool  # the verifier has a box of its own
    binary: bool  # a reward is 0 or 1, nothing between
    agent_timeout: float
    verifier_timeout: float
    verifier_env: Mapping[str, str]
    limits: Limits
    metadata: Mapping[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def bundle(self) -> str:
        """SHA-256 of everything in the task's folder but its record of gates, as it is on disk now."""
        return bundle_hash(self.folder)


def read_text(path: Path) -> str:
    """A text file of a task, its lines ended by line feeds. Raises TaskError if it is no UTF-8 or over a MiB long."""
    try:
        if (size := path.stat().st_size) > _LONGEST:
            raise TaskError(f"{path} has {size} bytes; {_LONGEST} are read")
        return text.read_text(path).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise TaskError(f"{path}: {error}") from error
    except text.TextError as error:
        raise TaskError(str(error)) from error


def bundle_hash(folder: Path) -> str:
    """SHA-256 over every file of a task's folder. What gates have found holds for this hash alone."""
    tree = {path: file for path, file in read_tree(folder).items() if path != GATES_FILE}
    return hashlib.sha256(f"1 {digest(tree)}".encode()).hexdigest()
