"""A number for the contents of a pytree of arrays that its layout, its order and the mesh do not change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


def checksum(arrays: Any) -> UInt32[Array, ""]:
    """Σ mix(w) mod 2³² over the words w of all arrays, a word being a number's bits (of a wider one, its halves).

    Sums mod 2³² come out the same in any order, so two devices, two layouts and a host agree to the last bit. `mix` is
    a bijection of 32-bit words in which every bit of w changes about half of the result's, so that no error of a few
    bits goes unseen but with probability 2⁻³²; swapped words do. Source of mix: C. Wellons, "Prospecting for hash
    functions" (lowbias32), public domain.
    """
    return sum((_of_one(a) for a in jax.tree.leaves(arrays)), jnp.zeros((), jnp.uint32))


def _of_one(a: Array) -> UInt32[Array, ""]:
    word = jnp.dtype(f"uint{8 * min(4, a.dtype.itemsize)}")
    w = jax.lax.bitcast_convert_type(a, word).astype(jnp.uint32) ^ jnp.uint32(0x9E3779B9)  # so that 0 counts too
    w = (w ^ (w >> 16)) * jnp.uint32(0x7FEB352D)
    w = (w ^ (w >> 15)) * jnp.uint32(0x846CA68B)
    return jnp.sum(w ^ (w >> 16), dtype=jnp.uint32)
