"""Whether the other processes of a run are alive: one that waits for another in vain learns why, and ends.

A process that is killed says nothing, and the others would wait in a collective for as long as the network lets them.
So each tells the coordination service once in a while that it is there, and reads who else is; one that ends by an
error tells that before it goes. The service runs in process 0: when that is killed, jax itself aborts the others, with
a message of its own and code 134, often before they can say more.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from glm_jax.host.errors import PreemptedError
from glm_jax.host.peers import Peers

BEAT, STOPPED = "beat", "stopped"  # folder of what each process last said; what the first to end by an error told
GONE = "gone"  # the last that a process says
INTERVAL, LOST = 1.0, 30.0  # seconds between two signs of life, and without one after which a process counts as lost
FAREWELL = 10.0  # seconds that process 0 waits for the others to read why it ends
AGAIN = PreemptedError.exit_code  # which launchers start again
DEAD = ": it was killed, or its machine lost. The same command goes on from the last checkpoint."

Verdict = tuple[str, int]  # why this process has to end, and its exit code


@contextmanager
def watched(peers: Peers, report: Callable[[BaseException], int]) -> Iterator[None]:
    """What is done within ends this process where another one ends; an error of its own ends the others.

    `report` tells the person of an error and returns the exit code. The process is left at once, as on the usual way
    out jax and orbax would wait for the others.
    """
    if peers.count == 1:
        yield
        return
    watch = Watch(peers, _end)
    try:
        yield
    except BaseException as error:
        if _from_jax(error):
            # A collective may have broken off because another process is gone: then the watch ends this one.
            time.sleep(LOST + 2 * INTERVAL)
        code = report(error)
        watch.tell(f"{type(error).__name__}: {error}", code)
        _leave(code)
    watch.close()


class Watch:
    """Watches the other processes in a thread, in which `end` is called once, with the verdict.

    The thread that the run goes on in may be waiting in a collective.
    """

    def __init__(self, peers: Peers, end: Callable[[str, int], None], interval: float = INTERVAL, lost: float = LOST):
        self.peers, self.client, self.end, self.interval, self.lost = peers, peers.client, end, interval, lost
        self._seen = {number: ("", time.monotonic()) for number in range(peers.count)}  # last sign of life, and when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This process has come to its end, and all is well."""
        self._over.set()
        self._thread.join()
        self._say(GONE)

    def tell(self, text: str, code: int) -> None:
        """This process ends by an error; returns once the others could read it."""
        self._over.set()
        try:
            self.client.key_value_set(STOPPED, json.dumps([self.peers.index, text, code]), allow_overwrite=True)
            self._take_leave()
        except jax.errors.JaxRuntimeError:
            pass  # process 0 is gone, and nobody is left to be told

    def _run(self) -> None:
        beat = 0
        while not self._over.is_set():
            beat += 1
            try:
                self._say(str(beat))
                verdict = self._silent() or self._told()
            except jax.errors.JaxRuntimeError as error:
                reason = str(error).splitlines()[0]
                verdict = f"process 0 cannot be reached any more ({reason}){DEAD}", AGAIN
            if verdict and not self._over.is_set():
                self._over.set()
                self.end(*verdict)

    def _silent(self) -> Verdict | None:
        """Of a process that has given no sign of life for too long."""
        now = time.monotonic()
        for number, said in self._said().items():
            if said != self._seen[number][0]:
                self._seen[number] = said, now
        for number, (said, when) in self._seen.items():
            if said != GONE and now - when > self.lost:
                return f"process {number} has given no sign of life for {now - when:.0f} s{DEAD}", AGAIN
        return None

    def _told(self) -> Verdict | None:
        """Of a process that ended by an error; waits for an interval."""
        try:
            told = self.client.blocking_key_value_get(STOPPED, int(self.interval * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise
        number, text, code = json.loads(told)
        if number != self.peers.index:
            self._take_leave()
        return f"process {number} stopped: {text}", code

    def _take_leave(self) -> None:
        """Process 0 goes last: jax aborts the others once it is gone."""
        self._say(GONE)
        if self.peers.index == 0:
            until = time.monotonic() + FAREWELL
            while time.monotonic() < until and any(said != GONE for said in self._said().values()):
                time.sleep(0.1)
            time.sleep(0.5)

    def _said(self) -> dict[int, str]:
        return {int(key.rpartition("/")[2]): said for key, said in self.client.key_value_dir_get(f"{BEAT}/")}

    def _say(self, text: str) -> None:
        self.client.key_value_set(f"{BEAT}/{self.peers.index}", text, allow_overwrite=True)


def _from_jax(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(text: str, code: int) -> None:
    print(f"glm-jax: {text}", file=sys.stderr)
    _leave(code)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
