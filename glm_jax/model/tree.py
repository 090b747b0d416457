"""The abstract tree: one declaration of every parameter drives initialisation, sharding, checkpoints and file names."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter that is declared, not yet made.

    `axes` names each dimension's logical axis (sharding/layout.py maps them to mesh axes; None is never split).
    `fan_in` counts the inputs of a matrix; 0 marks a constant, filled with `value`.
    """

    shape: tuple[int, ...]
    axes: Axes
    fan_in: int = 0
    value: float = 0.0
    dtype: str | None = None  # None: the model's; "float32" where it must not be rounded

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a leaf of shape {self.shape} needs as many axes, got {self.axes}")


def is_leaf(x: Any) -> bool:
    return isinstance(x, Leaf)


def map_leaves(f, tree, *rest):
    """`jax.tree.map` over declared leaves."""
    return jax.tree.map(f, tree, *rest, is_leaf=is_leaf)


def stack(tree, repeats: int, axis: str = "layer"):
    """Adds the leading dimension, by this name, of layers that a scan runs over; a group of one layer has none."""
    if repeats == 1:
        return tree
    return map_leaves(
        lambda leaf: dataclasses.replace(leaf, shape=(repeats, *leaf.shape), axes=(axis, *leaf.axes)), tree
    )


def initialise(tree, key: jax.Array, dtype: str, scale: float | None):
    """Draws every leaf: N(0, scale²) for matrices (scale None: fan_in^-1/2), constants elsewhere.

    A leaf's numbers depend on its place in the tree alone, so no other leaf's presence changes them.
    """

    def draw(path, leaf: Leaf):
        leaf_dtype = jnp.dtype(leaf.dtype or dtype)
        if not leaf.fan_in:
            return jnp.full(leaf.shape, leaf.value, leaf_dtype)
        leaf_key = jax.random.fold_in(key, _hash(jax.tree_util.keystr(path)))
        std = leaf.fan_in**-0.5 if scale is None else scale
        return (std * jax.random.normal(leaf_key, leaf.shape, jnp.float32)).astype(leaf_dtype)

    return jax.tree_util.tree_map_with_path(draw, tree, is_leaf=is_leaf)


def shapes(tree, dtype: str):
    """The tree as `jax.ShapeDtypeStruct`s, for ahead-of-time compiles and checkpoint manifests."""
    return map_leaves(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype or dtype)), tree)


def size(tree) -> int:
    """Number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_leaf))


def _hash(text: str) -> int:
    """FNV-1a: a stable 32-bit number for a path (Python's own hash changes from run to run)."""
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value
