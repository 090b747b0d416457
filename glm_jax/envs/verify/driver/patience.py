"""How long a candidate may keep its driver: by running, and by what it wrote, which the driver then reads.

What takes longer is the candidate's failure, and its reward 0. An error without a reward is left for the verifier's
faults.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

READING = 10.0  # seconds for code that reads what a candidate wrote; what is right takes milliseconds
_limit = float(os.environ.get("GRADER_LIMIT", "inf"))  # seconds that any candidate may run
_left = 0.8 * float(os.environ.get("GRADER_SECONDS", "inf"))  # of the verifier's own, for all that a candidate takes
_outermost = True


class Failed(Exception):
    """The candidate did not do what was asked: the reward is 0, and this says why."""


class Overdue(BaseException):
    """Raised wherever the driver is when time is up. No Exception, which code that expects the worst would hold."""


@contextlib.contextmanager
def spending(seconds: float) -> Iterator[float]:
    """What is left of some seconds for a candidate. Raises Failed where it has used up its part of the verifier's."""
    global _left, _outermost
    if _left <= 0:
        raise Failed("it has taken four fifths of the verifier's time (verifier.timeout_sec)")
    begin, counts, _outermost = time.monotonic(), _outermost, False
    try:
        yield min(seconds, _left)
    finally:
        if counts:
            _left -= time.monotonic() - begin
            _outermost = True


@contextlib.contextmanager
def running(seconds: float) -> Iterator[float]:
    """The same of a candidate's process, which the gates may give less."""
    with spending(min(seconds, _limit)) as left:
        yield left


@contextlib.contextmanager
def deadline(seconds: float = READING) -> Iterator[None]:
    """`with` it or as a decorator: around code that reads what a candidate wrote. Raises Failed when time is up.

    One step of the interpreter is not interrupted (a sort, a number's digits): bound what is read before it.
    """
    with spending(seconds) as left:
        armed = True

        def ring(*_: object) -> None:
            if armed:
                raise Overdue

        begin, before = time.monotonic(), signal.signal(signal.SIGALRM, ring)
        outer = signal.getitimer(signal.ITIMER_REAL)[0]
        left = max(min(left, outer or left), 1e-3)  # a timer of 0 would be none
        signal.setitimer(signal.ITIMER_REAL, left, 0.1)  # again and again, should a finalizer drop it
        try:
            yield
        except Overdue:
            raise Failed(f"what it wrote took more than {left:.3g} s to read") from None
        finally:
            armed = False
            rest = max(outer - (time.monotonic() - begin), 1e-3) if outer else 0.0
            signal.setitimer(signal.ITIMER_REAL, rest, 0.1 if outer else 0.0)
            signal.signal(signal.SIGALRM, before)
