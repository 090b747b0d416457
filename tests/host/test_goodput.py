"""Where the time went: every moment once, whatever is nested, divided or resumed."""

from __future__ import annotations

import time

import pytest

from glm_jax.host.goodput import (
    ADMIT,
    CHECKPOINT,
    COMPILE,
    DATA,
    ENVIRONMENTS,
    HOST,
    LEARN,
    NAMES,
    SAMPLE,
    Goodput,
)
from tests.host.doubles import FakePool, FakeProgram, MemorySaver, Rows, make_loop, plan


@pytest.fixture
def clock(monkeypatch):
    """Moves time on by so many seconds."""
    now = [100.0]
    monkeypatch.setattr("glm_jax.host.goodput.time.monotonic", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def test_every_second_counts_under_the_innermost_name(clock):
    watch = Goodput({ADMIT: 3.0})
    clock(1)
    with watch.at(ADMIT):
        clock(2)
        with watch.at(DATA):
            clock(4)
        clock(8)
    with pytest.raises(KeyError), watch.at(CHECKPOINT):
        clock(16)
        raise KeyError
    with watch.at(ADMIT):
        clock(32)
        watch.rename(COMPILE)
    clock(64)
    figures = watch.figures()
    wanted = {HOST: 65, ADMIT: 13, DATA: 4, CHECKPOINT: 16, COMPILE: 32}
    assert {name: figures[f"goodput/{name}"] for name in NAMES} == {name: wanted.get(name, 0) for name in NAMES}
    assert figures["goodput/share"] == 0 and sum(watch.seconds.values()) == 127 + 3


def test_a_round_that_did_both_is_divided_by_the_ticks_of_rounds_that_only_sampled(clock):
    watch = Goodput()
    for seconds, ticks, learned in ((6, 3, False), (11, 4, True), (5, 9, True), (7, 0, True)):
        with watch.at(SAMPLE):
            clock(seconds)
        watch.waited(seconds, ticks, learned)
    # 2 seconds a tick: 8 of the 11 are sampling's, all of the 5, none of the 7.
    assert watch.seconds[SAMPLE] == 6 + 8 + 5 and watch.seconds[LEARN] == 3 + 7
    assert watch.figures()["goodput/share"] == 1


class Waits(FakePool):
    def wait(self, timeout):
        time.sleep(0.004)
        return super().wait(timeout)


class Slow(MemorySaver):
    def save(self, *args):
        time.sleep(0.05)
        super().save(*args)


def test_a_loop_accounts_for_all_of_its_time_and_a_resumed_one_goes_on_counting(tmp_path):
    saver, rows = Slow(), Rows()
    settings = plan(sft=2, value=1, rl=5, checkpoint_every=3)
    make_loop(tmp_path, settings, pool=Waits(), saver=saver, rows=rows).run()
    learned = [row for _, row in rows if "time/round" in row]
    last = learned[-1]
    assert sum(last[f"goodput/{name}"] for name in NAMES) == pytest.approx(last["time/wall"], abs=0.05)
    assert last["goodput/checkpoint"] >= 2 * 0.05 and last["goodput/environments"] >= 0.02
    for name in NAMES:
        values = [row[f"goodput/{name}"] for row in learned]
        assert values == sorted(values), name
    kept = saver.saved[6][2]["goodput"]
    assert kept["checkpoint"] >= 0.05
    rows = Rows()
    make_loop(tmp_path, settings, program=FakeProgram(), saver=saver, rows=rows, restored=saver.saved[6]).run()
    assert all(rows[0][1][f"goodput/{name}"] >= kept[name] for name in (CHECKPOINT, ENVIRONMENTS, ADMIT))
