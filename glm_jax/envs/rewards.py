"""Rewards in worker processes, off the loop: every call ends in a value or in a named cause, none in a hang."""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from multiprocessing.connection import wait as wait_for_any

from glm_jax.envs.process import Worker

START_LIMIT = 120.0  # seconds a worker has to import the function
STARTS = 3  # failed starts in a row after which the pool gives up
TRIES = 2  # calls of a completion whose worker dies
NAMED = 10  # keys named in an error


class RewardError(RuntimeError):
    """The reward function cannot be used at all, or the pool was waited for in vain."""


@dataclass(frozen=True)
class Score:
    """A reward, or why there is none. Exactly one of `value` and `cause` is None."""

    value: float | None
    cause: str | None = None  # raised | timed_out | nan | out_of_range | worker_died
    detail: str = ""  # the cause in words


@dataclass
class _Call:
    key: int
    message: bytes
    tries: int = 0


@dataclass
class _Seat:
    """A worker, what it does, and until when (time.monotonic) it has to be done."""

    worker: Worker
    deadline: float
    ready: bool = False
    call: _Call | None = None


class RewardPool:
    """Calls `function` (module:function of (completion: str, task: dict) -> float) in `workers` processes.

    Each call has `time_limit` seconds from the moment a worker takes it up; a worker that exceeds it is killed with
    everything it started, and replaced. A call whose worker dies is made once more. Rewards lie within `bounds`, both
    ends included. A function may carry an attribute `prepare`, which each worker calls once before its first call.

    Entering waits until the function is imported; an import that fails raises RewardError. A thread of its own hands
    out calls, so scoring goes on while the caller does other work.
    """

    def __init__(
        self, function: str, workers: int, time_limit: float, bounds: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a reward pool wants at least 1")
        if not time_limit > 0:
            raise ValueError(f"time_limit is {time_limit}; it has to be a number of seconds above 0")
        if not bounds[0] < bounds[1]:
            raise ValueError(f"bounds is {bounds}; the first has to lie below the second")
        self._function, self._workers, self._time_limit, self._bounds = function, workers, time_limit, bounds
        self._seats: list[_Seat] = []
        self._queue: deque[_Call] = deque()
        self._outstanding: set[int] = set()
        self._scored: list[tuple[int, Score]] = []
        self._failed_starts = 0
        self._started = self._closing = False
        self._error: str | None = None
        self._changed = threading.Condition()  # guards everything above
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def __enter__(self) -> RewardPool:
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error)
            error = self._error
        if error:
            self.close()
            raise RewardError(error)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, key: int, completion: str, task: dict) -> None:
        """Asks for the reward of a completion; `key` names it and must not be outstanding. Never blocks."""
        call = _Call(key, pickle.dumps((completion, task)))
        with self._changed:
            self._check()
            if key in self._outstanding:
                raise ValueError(f"key {key} is submitted while its first call is still outstanding")
            self._outstanding.add(key)
            self._queue.append(call)
        self._wake()

    def poll(self) -> list[tuple[int, Score]]:
        """What was scored since the last poll or wait, in the order of its end. Never blocks."""
        with self._changed:
            self._check()
            return self._take()

    def wait(self, timeout: float) -> list[tuple[int, Score]]:
        """Blocks until every submitted completion is scored; what was not handed out yet, ordered by key.

        Raises RewardError naming the keys waited for after `timeout` seconds; scores that came by then stay for poll.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._outstanding or self._error, timeout)
            self._check()
            if not done:
                keys = sorted(self._outstanding)
                more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
                raise RewardError(
                    f"waited {timeout:g} s for {len(keys)} rewards of {self._function}: keys "
                    f"{', '.join(map(str, keys[:NAMED]))}{more}; each call may take {self._time_limit:g} s in "
                    f"{self._workers} workers: raise the workers, lower the time limit, or wait longer"
                )
            return sorted(self._take(), key=lambda pair: pair[0])

    def close(self) -> None:
        """Ends all workers with everything they started; what was not scored is dropped. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._wake_read.close()
        self._wake_write.close()

    def _check(self) -> None:
        if self._error:
            raise RewardError(self._error)
        if self._closing or not self._started:
            raise RewardError("this reward pool is not open; use it inside `with RewardPool(...) as pool:`")

    def _take(self) -> list[tuple[int, Score]]:
        taken, self._scored = self._scored, []
        return taken

    def _wake(self) -> None:
        # One unread byte is enough, and more could fill the pipe and block.
        if not self._wake_read.poll():
            self._wake_write.send_bytes(b"\0")

    # Below: the thread.

    def _run(self) -> None:
        try:
            self._seats = [self._seat() for _ in range(self._workers)]
            while not self._closing and not self._error:
                self._hand_out()
                self._listen()
                self._enforce_limits()
        except Exception as error:  # a thread that died silently would leave the caller waiting
            self._fail(f"the reward pool broke: {type(error).__name__}: {error}")
        finally:
            for seat in self._seats:
                seat.worker.kill()

    def _seat(self) -> _Seat:
        return _Seat(Worker(self._function), time.monotonic() + START_LIMIT)

    def _hand_out(self) -> None:
        for seat in self._seats:
            if seat.ready and seat.call is None:
                with self._changed:
                    if not self._queue:
                        return
                    seat.call = self._queue.popleft()
                seat.call.tries += 1
                seat.deadline = time.monotonic() + self._time_limit
                seat.worker.call(seat.call.message)

    def _listen(self) -> None:
        """Waits for a message, a wake-up or the nearest deadline, and takes in what came."""
        busy = [seat.deadline for seat in self._seats if seat.call or not seat.ready]
        timeout = max(0.0, min(busy) - time.monotonic()) if busy else None
        seats = {seat.worker.connection: seat for seat in self._seats}
        for source in wait_for_any([self._wake_read, *seats], timeout):
            if source is self._wake_read:
                self._wake_read.recv_bytes()
            else:
                self._take_in(seats[source])

    def _take_in(self, seat: _Seat) -> None:
        message = seat.worker.answer()
        if message is None:
            self._died(seat)
        elif "ready" in message:
            seat.ready, self._failed_starts = True, 0
            with self._changed:
                self._started = True
                self._changed.notify_all()
        elif "failed" in message:
            self._fail(f"the reward function cannot be loaded: {message['failed']}; set tasks.reward")
        elif seat.call:
            self._finish(seat, self._judge(message))

    def _judge(self, message: dict) -> Score:
        if "raised" in message:
            return Score(None, "raised", message["raised"])
        value = message["value"]
        low, high = self._bounds
        if math.isnan(value):
            return Score(None, "nan", "the reward is NaN")
        if not low <= value <= high:
            return Score(None, "out_of_range", f"the reward is {value:g}; it has to lie in [{low:g}, {high:g}]")
        return Score(value)

    def _finish(self, seat: _Seat, score: Score) -> None:
        call, seat.call = seat.call, None
        with self._changed:
            self._outstanding.discard(call.key)
            self._scored.append((call.key, score))
            self._changed.notify_all()

    def _died(self, seat: _Seat) -> None:
        if not seat.ready:
            self._start_failed("a reward worker died while it imported the function")
        elif seat.call and seat.call.tries < TRIES:
            with self._changed:
                self._queue.appendleft(seat.call)
        elif seat.call:
            self._finish(seat, Score(None, "worker_died", f"{seat.call.tries} workers died in this call"))
        self._replace(seat)

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for seat in list(self._seats):
            if now < seat.deadline or (seat.ready and not seat.call):
                continue
            # The answer may have come while another seat was served.
            if seat.worker.connection.poll():
                continue
            if seat.ready:
                self._finish(seat, Score(None, "timed_out", f"the call took more than {self._time_limit:g} s"))
            else:
                self._start_failed(f"a reward worker took more than {START_LIMIT:g} s to import the function")
            self._replace(seat)

    def _start_failed(self, what: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            self._fail(f"{what} ({self._function}), {STARTS} times in a row; try the import by hand")

    def _replace(self, seat: _Seat) -> None:
        seat.worker.kill()
        if not self._error and not self._closing:
            self._seats[self._seats.index(seat)] = self._seat()

    def _fail(self, error: str) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
