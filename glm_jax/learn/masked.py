"""Masked reductions: a mask selects, it never multiplies, so what stands in masked places reaches nothing."""

from __future__ import annotations

import jax.numpy as jnp


def total(x, mask):
    """Σ x over the mask."""
    return jnp.sum(jnp.where(mask, x, 0))


def mean(x, mask):
    """Mean of x over the mask; 0 where it selects nothing."""
    return total(x, mask) / jnp.maximum(jnp.sum(mask), 1)


def variance(x, mask):
    """Population variance of x over the mask."""
    return mean(jnp.square(jnp.where(mask, x - mean(x, mask), 0)), mask)


def maximum(x, mask):
    """Largest x over the mask; 0 where it selects nothing."""
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, x, -jnp.inf)), 0)
