"""Attempts at tasks in long-lived boxes, as a worker process serves them to a run.

A box lives here from a rollout's first tool call to its verdict. A request names every call that the rollout has made,
so a box that is gone (its worker died, the run was resumed) is made anew and the calls are carried out again, in their
order, before the new one. What they then do may differ where a command reads the clock or draws random numbers: the
rollout goes on from the new box, and is graded by what is in it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.agents.scripted import oracle_calls
from glm_jax.envs.agents.tools import Observation, Tools
from glm_jax.envs.gates.record import UngatedTask
from glm_jax.envs.sandbox import probe
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.sandbox.errors import BoxDied
from glm_jax.envs.tasks import family
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.tasks.task import Task
from glm_jax.envs.verify.attempt import agent_box, finish
from glm_jax.envs.verify.grade import grade

CALL, GRADE, TRANSCRIPT, LEAVE = "call", "grade", "transcript", "leave"
_TRIES = 2  # of a request whose box ends by itself


@dataclass(frozen=True)
class Place:
    """Which task: a folder whose gates passed with this content, and the instance where it is a family."""

    folder: str
    bundle: str
    index: int | None = None


@dataclass
class _Attempt:
    box: Box
    tools: Tools
    done: int = 0  # calls that were carried out in it


_attempts: dict[int, _Attempt] = {}
_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)  # one request of a rollout at a time
_changing = threading.Lock()  # either table


def serve(do: str, rollout: int, place: Place, calls: Sequence[ToolCall], seconds: float) -> dict:
    """Answers one request about a rollout. `calls` are all that it made so far, `seconds` the limit of each.

    CALL: carries the last call out; {"text", "error"}. GRADE: ends the attempt and has it judged; {"reward", "why"}.
    TRANSCRIPT: the oracle's turns in a box of their own; {"turns": [[name, arguments, text]], "reward", "why"}. LEAVE:
    ends the attempt. Where a box ends by itself again after a second try, {"failed": why}.
    """
    with _changing:
        mine = _locks[rollout]
    with mine:
        if do == LEAVE:
            _close(rollout)
            with _changing:
                _locks.pop(rollout, None)
            return {}
        for again in reversed(range(_TRIES)):
            try:
                return _answer(do, rollout, place, calls, seconds)
            except BoxDied as error:
                _close(rollout)
                if not again:
                    return {"failed": str(error)}
            except BaseException:
                _close(rollout)
                raise
    raise AssertionError("unreachable")


serve.prepare = probe.require


def _answer(do: str, rollout: int, place: Place, calls: Sequence[ToolCall], seconds: float) -> dict:
    task = _task(place)
    if do == TRANSCRIPT:
        calls = oracle_calls(task.solution)
    attempt = _attempt(rollout, task, seconds)
    seen = [attempt.tools.call(call) for call in calls[attempt.done :]]
    attempt.done = len(calls)
    if do == CALL:
        return {"text": seen[-1].text, "error": seen[-1].error}
    found = finish(task, attempt.box)
    _close(rollout)
    verdict = grade(task, found)
    answer = {"reward": verdict.reward, "why": verdict.error or verdict.said}
    return answer if do == GRADE else answer | {"turns": list(map(_turn, calls, seen))}


def _turn(call: ToolCall, seen: Observation) -> list[str]:
    return [call.name, call.arguments, seen.text]


def _attempt(rollout: int, task: Task, seconds: float) -> _Attempt:
    with _changing:
        found = _attempts.get(rollout)
    if found is None:
        box = agent_box(task)
        found = _Attempt(box, Tools(box, task.workdir, task.env, seconds))
        with _changing:
            _attempts[rollout] = found
    return found


def _close(rollout: int) -> None:
    with _changing:
        found = _attempts.pop(rollout, None)
    if found is not None:
        found.box.close()


@lru_cache(maxsize=4096)
def _task(place: Place) -> Task:
    task = _template(place.folder, place.bundle)
    return task if place.index is None else family.instance(task, place.index)


@lru_cache
def _template(folder: str, bundle: str) -> Task:
    task = read_task(Path(folder))
    if task.bundle != bundle:
        raise UngatedTask(f"{folder} was changed while a run was using it: glm-jax envs check {folder}")
    return task
