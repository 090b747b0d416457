"""A token's cache row for the kernels: 32-bit words, since only rows of whole lanes of these are copied one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from pallas_kernels.quantize import quantize_rows

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


def pack_rows(latent: Float[Array, "*B C"], rope: Float[Array, "*B R"], fp8: bool = False) -> UInt32[Array, "*B 1 W"]:
    """Latent and rope key side by side, of W words.

    float32: a word each, W = C + 128. bfloat16: word i holds latent i (low half) and latent C/2 + i (high half), then a
    word per rope feature in its high half: W = C/2 + 128, 1.33 times the bytes of the 576 values at C = 512, R = 64.
    `fp8`, from bfloat16: the latent as `quantize_rows` gives it, four values C/4 apart per word, then the rope features
    as before and the scales in the last words: W = C/4 + 128.
    Raises NotImplementedError where C does not fill the lanes or R does not fit behind it.
    """
    size, roped = latent.shape[-1], rope.shape[-1]
    words(latent.dtype, size, roped)
    if not fp8:
        return pack(latent, rope)[..., None, :]
    scales = size // LANES
    if latent.dtype != jnp.bfloat16 or size % (4 * LANES) or roped > LANES - scales:
        raise NotImplementedError(
            f"fp8 rows want a bfloat16 latent that is a multiple of {4 * LANES} and at most {LANES - scales} rope "
            f"features, got {latent.dtype}, {size} and {roped}"
        )
    value, scale = quantize_rows(latent)
    byte = jax.lax.bitcast_convert_type(value, jnp.uint8).astype(jnp.uint32)
    quarters = [byte[..., i * size // 4 : (i + 1) * size // 4] << 8 * i for i in range(4)]
    scale = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    between = jnp.zeros((*rope.shape[:-1], LANES - scales - roped), jnp.uint32)
    rows = [sum(quarters), _bits(rope), between, scale]
    return jnp.concatenate(rows, axis=-1)[..., None, :]


def _bits(a):
    """Those of the float32 of the same value; a bfloat16 is its high half."""
    return jax.lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32)


def pack(latent: Float[Array, "*B C"], rope: Float[Array, "*B R"]) -> UInt32[Array, "*B W"]:
    """The words of `pack_rows` without fp8, in an array or inside a kernel."""
    half, zeros = latent.shape[-1] // 2, jnp.zeros((*rope.shape[:-1], LANES - rope.shape[-1]), jnp.uint32)
    wide = latent.dtype == jnp.float32
    words = _bits(latent) if wide else _bits(latent[..., :half]) >> 16 | _bits(latent[..., half:])
    return jnp.concatenate([words, _bits(rope), zeros], axis=-1)


def unpack(words: UInt32[Array, "*B W"], dtype, latent: int) -> Float[Array, "*B F"]:
    """The row's features, F = C + 128: latent, rope, zeros. W tells how the row is packed."""
    value = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    size = words.shape[-1] - LANES
    if size == latent:
        return value(words)
    high, behind = jnp.uint32(0xFFFF0000), words[..., size:]
    if size == latent // 2:
        return jnp.concatenate([value(words[..., :size] << 16), value(words & high)], axis=-1)
    scales = latent // LANES
    quarters = jnp.concatenate([_from_fp8(words[..., :size] >> 8 * i & 0xFF) for i in range(4)], axis=-1)
    scale = jax.lax.bitcast_convert_type(behind[..., LANES - scales :], jnp.float32)
    blocks = [quarters[..., i * LANES : (i + 1) * LANES] * scale[..., i : i + 1] for i in range(scales)]
    lane = jax.lax.broadcasted_iota(jnp.int32, behind.shape, behind.ndim - 1)
    rope = jnp.where(lane < LANES - scales, behind & high, 0)
    return jnp.concatenate([*(block.astype(dtype) for block in blocks), value(rope)], axis=-1)


def _from_fp8(byte: UInt32[Array, "*B"]) -> Float[Array, "*B"]:
    """float32 of the finite float8_e4m3fn with these bits: by hand, as not every TPU has the type."""
    bits = ((byte & 0x7F) << 20) + jnp.uint32(120 << 23)
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    size = jnp.where((byte & 0x78) > 0, size, 2 * size - 2**-6)  # subnormals have no leading one
    return jnp.where((byte & 0x80) > 0, -size, size)


def joined(q_latent: Float[Array, "*B C"], q_rope: Float[Array, "*B R"]) -> Float[Array, "*B F"]:
    """A query's features in the order of `unpack`."""
    zeros = jnp.zeros((*q_rope.shape[:-1], LANES - q_rope.shape[-1]), q_rope.dtype)
    return jnp.concatenate([q_latent, q_rope, zeros], axis=-1)
