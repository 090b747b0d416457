"""What the host asks of the sampler, and what the sampler logs, as arrays of fixed shape."""

from __future__ import annotations

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

STOP_IDS = 8  # stop ids a request may carry
# How a rollout ended on the device; 0 where it goes on. A parked one has not ended: it waits for what its call gives.
GOES_ON, STOP, LENGTH, PARKED = 0, 1, 2, 3


@struct.dataclass
class Requests:
    """A rows of rollouts to start, or to go on with: rows from `count` on are empty.

    A request holds every token of the rollout so far: the prompt of a new one; prompt, sampled and observed tokens of
    one that is prefilled again, or that is parked and gets an observation. Sampling goes on at position `length`.
    """

    tokens: Int[Array, "A C"]  # left-aligned, 0 beyond length
    length: Int[Array, "A"]  # at least 1, below limit
    limit: Int[Array, "A"]  # total length at which the rollout ends with LENGTH; at most C
    rollout: Int[Array, "A"]  # id, unique in a run; part of the random key of each of its tokens
    temperature: Float[Array, "A"]  # 0 = greedy
    top_p: Float[Array, "A"]
    stop: Int[Array, "A 8"]  # ids that end the rollout (the stop id itself is sampled and kept); -1 = none
    park: Int[Array, "A"]  # the id that closes a tool call: sampled, it parks the rollout in its slot; -1 = none
    shard: Int[Array, "A"]  # whose slots it goes to: of several that sample each for itself
    pages: Int[Array, "A N"]  # names of pages that hold its first tokens; without pages N = 0
    shared: Int[Array, "A"]  # how many of them
    count: Int[Array, ""]


@struct.dataclass
class Log:
    """What was sampled, per tick N and slot B, of up to W tokens. A slot may change owner from one tick to the next."""

    token: Int[Array, "N B W"]
    logp: Float[Array, "N B W"]  # of the distribution sampled from: after temperature and top-p
    count: Int[Array, "N B"]  # tokens that the slot sampled in this tick; 0 = none
    drafted: Int[Array, "N B"]  # drafts among which they were looked for
    rollout: Int[Array, "N B"]  # -1: the slot sampled nothing in this tick
    ending: Int[Array, "N B"]  # GOES_ON, or STOP, LENGTH or PARKED at the rollout's last token
    version: Int[Array, ""]  # of the weights that sampled every token of this log
    ticks: Int[Array, ""]  # rows used


def empty_requests(rows: int, window: int, pages: int = 0) -> Requests:
    """No requests, as numpy arrays, which the host fills in place. `pages`: of a slot at most."""
    return Requests(
        tokens=np.zeros((rows, window), np.int32),
        length=np.ones((rows,), np.int32),
        limit=np.full((rows,), window, np.int32),
        rollout=np.full((rows,), -1, np.int32),
        temperature=np.ones((rows,), np.float32),
        top_p=np.ones((rows,), np.float32),
        stop=np.full((rows, STOP_IDS), -1, np.int32),
        park=np.full((rows,), -1, np.int32),
        shard=np.zeros((rows,), np.int32),
        pages=np.full((rows, pages), -1, np.int32),
        shared=np.zeros((rows,), np.int32),
        count=np.zeros((), np.int32),
    )
