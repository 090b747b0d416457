"""Calls in worker processes, off the loop: every call ends in a value or in a named cause, none in a hang."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from multiprocessing.connection import wait as wait_for_any
from typing import Any

from glm_jax.envs.process import Worker

START_LIMIT = 120.0  # seconds a worker has to import the function
STARTS = 3  # failed starts in a row after which the pool gives up
TRIES = 2  # of a call whose worker dies, and workers that a home may lose
RAISED, NOT_A_NUMBER, TIMED_OUT, WORKER_DIED = "raised", "not_a_number", "timed_out", "worker_died"


class PoolError(RuntimeError):
    """The function cannot be used at all, or the pool was waited for in vain."""


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it returned nothing: `cause` is one of those above, `detail` says it in words."""

    value: Any = None
    cause: str | None = None
    detail: str = ""


@dataclass
class _Call:
    number: int
    key: Hashable
    message: bytes
    limit: float  # seconds from the moment a worker takes it up
    home: Hashable | None
    tries: int = 0
    deadline: float = 0.0


@dataclass
class _Seat:
    """A worker, the calls it is at by their numbers, and the homes that it may keep things for."""

    worker: Worker
    start_by: float  # time.monotonic
    ready: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)
    homes: set[Hashable] = field(default_factory=set)


class Pool:
    """Calls `function` (module:function) in `workers` processes, up to `at_once` calls (in threads) in each.

    A call over its limit has its worker killed, with everything that it started, and replaced. A call whose worker dies
    is made once more. Calls of one `home` go to one worker as long as that lives, so that it may keep things for them;
    a home that loses a second worker gets no third. A function may carry an attribute `prepare`, which each worker
    calls once before its first call.

    Entering waits until the function is imported; an import that fails raises PoolError, in which `noun` says what the
    calls are and `remedy` what to change. A thread of its own hands out calls while the caller does other work.
    """

    def __init__(self, function: str, workers: int, at_once: int = 1, *, noun: str, remedy: str) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}; a {noun} pool wants at least 1")
        self._function, self._workers, self._at_once = function, workers, at_once
        self._noun, self._remedy = noun, remedy
        self._seats: list[_Seat] = []
        self._queue: deque[_Call] = deque()
        self._farewells: deque[tuple[Hashable, bytes]] = deque()
        self._outstanding: set[Hashable] = set()
        self._answers: list[tuple[Any, Answer]] = []
        self._lost: Counter[Hashable] = Counter()  # workers that a home lost
        self._number = 0  # of the last call
        self._failed_starts = 0
        self._started = self._closing = False
        self._error: str | None = None
        self._changed = threading.Condition()  # guards everything above
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name=f"{noun}s", daemon=True)

    def __enter__(self) -> Pool:
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error)
            error = self._error
        if error:
            self.close()
            raise PoolError(error)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, key: Hashable, arguments: tuple, limit: float, home: Hashable | None = None) -> None:
        """Makes a call; `key` names it and must not be outstanding. Never blocks."""
        with self._changed:
            self._check()
            if key in self._outstanding:
                raise ValueError(f"key {key} is submitted while its first call is still outstanding")
            self._outstanding.add(key)
            self._number += 1
            self._queue.append(_Call(self._number, key, pickle.dumps((self._number, arguments)), limit, home))
        self._wake()

    def leave(self, home: Hashable, arguments: tuple) -> None:
        """A home's last call, whose answer nobody wants: made if a worker still keeps something for it.

        What it had asked before is not begun any more.
        """
        with self._changed:
            self._check()
            self._farewells.append((home, pickle.dumps((None, arguments))))
        self._wake()

    def take(self) -> list[tuple[Any, Answer]]:
        """What was answered since the last time, in the order of its end. Never blocks."""
        with self._changed:
            self._check()
            taken, self._answers = self._answers, []
            return taken

    def wait(self, timeout: float, done: Callable[[set[Hashable], int], bool] = lambda asked, _: not asked) -> bool:
        """Blocks until `done(outstanding keys, answers to take)`, at most `timeout` seconds; returns whether it is."""
        with self._changed:
            met = self._changed.wait_for(lambda: self._error or done(self._outstanding, len(self._answers)), timeout)
            self._check()
            return bool(met)

    @property
    def outstanding(self) -> list[Any]:
        """Keys of calls that have no answer yet."""
        with self._changed:
            return list(self._outstanding)

    def close(self) -> None:
        """Ends all workers with everything they started; what was not answered is dropped. May be called twice."""
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
            raise PoolError(self._error)
        if self._closing or not self._started:
            raise PoolError(f"this {self._noun} pool is not open; use it inside `with ... as pool:`")

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
            self._fail(f"the {self._noun} pool broke: {type(error).__name__}: {error}")
        finally:
            for seat in self._seats:
                seat.worker.kill()

    def _seat(self) -> _Seat:
        return _Seat(Worker(self._function, self._at_once), time.monotonic() + START_LIMIT)

    def _hand_out(self) -> None:
        """Gives calls to seats that have room, oldest first; a call whose home is at a full seat waits for that one."""
        with self._changed:
            while self._farewells:
                self._part(*self._farewells.popleft())
            for call in list(self._queue):
                if self._lost[call.home] >= TRIES and call.home is not None:
                    self._queue.remove(call)
                    self._finish(call, Answer(None, WORKER_DIED, f"{TRIES} workers died that served it"))
                elif (seat := self._seat_for(call.home)) is not None:
                    self._queue.remove(call)
                    self._give(seat, call)

    def _part(self, home: Hashable, message: bytes) -> None:
        self._lost.pop(home, None)
        for call in [call for call in self._queue if call.home == home]:
            self._queue.remove(call)
            self._outstanding.discard(call.key)
        if (seat := next((seat for seat in self._seats if home in seat.homes), None)) is not None:
            seat.homes.discard(home)
            seat.worker.call(message)

    def _seat_for(self, home: Hashable | None) -> _Seat | None:
        room = [seat for seat in self._seats if seat.ready and len(seat.calls) < self._at_once]
        if home is not None and (own := next((seat for seat in self._seats if home in seat.homes), None)) is not None:
            return own if own in room else None
        return min(room, key=lambda seat: (len(seat.calls), len(seat.homes)), default=None)

    def _give(self, seat: _Seat, call: _Call) -> None:
        call.tries += 1
        call.deadline = time.monotonic() + call.limit
        seat.calls[call.number] = call
        if call.home is not None:
            seat.homes.add(call.home)
        seat.worker.call(call.message)

    def _listen(self) -> None:
        """Waits for a message, a wake-up or the nearest deadline, and takes in what came."""
        ends = [seat.start_by for seat in self._seats if not seat.ready]
        ends += [call.deadline for seat in self._seats for call in seat.calls.values()]
        timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
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
            self._fail(f"the {self._noun} function cannot be loaded: {message['failed']}; {self._remedy}")
        elif (call := seat.calls.pop(message["number"], None)) is not None:
            with self._changed:
                self._finish(call, Answer(message.get("value"), message.get("cause"), message.get("detail", "")))

    def _finish(self, call: _Call, answer: Answer) -> None:
        self._outstanding.discard(call.key)
        self._answers.append((call.key, answer))
        self._changed.notify_all()

    def _died(self, seat: _Seat) -> None:
        if not seat.ready:
            self._start_failed(f"a {self._noun} worker died while it imported the function")
        self._requeue(seat)
        self._replace(seat)

    def _requeue(self, seat: _Seat) -> None:
        """The calls of a seat that is lost are made once more."""
        with self._changed:
            self._lost.update(seat.homes)
            for call in reversed(seat.calls.values()):
                if call.home is not None and call.home not in seat.homes:  # it has left
                    self._outstanding.discard(call.key)
                elif call.tries < TRIES:
                    self._queue.appendleft(call)
                else:
                    self._finish(call, Answer(None, WORKER_DIED, f"{call.tries} workers died in this call"))

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        for seat in list(self._seats):
            late = [call for call in seat.calls.values() if call.deadline <= now]
            # The answer may have come while another seat was served.
            if (seat.ready and not late) or (not seat.ready and now < seat.start_by) or seat.worker.connection.poll():
                continue
            if not seat.ready:
                self._start_failed(f"a {self._noun} worker took more than {START_LIMIT:g} s to import the function")
            for call in late:
                del seat.calls[call.number]
                with self._changed:
                    self._finish(call, Answer(None, TIMED_OUT, f"the call took more than {call.limit:g} s"))
            self._requeue(seat)
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
