"""A fleet of shards that takes no time: an event simulation of slots and queues, driven by the program's own router.

What is simulated is ticks. A slot samples a token per tick, and takes the oldest request of its shard's queue in the
tick after its rollout ended. The host sends a round while the one before it runs, and learns of that one after the next
was sent. A round ends early where nobody has anything to sample.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from glm_jax.host.lengths import Lengths
from glm_jax.host.router import Job, Router
from glm_jax.rollout.config import RolloutConfig


@dataclasses.dataclass(frozen=True)
class Work:
    """Rollouts in the order in which they are opened: how long each will become, and its kind."""

    lengths: Sequence[int]
    kinds: Sequence[str]


def draw(count: int, medians: Sequence[int], most: int, seed: int) -> Work:
    """Log-normal lengths with sigma = 1, cut at `most`, of kinds that have these medians and come as often."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(len(medians), size=count)
    lengths = np.rint(np.exp(rng.normal(np.log(np.asarray(medians, float))[kind], 1.0)))
    return Work(np.clip(lengths, 1, most).astype(int).tolist(), [f"median {medians[k]}" for k in kind])


class Line:
    """The host's side: keeps `at_once` rollouts open as they end, or batch-wise opens so many when all have ended."""

    def __init__(self, work: Work, at_once: int, batchwise: bool):
        self.work, self.at_once, self.batchwise = work, at_once, batchwise
        self.opened: list[int] = []  # when each rollout was
        self.open = 0
        self._sent = 0

    @property
    def left(self) -> int:
        """Rollouts that were not sent yet."""
        return len(self.work.lengths) - self._sent

    @property
    def done(self) -> bool:
        return not self.left and not self.open

    def send(self, now: int, room: int) -> range:
        """The rollouts to send now."""
        if not (self.batchwise and self.open):
            count = min(self.at_once - self.open, len(self.work.lengths) - len(self.opened))
            self.opened += [now] * count
            self.open += count
        first = self._sent
        self._sent += min(room, len(self.opened) - first)
        return range(first, self._sent)


@dataclasses.dataclass(frozen=True)
class Found:
    """How a piece of work went. Waits are ticks from a rollout's opening to its first token."""

    idle: float  # share of slot-ticks without a rollout, of those in which one waited somewhere
    used: float  # share of all slot-ticks in which a token was sampled: the end, when nothing waits, included
    wait_median: float
    wait_p99: float
    wait_most: int
    ticks: int

    @staticmethod
    def of(idle: int, waiting: int, sampled: int, held: int, waits: Sequence[int], ticks: int) -> Found:
        """From slot-ticks: idle ones, all while something waited, those that sampled, and all."""
        median, p99 = np.quantile(waits, [0.5, 0.99])
        return Found(idle / max(1, waiting), sampled / held, float(median), float(p99), max(waits), ticks)


class _Shard:
    def __init__(self, slots: int):
        self.free = [0] * slots  # a heap: since when each free slot is
        self.running: list[tuple[int, int]] = []  # a heap: when a rollout ends, and which
        self.queue: deque[int] = deque()
        self.emptied = 0  # when the queue last was

    def run(self, end: int, lengths: Sequence[int], started: dict[int, int]) -> list[tuple[int, int]]:
        """Up to the tick `end`; returns which rollouts ended, and when."""
        ended = []
        while True:
            while self.free and self.queue:
                at, rollout = heapq.heappop(self.free), self.queue.popleft()
                started[rollout] = at
                heapq.heappush(self.running, (at + lengths[rollout], rollout))
                self.emptied = at
            if not self.running or self.running[0][0] > end:
                return ended
            at, rollout = heapq.heappop(self.running)
            heapq.heappush(self.free, at)
            ended.append((rollout, at))


def simulate(sizes: RolloutConfig, shards: int, work: Work, at_once: int, batchwise: bool) -> Found:
    """`sizes` are those of one shard; `at_once` rollouts of the whole fleet are open."""
    whole = dataclasses.replace(sizes, slots=sizes.slots * shards, queue=sizes.queue * shards)
    lengths, line = Lengths(), Line(work, at_once, batchwise)
    router = Router(whole, shards, lengths)
    fleet = [_Shard(sizes.slots) for _ in range(shards)]
    started: dict[int, int] = {}
    under_way = None  # what the round that was sent last came to
    now = idle = waiting = 0
    while not line.done:
        router.begin()
        for rollout in line.send(now, router.room()):
            job = Job(rollout, work.kinds[rollout], sampled=0, most=sizes.window)
            fleet[router.place(job, {})].queue.append(rollout)
        sampled, end, ended = _round(fleet, now, sizes.ticks, work.lengths, started)
        until = end if line.left or any(s.queue for s in fleet) else max(now, *(s.emptied for s in fleet))
        waiting += (until - now) * whole.slots
        idle += sum(max(0, until - max(now, since)) for shard in fleet for since in shard.free)
        before, under_way = under_way, (sampled, [len(shard.queue) for shard in fleet], ended)
        now = end
        if before is not None:
            _take_in(router, line, lengths, *before)
    waits = [started[rollout] - at for rollout, at in enumerate(line.opened)]
    return Found.of(idle, waiting, sum(work.lengths), now * whole.slots, waits, now)


def _round(fleet: Sequence[_Shard], now: int, ticks: int, lengths: Sequence[int], started: dict[int, int]):
    """Runs all shards: what each rollout sampled, when the round ended, and which rollouts did."""
    for shard in fleet:
        shard.free = [max(now, since) for since in shard.free]  # what was sent is taken in the round's first tick
    ended = [pair for shard in fleet for pair in shard.run(now + ticks, lengths, started)]
    going_on = [rollout for shard in fleet for _, rollout in shard.running]
    end = now + ticks if going_on else max((at for _, at in ended), default=now)
    until = [*ended, *((rollout, end) for rollout in going_on)]
    sampled = [(rollout, at - max(now, started[rollout])) for rollout, at in until]
    return sampled, end, [rollout for rollout, _ in ended]


def _take_in(router: Router, line: Line, lengths: Lengths, sampled, queued, ended: Sequence[int]) -> None:
    router.came_back(sampled, queued)
    for rollout in ended:
        router.leave(rollout)
        lengths.add(line.work.kinds[rollout], line.work.lengths[rollout])
    line.open -= len(ended)
