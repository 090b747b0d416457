"""Rollouts between the ledger and the device: sent out as requests, taken in as tokens, handed on to scoring."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from glm_jax.data.tasks import Task
from glm_jax.host.device import Device, Outcome, Request
from glm_jax.host.errors import LedgerError
from glm_jax.host.ledger import Ledger
from glm_jax.host.rollouts import CANCELLED, EVAL, LENGTH, STOP, WALL_TIME, Rollout
from glm_jax.host.scoring import Scorer
from glm_jax.rollout.requests import STOP as DEVICE_STOP

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Draw:
    """How rollouts are drawn. temperature and top_p are those of training; evaluation draws at 1 and 1."""

    window: int  # most tokens of a rollout, prompt included
    temperature: float
    top_p: float
    stop: tuple[int, ...]


class Sampling:
    """Where each rollout without an ending stands: waiting on the host (by id), or under way on the device."""

    def __init__(self, ledger: Ledger, device: Device, scorer: Scorer, encode: Encode, draw: Draw):
        self.ledger, self.device, self.scorer, self.encode, self.draw = ledger, device, scorer, encode, draw
        self.waiting: list[int] = []
        self.on_device: set[int] = set()
        self.cancel: list[int] = []  # to be named in the next inbox
        self.started: dict[int, float] = {}  # monotonic time at which a rollout was opened

    def open(self, task: Task, group: int, purpose: str) -> Rollout:
        """Submits a rollout of `task`; it goes to the device when there is room."""
        rollout = self.ledger.submit(task.id, group, task.family, purpose, self.encode(task.question))
        bisect.insort(self.waiting, rollout.id)
        self.started[rollout.id] = time.monotonic()
        return rollout

    def resume(self) -> None:
        """Sends every live rollout anew, from its tokens, after the sampler was emptied or the run was resumed."""
        self.on_device.clear()
        self.cancel.clear()
        live = self.ledger.live.values()
        self.waiting = sorted(rollout.id for rollout in live if rollout.ending is None)
        for id in self.waiting:
            self.started.setdefault(id, time.monotonic())
        for rollout in live:
            if rollout.ending is not None and not rollout.scored and rollout.id not in self.scorer.waiting:
                self.scorer.submit(rollout)

    def next_requests(self) -> list[Request]:
        """What the next inbox asks for, in the order of ids."""
        count = self.device.room()
        ids, self.waiting = self.waiting[:count], self.waiting[count:]
        self.on_device.update(ids)
        return [self._request(self.ledger.live[id]) for id in ids]

    def next_cancellations(self) -> list[int]:
        count = self.device.rollout.requests
        ids, self.cancel = self.cancel[:count], self.cancel[count:]
        return ids

    def take(self, outcome: Outcome) -> list[int]:
        """Records what a round sampled; returns the rollouts that ended. Tokens of a cancelled rollout are surplus."""
        ended = []
        for part in outcome.sampled:
            if part.rollout not in self.on_device:
                if part.rollout >= self.ledger.book.submitted:
                    raise LedgerError(f"round {outcome.round} sampled for rollout {part.rollout}, never submitted")
                continue
            self.ledger.tokens(part.rollout, part.tokens, part.logp, part.version)
            if part.ending:
                self._end(part.rollout, STOP if part.ending == DEVICE_STOP else LENGTH)
                ended.append(part.rollout)
        return ended

    def cut(self, id: int, ending: str = CANCELLED) -> None:
        """Ends a rollout from the host's side, wherever it stands."""
        if id in self.on_device:
            self.cancel.append(id)
        else:
            self.waiting.remove(id)
        self._end(id, ending, score=ending != CANCELLED)

    def cut_overdue(self, wall_time: float) -> list[int]:
        """Ends the rollouts that were opened more than `wall_time` seconds ago; what they sampled is still scored."""
        now = time.monotonic()
        late = [id for id, start in self.started.items() if now - start > wall_time]
        for id in late:
            self.cut(id, WALL_TIME)
        return late

    def oldest(self, rollout: Rollout) -> int:
        """The version of a rollout's oldest token, or a lower bound of what it will be."""
        if rollout.version:
            return rollout.version[0]
        return self.device.oldest_version if rollout.id in self.on_device else self.device.version

    def _end(self, id: int, ending: str, score: bool = True) -> None:
        self.on_device.discard(id)
        self.started.pop(id, None)
        self.ledger.end(id, ending)
        if score:
            self.scorer.submit(self.ledger.live[id])

    def _request(self, rollout: Rollout) -> Request:
        temperature, top_p = (1.0, 1.0) if rollout.purpose == EVAL else (self.draw.temperature, self.draw.top_p)
        tokens = [*rollout.prompt, *rollout.tokens]
        return Request(rollout.id, tokens, self.draw.window, temperature, top_p, self.draw.stop)
