"""Matrix products inside kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def product(a, b, contract: tuple[int, int]):
    """Over dimension contract[0] of a and contract[1] of b, summed in float32; float32 operands at full precision.

    The precision is named in any case: Mosaic refuses a bfloat16 product that takes a default of "highest" from jax's
    configuration.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    over = tuple((dimension,) for dimension in contract)
    return jax.lax.dot_general(a, b, (over, ((), ())), precision=exact, preferred_element_type=jnp.float32)
