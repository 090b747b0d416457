"""jax.distributed's coordination service for threads that stand for processes, and such threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.errors import JaxRuntimeError

from glm_jax.host.peers import Peers


class Service:
    """Keys and values, and barriers that `count` have to come to. Once it is `gone`, every call fails."""

    def __init__(self, count: int):
        self.count, self.gone = count, False
        self.values: dict[str, str] = {}
        self._came: Counter[str] = Counter()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            self._check()
            if key in self.values and not allow_overwrite:
                raise JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values.pop(key, None)

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self._changed:
            self._check()
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        self._wait(lambda: key in self.values, milliseconds)
        return self.values[key]

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        with self._changed:
            self._came[name] += 1
            self._changed.notify_all()
        self._wait(lambda: self._came[name] >= self.count, milliseconds)

    def _wait(self, met: Callable[[], bool], milliseconds: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.gone or met(), milliseconds / 1000):
                raise JaxRuntimeError("DEADLINE_EXCEEDED: nobody came")
            self._check()

    def _check(self) -> None:
        if self.gone:
            raise JaxRuntimeError("UNAVAILABLE: Failed to send RPC to coordination service.\nand more lines")


def together(count: int, run: Callable[[Peers], Any], limit: float = 20.0) -> list[Any]:
    """What `run` gives in threads that stand for `count` processes. The first error, where they give none."""
    service = Service(count)
    with ThreadPoolExecutor(count) as threads:
        made = [threads.submit(run, Peers(number, count, service, limit)) for number in range(count)]
        return [one.result(60) for one in made]
