"""`glm-jax envs ACTION ...`: tasks of environments: whether their verifiers may be trusted, and agents on them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from glm_jax.cli.flags import Command, UsageError, parse

if TYPE_CHECKING:
    from glm_jax.envs.agents.chat import ChatClient
    from glm_jax.envs.gates.record import Record
    from glm_jax.envs.tasks.task import Task


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
        flags.DEFINE_integer("tries", 4, "of the agent, for the gate `solver`", lower_bound=2, flag_values=values)
        _define_agent(values, None)

    command = parse("envs check", argv, define, positional=("dir...",), required=())
    tell = (lambda line: print(line, file=sys.stderr)) if command.flags.verbose else (lambda line: None)
    rows = [("task", "gates", "trials", "seconds", "")]
    good = True
    for folder in _tasks(command):
        row, passed = _checked(folder, command, tell)
        rows.append(row)
        good = good and passed
    print(_table(rows))
    return 0 if good else 1


def run_agent(argv: Sequence[str]) -> int:
    """Runs one agent on one task, prints what was said and seen, and the verifier's reward."""

    def define(values: flags.FlagValues) -> None:
        _define_agent(values, "oracle")
        flags.DEFINE_string("record", None, "with --agent=http: cassette to record the answers on", flag_values=values)
        flags.DEFINE_integer("instance", 0, "of a family: which one", lower_bound=0, flag_values=values)
        flags.DEFINE_integer("turns", 40, "the most that the agent gets", lower_bound=1, flag_values=values)
        flags.DEFINE_float("seconds", 900.0, "the most that it may take", lower_bound=1.0, flag_values=values)

    command = parse("envs run", argv, define, positional=("dir",), required=())
    from glm_jax.envs.agents import episode
    from glm_jax.envs.sandbox import probe
    from glm_jax.envs.tasks import family
    from glm_jax.envs.tasks.harbor import read_task

    task = read_task(Path(command.positional[0]).expanduser())
    if family.is_family(task):
        task = family.instance(task, command.flags.instance)
    for warning in task.warnings:
        print(f"{task.name}: {warning}", file=sys.stderr)
    limits = episode.EpisodeLimits(turns=command.flags.turns, seconds=command.flags.seconds)
    agent = _agent(command, task)()
    probe.require()
    found = asyncio.run(episode.run(task, agent, limits, hear=_show))
    verdict = found.verdict
    given = f"error: {verdict.error}" if verdict.reward is None else f"reward {verdict.reward:g}"
    metrics = "".join(f", {name} {value:g}" for name, value in verdict.metrics.items())
    print(f"== {found.ending} after {len(found.turns)} turns: {given}{metrics}\n{verdict.said}".rstrip())
    return 1 if verdict.reward is None else 0


def _define_agent(values: flags.FlagValues, default: str | None) -> None:
    about = (
        "oracle, nothing, partial:NAME, attack:NAME, replay:CASSETTE, policy:FOLDER (a model folder), or http: a "
        "server of OpenAI's chat form"
    )
    flags.DEFINE_string("agent", default, about, flag_values=values)
    flags.DEFINE_string("model", "", "the server's name of the model", flag_values=values)
    about = "with --agent=policy: the most tokens of a result that it is shown, as in its training"
    flags.DEFINE_integer("observation", 256, about, lower_bound=1, flag_values=values)
    about = "with --agent=http: the server; its key is read from OPENAI_API_KEY"
    flags.DEFINE_string("base_url", "http://localhost:8000/v1", about, flag_values=values)


def _agent(command: Command, task: Task) -> Callable[[], ChatClient]:
    """What makes a new agent of the kind that --agent names."""
    from glm_jax.envs.agents.cassette import Cassette
    from glm_jax.envs.agents.http import HttpChat
    from glm_jax.envs.agents.scripted import Scripted, by_script, calls

    kind, _, name = command.flags.agent.partition(":")
    scripts = {"oracle": {"": task.solution}, "partial": task.partials, "attack": task.attacks}
    if kind == "nothing":
        return lambda: Scripted([calls(("submit", {}))])
    if kind in scripts:
        if name not in scripts[kind]:
            raise UsageError(f"{task.folder} has no {kind} {name!r}; it has {', '.join(scripts[kind]) or 'none'}")
        return lambda: by_script(scripts[kind][name])
    if kind == "policy":
        from glm_jax.host.policy import Policy

        policy = Policy.load(Path(name).expanduser(), command.flags.observation)
        return lambda: policy
    if kind == "replay":
        return lambda: Cassette(Path(name), command.flags.model)
    if kind != "http":
        raise UsageError(f"--agent={command.flags.agent}: {command.flags['agent'].help}")
    if not command.flags.model:
        raise UsageError("--agent=http wants --model, the server's name of the model")
    make = lambda: HttpChat(command.flags.base_url, command.flags.model)
    if (tape := getattr(command.flags, "record", None)) is None:
        return make
    return lambda: Cassette(Path(tape), command.flags.model, "record", make())


def _show(message: dict) -> None:
    """A message as a person reads it."""
    print(f"== {message['role']}")
    if message["content"]:
        print(message["content"])
    for call in message.get("tool_calls", ()):
        print(f"-> {call['function']['name']} {call['function']['arguments']}")


def _tasks(command: Command) -> list[Path]:
    """The task folders that the arguments name."""
    found: list[Path] = []
    for name in command.positional:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UsageError(f"{name} is no folder")
        below = sorted(path.parent for path in folder.glob("*/task.toml"))
        if not (folder / "task.toml").exists() and not below:
            raise UsageError(f"{name} is no task and holds none: there is no task.toml in it or one folder below")
        found += [folder] if (folder / "task.toml").exists() else below
    return found


def _checked(folder: Path, command: Command, tell: Callable[[str], None]) -> tuple[tuple[str, ...], bool]:
    """A task's row of the table, and whether it passed. What cannot be read or run here gets a row too."""
    from glm_jax.envs.gates import pipeline, record
    from glm_jax.envs.tasks.task import TaskError

    start = time.monotonic()
    try:
        solver = (lambda task: _agent(command, task)()) if command.flags.agent else None
        found = pipeline.check(folder, command.flags.workers, tell, solver, command.flags.tries)
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


ACTIONS = {"check": check, "run": run_agent}
