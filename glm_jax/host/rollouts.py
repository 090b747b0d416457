"""One attempt at a task, token by token, as the host keeps it until its fate is settled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

TRAIN, EVAL = "train", "eval"
PURPOSES = (TRAIN, EVAL)
# How a rollout ended: with a stop id, with a stop string, at the end of the window, at its budget of sampled tokens, of
# turns, of wall time, or cut by the host.
STOP, STRING, LENGTH, TOKENS = "stop", "stop_string", "length", "tokens"
TURNS, WALL_TIME, CANCELLED = "turns", "wall_time", "cancelled"
ENDINGS = (STOP, STRING, LENGTH, TOKENS, TURNS, WALL_TIME, CANCELLED)
TRUNCATED = (LENGTH, TOKENS)  # in the midst of what it had to say
# What became of it. Every submitted rollout gets exactly one fate, and then leaves memory.
TRAINED, REJECTED, FAILED, INVALID, UNUSED = "trained", "rejected", "failed", "invalid", "unused"
FATES = (TRAINED, REJECTED, FAILED, INVALID, UNUSED)


@dataclass
class Rollout:
    """The record of a rollout.

    Its tokens after the prompt, their log-probs (float32, exact) and versions grow side by side. Those that the policy
    sampled are trained; those that it observed (the result of a tool call) have log-prob 0 and its call's version.
    """

    id: int
    task: str
    group: int  # number of the prompt in the run's order of prompts: equal for rollouts of one prompt
    family: str
    purpose: str
    prompt: array  # int32 tokens
    tokens: array = field(default_factory=lambda: array("i"))
    logp: array = field(default_factory=lambda: array("f"))
    version: array = field(default_factory=lambda: array("i"))
    sampled: array = field(default_factory=lambda: array("b"))  # 1: by the policy, 0: observed
    observations: int = 0
    ending: str | None = None
    scored: bool = False
    reward: float | None = None  # None where scoring failed, and the cause says how
    exact: bool | None = None  # None where the task has no answer to compare with
    cause: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # what else the reward function told, by name

    @property
    def kind(self) -> str:
        """Those of a kind become about equally long: of a family, in training or in evaluation."""
        return f"{self.purpose}/{self.family}"

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def count(self) -> int:
        """Sampled tokens."""
        return sum(self.sampled)

    @property
    def ready(self) -> bool:
        """Whether a batch may take it: it has ended and its reward is known."""
        return self.ending is not None and self.reward is not None


def mean_metrics(told: Sequence[dict[str, float]], prefix: str) -> dict[str, float]:
    """The mean of each of the reward functions' own metrics, over the rollouts that have it."""
    names = sorted({name for metrics in told for name in metrics})
    found = {name: [metrics[name] for metrics in told if name in metrics] for name in names}
    return {f"{prefix}{name}": sum(values) / len(values) for name, values in found.items()}
