"""Calls in worker processes of several hosts: each host's workers serve a part, and all hosts learn the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from glm_jax.envs.pool import Answer, Pool
from glm_jax.host.peers import Peers

SLICE = 0.25  # seconds after which a process that waits looks what the others have


class Divided(Pool):
    """A pool whose calls are divided among the processes by the number of their home, or by their own.

    Every process asks for every call, and has it made if the call is its own. `take` and `wait` have to be called by
    all of them at the same points, and give all of them the same.
    """

    def __init__(self, function: str, workers: int, at_once: int = 1, *, noun: str, remedy: str, peers: Peers) -> None:
        super().__init__(function, workers, at_once, noun=noun, remedy=remedy)
        self._peers = peers
        self._missing: set[Hashable] = set()

    def ask(self, key: Hashable, arguments: tuple, limit: float, home: Hashable | None = None) -> None:
        if self._is_own(key if home is None else home):
            super().ask(key, arguments, limit, home)

    def leave(self, home: Hashable, arguments: tuple) -> None:
        if self._is_own(home):
            super().leave(home, arguments)

    def take(self) -> list[tuple[Any, Answer]]:
        own = [[key, answer.value, answer.cause, answer.detail] for key, answer in super().take()]
        return [(key, Answer(*answer)) for part in self._peers.exchange(own) for key, *answer in part]

    def wait(self, timeout: float, done: Callable[[set[Hashable], int], bool] = lambda asked, _: not asked) -> bool:
        deadline, own = time.monotonic() + timeout, None

        def look(asked: set[Hashable], answers: int) -> bool:
            nonlocal own
            own = [list(asked), answers]
            return done(asked, answers)

        while True:
            super().wait(min(SLICE, timeout), look)
            parts = self._peers.exchange([*own, time.monotonic() >= deadline])
            self._missing = {key for asked, _, _ in parts for key in asked}
            if done(self._missing, sum(answers for _, answers, _ in parts)):
                return True
            if any(late for _, _, late in parts):
                return False

    @property
    def outstanding(self) -> list[Any]:
        """Keys that had no answer in any process when it was last waited for."""
        return list(self._missing)

    def _is_own(self, number: Hashable) -> bool:
        return number % self._peers.count == self._peers.index
