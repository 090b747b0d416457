"""A model that answers requests: rounds of the sampler alone, with weights that stay as they are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.host.errors import RunError
from glm_jax.host.requests import Request, as_rows, padded
from glm_jax.host.shards import Shards
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer, for_decoding
from glm_jax.program.exchange import PageNews
from glm_jax.rollout import admission, sampler, slots
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled, read_log
from glm_jax.rollout.requests import GOES_ON, STOP_IDS


class Engine:
    """Slots, queue and pages that outlive a call: what a request computed is there for the next that begins alike.

    Requests of any lengths may come at any time; each round takes what there is room for. What is sampled for a request
    hangs on its tokens, the seed and its number alone. `usage` adds up what the sampler counted (see sampler.Usage).
    """

    def __init__(self, params: Transformer, config: ModelConfig, sizes: RolloutConfig, seed: int = 0):
        if problems := sizes.check():
            raise RunError("; ".join(problems))
        self.config, self.sizes, self.seed = config, sizes, seed
        self.view = for_decoding(params, config)
        self.state = slots.init(config, sizes)
        self.shards = Shards(sizes)
        self.usage: Counter[str] = Counter()
        self.running: set[int] = set()  # requests that were taken up and have not ended
        self._waiting: deque[Request] = deque()
        self._cancel: list[int] = []
        self._next = 0

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self.running)

    @property
    def busy(self) -> bool:
        return self.pending > 0

    def submit(
        self,
        tokens: Sequence[int],
        new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[int] = (),
        number: int | None = None,
    ) -> int:
        """Asks for up to `new` tokens after `tokens`; returns the request's number: by default one that was never used.

        Raises RunError where both together do not fit the window, for more than 8 stop ids, and for a number in use.
        """
        limit = len(tokens) + new
        if not tokens or new < 1 or limit > self.sizes.window:
            raise RunError(
                f"{len(tokens)} tokens and {new} new ones: both have to be at least 1, and together at most the window "
                f"of {self.sizes.window}."
            )
        if len(stop) > STOP_IDS:
            raise RunError(f"{len(stop)} stop ids given, at most {STOP_IDS} are looked at.")
        if number is None:
            number, self._next = self._next, self._next + 1
        elif number in self.running or any(request.rollout == number for request in self._waiting):
            raise RunError(f"request {number} has not ended: give another number.")
        self._waiting.append(Request(number, list(tokens), limit, temperature, top_p, tuple(stop)))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request wherever it stands: the next round frees what it holds."""
        self._waiting = deque(request for request in self._waiting if request.rollout != number)
        if number in self.running:
            self.running.discard(number)
            self._cancel.append(number)

    def round(self, depth: int = 0, ticks: int | None = None) -> list[Sampled]:
        """Runs up to `ticks` ticks (default: those of a round), and gives what they sampled, by request.

        `depth`: one of sizes.drafts, or 0.
        """
        rows, room = self.sizes.requests, self.shards.room()
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), rows, room))]
        cancel, self._cancel = self._cancel[:rows], self._cancel[rows:]
        self.running |= {request.rollout for request in taken}
        places = self.shards.send([(request.job, request.tokens) for request in taken], cancel)
        sent = as_rows(taken, places, self.sizes), padded(cancel, rows), self.shards.offer()
        numbers = (self.seed, depth, self.sizes.ticks if ticks is None else ticks)
        self.state, log, usage, queued, news = _round(
            self.view, self.config, self.sizes, self.state, *sent, *map(np.int32, numbers)
        )
        log, usage, queued, news = jax.device_get((log, usage, queued, news))
        sampled = read_log(log, depth)
        self.shards.came_back(sampled, queued, news, current=True)
        self.usage.update({name: int(value) for name, value in asdict(usage).items()})
        self.usage["ticks"] += int(log.ticks)
        sampled = [part for part in sampled if part.rollout in self.running]  # the rest was cancelled
        self.running -= {part.rollout for part in sampled if part.ending != GOES_ON}
        return sampled


@partial(jax.jit, static_argnums=(1, 2), donate_argnums=3)
def _round(view, config, sizes, state, requests, cancel, offer, seed, depth, ticks):
    state = admission.begin(admission.cancel(state, cancel), offer)
    state = admission.send(state, requests)
    state, log, usage = sampler.run(view, config, sizes, state, jnp.int32(0), seed, depth, ticks)
    news = state.pages and PageNews(state.pages.news, state.pages.lost)
    return state, log, usage, state.queue.requests.count, news
