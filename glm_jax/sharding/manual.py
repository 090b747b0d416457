"""Each device on its own rows: the model runs in a `shard_map`, so that what moves between devices is written down.

Rows of a batch and slots meet nowhere but at the experts (model/exchange.py), in the weights, in attention where
devices share a row, each with some of its columns (model/context.py), and in layers that devices share out, through
which rows pass from one to the next (model/stages.py). Weights of the learning layout are gathered layer by layer,
inside what is recomputed, and their gradients scattered as they are summed; those of the sampling layout are where they
are wanted. Meshes with a `tensor` axis are left to XLA's partitioner: the collectives that it adds are for all devices,
and devices that loop as often as their own rows want would not all come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from glm_jax.model import cache, tree, weights
from glm_jax.model.cache import Caches
from glm_jax.model.config import ModelConfig
from glm_jax.model.stages import Stages
from glm_jax.model.target import target, tracing_for
from glm_jax.model.weights import Transformer
from glm_jax.sharding import layout

KEPT = ("expert",)  # the logical axes of which each device keeps its part
# Outside of the layers, which gather their own:
ENDS, DRAFT_ENDS = ("embed", "norm", "head", "value"), ("embed_norm", "hidden_norm", "proj", "norm")


def ways() -> int:
    """Devices that each run the model on their own rows; 1 where one does, or the partitioner spreads it."""
    where = target()
    if where.mesh is None or where.experts:
        return 1
    split = math.prod(where.mesh.shape[axis] for axis in where.rows)
    return split if split == where.mesh.size else 1


def each_on_its_rows(
    run: Callable, params: Transformer, config: ModelConfig, rules: layout.Rules, split: Sequence[int], results: Any
) -> Callable:
    """`run(params, *arrays)` as a function of the arrays, run by each device on its own rows.

    `params` lie by `rules`. `split` and `results` tell the dimension of rows of each argument and result. In learning,
    devices that share rows have all their columns in the arguments, and give them in the results. Without a mesh, and
    where `tensor` splits it too, it is `run` itself.
    """
    where = target()
    if ways() == 1:
        return lambda *arrays: run(params, *arrays)
    leaves = weights.declared(params, config)

    def split_over(leaf: tree.Leaf) -> list[tuple[str, ...]]:
        """The mesh axes of each dimension, `tensor` apart, which has one device here."""
        return [tuple(a for a in axes if a in where.rows) for axes in layout.split(leaf, rules)]

    def gather(leaf: tree.Leaf, a: Array, apart: str | None = None) -> Array:
        for dimension, (name, axes) in enumerate(zip(leaf.axes, split_over(leaf), strict=True)):
            axes = tuple(axis for axis in axes if axis != apart)
            if name not in KEPT and axes:
                a = jax.lax.all_gather(a, axes, axis=dimension, tiled=True)
        return a

    samples = rules is layout.SAMPLE
    if samples:
        how = {"widths": tuple(a for a in rules["expert_width"] if a in where.rows)}
    else:
        shared_out = Stages(layout.STAGES, partial(gather, apart=layout.STAGES))
        how = {"gather": gather, "context": layout.COLUMNS, "stages": shared_out}
    device_axes = layout.SLOTS if samples else layout.ROWS
    flat, structure = jax.tree.flatten(params)
    places = [PartitionSpec(*split_over(leaf)) for leaf in jax.tree.leaves(leaves, is_leaf=tree.is_leaf)]
    rows = lambda dimension: PartitionSpec(*[None] * dimension, device_axes)

    def on_one(flat, *arrays):
        mine = jax.tree.unflatten(structure, flat)
        if not samples:
            mine = _whole(gather, leaves, mine, ENDS)
            if mine.draft is not None:
                mine = mine.replace(draft=_whole(gather, leaves.draft, mine.draft, DRAFT_ENDS))
        with tracing_for(**{**where._asdict(), "experts": "expert", **how}):
            return run(mine, *arrays)

    on_each = jax.shard_map(
        on_one,
        mesh=where.mesh,
        in_specs=(places, *map(rows, split)),
        out_specs=jax.tree.map(rows, results),
        check_vma=False,
    )
    return lambda *arrays: on_each(flat, *arrays)


def _whole(gather: Callable, leaves: Any, params: Any, names: Sequence[str]) -> Any:
    found = {name: tree.map_leaves(gather, getattr(leaves, name), getattr(params, name)) for name in names}
    return params.replace(**found)


def extend(
    view: Transformer,
    config: ModelConfig,
    caches: Caches,
    tokens: Int[Array, "B S"],
    start: Int[Array, "B"],
    count: Int[Array, "B"],
    table: Int[Array, "B N"] | None = None,
) -> tuple[Float[Array, "B S D"], Caches]:
    """cache.extend by each device on its slots. `table` counts pages from the device's first one."""

    def run(view, caches, *rows):
        return cache.extend(view, config, caches, *rows)

    rows = (tokens, start, count) if table is None else (tokens, start, count, table)
    split = (1, *[0] * len(rows))
    return each_on_its_rows(run, view, config, layout.SAMPLE, split, (0, 1))(caches, *rows)


def on_each(run: Callable, share: Any, mine: Any, known: Any) -> Any:
    """`run(shard, share, mine, known)`, which gives a new share, by each device that samples for itself.

    `shard` [1] is its number; of `share` and `mine` it has its rows, of `known` everything. Without a mesh, and where
    `tensor` splits it too, that is one device: `run` itself.
    """
    shards = ways()
    if shards == 1:
        return run(jnp.zeros((1,), jnp.int32), share, mine, known)
    rows = PartitionSpec(target().rows)
    on_one = jax.shard_map(
        run, mesh=target().mesh, in_specs=(rows, rows, rows, PartitionSpec()), out_specs=rows, check_vma=False
    )
    return on_one(jnp.arange(shards, dtype=jnp.int32), share, mine, known)
