"""What a run learns and how: sizes of a batch, the estimator, the losses' constants, the optimisers."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adam with decoupled weight decay. Learning rates arrive with each batch (host/schedule)."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of the global gradient


@dataclasses.dataclass(frozen=True)
class LearnConfig:
    micro_batches: int = 1  # M: gradients of this many are added before a step
    rows: int = 64  # R
    length: int = 128  # C
    advantage: Literal["sao", "running_mean", "group"] = "sao"
    clip_low: float = 0.3  # the window on the ratio is (1 - clip_low, 1 + clip_high)
    clip_high: float = 5.0
    window: bool = True  # False leaves every token in: for ablations
    gamma: float = 1.0
    lambda_alpha: float = 1.5  # λ_policy = 1 - 1 / (alpha l)
    lambda_critic: float = 1.0
    critic_updates: int = 2  # K per policy update, on the same batch
    freeze_critic_attention: bool = True
    indexer_kl: float = 0.0  # weight of the indexer's own loss in SFT; 0 leaves the indexer as it is
    draft_depth: int = 0  # drafts in a row that the draft layer learns to make; 0 leaves it as it is
    draft_loss: Literal["tv", "ce"] = "tv"  # of the draft stage: drafts refused, or cross-entropy as in SFT
    policy: OptimizerConfig = OptimizerConfig()
    critic: OptimizerConfig = OptimizerConfig()

    def check(self) -> list[str]:
        sizes = ("micro_batches", "rows", "length", "critic_updates")
        problems = [f"{k}={getattr(self, k)} must be at least 1" for k in sizes if getattr(self, k) < 1]
        if self.draft_depth < 0:
            problems.append(f"draft_depth={self.draft_depth} must be at least 0")
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            problems.append(
                f"the window (1 - {self.clip_low}, 1 + {self.clip_high}) must hold 1: "
                "clip_low lies in (0, 1], clip_high is positive"
            )
        return problems
