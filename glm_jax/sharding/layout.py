"""Layouts: rules from logical axes of parameters to mesh axes, one for learning and one for sampling."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.model import target, tree
from glm_jax.sharding.mesh import LayoutError

Rules = dict[str, str | tuple[str, ...] | None]

WIDTHS = ("data", "fsdp", "tensor", "context")  # what splits an MLP in sampling
# Parameters and optimiser state over everything.
LEARN: Rules = {
    "embed": ("data", "fsdp", "context"),
    "vocab": ("expert", "tensor"),
    "latent": "expert",
    "head": "tensor",
    "value": "expert",
    "index_head": "tensor",
    "mlp": ("expert", "tensor"),
    "expert": "expert",
    "expert_width": WIDTHS,
    "layer": None,
}
# The experts, 97 % of the weights, stay where they are; the other MLPs join them, the rest is gathered but for heads.
SAMPLE: Rules = {**LEARN, "embed": None, "vocab": "tensor", "latent": None, "value": None, "mlp": WIDTHS}
ROWS = ("data", "fsdp", "expert")  # what batch rows are split over
COLUMNS = "context"  # and their columns
SLOTS = (*ROWS, COLUMNS)


def shardings(leaves: Any, rules: Rules, mesh: Mesh) -> Any:
    """A NamedSharding for every declared leaf.

    Raises:
        LayoutError: where a dimension does not divide over its mesh axes, or two dimensions of a leaf claim one axis.
    """

    def of(path, leaf: tree.Leaf):
        spec = PartitionSpec(*(rules[axis] if axis else None for axis in leaf.axes))
        used = [a for part in spec if part for a in ((part,) if isinstance(part, str) else part)]
        if len(used) != len(set(used)):
            raise LayoutError(f"{jax.tree_util.keystr(path)}: axes {leaf.axes} claim one mesh axis twice: {spec}")
        for size, part in zip(leaf.shape, spec, strict=True):
            ways = 1
            for axis in (part,) if isinstance(part, str) else part or ():
                ways *= mesh.shape[axis]
            if size % ways:
                raise LayoutError(
                    f"{jax.tree_util.keystr(path)} has a dimension of {size} that does not divide over "
                    f"{part} ({ways} devices): change the mesh or the model"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, leaves, is_leaf=tree.is_leaf)


def rows(mesh: Mesh, dimension: int = 0) -> NamedSharding:
    """Arrays whose `dimension` are batch rows."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, ROWS))


def slots(mesh: Mesh, dimension: int = 0) -> NamedSharding:
    """Arrays whose `dimension` are slots."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, SLOTS))


def tracing_for(mesh: Mesh):
    """Traces the model for the mesh's devices, slots and heads divided among them."""
    heads = LEARN["head"]
    return target.tracing_for(mesh.devices.flat[0].platform, mesh=mesh, rows=SLOTS, heads=(heads,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
