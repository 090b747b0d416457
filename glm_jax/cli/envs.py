"""`glm-jax envs ACTION ...`: tasks of environments: whether their verifiers may be trusted."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from glm_jax.cli.flags import Command, UsageError, parse

if TYPE_CHECKING:
    from glm_jax.envs.gates.record import Record


def run(argv: Sequence[str]) -> int:
    """Does what the first word names."""
    if argv and argv[0] in ACTIONS:
        return ACTIONS[argv[0]](argv[1:])
    known = "\n".join(f"  {name:<6} {(action.__doc__ or '').splitlines()[0]}" for name, action in ACTIONS.items())
    if {"-h", "--help"} & set(argv):
        print(f"usage: glm-jax envs ACTION ...\n\n{known}\n\nglm-jax envs ACTION --help lists its flags.")
        return 0
    raise UsageError(f"{argv[0]!r} is no action. Known:\n{known}" if argv else f"which action? Known:\n{known}")


def check(argv: Sequence[str]) -> int:
    """Runs tasks through the gates and writes gates.json into each; DIR is a task or a folder of tasks."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_integer("workers", os.cpu_count(), "boxes at work at once", lower_bound=1, flag_values=values)
        flags.DEFINE_bool("verbose", False, "tell of each trial as it ends, on stderr", flag_values=values)

    command = parse("envs check", argv, define, positional=("dir...",), required=())
    tell = (lambda line: print(line, file=sys.stderr)) if command.flags.verbose else (lambda line: None)
    rows = [("task", "gates", "trials", "seconds", "")]
    good = True
    for folder in _tasks(command):
        row, passed = _checked(folder, command.flags.workers, tell)
        rows.append(row)
        good = good and passed
    print(_table(rows))
    return 0 if good else 1


def _tasks(command: Command) -> list[Path]:
    """The task folders that the arguments name."""
    found = []
    for name in command.positional:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UsageError(f"{name} is no folder")
        below = sorted(path.parent for path in folder.glob("*/task.toml"))
        if not (folder / "task.toml").exists() and not below:
            raise UsageError(f"{name} is no task and holds none: there is no task.toml in it or one folder below")
        found += [folder] if (folder / "task.toml").exists() else below
    return found


def _checked(folder: Path, workers: int, tell: Callable[[str], None]) -> tuple[tuple[str, ...], bool]:
    """A task's row of the table, and whether it passed. What cannot be read or run here gets a row too."""
    from glm_jax.envs.gates import pipeline, record
    from glm_jax.envs.tasks.task import TaskError

    start = time.monotonic()
    try:
        found = pipeline.check(folder, workers, tell)
    except TaskError as error:
        return (folder.name, "unread", "", "", str(error)), False
    record.write(folder, found)
    trials = sum(len(gate.trials) for gate in found.gates)
    return (folder.name, _marks(found), str(trials), f"{time.monotonic() - start:.1f}", _why(found)), found.passed


def _marks(found: Record) -> str:
    passed = sum(gate.passed for gate in found.gates)
    return "passed" if found.passed else f"{passed} passed"


def _why(found: Record) -> str:
    return f"refused by {found.failing.name}: {found.failing.why}" if found.failing else ""


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


ACTIONS = {"check": check}
