"""Rotary positions."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.config import ModelConfig
from glm_jax.model.norms import wide


def rope_tables(position: Int[Array, "*B"], config: ModelConfig) -> tuple[Array, Array]:
    """cos and sin of position · θ^(-2j/dim), j < dim/2: computed in float32, rounded to the activations' dtype.

    With YaRN slow channels turn more slowly, and both are scaled (see yarn.py).
    """
    dtype, dim, scale = jnp.dtype(config.dtype), config.qk_rope_head_dim, 1.0
    frequency = config.rope_theta ** (-jnp.arange(0, dim, 2, dtype=wide(dtype)) / dim)
    if config.yarn is not None:
        slowed, scale = config.yarn.slowed(dim, config.rope_theta), config.yarn.table_scale
        frequency = frequency * (1 - slowed + slowed / config.yarn.factor).astype(frequency.dtype)
    angle = position[..., None].astype(wide(dtype)) * frequency
    return (jnp.cos(angle) * scale).astype(dtype), (jnp.sin(angle) * scale).astype(dtype)


def rope(x: Float[Array, "... P"], cos: Float[Array, "... p"], sin: Float[Array, "... p"]) -> Float[Array, "... P"]:
    """Rotates interleaved pairs (x_2j, x_2j+1); returns all first components, then all second ones.

    The order of the result is transformers': dot products do not notice, cache rows do.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
