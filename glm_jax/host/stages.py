"""The stages of a run, in order, and the learning rate of each of their steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

SFT, DRAFT, VALUE, RL = "sft", "draft", "value", "rl"
SMOOTHED = 10  # losses that `until` looks at together
STAGES = (SFT, DRAFT, VALUE, RL)
SUPERVISED = (SFT, DRAFT)  # that learn from examples


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up to `peak` over `warmup` steps, then constant, or a cosine to `end` x peak at the last step."""

    peak: float = 0.0
    warmup: int = 0
    shape: Literal["constant", "cosine"] = "constant"
    end: float = 0.0

    def check(self) -> list[str]:
        problems = []
        if self.peak < 0:
            problems.append(f"peak is {self.peak}; a learning rate must be at least 0")
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup}; it counts steps, so it must be at least 0")
        if not 0 <= self.end <= 1:
            problems.append(f"end is {self.end}; it is a share of peak, so it must lie between 0 and 1")
        return problems


@dataclass(frozen=True)
class StageConfig:
    """One stage: `steps` updates of `batch` rollouts (of examples, in sft and draft) each.

    `until` (sft only) ends the stage early, once the loss of SMOOTHED steps is at most that on average: seeds learn at
    different speeds, and what comes after wants equals to start from.
    """

    steps: int = 0
    batch: int = 1
    policy_lr: ScheduleConfig = field(default_factory=ScheduleConfig)
    critic_lr: ScheduleConfig = field(default_factory=ScheduleConfig)
    until: float | None = None

    def check(self) -> list[str]:
        problems = []
        if self.steps < 0:
            problems.append(f"steps is {self.steps}; it must be at least 0")
        if self.batch < 1:
            problems.append(f"batch is {self.batch}; it must be at least 1")
        return problems


@dataclass(frozen=True)
class Stage:
    """A stage as the loop meets it."""

    name: str
    config: StageConfig
    start: int  # steps of the stages before it


def lay_out(configs: dict[str, StageConfig]) -> tuple[Stage, ...]:
    """The stages that have steps, in the order of STAGES."""
    stages, start = [], 0
    for name in STAGES:
        config = configs.get(name, StageConfig())
        if config.steps:
            stages.append(Stage(name, config, start))
            start += config.steps
    return tuple(stages)


def stage_at(stages: tuple[Stage, ...], step: int) -> Stage | None:
    """The stage that makes step `step` (from 0) of the run; None when the run is done."""
    return next((stage for stage in stages if stage.start <= step < stage.start + stage.config.steps), None)


def learning_rate(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of a stage of `steps`: the first step of a warm-up already moves."""
    if step < schedule.warmup:
        return schedule.peak * (step + 1) / schedule.warmup
    if schedule.shape == "constant":
        return schedule.peak
    share = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
    return schedule.peak * (schedule.end + (1 - schedule.end) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
