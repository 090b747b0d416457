"""Where the time of a run's rounds went: every moment of the loop under one name, added up over resumes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# What the loop is at. SAMPLE and LEARN are the time that it waits for the device: what the host does meanwhile costs
# nothing. HOST is all that has no other name.
COMPILE, ADMIT, SAMPLE, LEARN = "compile", "admit", "sample", "learn"
CHECKPOINT, DATA, ENVIRONMENTS, HOST = "checkpoint", "data", "environments", "host"
NAMES = (COMPILE, ADMIT, SAMPLE, LEARN, CHECKPOINT, DATA, ENVIRONMENTS, HOST)
RECENT = 0.1  # weight of the newest round in the seconds per tick


class Goodput:
    """A stopwatch per name, of which one is always running. `seconds` continues a resumed run's."""

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self.seconds = dict.fromkeys(NAMES, 0.0) | dict(seconds or {})
        self._at, self._since = HOST, time.monotonic()
        self._tick: float | None = None  # seconds that a tick of sampling takes where nothing is learned

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """What happens within counts as `name`, except what is named anew within it."""
        before = self._at
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def rename(self, name: str) -> None:
        """The time since the last switch counts as `name` instead."""
        self._at = name

    def waited(self, seconds: float, ticks: float, learned: bool) -> None:
        """Divides a wait for a round, which was counted as SAMPLE, if the round learned.

        One program does both, so that its sampling is estimated: at the seconds per tick of rounds that only sampled.
        """
        if learned:
            learning = seconds - min(seconds, ticks * (self._tick or 0.0))
            self.seconds[SAMPLE] -= learning
            self.seconds[LEARN] += learning
        elif ticks:
            new = seconds / ticks
            self._tick = new if self._tick is None else self._tick + RECENT * (new - self._tick)

    def figures(self) -> dict[str, float]:
        """Seconds by name so far, and the share of them in which the device sampled or learned."""
        self._switch(self._at)
        share = (self.seconds[SAMPLE] + self.seconds[LEARN]) / max(sum(self.seconds.values()), 1e-9)
        return {f"goodput/{name}": value for name, value in self.seconds.items()} | {"goodput/share": share}

    def _switch(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[self._at] += now - self._since
        self._at, self._since = name, now
