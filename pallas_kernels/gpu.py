"""The GPU that kernels are traced for: the one at hand, or one that is assumed."""

from __future__ import annotations

import jax

ASSUMED = 9.0  # compute capability where no GPU is at hand: an H100's


def capability() -> float:
    return float(jax.devices()[0].compute_capability) if jax.default_backend() == "gpu" else ASSUMED


def shared_memory() -> int:
    """KiB that a program may have."""
    if capability() in (8.6, 8.9) or capability() >= 12:
        return 99
    return 227 if capability() >= 9 else 163


def want_float8(operation: str) -> None:
    """Raises NotImplementedError on a GPU that cannot convert float8."""
    if capability() < 8.9:
        raise NotImplementedError(f"{operation}: float8 wants compute capability 8.9, this GPU has {capability()}")
