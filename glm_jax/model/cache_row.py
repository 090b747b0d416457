"""A token's row of the latent cache: latent ‖ rope key as they are, or in the words that the kernels read.

Kernels copy rows one by one, which only whole lanes of 32-bit words allow (pallas_kernels/sparse_mla/rows.py). So where
they read the caches, and serve the model's dtype and widths, a row is packed when it is written; what goes by XLA
unpacks the rows that it reads. Elsewhere, on a CPU above all, rows are RP numbers of the model's dtype.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from glm_jax.model import kernels
from glm_jax.model.config import ModelConfig
from pallas_kernels.sparse_mla.rows import pack_rows, unpack

Rows = Float[Array, "*B RP"] | UInt32[Array, "*B 1 W"]


def empty(config: ModelConfig, *lead: int) -> Rows:
    """A buffer of such rows, all zero."""
    row = jax.ShapeDtypeStruct((*lead, config.row_dim), jnp.dtype(config.dtype))
    stored = jax.eval_shape(partial(store, config), row)
    return jnp.zeros(stored.shape, stored.dtype)


def store(config: ModelConfig, row: Float[Array, "*B RP"]) -> Rows:
    """Rows as caches hold them on the target."""
    if not kernels.read_caches():
        return row
    try:
        return pack_rows(*jnp.split(row, [config.kv_lora_rank], axis=-1))
    except NotImplementedError:
        return row


def packed(rows: Rows) -> bool:
    return rows.dtype == jnp.uint32


def load(config: ModelConfig, rows: Rows) -> Float[Array, "*B RP"]:
    """Rows of a cache as numbers."""
    if not packed(rows):
        return rows
    return unpack(rows[..., 0, :], jnp.dtype(config.dtype), config.kv_lora_rank)[..., : config.row_dim]
