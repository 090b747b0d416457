"""The device as the host sees it: rounds go out, and their logs come back one round later."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from glm_jax.host.errors import RunError, StallError
from glm_jax.host.peers import ALONE, Peers
from glm_jax.host.requests import Request, as_rows, padded
from glm_jax.host.shards import Shards
from glm_jax.learn.batch import IDLE, RL, SFT, LearnBatch, empty_batch
from glm_jax.program.exchange import Inbox
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled, read_log
from glm_jax.rollout.pace import Pace


@dataclass(frozen=True)
class Learning:
    """What a round is to learn, with figures of the batch that go into the step's metrics."""

    step: int
    mode: int  # of learn.batch
    batch: LearnBatch
    policy_lr: float
    critic_lr: float
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A round that has come back: what it sampled by rollout id, and what the program measured."""

    round: int
    sampled: list[Sampled]
    learning: Learning | None
    metrics: dict[str, float]
    depth: int = 0  # to which it drafted


@dataclass(frozen=True)
class _Sent:
    round: int
    version: int
    learning: Learning | None
    outbox: Any
    depth: int
    start: float


class Device:
    """Holds the program's state, and counts what is under way on the device.

    shape: (M, R, C) of a learning batch. patience: seconds that a round may take.
    """

    def __init__(
        self,
        program: Any,
        state: Any,
        rollout: RolloutConfig,
        shape: tuple[int, int, int],
        patience: float,
        deterministic: bool = False,
        peers: Peers = ALONE,
    ):
        self.peers = peers
        self.program, self.state, self.rollout, self.patience = program, state, rollout, patience
        self.version = int(state.policy.version)
        self.round = 0
        self.shards = Shards(rollout, program.shards, reuse=not deterministic)
        self.pending: deque[_Sent] = deque()
        self._nothing = empty_batch(*shape)
        self.pace = Pace(rollout.drafts, deterministic)
        self._free = math.inf  # since when the device has had no older round to do; unknown before the first is back

    def room(self) -> int:
        """Requests that the next round can take without overflowing a queue of the device."""
        return min(self.rollout.requests, self.shards.room())

    @property
    def oldest_version(self) -> int:
        """No token that has not come back yet is older than this."""
        return self.pending[0].version if self.pending else self.version

    def dispatch(self, requests: Sequence[Request], cancel: Sequence[int], learning: Learning | None) -> None:
        """Starts a round. Returns at once: the device works while the host goes on."""
        places = self.shards.send([(request.job, request.tokens) for request in requests], cancel)
        inbox = Inbox(
            requests=as_rows(requests, places, self.rollout),
            cancel=padded(cancel, self.rollout.requests),
            batch=learning.batch if learning else self._nothing,
            mode=np.asarray(learning.mode if learning else IDLE, np.int32),
            policy_lr=np.asarray(learning.policy_lr if learning else 0.0, np.float32),
            critic_lr=np.asarray(learning.critic_lr if learning else 0.0, np.float32),
            offer=self.shards.offer(),
            depth=np.asarray(depth := self.pace.next(), np.int32),
        )
        start = time.monotonic()
        self.state, outbox = self.program.round(self.state, inbox)
        self.pending.append(_Sent(self.round, self.version, learning, outbox, depth, start))
        self.round += 1
        if learning and learning.mode in (SFT, RL):
            self.version += 1
            self.shards.updated()

    def collect(self) -> Outcome:
        """The oldest round that is under way, once it is done; raises StallError when it takes longer than patience."""
        sent = self.pending[0]
        self._await(sent)
        outbox = jax.device_get(sent.outbox)
        self.pending.popleft()
        if int(outbox.log.version) != sent.version:
            raise RunError(f"round {sent.round} sampled with version {int(outbox.log.version)}, not {sent.version}.")
        learnt, seen = map(int, outbox.weights)
        if learnt != seen:
            raise RunError(
                f"round {sent.round} sampled with weights of checksum {seen:#010x}, and version {sent.version} has "
                f"{learnt:#010x}: a device or a link changed them. Go on from the last checkpoint on other hardware."
            )
        metrics = {name: float(value) for name, value in outbox.metrics.items()}
        metrics["handoff/checksum"] = float(seen)
        sampled = read_log(outbox.log, sent.depth)
        self.shards.came_back(sampled, outbox.queued, outbox.pages, sent.version == self.version)
        self._measure(sent, sampled)
        return Outcome(sent.round, sampled, sent.learning, metrics, sent.depth)

    def start_critic(self) -> None:
        """Makes a new critic from the policy as it is now."""
        self.state = self.program.start_critic(self.state)

    def reset_sampler(self) -> None:
        """Empties slots and queue. All rounds must have come back; live rollouts are to be sent again."""
        assert not self.pending, "reset_sampler with rounds under way"
        self.state = self.program.reset_sampler(self.state)
        self.shards.reset()

    def _measure(self, sent: _Sent, sampled: Sequence[Sampled]) -> None:
        """Tells the pace how fast a round sampled; not of one that learned, nor of the first, which was compiled."""
        now = time.monotonic()
        if sent.learning is None and self._free < math.inf:
            seconds = now - max(sent.start, self._free)
            if self.pace.chooses:
                seconds = self.peers.of_first(seconds)
            self.pace.add(sent.depth, sum(len(part.tokens) for part in sampled), seconds)
        self._free = now

    def _await(self, sent: _Sent) -> None:
        leaves = [leaf for leaf in jax.tree.leaves(sent.outbox) if isinstance(leaf, jax.Array)]
        start, pause = time.monotonic(), 1e-4
        while not all(leaf.is_ready() for leaf in leaves):
            if time.monotonic() - start > self.patience:
                raise StallError(
                    f"round {sent.round} has been on the device for {self.patience:.0f} s and is not done. If rounds "
                    "of this size take that long, sample fewer ticks in a round or raise config.patience."
                )
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
