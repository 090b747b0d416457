"""The shards of the device: each samples for itself, with slots, a queue and pages of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_jax.host.prefixes import Prefixes
from glm_jax.program.exchange import PageNews
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled
from glm_jax.rollout.pages import Offer, no_offer
from glm_jax.rollout.requests import GOES_ON, PARKED


@dataclass(frozen=True)
class Place:
    """Where a request goes, and the names of pages there that hold its first tokens."""

    shard: int
    pages: list[int] = field(default_factory=list)


@dataclass
class _Shard:
    prefixes: Prefixes | None
    queued: int = 0  # requests that waited at the end of the last round that came back
    rollouts: set[int] = field(default_factory=set)


class Shards:
    """Keeps the shard and the tokens of every rollout that the device has to do with.

    A rollout stays where it was first sent: its pages, or its parked slot, are there. Without `reuse` no request names
    pages: rows that were there already differ in their last bits from rows run anew.
    """

    def __init__(self, config: RolloutConfig, count: int = 1, reuse: bool = True):
        self.config, self.count, self.reuse = config, count, reuse and config.page > 0
        self.asked = self.named = 0  # tokens sent to queues, and those of them that a tree had pages of
        self._sent: deque[list[int]] = deque()  # requests for each queue, of rounds under way
        self.reset()

    def reset(self) -> None:
        """The device has forgotten everything."""
        config = self.config
        tree = lambda: Prefixes(config.page, bool(config.drafts)) if config.page else None
        self._shards = [_Shard(tree()) for _ in range(self.count)]
        self._of: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._parked: set[int] = set()
        assert not self._sent, "reset with rounds under way"

    @property
    def kept(self) -> int:
        """Pages that are held for later requests."""
        return sum(len(shard.prefixes or ()) for shard in self._shards)

    def room(self) -> int:
        """Requests that the queues can take."""
        return sum(max(0, self._room(shard)) for shard in range(self.count))

    def send(self, requests: Sequence[tuple[int, Sequence[int]]], cancel: Sequence[int]) -> list[Place]:
        """Notes what a round is sent, and says where each request, a rollout and its tokens, goes."""
        for rollout in cancel:
            self._leave(rollout)
        self._sent.append([0] * self.count)
        return [self._place(rollout, list(tokens)) for rollout, tokens in requests]

    def offer(self) -> Offer | None:
        """What the trees give up in the round that was sent last."""
        if not self.config.page:
            return None
        offer, size = no_offer(self.config.pool, self.count), self.config.pool // self.count
        for number, shard in enumerate(self._shards):
            names, offer.drop[number] = shard.prefixes.offer(size)
            offer.name[number * size : number * size + len(names)] = names
        return offer

    def updated(self) -> None:
        """The round that was sent last changes the weights: what follows begins with nothing."""
        for shard in self._shards:
            if shard.prefixes is not None:
                shard.prefixes.clear()

    def came_back(
        self, sampled: Sequence[Sampled], queued: Sequence[int], news: PageNews | None, current: bool
    ) -> None:
        """Takes in a round. `current`: its weights are those that the next round samples with."""
        self._sent.popleft()
        for part in sampled:
            if part.rollout in self._tokens:
                self._tokens[part.rollout] += part.tokens
                if part.ending == PARKED:
                    self._parked.add(part.rollout)
        for number, shard in enumerate(self._shards):
            shard.queued = int(queued[number])
            if news is not None:
                lost = np.split(news.lost, self.count)[number]
                shard.prefixes.given(lost[lost >= 0].tolist())
                self._learn(number, shard.prefixes, news, current)
        for part in sampled:
            if part.ending not in (GOES_ON, PARKED):
                self._leave(part.rollout)

    def _learn(self, number: int, prefixes: Prefixes, news: PageNews, current: bool) -> None:
        rows = np.split(np.arange(news.told.rollout.size), self.count)[number]
        for row in rows[news.told.rollout[rows] >= 0]:
            tokens = self._tokens.get(int(news.told.rollout[row]))
            names = news.told.name[row, : news.told.count[row]].tolist()
            if current and tokens is not None:
                prefixes.add(tokens, int(news.told.first[row]), names)
            else:
                prefixes.refuse(names)

    def _place(self, rollout: int, tokens: list[int]) -> Place:
        """A rollout that is parked goes straight to its slot; another to the queue with room that knows most of it.

        Where several know as much, to the one that has least to do.
        """
        self._tokens[rollout] = tokens
        if rollout in self._parked:
            self._parked.discard(rollout)
            return Place(self._of[rollout])
        known = [self._of[rollout]] if rollout in self._of else range(self.count)
        found = {s: self._shards[s].prefixes.match(tokens) if self.reuse else [] for s in known}
        by_worth = lambda s: (self._room(s) > 0, len(found[s]), -len(self._shards[s].rollouts))
        shard = max(found, key=by_worth)
        self._of[rollout] = shard
        self._shards[shard].rollouts.add(rollout)
        self._sent[-1][shard] += 1
        self.asked += len(tokens)
        self.named += len(found[shard]) * self.config.page
        return Place(shard, found[shard])

    def _room(self, shard: int) -> int:
        under_way = sum(sent[shard] for sent in self._sent)
        return self.config.queue // self.count - self._shards[shard].queued - under_way

    def _leave(self, rollout: int) -> None:
        if rollout in self._of:
            self._shards[self._of.pop(rollout)].rollouts.discard(rollout)
        self._tokens.pop(rollout, None)
        self._parked.discard(rollout)
