"""The sampler's sizes, fixed for a run so that its program compiles once."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    slots: int = 64  # B: rollouts that are sampled at once
    window: int = 128  # C: most tokens of a rollout, prompt included
    ticks: int = 128  # N: decode steps of one round at most
    queue: int = 128  # requests that can wait on the device
    requests: int = 64  # A: requests (and cancellations) that one round can take
    page: int = 0  # columns of a cache page; 0 = every slot keeps `window` columns to itself
    pages: int = 0  # in all; 0 = enough for every slot to fill its window
    prefill_slots: int = 8  # slots that one prefill step serves
    prefill_chunk: int = 16  # tokens of each in one prefill step
    prefill_steps: int = 0  # of a tick at most, so that long prompts do not hold up the others; 0 = all there are
    on_update: Literal["keep", "recompute"] = "keep"  # what becomes of live rollouts' cache rows when weights change
    drafts: tuple[int, ...] = ()  # depths to which the draft layer may draft; each is a decode step of its own
    temperature: float = 1.0  # of training rollouts; 0 = greedy
    top_p: float = 1.0

    @property
    def per_slot(self) -> int:
        """Pages of a rollout that fills its window; 0 without pages."""
        return -(-self.window // self.page) if self.page else 0

    @property
    def pool(self) -> int:
        """Pages in all."""
        return self.pages or self.slots * self.per_slot

    def check(self) -> list[str]:
        sizes = ("slots", "window", "ticks", "queue", "requests", "prefill_slots", "prefill_chunk")
        problems = [f"{k}={getattr(self, k)} must be at least 1" for k in sizes if getattr(self, k) < 1]
        problems += [f"{k}={getattr(self, k)} must be at least 0" for k in ("page", "pages") if getattr(self, k) < 0]
        if self.pages and not self.page:
            problems.append(f"pages={self.pages} wants to know how many columns each has: set page")
        if self.page and 0 < self.pages < self.per_slot:
            problems.append(
                f"pages={self.pages} of {self.page} columns cannot hold one rollout of window={self.window} tokens: "
                f"{self.per_slot} pages can"
            )
        if self.prefill_steps < 0:
            problems.append(f"prefill_steps={self.prefill_steps} must be at least 0; 0 sets no bound")
        if self.prefill_slots > self.slots:
            problems.append(f"prefill_slots={self.prefill_slots} exceeds slots={self.slots}")
        if list(self.drafts) != sorted({*self.drafts}) or any(depth < 1 for depth in self.drafts):
            problems.append(f"drafts={self.drafts} must be ascending depths of at least 1, or ()")
        if self.temperature < 0:
            problems.append(f"temperature={self.temperature} must be at least 0")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must lie in (0, 1]")
        return problems
