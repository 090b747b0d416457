"""How many tokens a pass that verifies drafts samples: overall, and by family of tasks."""

from __future__ import annotations

import logging
from collections import Counter

from glm_jax.host.device import Outcome
from glm_jax.host.ledger import Ledger

logger = logging.getLogger(__name__)

ENOUGH = 1000  # passes by which a share of drafts kept is judged
NEVER, ALWAYS = 0.02, 0.998  # shares of drafts kept at which something is wrong rather than bad or good


class Acceptance:
    """Counts the passes that were offered all drafts and did not end their rollout; see rollout.log.Sampled."""

    def __init__(self) -> None:
        self._drafts = self._judged = self._kept = 0
        self._told = False
        self._clear()

    def add(self, outcome: Outcome, ledger: Ledger) -> None:
        """To be called while the ledger still holds the rollouts of the round."""
        for part in outcome.sampled:
            if part.passes and part.rollout in ledger.live:
                family = ledger.live[part.rollout].family
                self.passes[family] += part.passes
                self.tokens[family] += part.passed
                self._judged += part.passes
                self._drafts += part.passes * outcome.depth
                self._kept += part.passed - part.passes
        self._judge()

    def row(self) -> dict[str, float]:
        """Mean tokens of a pass since the last row: drafts kept and the one that follows them."""
        if not self.passes:
            return {}
        values = {f"drafts/length_{family}": self.tokens[family] / count for family, count in self.passes.items()}
        values["drafts/length"] = self.tokens.total() / self.passes.total()
        self._clear()
        return values

    def _judge(self) -> None:
        if self._told or self._judged < ENOUGH:
            return
        share = self._kept / self._drafts
        if share <= NEVER:
            logger.warning(
                "%.1f %% of %d drafts were kept: the draft layer has not learned this policy (learn.draft_depth trains "
                "it in SFT and in the draft stage), or its weights are not the model's",
                100 * share,
                self._drafts,
            )
        elif share >= ALWAYS:
            logger.warning(
                "%.1f %% of %d drafts were kept: rollouts that a draft layer foresees entirely leave nothing to learn; "
                "look at the samples for repetition",
                100 * share,
                self._drafts,
            )
        self._told = share <= NEVER or share >= ALWAYS
        self._judged = self._drafts = self._kept = 0

    def _clear(self) -> None:
        self.passes: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
