"""Requests as the host writes them, and as the rows of arrays that the device takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_jax.host.errors import RunError
from glm_jax.host.router import Job
from glm_jax.host.shards import Place
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import STOP_IDS, Requests, empty_requests


@dataclass(frozen=True)
class Request:
    """A rollout to start or to go on with: all of its tokens so far."""

    rollout: int
    tokens: Sequence[int]
    limit: int
    temperature: float
    top_p: float
    stop: tuple[int, ...]
    park: int = -1  # the id that closes a tool call
    kind: str = ""  # rollouts of a kind become about equally long
    sampled: int = 0  # of the tokens

    @property
    def job(self) -> Job:
        """For the router."""
        count = len(self.tokens)
        return Job(self.rollout, self.kind, self.sampled, most=self.limit - count, prompt=count)


def as_rows(requests: Sequence[Request], places: Sequence[Place], sizes: RolloutConfig) -> Requests:
    """The requests of a round. Raises RunError for one that does not fit the window."""
    rows = empty_requests(sizes.requests, sizes.window, sizes.per_slot)
    for row, (request, place) in enumerate(zip(requests, places, strict=True)):
        length = len(request.tokens)
        if not 0 < length < request.limit <= sizes.window:
            raise RunError(
                f"rollout {request.rollout} has {length} tokens and a limit of {request.limit} in a window of "
                f"{sizes.window}: it must hold a token, and leave room for one more."
            )
        rows.tokens[row, :length] = request.tokens
        rows.length[row], rows.limit[row], rows.rollout[row] = length, request.limit, request.rollout
        rows.temperature[row], rows.top_p[row] = request.temperature, request.top_p
        rows.stop[row], rows.park[row] = padded(request.stop, STOP_IDS), request.park
        rows.shard[row], rows.shared[row] = place.shard, len(place.pages)
        rows.pages[row, : len(place.pages)] = place.pages
    return rows.replace(count=np.asarray(len(requests), np.int32))


def padded(values: Sequence[int], size: int) -> np.ndarray:
    """`size` ids, -1 after those that there are."""
    return np.asarray([*values, *[-1] * (size - len(values))], np.int32)
