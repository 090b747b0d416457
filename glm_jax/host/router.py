"""The router: which shard of the device a rollout is sent to. The program's host and a simulator of fleets drive it.

A shard's load is the time, in ticks, that its rollouts still take there:

    load = sum over its rollouts of  min(remaining, HORIZON rounds) / slots  +  prompt tokens to run / tokens of a step

with `remaining` the tokens that a rollout is expected to sample yet (host.lengths). Beyond the horizon a rollout is a
slot that is not there, and how long it will not be there says nothing about who should get the next request.

A request goes to the shard with room in its queue where load and its own prompt together are least. A shard that holds
pages of its first tokens has less of the prompt to run, so it gets the request unless it is behind by more than that
saves. Ties go to the one that knows more, then to the lower shard.

Nobody starves: the host sends what waits by age (rollout ids), a queue is first come first served, and what yields its
pages goes back to the head of its queue. So before a rollout go at most the older ones on the host, what holds a slot
already (observations), and on the device the places of one queue.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from glm_jax.host.errors import RunError
from glm_jax.host.lengths import Lengths
from glm_jax.rollout.config import RolloutConfig

HORIZON = 8  # rounds


@dataclass
class Job:
    """A rollout as the router sees it."""

    rollout: int
    kind: str  # rollouts of a kind become about equally long
    sampled: int  # tokens so far
    most: int  # that it may sample yet
    prompt: int = 0  # tokens to run before it goes on


@dataclass
class _Shard:
    jobs: dict[int, Job] = field(default_factory=dict)
    queued: int = 0  # requests that waited at the end of the last round that came back
    sent: deque[int] = field(default_factory=deque)  # requests for its queue, of rounds under way
    load: float = 0.0


class Router:
    """Knows the rollouts of every shard. Equal calls give equal places."""

    def __init__(self, config: RolloutConfig, shards: int, lengths: Lengths):
        self.lengths = lengths
        self._slots, self._queue = config.slots // shards, config.queue // shards
        self._horizon = HORIZON * config.ticks
        self._step = -(-config.prefill_slots // shards) * config.prefill_chunk
        self._shards = [_Shard() for _ in range(shards)]
        self._of: dict[int, int] = {}
        self._least: list[tuple[float, int]] = []  # a heap of loads, some of them outdated

    def room(self) -> int:
        """Requests that the queues can take."""
        return sum(max(0, self._room(shard)) for shard in self._shards)

    def begin(self) -> None:
        """A round is about to be sent."""
        for shard in self._shards:
            shard.sent.append(0)
            shard.load = sum(map(self._ticks, shard.jobs.values()))
        self._least = [(shard.load, number) for number, shard in enumerate(self._shards)]
        heapq.heapify(self._least)

    def place(self, job: Job, known: Mapping[int, int]) -> int:
        """The shard that a rollout goes to in this round; `known`: prompt tokens that shards have in pages.

        Raises RunError where no queue has room.
        """
        costs = {n: self._shards[n].load + (job.prompt - k) / self._step for n, k in known.items() if self._has_room(n)}
        if (other := self._least_loaded()) is not None:
            costs.setdefault(other, self._shards[other].load + job.prompt / self._step)
        if not costs:
            raise RunError(f"rollout {job.rollout} was sent, but no queue has room: send no more than room() says.")
        number = min(costs, key=lambda n: (costs[n], -known.get(n, 0), n))
        job.prompt -= known.get(number, 0)
        shard = self._shards[number]
        shard.jobs[job.rollout], self._of[job.rollout] = job, number
        shard.sent[-1] += 1
        shard.load += self._ticks(job)
        heapq.heappush(self._least, (shard.load, number))
        return number

    def shard_of(self, rollout: int) -> int:
        return self._of[rollout]

    def came_back(self, sampled: Iterable[tuple[int, int]], queued: Sequence[int]) -> None:
        """A round is back: tokens that rollouts sampled, and how many requests wait in each queue."""
        for shard, count in zip(self._shards, queued, strict=True):
            shard.sent.popleft()
            shard.queued = int(count)
        for rollout, count in sampled:
            if (number := self._of.get(rollout)) is not None:
                job = self._shards[number].jobs[rollout]
                job.sampled, job.most, job.prompt = job.sampled + count, max(1, job.most - count), 0

    def leave(self, rollout: int) -> None:
        """The device has nothing more to do for this rollout."""
        if (number := self._of.pop(rollout, None)) is not None:
            del self._shards[number].jobs[rollout]

    def _ticks(self, job: Job) -> float:
        remaining = self.lengths.remaining(job.kind, job.sampled, job.most)
        return min(remaining, self._horizon) / self._slots + job.prompt / self._step

    def _room(self, shard: _Shard) -> int:
        return self._queue - shard.queued - sum(shard.sent)

    def _has_room(self, number: int) -> bool:
        return self._room(self._shards[number]) > 0

    def _least_loaded(self) -> int | None:
        """Of the shards with room."""
        while self._least:
            load, number = self._least[0]
            if load == self._shards[number].load and self._has_room(number):
                return number
            heapq.heappop(self._least)
        return None
