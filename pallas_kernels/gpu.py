"""The GPU that kernels are traced for."""

from __future__ import annotations

import jax

HOPPER = 9.0


def shared_memory() -> int:
    """KiB of shared memory that a program may have: of the GPU at hand, or of an H100 where there is none."""
    gpu = jax.default_backend() == "gpu"
    capability = float(jax.devices()[0].compute_capability) if gpu else HOPPER
    if capability in (8.6, 8.9) or capability >= 12:
        return 99
    return 227 if capability >= HOPPER else 163
