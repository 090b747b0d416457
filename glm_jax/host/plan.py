"""What the loop of a run is to do."""

from __future__ import annotations

from dataclasses import dataclass

from glm_jax.host.stages import SUPERVISED, Stage
from glm_jax.host.staleness import StalenessConfig


@dataclass(frozen=True)
class Plan:
    """As run.py composes it from the config."""

    stages: tuple[Stage, ...]
    staleness: StalenessConfig
    group: int  # rollouts of one prompt that are trained together; 1 unless advantages are taken within groups
    shape: tuple[int, int, int]  # of a learning batch
    eval_every: int  # RL steps between evaluations; 0 = only before the first and after the last
    eval_samples: int  # per held-out task; 0 = no evaluation
    checkpoint_every: int  # steps; 0 = only at the end
    checkpoint_evaluated: bool  # after every evaluation too
    wall_time: float | None  # seconds a rollout may take
    patience: float  # seconds without any progress after which the run stops
    deterministic: bool

    @property
    def steps(self) -> int:
        return sum(stage.config.steps for stage in self.stages)

    @property
    def critic_starts_at(self) -> int | None:
        """The step at which the critic is made anew from what SFT left of the policy; None where there is no SFT."""
        after = [stage.start for stage in self.stages if stage.name not in SUPERVISED]
        return after[0] if after and after[0] > 0 else None
