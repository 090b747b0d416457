"""Context parallelism: the columns of a row over several devices, and what crosses between them.

Of w devices, device d has columns d, d + w, d + 2w, …: of every document the same share, early and late tokens alike,
so that each has as much to score and attend to, whatever is packed into a row. (Contiguous parts leave most to the last
device. Pairs from both ends balance a row of one document only.) Where nothing splits columns, whole is what one has.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from glm_jax.model.target import target


def ways() -> int:
    """Devices that share a row."""
    axis = target().context
    return 1 if axis is None else jax.lax.axis_size(axis)


def own(tree: Any) -> Any:
    """This device's columns of arrays [B, T, ...] that each has whole; T is a multiple of the devices."""
    if ways() == 1:
        return tree
    number = jax.lax.axis_index(target().context)

    def part(a):
        by_turn = a.reshape(a.shape[0], -1, ways(), *a.shape[2:])
        return jax.lax.dynamic_index_in_dim(by_turn, number, axis=2, keepdims=False)

    return jax.tree.map(part, tree)


def whole(x: Shaped[Array, "B S *D"]) -> Shaped[Array, "B T *D"]:
    """All columns in their order, from each device's own. Its gradient adds up what all devices say of a column."""
    if ways() == 1:
        return x
    by_turn = jax.lax.all_gather(x, target().context, axis=2)
    return by_turn.reshape(x.shape[0], -1, *x.shape[2:])


def total(x: Array) -> Array:
    """Sum over the devices that share a row."""
    return x if ways() == 1 else jax.lax.psum(x, target().context)


def moved(x: Shaped[Array, "B S *D"], by: int) -> Shaped[Array, "B S *D"]:
    """Own columns of the row in which what stood at column j stands at j + by; zeros come in."""
    down = lambda a, n: jnp.pad(a, [(0, 0), (n, 0)] + [(0, 0)] * (a.ndim - 2))[:, : a.shape[1]]
    if ways() == 1:
        return down(x, by)
    axis, (turns, rest) = target().context, divmod(by, ways())
    x = jax.lax.ppermute(x, axis, [(d, (d + rest) % ways()) for d in range(ways())])
    return jnp.where(jax.lax.axis_index(axis) < rest, down(x, turns + 1), down(x, turns))
