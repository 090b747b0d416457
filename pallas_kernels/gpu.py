"""What GPU kernels share: the GPU that they are traced for, at hand or assumed, and how they divide work on it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ASSUMED = 9.0  # compute capability where no GPU is at hand: an H100's
PROGRAMS = 256  # that fill a GPU
LOG2_E = math.log2(math.e)


def capability() -> float:
    return float(jax.devices()[0].compute_capability) if jax.default_backend() == "gpu" else ASSUMED


def shared_memory() -> int:
    """KiB that a program may have."""
    if capability() in (8.6, 8.9) or capability() >= 12:
        return 99
    return 227 if capability() >= 9 else 163


def want_float8(operation: str) -> None:
    """Raises NotImplementedError on a GPU that cannot convert float8."""
    if capability() < 8.9:
        raise NotImplementedError(f"{operation}: float8 wants compute capability 8.9, this GPU has {capability()}")


def sharers(blocks: int, items: int, least: int) -> int:
    """Programs that share the items of a block where the blocks alone fill no GPU: a power of two, each of `least`."""
    share = min(PROGRAMS // max(1, blocks), items // least)
    return max(1, pl.next_power_of_2(share + 1) // 2)


def gather(ref, row, start: int = 0, size: int | None = None):
    """Rows of a matrix, or some of their columns, inside a kernel."""
    return ref[row[:, None], start + jnp.arange(size or ref.shape[1])[None, :]]


def by_key(of_selection, index, count, keys: int, nothing):
    """[B,S,keys] from values of each query's selection [B,S,K]: a key's own, `nothing` where it was not selected."""
    batch, queries, top_k = index.shape
    chosen = jnp.where(jnp.arange(top_k) < count[..., None], index, keys)  # beyond the last key nothing is written
    at = jnp.arange(batch)[:, None, None], jnp.arange(queries)[:, None], chosen
    empty = jnp.full((batch, queries, keys), nothing, of_selection.dtype)
    return empty.at[at].set(of_selection, mode="drop", unique_indices=True)
