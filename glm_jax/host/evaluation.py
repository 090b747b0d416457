"""One evaluation: every held-out task sampled at temperature 1 by the same round function, while learning pauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm_jax.data.tasks import Task
from glm_jax.host.rollouts import EVAL, TRUNCATED, UNUSED, Rollout, mean_metrics
from glm_jax.host.sampling import Sampling
from glm_jax.report.plots import Sample

SHOWN = 3  # rollouts that are kept as text


@dataclass(frozen=True)
class Result:
    """How one sampled answer did."""

    task: str
    reward: float
    exact: bool | None
    length: int  # sampled tokens
    truncated: bool
    metrics: dict[str, float] = field(default_factory=dict)  # the reward function's own


class Evaluation:
    """Opens `samples` rollouts per task at once; `take` collects them as they are scored."""

    def __init__(self, step: int, sampling: Sampling, tasks: Sequence[Task], samples: int):
        self.step, self.sampling = step, sampling
        self.total = len(tasks) * samples
        self.results: list[Result] = []
        self.shown: list[Sample] = []
        opened = (sampling.open(task, group, EVAL) for group, task in enumerate(tasks) for _ in range(samples))
        self.open = {rollout.id for rollout in opened}

    @property
    def done(self) -> bool:
        """Whether every rollout has its fate; those without a valid reward got it from the scorer."""
        self.open &= self.sampling.ledger.live.keys()
        return not self.open

    def take(self, scored: Sequence[Rollout]) -> None:
        """Records the scored rollouts of this evaluation; they are used for nothing else."""
        mine = [rollout for rollout in scored if rollout.purpose == EVAL and rollout.reward is not None]
        for rollout in mine:
            exact, cut = rollout.exact, rollout.ending in TRUNCATED
            self.results.append(Result(rollout.task, rollout.reward, exact, rollout.count, cut, rollout.metrics))
            if len(self.shown) < SHOWN:
                self.shown.append(as_sample(rollout, self.sampling))
        self.sampling.ledger.settle([rollout.id for rollout in mine], UNUSED)

    def give_up(self) -> None:
        """Ends every rollout that has no fate yet."""
        left = sorted(self.open & self.sampling.ledger.live.keys())
        for id in left:
            if self.sampling.ledger.live[id].ending is None:
                self.sampling.cut(id)
        self.sampling.ledger.settle(left, UNUSED)

    def metrics(self) -> dict[str, float]:
        """Means over the answers with a valid reward; `eval/invalid` counts the others."""
        values = {"eval/count": float(self.total), "eval/invalid": float(self.total - len(self.results))}
        exact = [result.exact for result in self.results if result.exact is not None]
        if exact:
            values["eval/exact_match"] = sum(exact) / len(exact)
        if self.results:
            count = len(self.results)
            values["eval/reward"] = sum(result.reward for result in self.results) / count
            values["eval/length"] = sum(result.length for result in self.results) / count
            values["eval/truncated_share"] = sum(result.truncated for result in self.results) / count
            values |= mean_metrics([result.metrics for result in self.results], "eval/score/")
        return values


def as_sample(rollout: Rollout, sampling: Sampling) -> Sample:
    """A rollout as a person reads it."""
    task = sampling.scorer.tasks[rollout.task]
    return Sample(task.question, sampling.scorer.completion(rollout), task.answer, rollout.reward)
