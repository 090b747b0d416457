"""The staleness bound: which rollouts the next update trains, which it must wait for, how many prompts may start.

A unit is what a batch is counted in: one rollout, or with group advantages the rollouts of one prompt. Its age is the
version of its oldest token, and tau bounds how far any trained token may lag at the moment of training.

With B units in a batch and at most (tau + 1) B units in flight or ready, an update from version v to v + 1 is
dispatched only if every unit that it leaves behind can still be trained in time: taken oldest first, the i-th of them
(from 0) is trained from version v + 1 + floor(i / B) at the earliest, which must not lie more than tau beyond its age.
For i < B this says that the update pushes nobody past tau; for later ones, that no later update will be forced to.
Units of the batch that is dispatched in a round count as ready in that round: their places free up one round later,
which at tau = 0 keeps anything from being in flight in a round that learns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StalenessConfig:
    """tau: most versions that a trained token may lag; 0 = sampling and learning alternate.

    on_exceed: what happens when an update would push a rollout past tau. `wait`: the update waits for the rollout while
    sampling goes on. `drop`: the rollout is rejected.
    """

    tau: int = 1
    on_exceed: Literal["wait", "drop"] = "wait"

    def check(self) -> list[str]:
        return [] if self.tau >= 0 else [f"tau is {self.tau}; it counts versions, so it must be at least 0"]


@dataclass(frozen=True)
class Unit:
    """What the bound knows of a rollout, or of the rollouts of one prompt."""

    key: int
    oldest: int  # version of the oldest token, or a lower bound of it while none has been seen
    ready: bool  # every member has ended and is scored
    members: tuple[int, ...]  # rollout ids


@dataclass(frozen=True)
class Choice:
    """train: units of the next batch, oldest first, empty if there is no batch now. wait: the units that prevent it.
    drop: units that the update would push past tau."""

    train: tuple[Unit, ...] = ()
    wait: tuple[Unit, ...] = ()
    drop: tuple[Unit, ...] = ()


def choose(units: Iterable[Unit], version: int, batch: int, staleness: StalenessConfig, bump: int = 1) -> Choice:
    """The batch for an update from `version` to `version + bump` (bump is 0 where only the critic learns)."""
    tau, after = staleness.tau, version + bump
    order = sorted(units, key=lambda unit: (unit.oldest, unit.key))
    train = tuple(unit for unit in order if unit.ready)[:batch]
    if len(train) < batch:
        return Choice()
    chosen = {unit.key for unit in train}
    rest = [unit for unit in order if unit.key not in chosen]
    if staleness.on_exceed == "drop":
        return Choice(train, drop=tuple(unit for unit in rest if stale(unit.oldest, after, tau)))
    late = [i for i, unit in enumerate(rest) if stale(unit.oldest, after + bump * (i // batch), tau)]
    if late:
        return Choice(wait=tuple(unit for unit in rest[: late[-1] + 1] if not unit.ready))
    return Choice(train)


def stale(oldest: int, current: int, tau: int) -> bool:
    """Whether a rollout may no longer be trained: iff current - oldest > tau."""
    return current - oldest > tau


def most_units(batch: int, tau: int, later_batch: int | None) -> int:
    """Units in flight or ready at which submission pauses: (tau + 1) batches.

    Before a stage with smaller batches there may be fewer, so that what goes over into it can be trained there in time.
    """
    limit = (tau + 1) * batch
    return limit if later_batch is None else min(limit, max(batch, (tau + 1) * later_batch))


def lags(versions: Sequence[int], current: int) -> list[int]:
    """How many versions each token lags behind the weights that are being trained."""
    return [current - version for version in versions]
