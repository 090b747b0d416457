"""Normalisation, and products over the last axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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


def linear(x: Float[Array, "*B I"], weight: Float[Array, "I *O"] | Quantised) -> Float[Array, "..."]:
    """x · weight over the last axis, to [*B, *O], in two dimensions: twice as fast a weight gradient on a CPU."""
    out = x.reshape(-1, x.shape[-1]) @ dense(weight, x.dtype).reshape(weight.shape[0], -1)
    return out.reshape(*x.shape[:-1], *weight.shape[1:])
