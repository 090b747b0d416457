"""Drives the sampler round by round, as a host would, and collects what every rollout sampled."""

from __future__ import annotations

from collections import defaultdict
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model.config import ModelConfig
from glm_jax.model.target import tracing_for
from glm_jax.model.weights import Transformer, unstack
from glm_jax.rollout import admission, sampler, slots
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.pages import no_offer
from glm_jax.rollout.requests import GOES_ON, PARKED, Log, empty_requests
from tests.model.tiny import random_params, two_layers

MODEL = two_layers()
WINDOW = 20
SIZES = RolloutConfig(slots=3, window=WINDOW, ticks=6, queue=8, requests=8, prefill_slots=2, prefill_chunk=3)


@cache
def params():
    return random_params(MODEL)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _round(platform, model, sizes, params, state, requests, cancel, depth, offer):
    state = admission.begin(admission.cancel(state, cancel), offer)
    state = admission.send(state, requests)
    with tracing_for(platform):
        return sampler.run(unstack(params, model), model, sizes, state, jnp.int32(4), jnp.int32(11), depth)


class Driver:
    """`logs` and `usages` of the rounds so far; `tokens`, `logp` and `ending` by rollout id; sampled tokens only."""

    def __init__(
        self,
        sizes: RolloutConfig = SIZES,
        model: ModelConfig = MODEL,
        weights: Transformer | None = None,
        platform: str = "cpu",
    ):
        self.sizes, self.model, self.platform = sizes, model, platform
        with tracing_for(platform):
            self.state = slots.init(model, sizes)
        self.weights = params() if weights is None else weights
        self.depth = max(sizes.drafts, default=0)
        self.logs: list[Log] = []
        self.usages: list[sampler.Usage] = []
        self.tokens, self.logp, self.ending = defaultdict(list), defaultdict(list), {}
        self.parked: set[int] = set()  # rollouts that wait for an observation

    def round(self, requests=(), cancel=(), offer=(), drop=0) -> Log:
        """One round. Each request is (rollout, tokens so far, limit) and, if given, more fields by name.

        `offer` and `drop`: of pages, as in rollout.pages.Offer.
        """
        rows = empty_requests(self.sizes.requests, WINDOW, self.sizes.per_slot)
        for i, (rollout, tokens, limit, *more) in enumerate(requests):
            self.parked.discard(rollout)
            rows.tokens[i, : len(tokens)], rows.length[i] = tokens, len(tokens)
            rows.rollout[i], rows.limit[i] = rollout, limit
            for name, value in (more[0] if more else {}).items():
                place = getattr(rows, name)
                if name == "pages":
                    rows.shared[i], place[i, : len(value)] = len(value), value
                else:
                    place[i] = value
        rows = rows.replace(count=np.int32(len(requests)))
        names = np.full(self.sizes.requests, -1, np.int32)
        names[: len(cancel)] = cancel
        given = no_offer(self.sizes.pool) if self.sizes.page else None
        if given:
            given.name[: len(offer)], given.drop[0] = offer, drop
        run = partial(_round, self.platform, self.model, self.sizes, self.weights)
        self.state, log, usage = run(self.state, rows, names, self.depth, given)
        log = jax.device_get(log)
        self.logs.append(log)
        self.usages.append(jax.device_get(usage))
        for tick, slot in np.argwhere(log.rollout >= 0):
            rollout, count = int(log.rollout[tick, slot]), log.count[tick, slot]
            assert rollout not in self.ending, f"rollout {rollout} has ended and samples on"
            self.tokens[rollout] += log.token[tick, slot, :count].tolist()
            self.logp[rollout] += log.logp[tick, slot, :count].tolist()
            if log.ending[tick, slot] == PARKED:
                self.parked.add(rollout)
            elif log.ending[tick, slot] != GOES_ON:
                self.ending[rollout] = int(log.ending[tick, slot])
        return log

    @property
    def busy(self) -> bool:
        return bool(self.state.slots.awake.any() | (self.state.queue.requests.count > 0).any())

    def finish(self, requests=()) -> Driver:
        """Rounds until nothing is left, the requests sent as fast as the queue takes them."""
        waiting = list(requests)
        while waiting or self.busy:
            assert len(self.logs) < 500, "the sampler goes on for ever"
            room = min(self.sizes.requests, self.sizes.queue - int(self.state.queue.requests.count.sum()))
            self.round(waiting[:room])
            waiting = waiting[room:]
        return self


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, MODEL.vocab_size, rng.integers(1, 9)).tolist() for _ in range(count)]


def some_requests(count: int = 10) -> list[tuple]:
    """Rollouts of many lengths, temperatures and nuclei."""
    settings = [dict(temperature=t, top_p=p) for t, p in ((1.0, 1.0), (0.7, 1.0), (0.0, 1.0), (1.3, 0.8))]
    limits = [20, 9, 14, 12, 20, 10, 17]
    return [(100 + i, p, limits[i % 7], settings[i % 4]) for i, p in enumerate(prompts(count))]
