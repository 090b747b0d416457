"""Rewards in worker processes: whatever user code does, each call ends in a value or in a named cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from glm_jax.envs.pool import PoolError
from glm_jax.envs.rewards import RewardPool, Score

FUNCTIONS = """
import os, subprocess, sys, time

def score(completion, task):
    print("user code prints")
    if completion == "sleep":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "raise":
        raise KeyError("no such thing")
    if completion == "exit":
        sys.exit(3)
    if completion == "die":
        os._exit(9)
    if completion == "die once":
        try:
            open(task["mark"], "x").close()
        except FileExistsError:
            return 0.5
        os._exit(9)
    if completion == "family":
        # a child in a session of its own, so that no process group reaches it
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(task["mark"], "w") as file:
            print(os.getpid(), child.pid, file=file)
        time.sleep(1000)
    if completion == "None":
        return None
    return float(completion)

def prepared(completion, task):
    return prepared.value

def prepare():
    prepared.value = 0.25

prepared.prepare = prepare

def evaluated(completion, task):
    return eval(completion, {"np": __import__("numpy")})
"""


@pytest.fixture
def functions(tmp_path, monkeypatch) -> str:
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_rewards:score"


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie that nobody has reaped yet runs no more."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def gone_within(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pids)


def pids_in(mark, seconds: float = 20.0) -> list[int]:
    end = time.monotonic() + seconds
    while not (mark.exists() and mark.read_text().endswith("\n")):
        assert time.monotonic() < end, "the worker never said which processes it started"
        time.sleep(0.02)
    return [int(word) for word in mark.read_text().split()]


def test_good_and_bad_calls_end_in_a_value_or_a_cause_and_the_others_go_on(functions):
    asked = ["0.5", "raise", "nan", "1.5", "-0.1", "inf", "None", "exit", "0", "1", "what"]
    with RewardPool(functions, workers=2, time_limit=20.0) as pool:
        for key, completion in enumerate(asked):
            pool.submit(key, completion, {})
        scores = dict(pool.wait(60.0))
        assert pool.poll() == []
    assert sorted(scores) == list(range(len(asked)))
    assert scores[0] == Score(0.5) and scores[8] == Score(0.0) and scores[9] == Score(1.0)
    causes = {asked[key]: score.cause for key, score in scores.items() if score.value is None}
    ranged, raised = dict.fromkeys(["1.5", "-0.1", "inf"], "out_of_range"), ["raise", "exit", "what"]
    assert causes == {"nan": "nan", "None": "not_a_number", **ranged, **dict.fromkeys(raised, "raised")}
    assert "KeyError: 'no such thing' (own_rewards.py:" in scores[1].detail
    assert scores[3].detail == "the reward is 1.5; it has to lie in [0, 1]"
    assert "returned None (NoneType)" in scores[6].detail


def test_what_functions_written_for_others_return_is_read_as_meant_or_named(functions):
    rewards = {
        "np.float32(0.5)": Score(0.5),
        "np.array(1)": Score(1.0),
        "np.bool_(True)": Score(1.0),
        "{'score': 1.0, 'acc': True, 'said': 'yes', 'parts': [1, np.int64(2)]}": Score(1.0, metrics={"acc": 1.0}),
        "{'score': np.float64(0.25), 'loss': np.array(2.0), 'bad': float('nan')}": Score(0.25, metrics={"loss": 2.0}),
    }
    odd = ["(1.0, {})", "'0.5'", "np.str_('0.5')", "np.ones(1)", "[1.0]", "{'acc': 1.0}", "{'score': '1'}", "10**400"]
    with RewardPool(f"{functions.partition(':')[0]}:evaluated", workers=1, time_limit=20.0) as pool:
        for key, completion in enumerate([*rewards, *odd]):
            pool.submit(key, completion, {})
        scores = [score for _, score in pool.wait(60.0)]
    assert scores[: len(rewards)] == list(rewards.values())
    for completion, score in zip(odd, scores[len(rewards) :], strict=True):
        assert (score.value, score.cause) == (None, "not_a_number"), completion
        assert "own_rewards:evaluated return one number, or a dict with a number under 'score'" in score.detail
    assert scores[len(rewards) + 1].detail.startswith("it returned '0.5' (str)")


def test_bounds_are_the_callers(functions):
    with RewardPool(functions, workers=1, time_limit=20.0, bounds=(-1.0, 2.0)) as pool:
        for key, completion in enumerate(["-1", "2", "2.1"]):
            pool.submit(key, completion, {})
        assert [score.cause for _, score in pool.wait(60.0)] == [None, None, "out_of_range"]


@pytest.mark.parametrize("completion", ["sleep", "spin"])
def test_a_call_over_its_limit_is_timed_out_and_its_worker_replaced(functions, completion: str):
    with RewardPool(functions, workers=1, time_limit=0.5) as pool:
        pool.submit(1, completion, {})
        pool.submit(2, "0.5", {})
        scores = dict(pool.wait(60.0))
    assert scores[1] == Score(None, "timed_out", "the call took more than 0.5 s")
    assert scores[2] == Score(0.5)


def test_a_timed_out_call_takes_what_it_started_with_it(functions, tmp_path):
    mark = tmp_path / "pids"
    with RewardPool(functions, workers=1, time_limit=2.0) as pool:
        pool.submit(1, "family", {"mark": str(mark)})
        pids = pids_in(mark)
        assert len(alive(pids)) == 2
        assert pool.wait(60.0)[0][1].cause == "timed_out"
        assert gone_within(pids, 5.0)


def test_a_call_whose_worker_dies_is_made_once_more(functions, tmp_path):
    with RewardPool(functions, workers=2, time_limit=20.0) as pool:
        pool.submit(1, "die once", {"mark": str(tmp_path / "mark")})
        pool.submit(2, "die", {})
        pool.submit(3, "1", {})
        scores = dict(pool.wait(60.0))
    assert scores[1] == Score(0.5)
    assert scores[2] == Score(None, "worker_died", "2 workers died in this call")
    assert scores[3] == Score(1.0)


def test_a_worker_killed_from_outside_loses_no_call(functions, tmp_path):
    mark = tmp_path / "pids"
    with RewardPool(functions, workers=1, time_limit=30.0) as pool:
        pool.submit(1, "family", {"mark": str(mark)})
        worker, child = pids_in(mark)
        mark.unlink()
        os.kill(worker, signal.SIGKILL)
        again, _ = pids_in(mark)  # the same call, in another process
        assert again != worker and gone_within([child], 5.0)
        os.kill(again, signal.SIGKILL)
        assert pool.wait(60.0)[0][1].cause == "worker_died"


def test_closing_ends_every_process_at_once(functions, tmp_path):
    mark = tmp_path / "pids"
    before = set(psutil.Process().children(recursive=True))
    with RewardPool(functions, workers=2, time_limit=1000.0) as pool:
        pool.submit(1, "family", {"mark": str(mark)})
        pids = pids_in(mark)
        start = time.monotonic()
    assert time.monotonic() - start < 5.0
    assert not alive(pids)
    assert set(psutil.Process().children(recursive=True)) <= before
    with pytest.raises(PoolError, match="not open"):
        pool.submit(2, "1", {})


def test_no_process_outlives_a_parent_killed_with_9(functions, tmp_path):
    mark = tmp_path / "pids"
    script = f"""
        import sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        from glm_jax.envs.rewards import RewardPool
        with RewardPool({functions!r}, workers=3, time_limit=1000.0) as pool:
            pool.submit(1, "family", {{"mark": {str(mark)!r}}})
            pool.submit(2, "spin", {{}})
            time.sleep(1000)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        named = pids_in(mark)
        end, below = time.monotonic() + 20.0, []
        while len(below) < 7 and time.monotonic() < end:  # three keepers, three workers, one grandchild
            below = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        assert set(named) <= set(below) and len(below) == 7
    finally:
        parent.kill()
        parent.wait()
    assert gone_within(below, 10.0), f"still running: {alive(below)}"


def test_scoring_goes_on_while_the_caller_does_other_work(functions):
    with RewardPool(functions, workers=1, time_limit=20.0) as pool:
        for key in range(40):
            pool.submit(key, "1", {})
        end = time.monotonic() + 30.0
        while len(pool._pool._answers) < 40 and time.monotonic() < end:  # no call of the pool that could drive it
            time.sleep(0.01)
        assert [key for key, _ in pool.poll()] == list(range(40))


def test_waiting_in_vain_names_the_keys_and_keeps_what_was_scored(functions):
    with RewardPool(functions, workers=2, time_limit=1000.0) as pool:
        for key in (7, 8):
            pool.submit(key, "sleep" if key == 8 else "1", {})
        with pytest.raises(PoolError, match=r"waited 2 s for 1 rewards of own_rewards:score: keys 8;"):
            pool.wait(2.0)
        assert pool.poll() == [(7, Score(1.0))]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:score", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("own_rewards:scroe", "has no function 'scroe'"),
        ("own_rewards", "'own_rewards' is not of the form module:function"),
        ("broken_rewards:score", "cannot be imported: ZeroDivisionError: division by zero (broken_rewards.py:1)"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_one_clear_error_at_start(functions, tmp_path, name: str, message: str):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    with pytest.raises(PoolError) as caught, RewardPool(name, workers=2, time_limit=5.0):
        pass
    assert message in str(caught.value)
    assert "set tasks.reward" in str(caught.value)


def test_a_module_that_kills_its_worker_at_import_ends_the_start(functions, tmp_path):
    (tmp_path / "deadly_rewards.py").write_text("import os\nos._exit(1)\n")
    with pytest.raises(PoolError, match="died while it imported the function .* 3 times in a row"):
        with RewardPool("deadly_rewards:score", workers=1, time_limit=5.0):
            pass


def test_a_function_may_prepare_each_worker(functions):
    with RewardPool("own_rewards:prepared", workers=1, time_limit=5.0) as pool:
        pool.submit(1, "", {})
        assert pool.wait(30.0) == [(1, Score(0.25))]


def test_a_key_in_use_is_refused(functions):
    with RewardPool(functions, workers=1, time_limit=1000.0) as pool:
        pool.submit(1, "sleep", {})
        with pytest.raises(ValueError, match="key 1 is submitted while"):
            pool.submit(1, "1", {})
