"""A token's cache row for the kernels: 32-bit words, since only rows of whole lanes of these are copied one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

LANES = 128


def words(dtype, latent: int, rope: int) -> int:
    """W, the words of a row. Raises NotImplementedError for what does not fill the lanes."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"sparse_mla rows are packed from bfloat16 or float32, got {dtype}")
    whole = LANES if dtype == jnp.float32 else 2 * LANES
    if latent % whole or rope > LANES:
        raise NotImplementedError(
            f"sparse_mla rows of {dtype} want a latent that is a multiple of {whole} and at most {LANES} rope "
            f"features, got {latent} and {rope}"
        )
    return (latent if dtype == jnp.float32 else latent // 2) + LANES


def pack_rows(latent: Float[Array, "*B C"], rope: Float[Array, "*B R"]) -> UInt32[Array, "*B 1 W"]:
    """Latent and rope key side by side, of W words.

    bfloat16: word i holds latent i (low half) and latent C/2 + i (high half), then a word per rope feature in its high
    half: W = C/2 + 128, 1.33 times the bytes of the 576 values at C = 512, R = 64. float32: a word each, W = C + 128.
    Raises NotImplementedError where C does not fill the lanes or R is above 128.
    """
    words(latent.dtype, latent.shape[-1], rope.shape[-1])
    return pack(latent, rope)[..., None, :]


def pack(latent: Float[Array, "*B C"], rope: Float[Array, "*B R"]) -> UInt32[Array, "*B W"]:
    """The words of `pack_rows`, in an array or inside a kernel."""
    # A bfloat16 is the high half of the float32 of the same value.
    bits = lambda a: jax.lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32)
    rope = jnp.concatenate([bits(rope), jnp.zeros((*rope.shape[:-1], LANES - rope.shape[-1]), jnp.uint32)], axis=-1)
    half = latent.shape[-1] // 2
    pairs = bits(latent) if latent.dtype == jnp.float32 else bits(latent[..., :half]) >> 16 | bits(latent[..., half:])
    return jnp.concatenate([pairs, rope], axis=-1)


def unpack(words: UInt32[Array, "*B W"], dtype, latent: int) -> Float[Array, "*B F"]:
    """The row's features, F = C + 128: latent, rope, zeros."""
    value = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    if dtype == jnp.float32:
        return value(words)
    pairs, rope = words[..., : latent // 2], words[..., latent // 2 :]
    high = jnp.uint32(0xFFFF0000)
    return jnp.concatenate([value(pairs << 16), value(pairs & high), value(rope & high)], axis=-1)


def joined(q_latent: Float[Array, "*B C"], q_rope: Float[Array, "*B R"]) -> Float[Array, "*B F"]:
    """A query's features in the order of `unpack`."""
    zeros = jnp.zeros((*q_rope.shape[:-1], LANES - q_rope.shape[-1]), q_rope.dtype)
    return jnp.concatenate([q_latent, q_rope, zeros], axis=-1)
