"""What is taken off a reward before it is learnt from, where no critic does it: a running mean, or the group's mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from glm_jax.host.rollouts import Rollout

RUNNING_WINDOW = 128  # rewards


class Baseline:
    """Turns rewards into the figures of a batch. kind: 'sao' (rewards as they are), 'running_mean' or 'group'."""

    def __init__(self, kind: str, recent: Sequence[float] = ()):
        self.kind = kind
        self.recent = deque(recent, maxlen=RUNNING_WINDOW)

    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One figure per rollout of a batch.

        running_mean: reward minus the mean of the last 128 rewards of earlier batches, which do not depend on this
        rollout; the first batch of a run has only its own mean. group: reward minus the mean of its prompt's rollouts.
        """
        rewards = [rollout.reward for rollout in rollouts]
        if self.kind == "running_mean":
            mean = _mean(self.recent or rewards)
            self.recent.extend(rewards)
            return [reward - mean for reward in rewards]
        if self.kind == "group":
            groups: dict[int, list[float]] = {}
            for rollout in rollouts:
                groups.setdefault(rollout.group, []).append(rollout.reward)
            return [rollout.reward - _mean(groups[rollout.group]) for rollout in rollouts]
        return rewards

    def state(self) -> list[float]:
        """What a checkpoint keeps."""
        return list(self.recent)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
