"""pass@k from n samples per question, unbiased, with an interval over questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over questions and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples, drawn without replacement from `samples`, is right.

    1 - C(n - c, k) / C(n, k): unbiased for any n >= k (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples with {right} right; k must lie between 1 and the samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def estimate(counts: Sequence[tuple[int, int]], k: int, seed: int = 0) -> Estimate:
    """pass@k over questions, each (samples, right); questions with fewer than k samples are left out.

    Where a question's value is 0 or 1 (one sample, or k = all of them) the interval is Wilson's. Elsewhere answers to
    one question hang together, so whole questions are resampled (bootstrap, percentiles).
    """
    values = np.asarray([pass_at_k(n, c, k) for n, c in counts if n >= k])
    if not len(values):
        raise ValueError(f"pass@{k}: no question has {k} samples")
    mean = float(values.mean())
    if np.isin(values, (0, 1)).all():
        return Estimate(mean, *wilson(int(values.sum()), len(values)))
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927); it stays within [0, 1] and is no point at 0 or 1."""
    z = 1.959963984540054
    share, square = right / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)
