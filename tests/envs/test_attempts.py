"""Attempts as workers serve them, in real boxes: what a rollout did stays, survives a worker, and is judged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from glm_jax.envs import attempts
from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.attempts import CALL, GRADE, LEAVE, TRANSCRIPT, Place
from glm_jax.envs.gates.record import admitted
from glm_jax.envs.pool import Pool
from glm_jax.envs.sandbox.errors import BoxDied
from glm_jax.envs.tasks import family

pytestmark = pytest.mark.envs
FAMILY = Path(__file__).resolve().parents[2] / "experiments" / "families" / "copy-word"


@pytest.fixture(scope="module")
def place() -> Place:
    return Place(str(FAMILY), admitted(FAMILY).bundle, 5)


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall("", name, json.dumps(arguments))


def bash(command: str) -> ToolCall:
    return call("bash", command=command)


def solution(place: Place) -> ToolCall:
    return bash(family.instance(admitted(FAMILY), place.index).solution["solve.sh"].data.decode())


def request(do: str, rollout: int, place: Place, *made: ToolCall) -> tuple:
    return (do, rollout, place, made, 10.0)


@pytest.fixture
def workers():
    with Pool("glm_jax.envs.attempts:serve", 1, 4, noun="environment", remedy="install bubblewrap") as pool:
        yield pool


def ask(pool: Pool, do: str, rollout: int, place: Place, *made: ToolCall):
    pool.ask(rollout, request(do, rollout, place, *made), 60.0, home=rollout)
    assert pool.wait(60.0)
    return dict(pool.take())[rollout]


def worker_pid(pool: Pool) -> int:
    """The process that serves; its parent is the keeper that was started."""
    (keeper,) = (p for p in psutil.Process().children() if p.pid == pool._seats[0].worker._process.pid)
    return keeper.children()[0].pid


def test_a_box_lives_from_call_to_call_and_the_verifier_judges_what_is_in_it(workers, place):
    first, second = bash("echo mine > note; echo $$"), bash("cat note")
    ask(workers, CALL, 1, place, first)
    assert "mine" in ask(workers, CALL, 1, place, first, second).value["text"]
    assert ask(workers, CALL, 2, place, second).value["text"].startswith("[stderr]"), "another rollout's box is its own"
    assert ask(workers, GRADE, 1, place, first, second).value["reward"] == 0.0
    assert ask(workers, GRADE, 2, place, second, solution(place)).value["reward"] == 1.0
    assert ask(workers, GRADE, 3, place).value["reward"] == 0.0, "who did nothing is graded all the same"


def test_an_error_of_the_policy_is_an_observation(workers, place):
    seen = ask(workers, CALL, 1, place, call("read_file", path="nowhere")).value
    assert seen["error"] and "nowhere" in seen["text"]
    seen = ask(workers, CALL, 2, place, call("fly")).value
    assert seen["error"] and "there is no tool 'fly'" in seen["text"]


def test_the_oracle_plays_its_turns_and_is_rewarded(workers, place):
    value = ask(workers, TRANSCRIPT, 1, place).value
    word = next(iter(family.instance(admitted(FAMILY), 5).start.values())).data.decode()
    assert value["reward"] == 1.0 and [turn[0] for turn in value["turns"]] == ["read_file", "write_file", "submit"]
    assert value["turns"][0][2] == word and word in value["turns"][1][1]


def test_calls_are_carried_out_again_in_a_new_box_when_a_worker_dies(workers, place):
    made = [bash("echo one >> log"), bash("echo two >> log")]
    ask(workers, CALL, 1, place, made[0])
    ask(workers, CALL, 1, place, *made)
    os.kill(worker_pid(workers), signal.SIGKILL)
    look = bash("cat log")
    assert ask(workers, CALL, 1, place, *made, look).value["text"].startswith("one\ntwo\n")


def test_a_box_that_ends_by_itself_is_replaced_once(place, monkeypatch):
    """In this process: what ends a box from within is not known, so its end is made here."""
    made = [bash("echo one >> log"), bash("cat log")]
    try:
        attempts.serve(*request(CALL, 7, place, made[0]))
        attempts._attempts[7].box._process.kill()
        assert attempts.serve(*request(CALL, 7, place, *made))["text"].startswith("one\n[")
        attempts._attempts[7].tools.call = lambda call: (_ for _ in ()).throw(BoxDied("gone"))
        monkeypatch.setattr(attempts, "agent_box", lambda task: (_ for _ in ()).throw(BoxDied("gone again")))
        assert attempts.serve(*request(CALL, 7, place, *made, made[1])) == {"failed": "gone again"}
    finally:
        attempts.serve(LEAVE, 7, place, (), 0.0)
    assert 7 not in attempts._attempts


def test_a_task_that_changes_under_a_run_is_refused(workers, place, tmp_path):
    copied = tmp_path / "copy-word"
    shutil.copytree(FAMILY, copied)
    with open(copied / "instruction.md", "a") as file:
        file.write("And more.\n")
    answer = ask(workers, CALL, 1, Place(str(copied), place.bundle, 5), bash("true"))
    assert answer.cause == "raised" and "was changed while a run was using it" in answer.detail


def test_no_box_outlives_a_run_killed_with_9(place, tmp_path):
    script = f"""
        import sys, time
        from glm_jax.envs.agents.chat import ToolCall
        from glm_jax.envs.attempts import Place
        from glm_jax.envs.pool import Pool
        with Pool("glm_jax.envs.attempts:serve", 2, 4, noun="environment", remedy="") as pool:
            for rollout in range(4):
                call = ToolCall("", "bash", '{{"command": "sleep 1000 & echo"}}')
                pool.ask(rollout, ("call", rollout, {place!r}, (call,), 10.0), 60.0, home=rollout)
            assert pool.wait(60.0)
            print(len(pool.take()), flush=True)
            time.sleep(1000)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "4\n"
        below = []

        def asleep() -> bool:
            below[:] = psutil.Process(parent.pid).children(recursive=True)
            try:
                return sum(process.name() == "sleep" for process in below) == 4
            except psutil.NoSuchProcess:  # one of those that only start others
                return False

        # A shell goes on once it has forked, and its child is called sleep a moment later.
        assert within(10.0, asleep)
    finally:
        parent.kill()
        parent.wait()
    assert within(10.0, lambda: not [p for p in below if p.is_running() and p.status() != "zombie"])


def within(seconds: float, holds) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not holds():
        time.sleep(0.05)
    return holds()
