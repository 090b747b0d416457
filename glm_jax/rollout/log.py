"""The log of a round, read on the host: what each rollout sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm_jax.rollout.requests import GOES_ON, Log


@dataclass(frozen=True)
class Sampled:
    """What a round sampled of one rollout. ending: 0 where it goes on, else rollout.requests.STOP, LENGTH or PARKED."""

    rollout: int
    tokens: list[int]
    logp: list[float]
    version: int
    ending: int
    passes: int = 0  # that verified drafts to the full depth of the round and ended nothing
    passed: int = 0  # tokens that they sampled


def read_log(log: Log, depth: int = 0) -> list[Sampled]:
    """The tokens of a log by rollout, in the order of ids; a slot may have changed owner in mid-round.

    `depth`: to which the round drafted.
    """
    ticks = int(log.ticks)
    owner = np.asarray(log.rollout)[:ticks].reshape(-1)  # tick by tick, so a rollout's tokens stay in order
    count, drafted, ending = (np.asarray(x)[:ticks].reshape(-1) for x in (log.count, log.drafted, log.ending))
    token, logp = (np.asarray(x)[:ticks].reshape(owner.size, x.shape[-1]) for x in (log.token, log.logp))
    step = np.arange(token.shape[1])
    full = (drafted == depth) & (depth > 0) & (ending == GOES_ON)
    cells = np.flatnonzero(owner >= 0)
    cells = cells[np.argsort(owner[cells], kind="stable")]
    ids, starts, cell_counts = np.unique(owner[cells], return_index=True, return_counts=True)
    found = []
    for id, start, cell_count in zip(ids.tolist(), starts, cell_counts, strict=True):
        mine = cells[start : start + cell_count]
        taken = step < count[mine, None]
        found.append(
            Sampled(
                rollout=id,
                tokens=token[mine][taken].tolist(),
                logp=logp[mine][taken].tolist(),
                version=int(log.version),
                ending=int(ending[mine[-1]]),
                passes=int(full[mine].sum()),
                passed=int(count[mine][full[mine]].sum()),
            )
        )
    return found
