"""Rollouts between the ledger and the device: sent out as requests, taken in as tokens, handed on to scoring."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glm_jax.data.tasks import Task
from glm_jax.host import calls
from glm_jax.host.device import Device, Outcome
from glm_jax.host.environments import Environments, Seen
from glm_jax.host.errors import LedgerError
from glm_jax.host.ledger import Ledger
from glm_jax.host.monitor import DROP
from glm_jax.host.peers import ALONE, Peers
from glm_jax.host.requests import Request
from glm_jax.host.rollouts import (
    CANCELLED,
    EVAL,
    FAILED,
    LENGTH,
    REJECTED,
    STOP,
    STRING,
    TOKENS,
    TURNS,
    WALL_TIME,
    Rollout,
)
from glm_jax.host.scoring import Scorer
from glm_jax.rollout.log import Sampled
from glm_jax.rollout.requests import PARKED
from glm_jax.rollout.requests import STOP as DEVICE_STOP
from glm_jax.rollout.strings import StopStrings

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Draw:
    """How rollouts are drawn. temperature and top_p are those of training; evaluation draws at 1 and 1."""

    window: int  # most tokens of a rollout, prompt included
    temperature: float
    top_p: float
    stop: tuple[int, ...]
    tokens: int | None = None  # that a rollout may sample
    strings: StopStrings | None = None

    def limit(self, rollout: Rollout) -> int:
        """The length at which the rollout ends, from where it is now."""
        left = self.window if self.tokens is None else self.tokens - rollout.count
        return min(self.window, rollout.length + left)


class Sampling:
    """Where each rollout without an ending stands: waiting on the host (by id), under way on the device, or acting.

    One that acts waits for what its tool call gives; its slot on the device is parked. `environments` is None in runs
    without tools.
    """

    def __init__(
        self,
        ledger: Ledger,
        device: Device,
        scorer: Scorer,
        encode: Encode,
        draw: Draw,
        environments: Environments | None = None,
        peers: Peers = ALONE,
    ):
        self.ledger, self.device, self.scorer, self.encode, self.draw = ledger, device, scorer, encode, draw
        self.environments, self.peers = environments, peers
        self.park = -1 if environments is None else environments.tokenizer.tags[calls.CLOSE]
        self.waiting: list[int] = []
        self.on_device: set[int] = set()  # being sampled, or queued there
        self.parked: set[int] = set()  # those that hold a slot while they act, or wait with an observation
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
        self.parked.clear()
        self.cancel.clear()
        live = self.ledger.live.values()
        going_on = [rollout for rollout in live if rollout.ending is None]
        acting = {rollout.id for rollout in going_on if self._acts(rollout)}
        self.waiting = sorted(rollout.id for rollout in going_on if rollout.id not in acting)
        for rollout in going_on:
            self.started.setdefault(rollout.id, time.monotonic())
            if rollout.id in acting and rollout.id not in self.environments.calling:
                self.environments.call(rollout)
        for rollout in live:
            if rollout.ending is not None and not rollout.scored and rollout.id not in self.scorer.waiting:
                self.scorer.submit(rollout)

    def next_requests(self) -> list[Request]:
        """What the next inbox asks for, in the order of ids; observations for parked slots, which need no queue, first.

        So a full queue behind parked slots cannot keep them waiting.
        """
        rows = self.device.rollout.requests
        ids = [id for id in self.waiting if id in self.parked][:rows]
        ids += [id for id in self.waiting if id not in self.parked][: min(self.device.room(), rows - len(ids))]
        chosen = set(ids)
        self.waiting = [id for id in self.waiting if id not in chosen]
        self.on_device |= chosen
        self.parked -= chosen
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
            rollout = self.ledger.live[part.rollout]
            if part.ending:
                self.on_device.discard(part.rollout)  # its slot is free, or parked
            if part.ending == PARKED:
                self.parked.add(part.rollout)
            count = self._stopped(rollout, part)
            self.ledger.tokens(part.rollout, part.tokens[:count], part.logp[:count], part.version)
            if count is not None:
                self._end(part.rollout, STRING)
                ended.append(part.rollout)
            elif part.ending == PARKED:
                self.environments.call(rollout)
            elif part.ending:
                used_up = TOKENS if rollout.length < self.draw.window else LENGTH
                self._end(part.rollout, STOP if part.ending == DEVICE_STOP else used_up)
                ended.append(part.rollout)
        return ended

    def observe(self) -> int:
        """Takes in what came of tool calls; returns how many did. Never blocks."""
        seen = self.environments.seen() if self.environments else []
        for one in seen:
            self._observe(one)
        return len(seen)

    def cut(self, id: int, ending: str = CANCELLED) -> None:
        """Ends a rollout from the host's side, wherever it stands."""
        if id in self.waiting:
            self.waiting.remove(id)
        self._end(id, ending, score=ending != CANCELLED)

    def cut_overdue(self, wall_time: float) -> list[int]:
        """Ends the rollouts that were opened more than `wall_time` seconds ago; what they sampled is still scored."""
        now = time.monotonic()
        late = self.peers.of_first([id for id, start in self.started.items() if now - start > wall_time])
        for id in late:
            self.cut(id, WALL_TIME)
        return late

    def oldest(self, rollout: Rollout) -> int:
        """The version of a rollout's oldest token, or a lower bound of what it will be."""
        if rollout.version:
            return rollout.version[0]
        return self.device.oldest_version if rollout.id in self.on_device else self.device.version

    def ages(self) -> dict[str, float]:
        """Seconds since each rollout that goes on was opened, by id: what a checkpoint keeps of wall time."""
        now = time.monotonic()
        return {str(id): now - start for id, start in self.started.items()}

    def restore_ages(self, ages: Mapping[str, float]) -> None:
        now = time.monotonic()
        self.started = {int(id): now - age for id, age in ages.items()}

    def _stopped(self, rollout: Rollout, part: Sampled) -> int | None:
        """How many of the tokens that came back there are up to one that completes a stop string; None: none does."""
        if self.draw.strings is None:
            return None
        own = rollout.sampled[-self.draw.strings.reach :]
        turn = next((n for n, sampled in enumerate(reversed(own)) if not sampled), len(own))
        return self.draw.strings.end(rollout.tokens[len(rollout.tokens) - turn :], part.tokens)

    def _acts(self, rollout: Rollout) -> bool:
        """Whether its last token closed a tool call."""
        return bool(rollout.tokens) and rollout.tokens[-1] == self.park and bool(rollout.sampled[-1])

    def _observe(self, seen: Seen) -> None:
        """What a call came to: tokens to go on from, or an ending."""
        rollout = self.ledger.live[seen.rollout]
        if seen.rule is not None:
            self.ledger.monitor(rollout.id, seen.rule.action, seen.rule.name)
        if seen.failed is not None:
            self._end(rollout.id, CANCELLED, score=False)
            self.scorer.refuse(rollout.id, seen.failed, FAILED)
        elif seen.rule is not None and seen.rule.action == DROP:
            self._end(rollout.id, CANCELLED, score=False)
            self.ledger.settle([rollout.id], REJECTED, cause=f"monitor_{seen.rule.name}")
        elif seen.submitted:
            self._end(rollout.id, STOP)
        elif rollout.observations + 1 >= self.environments.config.turns:
            self._end(rollout.id, TURNS)
        else:
            ids = calls.response(seen.text, self.environments.tokenizer, self.environments.config.observation)
            if rollout.length + len(ids) >= self.draw.window:
                self._end(rollout.id, LENGTH)
            else:
                self.ledger.observation(rollout.id, ids)
                bisect.insort(self.waiting, rollout.id)

    def _end(self, id: int, ending: str, score: bool = True) -> None:
        """Ends a rollout; where the device may still know it, the next inbox frees its slot."""
        if id in self.on_device or id in self.parked:
            self.cancel.append(id)
        self.on_device.discard(id)
        self.parked.discard(id)
        self.started.pop(id, None)
        self.ledger.end(id, ending)
        if ending not in (WALL_TIME, CANCELLED):
            self.device.shards.lengths.add(self.ledger.live[id].kind, self.ledger.live[id].count)
        if score:
            self.scorer.submit(self.ledger.live[id])
        if self.environments:
            self.environments.forget(id)
            if id not in self.scorer.waiting:
                self.environments.leave(id)

    def _request(self, rollout: Rollout) -> Request:
        temperature, top_p = (1.0, 1.0) if rollout.purpose == EVAL else (self.draw.temperature, self.draw.top_p)
        tokens = [*rollout.prompt, *rollout.tokens]
        return Request(
            rollout=rollout.id,
            tokens=tokens,
            limit=self.draw.limit(rollout),
            temperature=temperature,
            top_p=top_p,
            stop=self.draw.stop,
            park=self.park,
            kind=rollout.kind,
            sampled=rollout.count,
        )
