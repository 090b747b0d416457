"""The shards of the device: each samples for itself, with slots, a queue and pages of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from glm_jax.host.lengths import Lengths
from glm_jax.host.prefixes import Prefixes
from glm_jax.host.router import Job, Router
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


class Shards:
    """Keeps the shard and the tokens of every rollout that the device has to do with.

    A rollout stays where it was first sent: its pages, or its parked slot, are there. Without `reuse` no request names
    pages: rows that were there already differ in their last bits from rows run anew.
    """

    def __init__(self, config: RolloutConfig, count: int = 1, reuse: bool = True):
        self.config, self.count, self.reuse = config, count, reuse and config.page > 0
        self.lengths = Lengths()
        self.reset()

    def reset(self) -> None:
        """The device has forgotten everything. No round is under way."""
        config = self.config
        trees = self.count if config.page else 0
        self._trees = [Prefixes(config.page, bool(config.drafts)) for _ in range(trees)]
        self._router = Router(config, self.count, self.lengths)
        self._tokens: dict[int, list[int]] = {}
        self._parked: set[int] = set()

    @property
    def kept(self) -> int:
        """Pages that are held for later requests."""
        return sum(map(len, self._trees))

    def room(self) -> int:
        """Requests that the queues can take."""
        return self._router.room()

    def send(self, requests: Sequence[tuple[Job, Sequence[int]]], cancel: Sequence[int]) -> list[Place]:
        """Notes what a round is sent, and says where each request, a rollout and its tokens, goes."""
        for rollout in cancel:
            self._leave(rollout)
        self._router.begin()
        return [self._place(job, list(tokens)) for job, tokens in requests]

    def offer(self) -> Offer | None:
        """What the trees give up in the round that was sent last."""
        if not self.config.page:
            return None
        offer, size = no_offer(self.config.pool, self.count), self.config.pool // self.count
        for number, tree in enumerate(self._trees):
            names, offer.drop[number] = tree.offer(size)
            offer.name[number * size : number * size + len(names)] = names
        return offer

    def updated(self) -> None:
        """The round that was sent last changes the weights: what follows begins with nothing."""
        for tree in self._trees:
            tree.clear()

    def came_back(
        self, sampled: Sequence[Sampled], queued: Sequence[int], news: PageNews | None, current: bool
    ) -> None:
        """Takes in a round. `current`: its weights are those that the next round samples with."""
        self._router.came_back([(part.rollout, len(part.tokens)) for part in sampled], queued)
        for part in sampled:
            if part.rollout in self._tokens:
                self._tokens[part.rollout] += part.tokens
                if part.ending == PARKED:
                    self._parked.add(part.rollout)
        for number, tree in enumerate(self._trees):
            lost = np.split(news.lost, self.count)[number]
            tree.given(lost[lost >= 0].tolist())
            self._learn(number, tree, news, current)
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

    def _place(self, job: Job, tokens: list[int]) -> Place:
        """A rollout that is parked goes straight to its slot, another where the router says."""
        self._tokens[job.rollout] = tokens
        if job.rollout in self._parked:
            self._parked.discard(job.rollout)
            return Place(self._router.shard_of(job.rollout))
        found = {s: names for s, tree in enumerate(self._trees) if self.reuse and (names := tree.match(tokens))}
        shard = self._router.place(job, {s: len(names) * self.config.page for s, names in found.items()})
        return Place(shard, found.get(shard, []))

    def _leave(self, rollout: int) -> None:
        self._router.leave(rollout)
        self._tokens.pop(rollout, None)
        self._parked.discard(rollout)
