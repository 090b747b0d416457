"""Grading by three parties: the agent's files, as the host copied them; a driver's box; the candidate's box within.

The driver's box is made after the agent has ended and holds the task's tests, the artifacts as plain files, and the
library `grader`, by which tests run the candidate in a box of its own that sees neither tests nor logs.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from glm_jax.envs.sandbox import bubblewrap, seccomp
from glm_jax.envs.sandbox.box import Box, Collected, environment
from glm_jax.envs.sandbox.errors import BoxDied, BoxError
from glm_jax.envs.sandbox.files import File, placed
from glm_jax.envs.sandbox.limits import Result
from glm_jax.envs.tasks.task import Task
from glm_jax.envs.verify.attempt import folders
from glm_jax.text import decode

LOGS = "/logs/verifier"
_LIBRARY = tuple(sorted(Path(__file__).with_name("driver").glob("[!_]*.py")))
_CANDIDATE_MB = 64  # of each writable folder of a candidate's box


@dataclass(frozen=True)
class Verdict:
    """A reward within [0, 1], or why there is none: `reward` is None exactly where `error` says why."""

    reward: float | None
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    said: str = ""  # what the verifier wrote, for a person
    record: tuple = ()  # what the candidate was asked and answered, where that was wanted

    @property
    def passed(self) -> bool:
        return self.reward == 1.0


def grade(
    task: Task, found: Collected, seed: int | None = None, record: bool = False, limit: float | None = None
) -> Verdict:
    """Runs the task's verifier on collected artifacts. `seed` (default: a new one) draws the hidden inputs.

    `record` asks for what the candidate was asked and answered; `limit` shortens the seconds that it gets.
    """
    seed = secrets.randbits(128) if seed is None else seed
    places = folders(task)
    with Box(task.limits, folders=("/tests", "/logs", "/grader", *places), nesting=True) as box:
        try:
            box.put(found.files)
        except BoxError as error:  # an agent that hands in too much has not done its task
            size = sum(len(file.data) for file in found.files.values()) >> 20
            return Verdict(0.0, said=f"{len(found.files)} artifacts of {size} MiB have no room to be judged: {error}")
        logs = {"/".join(path.split("/")[:3]) for path in found.files if path.startswith("/logs/")}
        box.put(placed(task.tests, "/tests") | _grader((*places, *sorted(logs)), task.limits.processes // 2))
        box.run(["/bin/mkdir", "-p", LOGS], 10.0)
        env = {**task.verifier_env, "GRADER_SEED": str(seed), **({"GRADER_RECORD": "1"} if record else {})}
        env["GRADER_SECONDS"] = str(task.verifier_timeout)
        if limit is not None:
            env["GRADER_LIMIT"] = str(limit)
        verdict = _verdict(task, box, env, "/tests", record)
    refused = "".join(f"not collected: {path}: {reason}\n" for path, reason in found.refused)
    refused = refused.encode(errors="backslashreplace").decode()  # names of files may be no text
    return replace(verdict, said=refused + verdict.said)


def grade_in_place(task: Task, box: Box) -> Verdict:
    """Runs the verifier of a task without a box for it, in the agent's own. Such a reward trains nothing."""
    box.stop()
    box.run(f"chmod -R 700 /tests /logs; rm -rf /tests/* /tests/.[!.]* {LOGS}; mkdir -p {LOGS}", 30.0)
    box.put(placed(task.tests, "/tests"))
    return _verdict(task, box, dict(task.verifier_env), task.workdir, False)


def _verdict(task: Task, box: Box, env: Mapping[str, str], cwd: str, record: bool) -> Verdict:
    """The driver's one file decides; its output and a success without that file count for nothing."""
    try:
        done = box.run(["/bin/bash", "/tests/test.sh"], task.verifier_timeout, env=env, cwd=cwd)
        found = box.collect([f"{LOGS}/reward.json", f"{LOGS}/reward.txt", f"{LOGS}/record.json"]).files
    except (BoxDied, BoxError) as error:
        return Verdict(None, f"the verifier's box failed: {error}")
    said = f"{done.out}{done.err}"
    if wrong := _wrong(done, task):
        return Verdict(None, wrong, said=said)
    try:
        reward, metrics = read_reward(found)
    except ValueError as error:
        return Verdict(None, str(error), said=said)
    lines = json.loads(found[f"{LOGS}/record.json"].data) if record and f"{LOGS}/record.json" in found else ()
    return Verdict(reward, metrics=metrics, said=said, record=tuple(lines))


def _wrong(done: Result, task: Task) -> str:
    if done.timed_out:
        return f"the verifier took more than {task.verifier_timeout:g} s (verifier.timeout_sec)"
    if done.code != 0:
        memory = f", out of memory ({task.limits.memory_mb} MiB)" if done.out_of_memory else ""
        return f"the verifier crashed with code {done.code}{memory}: {str(done.err)[-500:]}"
    return ""


def read_reward(found: Mapping[str, File]) -> tuple[float, dict[str, float]]:
    """The reward and other numbers that a verifier wrote. Raises ValueError where they are no finite numbers."""
    if file := found.get(f"{LOGS}/reward.json"):
        try:
            data = json.loads(file.data)
        except ValueError as error:
            raise ValueError(f"reward.json is no JSON: {error}") from error
        if not isinstance(data, dict) or "reward" not in data:
            raise ValueError(f"reward.json holds {str(data)[:100]}; it is a table with the key reward")
    elif file := found.get(f"{LOGS}/reward.txt"):
        try:
            data = {"reward": float(decode(file.data, "reward.txt"))}
        except ValueError as error:
            raise ValueError(f"reward.txt holds {file.data[:100]!r}, which is no number") from error
    else:
        raise ValueError(f"the verifier wrote neither {LOGS}/reward.json nor {LOGS}/reward.txt")
    for key, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the verifier wrote {key} = {value!r}; it has to be a finite number")
    reward = float(data.pop("reward"))
    if not 0 <= reward <= 1:
        raise ValueError(f"the verifier wrote the reward {reward:g}; it lies between 0 and 1")
    return reward, {key: float(value) for key, value in data.items()}


@cache
def _grader(places: tuple[str, ...], processes: int) -> dict[str, File]:
    """The library for tests, and how it starts a candidate's box: everything but the program and its own files."""
    mounts = [word for place in places for word in ("--ro-bind", place, place)]
    prefix = [
        *(bubblewrap.program(), *bubblewrap.namespaces(root=False, nesting=False)),
        *bubblewrap.system(),
        *("--ro-bind-try", "/etc/passwd", "/etc/passwd", "--ro-bind-try", "/etc/group", "/etc/group"),
        *bubblewrap.writable((), _CANDIDATE_MB),
        *bubblewrap.python(),
        *mounts,
    ]
    settings = {"prefix": prefix, "sealed": bubblewrap.sealed(), "env": environment(), "workdir": places[0]}
    settings |= {"python": sys.executable, "processes": processes}
    return {
        **{f"/grader/{path.name}": File(path.read_bytes()) for path in _LIBRARY},
        "/grader/settings.json": File(json.dumps(settings).encode()),
        "/grader/filter.bpf": File(seccomp.program(nesting=False, watched=False)),
    }
