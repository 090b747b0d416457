"""MLPs on other devices: tokens travel to their experts and back by all-to-all within a mesh axis, none is dropped.

A device sends to each other one up to `capacity` of its (token, expert) pairs at a time. That is enough where experts
are about equally popular; where they are not, it takes more rounds, as many as the fullest pair of devices needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.experts import combine, routed_mlp, take_rows
from glm_jax.model.target import target


class Route(NamedTuple):
    """Where each pair goes."""

    expert: Int[Array, "N k"]  # among those of its device
    device: Int[Array, "N k"]  # -1: the token is not valid
    rank: Int[Array, "N k"]  # among the pairs that go to the same device
    rounds: Int[Array, ""]  # of the exchange, equal on all devices of the axis


def routed(
    x: Float[Array, "N D"],
    expert: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    valid: Bool[Array, "N"],
    gate_up: Float[Array, "E D 2 I"],
    down: Float[Array, "E I D"],
) -> Float[Array, "N D"]:
    """experts.routed_mlp where the target's axis splits the experts, of which this device has E."""
    where = target()
    if where.experts is None or jax.lax.axis_size(where.experts) == 1:
        return routed_mlp(x, expert, weight, valid, gate_up, down)
    return _exchanged(x, expert, weight, valid, gate_up, down, where.experts)


def over_widths(mlp: Callable[..., Array], *rows: Array) -> Array:
    """`mlp(*rows)` where the target's axes split its width: a part of it for all their rows, then its own rows' sum.

    Rows stand first in arguments and result.
    """
    axes = target().widths
    if not axes:
        return mlp(*rows)
    out = mlp(*(jax.lax.all_gather(a, axes, axis=0, tiled=True) for a in rows))
    return jax.lax.psum_scatter(out, axes, scatter_dimension=0, tiled=True)


def capacity(pairs: int, devices: int) -> int:
    """Pairs that a device sends to another at a time: the mean, and four standard deviations of a fair draw."""
    mean = pairs / devices
    return min(pairs, math.ceil(mean + 4 * math.sqrt(mean) + 2))


def _exchanged(x, expert, weight, valid, gate_up, down, axis: str):
    devices, here = jax.lax.axis_size(axis), gate_up.shape[0]
    size = capacity(expert.size, devices)
    device = jnp.where(valid[:, None], expert // here, -1)
    to_each = device.reshape(-1, 1) == jnp.arange(devices)
    running = jnp.cumsum(to_each.astype(jnp.int32), axis=0)
    rank = jnp.sum(jnp.where(to_each, running - 1, 0), axis=1).reshape(device.shape)
    rounds = jax.lax.pmax(-(-jnp.max(running[-1]) // size), axis)
    return _in_rounds(axis, size, x, weight, gate_up, down, Route(expert % here, device, rank, rounds))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(axis: str, size: int, x, weight, gate_up, down, route: Route):
    add = lambda r, out: out + _round(axis, size, r, route, x, weight, gate_up, down)
    return jax.lax.fori_loop(0, route.rounds, add, jnp.zeros_like(x))


def _round(axis: str, size: int, number, route: Route, x, weight, gate_up, down):
    """What the pairs of rank number · size and the `size` - 1 after it give."""
    devices, (tokens, k) = jax.lax.axis_size(axis), route.device.shape
    rows = devices * size
    rank = route.rank - number * size
    place = jnp.where((route.device >= 0) & (rank >= 0) & (rank < size), route.device * size + rank, rows)
    pair = jnp.full((rows,), tokens * k, jnp.int32)
    pair = pair.at[place.reshape(-1)].set(jnp.arange(tokens * k, dtype=jnp.int32), mode="drop")
    nobody = gate_up.shape[0]
    expert = jnp.take(route.expert.reshape(-1), pair, mode="fill", fill_value=nobody)
    swap = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
    there, expert = swap(take_rows(x, pair // k)), swap(expert)
    one = jnp.ones((rows, 1), weight.dtype)
    done = routed_mlp(there, jnp.minimum(expert, nobody - 1)[:, None], one, expert < nobody, gate_up, down)
    return combine(swap(done), weight, place)


def _forward(axis, size, x, weight, gate_up, down, route):
    return _in_rounds(axis, size, x, weight, gate_up, down, route), (x, weight, gate_up, down, route)


def _backward(axis, size, residuals, d_out):
    """The same rounds again, each differentiated: a loop of unknown length keeps nothing."""
    *inputs, route = residuals

    def add(number, total):
        _, vjp = jax.vjp(partial(_round, axis, size, number, route), *inputs)
        return jax.tree.map(jnp.add, total, vjp(d_out))

    return *jax.lax.fori_loop(0, route.rounds, add, tuple(jax.tree.map(jnp.zeros_like, inputs))), None


_in_rounds.defvjp(_forward, _backward)
