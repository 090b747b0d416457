"""Rewards of finished rollouts, computed in worker processes while the loop goes on."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping

from glm_jax.data.scoring import exact_match
from glm_jax.data.tasks import Task
from glm_jax.envs.pool import WORKER_DIED
from glm_jax.envs.rewards import RewardPool, Score
from glm_jax.host.environments import BOX_DIED, Environments
from glm_jax.host.errors import RunError
from glm_jax.host.ledger import Ledger
from glm_jax.host.rollouts import FAILED, INVALID, Rollout

logger = logging.getLogger(__name__)

BARREN = 32  # rewards in a row without a valid one, after which the run stops: it would go on for ever
FAULTS = (WORKER_DIED, BOX_DIED)  # the environment's, not the reward function's
NO_TOKEN, BAD_LOGP = "no_trainable_token", "logp_not_finite"


class Scorer:
    """Hands ended rollouts to the pool and writes what comes back into the ledger.

    A rollout without a figure to learn from gets its fate here: `failed` where a worker or a box died twice, `invalid`
    where the reward raised, timed out, was NaN or out of range, or where nothing was sampled. It enters no mean.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: RewardPool | Environments,
        decode: Callable[[list[int]], str],
        tasks: Mapping[str, Task],
    ):
        self.ledger, self.pool, self.decode, self.tasks = ledger, pool, decode, tasks
        self.waiting: set[int] = set()
        self.barren = 0  # invalid rewards since the last valid one
        self.told: set[str] = set()

    def submit(self, rollout: Rollout) -> None:
        """Starts scoring a rollout that has ended."""
        if problem := _problem(rollout):
            self.ledger.reward(rollout.id, None, None, problem)
            self.ledger.settle([rollout.id], INVALID, cause=problem)
            return
        self.pool.submit(rollout.id, self.completion(rollout), dataclasses.asdict(self.tasks[rollout.task]))
        self.waiting.add(rollout.id)

    def poll(self) -> list[Rollout]:
        """The rollouts that were scored since the last call, by id."""
        return self._take(self.pool.poll())

    def wait(self, timeout: float) -> list[Rollout]:
        """As poll, after waiting for all; the pool raises an error that names those missing after `timeout` seconds."""
        return self._take(self.pool.wait(timeout)) if self.waiting else []

    def completion(self, rollout: Rollout) -> str:
        """The text that was sampled."""
        return self.decode(rollout.tokens.tolist())

    def _take(self, results: list[tuple[int, Score]]) -> list[Rollout]:
        scored = []
        for id, score in sorted(results, key=lambda result: result[0]):
            self.waiting.discard(id)
            rollout = self.ledger.live.get(id)
            if rollout is None:  # it was rejected while it was being scored
                continue
            answer = self.tasks[rollout.task].answer
            exact = None if answer is None else exact_match(self.completion(rollout), answer)
            self.ledger.reward(id, score.value, exact, score.cause, score.metrics)
            if score.value is None:
                self.refuse(id, score, FAILED if score.cause in FAULTS else INVALID)
            else:
                self.barren = 0
            scored.append(rollout)
        return scored

    def refuse(self, id: int, score: Score, fate: str) -> None:
        """Settles a rollout without a reward. Raises RunError when there have been none but such for too long."""
        self.ledger.settle([id], fate, cause=score.cause)
        self.barren += 1
        if score.cause not in self.told:
            self.told.add(score.cause)
            logger.warning("rollout %d has no reward: %s (%s); others are counted only", id, score.cause, score.detail)
        if self.barren >= BARREN:
            raise RunError(
                f"the last {self.barren} rewards were all invalid; the latest of rollout {id}: {score.cause} "
                f"({score.detail}). The reward function is named in tasks.reward, its limits in reward.*, environments "
                "in tasks.environments and tools.*"
            )


def _problem(rollout: Rollout) -> str | None:
    if not rollout.tokens:
        return NO_TOKEN
    return None if all(map(math.isfinite, rollout.logp)) else BAD_LOGP
