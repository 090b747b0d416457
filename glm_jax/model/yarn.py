"""YaRN: rotary frequencies stretched for contexts longer than those trained on (arXiv 2309.00071, §3.2 and 3.4)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Names and defaults are those of `rope_parameters` in `config.json`, where `rope_type` is "yarn"."""

    factor: float  # how many times the context is longer than the trained one
    original_max_position_embeddings: int  # the trained one
    beta_fast: float = 32.0  # channels that turn more often than this in the trained context stay as they are
    beta_slow: float = 1.0  # those that turn less often are slowed down by `factor`
    attention_factor: float | None = None  # of cos and sin; None: by the other fields
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ramp between the two kinds of channels begins and ends at whole ones

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by, of attention and of the indexer alike."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_scale(self) -> float:
        """What attention's softmax scale is multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def slowed(self, dim: int, theta: float) -> np.ndarray:
        """[dim/2]: of each pair of channels how far it is slowed down, 0 not at all, 1 by the whole factor."""
        turns = self.original_max_position_embeddings / (2 * math.pi)
        channel = lambda rotations: dim * math.log(turns / rotations) / (2 * math.log(theta))
        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0  # of factor 1: 1
