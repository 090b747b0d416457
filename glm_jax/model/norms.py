"""Normalisation and rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.quantised import Quantised, dense


def wide(dtype) -> jnp.dtype:
    """The dtype that reductions run in: float32, or float64 where the model itself is float64."""
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x²) + eps) in float32, cast back to x's dtype, then times weight."""
    x_wide = x.astype(wide(x.dtype))
    normed = x_wide * jax.lax.rsqrt(jnp.mean(x_wide * x_wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], bias: Float[Array, "D"], eps: float):
    """(x - mean) / sqrt(var + eps) · weight + bias, in float32; for the indexer's keys."""
    x_wide = x.astype(wide(x.dtype))
    centred = x_wide - jnp.mean(x_wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(x_wide.dtype) + bias.astype(x_wide.dtype)).astype(x.dtype)


def rope_tables(position: Int[Array, "*B"], dim: int, theta: float, dtype) -> tuple[Array, Array]:
    """cos and sin of position · theta^(-2j/dim), j < dim/2: computed in float32, rounded to the activations' dtype."""
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=wide(dtype)) / dim)
    angle = position[..., None].astype(wide(dtype)) * frequency
    return jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)


def rope(x: Float[Array, "... P"], cos: Float[Array, "... p"], sin: Float[Array, "... p"]) -> Float[Array, "... P"]:
    """Rotates interleaved pairs (x_2j, x_2j+1); returns all first components, then all second ones.

    The order of the result is transformers': dot products do not notice, cache rows do.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(x: Float[Array, "*B I"], weight: Float[Array, "I *O"] | Quantised) -> Float[Array, "..."]:
    """x · weight over the last axis, to [*B, *O], in two dimensions: twice as fast a weight gradient on a CPU."""
    out = x.reshape(-1, x.shape[-1]) @ dense(weight, x.dtype).reshape(weight.shape[0], -1)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])
