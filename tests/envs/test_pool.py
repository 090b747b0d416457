"""Workers that keep things for their callers: homes, several calls at a time, and what is lost with a worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from glm_jax.envs.pool import Answer, Pool

FUNCTIONS = """
import os, time

kept = {}

def serve(home, word):
    if word == "sleep":
        time.sleep(1000)
    if word == "die":
        os._exit(9)
    if word == "leave":
        kept.pop(home, None)
        return {}
    if word == "nap":
        time.sleep(3)
    if word == "wait for other":
        end = time.monotonic() + 20
        while "other" not in kept and time.monotonic() < end:
            time.sleep(0.01)
    kept.setdefault(home, []).append(word)
    return {"pid": os.getpid(), "kept": kept[home], "homes": sorted(map(str, kept))}
"""


@pytest.fixture
def serve(tmp_path, monkeypatch) -> str:
    (tmp_path / "own_places.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_places:serve"


def pool(serve: str, workers: int, at_once: int = 4) -> Pool:
    return Pool(serve, workers, at_once, noun="place", remedy="mend it")


def answers(pool: Pool) -> dict:
    assert pool.wait(60.0), f"waits for {pool.outstanding}"
    return dict(pool.take())


def test_calls_of_a_home_go_to_one_worker_and_homes_are_spread(serve):
    with pool(serve, 2) as places:
        end = time.monotonic() + 60
        while not all(seat.ready for seat in places._seats) and time.monotonic() < end:
            time.sleep(0.01)  # the first that is there would get them all
        found = []
        for turn in range(3):
            for home in range(4):
                places.ask(home, (home, f"turn {turn}"), 20.0, home=home)
            found.append(answers(places))
    pids = [{home: answer.value["pid"] for home, answer in turn.items()} for turn in found]
    assert pids[0] == pids[1] == pids[2]
    assert sorted(list(pids[0].values()).count(pid) for pid in set(pids[0].values())) == [2, 2]
    assert found[2][3].value["kept"] == ["turn 0", "turn 1", "turn 2"]


def test_a_worker_serves_several_calls_at_a_time(serve):
    with pool(serve, 1) as places:
        places.ask("a", ("a", "wait for other"), 30.0, home="a")
        places.ask("b", ("other", "x"), 30.0, home="b")
        assert "other" in answers(places)["a"].value["homes"]


def test_a_home_that_loses_its_worker_gets_one_more_and_no_third(serve):
    with pool(serve, 1) as places:
        places.ask("idle", ("idle", "x"), 20.0, home="idle")
        first = answers(places)["idle"].value["pid"]
        os.kill(first, signal.SIGKILL)
        places.ask("idle", ("idle", "y"), 20.0, home="idle")
        again = answers(places)["idle"].value
        assert again["pid"] != first and again["kept"] == ["y"], "what was kept went with the worker"
        places.ask("idle", ("idle", "die"), 20.0, home="idle")
        assert answers(places)["idle"].cause == "worker_died"
        places.ask("other", ("other", "x"), 20.0, home="other")
        assert answers(places)["other"].value["kept"] == ["x"], "others are served on"


def test_a_call_over_its_limit_ends_alone(serve):
    with pool(serve, 1) as places:
        places.ask("slow", ("slow", "sleep"), 0.5, home="slow")
        places.ask("good", ("good", "wait for other"), 60.0, home="good")
        time.sleep(0.7)
        places.ask("third", ("other", "x"), 20.0, home="third")
        found = answers(places)
    assert found["slow"] == Answer(None, "timed_out", "the call took more than 0.5 s")
    assert found["good"].value["kept"] == ["wait for other"] and found["third"].value


def test_who_leaves_is_forgotten_and_nobody_waits_for_it(serve):
    with pool(serve, 1) as places:
        places.ask("a", ("a", "x"), 20.0, home="a")
        answers(places)
        places.leave("a", ("a", "leave"))
        places.leave("nobody", ("nobody", "x"))
        places.ask("b", ("b", "x"), 20.0, home="b")
        homes = answers(places)["b"].value["homes"]
        assert "nobody" not in homes and not places._lost
        places.ask("a", ("a", "y"), 20.0, home="a")
        assert answers(places)["a"].value["kept"] == ["y"]


def test_what_waited_for_a_home_that_left_is_never_begun(serve):
    with pool(serve, 1, at_once=1) as places:
        places.ask("busy", ("busy", "nap"), 30.0, home="busy")
        places.ask("late", ("late", "x"), 30.0, home="late")
        places.leave("late", ("late", "leave"))
        places.ask("free", ("other", "x"), 60.0, home="free")
        time.sleep(0.2)
        assert sorted(places.outstanding) == ["busy", "free"]
        assert "late" not in answers(places)["free"].value["homes"]
