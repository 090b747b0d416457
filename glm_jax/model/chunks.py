"""Queries in chunks: what is made per (query, key) exists for one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def chunked(f: Callable[[Any], Any], per_query: Any, size: int) -> Any:
    """f over equal chunks of at most `size` queries: arrays [B, S, ...] to arrays [B, S, ...].

    What is missing in the last chunk is filled with zeros.
    """
    queries = jax.tree.leaves(per_query)[0].shape[1]
    if queries <= size:
        return f(per_query)
    chunks = -(-queries // size)
    size = -(-queries // chunks)
    pad = chunks * size - queries

    def split(a):
        a = jnp.pad(a, [(0, 0), (0, pad)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(a.shape[0], chunks, size, *a.shape[2:]).swapaxes(0, 1)

    def join(a):
        return a.swapaxes(0, 1).reshape(a.shape[1], chunks * size, *a.shape[3:])[:, :queries]

    return jax.tree.map(join, jax.lax.map(jax.checkpoint(f), jax.tree.map(split, per_query)))
