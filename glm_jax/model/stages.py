"""Pipeline parallelism: repeats of a layer group over several devices, and rows that pass from one to the next.

Of P devices, stage s holds the s-th part of the group's layers (schedule.staged_group) and rows of its own, as every
device does. Outside of the group each runs its own rows. Through it a row passes by itself, from stage to stage, a tick
each: row j of all P · R, which is row j div P of device j mod P, is in stage s at tick j + s (GPipe). Of P · R + P - 1
ticks a stage idles P - 1. Rows come to stage 0 from their owners down a ring, and go back to them from stage P - 1 down
another, which both move by one device a tick: a row is at stage 0 when its turn comes, and P rows are back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm_jax.model.target import target, tracing_for


class Stages(NamedTuple):
    """What is different for a group in stages."""

    axis: str  # of the mesh
    gather: Callable[[Any, Any], Any]  # Target.gather of its layers, of which other stages have no part


def ways() -> int:
    """Devices that share out the layers of a group."""
    stages = target().stages
    return 1 if stages is None else jax.lax.axis_size(stages.axis)


def run(
    stack: Callable[..., tuple[Any, Any, Any]],
    layers: Any,
    x: Float[Array, "R S D"],
    view: Any,
    state: Any,
    numbers: tuple[Any, Any],
    steps: tuple[int, int],
) -> tuple[Float[Array, "R S D"], Any, Any]:
    """`stack(layers, x, view, state, numbers)`, which runs a scan over repeats, of all rows over all stages' layers.

    `view` is what a row's tokens see; zeros are padding. Numbers in `state` add up over rows; arrays of rows pass from
    layer to layer within a stage, which finds zeros in them. `steps` is by how much a repeat advances `numbers`.
    Returns x, the state, whose arrays are those that came in, and what was seen of all repeats.
    """
    where = target()
    axis, stages, stage = where.stages.axis, ways(), jax.lax.axis_index(where.stages.axis)
    rows, repeats = x.shape[0], jax.tree.leaves(layers)[0].shape[0]
    ring = lambda a, by: jax.lax.ppermute(a, axis, [(s, (s + by) % stages) for s in range(stages)])
    is_array = lambda a: isinstance(a, jax.Array)
    of_all = lambda a: jax.lax.all_gather(a, axis, axis=1).reshape(-1, *a.shape[1:])
    views = jax.tree.map(lambda a: of_all(a) if is_array(a) else a, view)
    fresh = jax.tree.map(lambda a: jnp.zeros_like(a[:1] if a.ndim else a), state)
    numbers = [n + stage * repeats * step for n, step in zip(numbers, steps, strict=True)]

    def tick(carry, t):
        arrived, coming, leaving, out, state = carry
        row = t - stage
        active = (row >= 0) & (row < rows * stages)
        coming = jnp.where(t % stages == 0, x[jnp.minimum(t // stages, rows - 1)], coming)
        here = jnp.where(stage == 0, coming, arrived)[None]
        turn = lambda a: jnp.where(active, a[jnp.clip(row, 0, rows * stages - 1)], 0).astype(a.dtype)[None]
        seen_by = jax.tree.map(lambda a: turn(a) if is_array(a) else a, views)
        with tracing_for(**{**where._asdict(), "gather": where.stages.gather, "stages": None}):
            here, after, seen = stack(layers, here, seen_by, fresh, numbers)
        state = jax.tree.map(lambda a, n: a if a.ndim else a + jnp.where(active, n, 0), state, after)
        leaving = jnp.where(stage == stages - 1, here[0], leaving)
        turns, late = jnp.divmod(t - 2 * (stages - 1), stages)
        out = out.at[jnp.where((turns >= 0) & (late == 0), turns, rows)].set(leaving, mode="drop")
        coming, leaving = ring(jnp.stack([coming, leaving]), -1)
        return (ring(here[0], 1), coming, leaving, out, state), seen

    none = jnp.zeros_like(x[0])
    ticks = jnp.arange(rows * stages + stages - 1)
    (*_, out, state), seen = jax.lax.scan(tick, (none, none, none, jnp.zeros_like(x), state), ticks)
    own = jnp.arange(rows) * stages + stage

    def of_own(a):
        """[ticks, repeats, 1, ...] here, to [all stages' repeats, R, ...] of own rows."""
        every = jax.lax.all_gather(a, axis)
        return jnp.concatenate([every[s, own + s, :, 0] for s in range(stages)], axis=1).swapaxes(0, 1)

    return out, state, jax.tree.map(of_own, seen)
