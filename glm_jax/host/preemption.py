"""SIGTERM: schedulers send it some time before they take the machine away."""

from __future__ import annotations

import signal
from types import FrameType


class Notice:
    """Notes that SIGTERM came, for the loop to stop at its next safe point; a second one ends the process at once.

    A context manager, for the main thread: within it the signal no longer kills.
    """

    given = False

    def __enter__(self) -> Notice:
        self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
