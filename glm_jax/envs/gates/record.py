"""gates.json: what the gates found, bound to the content of the task; and the door that training goes through."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.tasks.task import GATES_FILE, Task, TaskError, bundle_hash

GATES = ("lint", "oracle", "no-op", "incomplete", "attacks")  # that every task has to pass; a solver's is one more
PIPELINE = 3  # of the gates themselves: stronger gates get a new number, which voids what weaker ones found


class UngatedTask(TaskError):
    """A task whose verifier has not passed its gates as it stands. Training takes none."""


@dataclass(frozen=True)
class Trial:
    """What was tried, the reward that the verifier gave, and the error where it gave none; of several gradings, with
    different hidden inputs, the worst."""

    name: str
    reward: float | None
    note: str = ""
    tried: int = 1


@dataclass(frozen=True)
class Gate:
    """A gate that was tried: `why` is empty where it was passed."""

    name: str
    why: str
    trials: tuple[Trial, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Record:
    """What the gates found of a task with this content, up to the first that was not passed."""

    bundle: str
    gates: tuple[Gate, ...]
    pipeline: int = PIPELINE

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @property
    def failing(self) -> Gate | None:
        return next((gate for gate in self.gates if not gate.passed), None)


def write(folder: Path, record: Record) -> None:
    """Writes gates.json: of each trial its reward, or the note where there is none, and how often if more than once."""
    gates = [
        {
            "name": gate.name,
            "why": gate.why,
            "trials": {trial.name: _told(trial) for trial in gate.trials},
        }
        for gate in record.gates
    ]
    data = {"passed": record.passed, "bundle": record.bundle, "pipeline": record.pipeline, "gates": gates}
    (folder / GATES_FILE).write_text(json.dumps(data, indent=1) + "\n")


def read(folder: Path) -> Record:
    """The record of a folder. Raises UngatedTask where there is none or it cannot be read."""
    path = folder / GATES_FILE
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        data = json.loads(path.read_text())
        gates = tuple(
            Gate(gate["name"], gate["why"], tuple(_trial(*trial) for trial in gate["trials"].items()))
            for gate in data["gates"]
        )
        if not all(isinstance(gate.why, str) for gate in gates):
            raise TypeError("why is a text")
        return Record(data["bundle"], gates, data["pipeline"])
    except FileNotFoundError as error:
        raise UngatedTask(f"{folder} has not been through the gates: glm-jax envs check {folder}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UngatedTask(f"{path} is no record of gates ({error!r}): glm-jax envs check {folder}") from error


def _told(trial: Trial) -> float | str | dict[str, float | str]:
    found = trial.note if trial.reward is None else trial.reward
    return found if trial.tried == 1 else {"found": found, "tried": trial.tried}


def _trial(name: str, told: float | str | dict) -> Trial:
    found, tried = (told["found"], told["tried"]) if isinstance(told, dict) else (told, 1)
    reward, note = (None, found) if isinstance(found, str) else (found, "")
    return Trial(name, reward, note, tried)


def admitted(folder: Path) -> Task:
    """The task of a folder whose gates are all passed by what is in it now. Raises UngatedTask, with the remedy."""
    record = read(folder)
    again = f"glm-jax envs check {folder}"
    if record.bundle != bundle_hash(folder):
        raise UngatedTask(f"{folder} was changed after it went through the gates: {again}")
    if record.pipeline != PIPELINE:
        raise UngatedTask(f"{folder} went through gates of version {record.pipeline}, now {PIPELINE}: {again}")
    if failing := record.failing:
        raise UngatedTask(f"{folder} did not pass the gate {failing.name!r}: {failing.why}")
    if missing := [name for name in GATES if name not in {gate.name for gate in record.gates}]:
        raise UngatedTask(f"{folder / GATES_FILE} holds no gate {', '.join(missing)}: {again}")
    return read_task(folder)
