"""Queries a block at a time, so that what exists of each exists of a few."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp


def in_blocks(queries: int, size: int) -> tuple[Callable, Callable]:
    """split: [B,S,...] -> [blocks,B,size,...], filled up with zeros; join: back again, without what was filled up."""
    blocks = -(-queries // size)

    def split(a):
        a = jnp.pad(a, [(0, 0), (0, blocks * size - queries)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(a.shape[0], blocks, size, *a.shape[2:]).swapaxes(0, 1)

    def join(a):
        return a.swapaxes(0, 1).reshape(a.shape[1], blocks * size, *a.shape[3:])[:, :queries]

    return split, join
