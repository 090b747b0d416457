"""Whether the other processes live: one falls silent, one ends by an error, and process 0 carries the news."""

from __future__ import annotations

import queue
import time

import pytest

from glm_jax.host.errors import PreemptedError
from glm_jax.host.peers import Peers
from glm_jax.host.watch import BEAT, Watch
from tests.host.service import Service

AGAIN = PreemptedError.exit_code
QUICK = dict(interval=0.02, lost=1.0)


@pytest.fixture
def service():
    return Service(2)


@pytest.fixture
def watch(service):
    """Makes the watch of a process, and the queue in which its verdicts stand."""
    made = []

    def make(number: int, **changes: float) -> tuple[Watch, queue.Queue]:
        verdicts = queue.Queue()
        made.append(Watch(Peers(number, 2, service), lambda *verdict: verdicts.put(verdict), **{**QUICK, **changes}))
        return made[-1], verdicts

    yield make
    for one in made:
        one._over.set()


def test_one_that_falls_silent_is_named_and_one_that_speaks_is_not(service, watch):
    _, verdicts = watch(0)
    for beat in range(20):  # twice as long as a silence may last
        service.key_value_set(f"{BEAT}/1", str(beat), allow_overwrite=True)
        time.sleep(0.1)
    assert verdicts.empty()
    text, code = verdicts.get(timeout=20)
    assert "process 1 has given no sign of life for 1 s: it was killed" in text and code == AGAIN


def test_one_that_never_spoke_is_missed_too(watch):
    _, verdicts = watch(1)
    assert "process 0 has given no sign of life" in verdicts.get(timeout=20)[0]


def test_one_that_is_done_is_not_missed(watch):
    done, _ = watch(1)
    _, verdicts = watch(0)
    done.close()
    time.sleep(1.5)
    assert verdicts.empty()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_ends_the_other_with_its_text_and_code(watch, failing):
    one, own = watch(failing)
    _, verdicts = watch(1 - failing)
    one.tell("DivergedError: step 7: policy/loss = nan", 1)
    assert verdicts.get(timeout=20) == (f"process {failing} stopped: DivergedError: step 7: policy/loss = nan", 1)
    assert own.empty() and verdicts.empty()


def test_process_0_stays_until_the_others_have_read_why_it_ends(service, watch):
    one, _ = watch(0)
    service.key_value_set(f"{BEAT}/1", "5", allow_overwrite=True)
    _, verdicts = watch(1, interval=1.0)  # looks once a second
    one.tell("gone wrong", 1)
    assert not verdicts.empty() and service.values[f"{BEAT}/1"] == "gone"


def test_without_process_0_the_others_end(service, watch):
    one, verdicts = watch(1)
    service.gone = True
    text, code = verdicts.get(timeout=20)
    assert (
        text.startswith("process 0 cannot be reached")
        and "coordination service.): it was killed" in text
        and code == AGAIN
    )
    one.tell("later", 1)  # nobody hears it, and it raises nothing
    assert verdicts.empty()
