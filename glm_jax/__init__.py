"""glm_jax: the post-training stack of GLM-5.3 in JAX, where one jitted program samples and learns.

The public functions are imported on first use, so that `glm-jax --help` need not import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm_jax.io.hf import load, save
    from glm_jax.model.transformer import forward
    from glm_jax.rollout.generate import generate

_HOMES = {
    "forward": "glm_jax.model.transformer",
    "generate": "glm_jax.rollout.generate",
    "load": "glm_jax.io.hf",
    "save": "glm_jax.io.hf",
}
__all__ = ["forward", "generate", "load", "save"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'glm_jax' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
