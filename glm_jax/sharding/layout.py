"""Layouts: rules from logical axes of parameters to mesh axes, one for learning and one for sampling."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.model import target, tree
from glm_jax.model.config import ModelConfig
from glm_jax.sharding.mesh import LayoutError

Rules = dict[str, tuple[str, ...]]

WIDTHS = ("data", "fsdp", "tensor", "context", "stage")  # what splits an MLP in sampling
# Parameters and optimiser state over everything. Layers in stages are on one each, others split over all of them.
LEARN: Rules = {
    "embed": ("data", "fsdp", "context", "stage"),
    "vocab": ("expert", "tensor"),
    "latent": ("expert",),
    "head": ("tensor",),
    "value": ("expert",),
    "index_head": ("tensor",),
    "mlp": ("expert", "tensor"),
    "expert": ("expert",),
    "expert_width": WIDTHS,
    "layer": (),
    "stage": ("stage",),
}
# The experts, 97 % of the weights, stay where they are but for those in stages, which travel within `stage`; the other
# MLPs join them, the rest is gathered but for heads.
GATHERED: Rules = {"embed": (), "vocab": ("tensor",), "latent": (), "value": (), "stage": ()}
SAMPLE: Rules = {**LEARN, **GATHERED, "mlp": WIDTHS}
ROWS = ("data", "stage", "fsdp", "expert")  # what batch rows are split over
COLUMNS = "context"  # and their columns
STAGES = "stage"  # and, in learning, the layers of a group
SLOTS = (*ROWS, COLUMNS)


def split(leaf: tree.Leaf, rules: Rules) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension. What tells the stages of a stack apart splits nothing else of it."""
    taken = rules["stage"] if "stage" in leaf.axes else ()
    apart = lambda axis: tuple(a for a in rules[axis] if axis == "stage" or a not in taken)
    return [apart(axis) if axis else () for axis in leaf.axes]


def shardings(leaves: Any, rules: Rules, mesh: Mesh) -> Any:
    """A NamedSharding for every declared leaf.

    Raises:
        LayoutError: where a dimension does not divide over its mesh axes, or two dimensions of a leaf claim one axis.
    """

    def of(path, leaf: tree.Leaf):
        each = split(leaf, rules)
        spec, used = PartitionSpec(*each), [a for part in each for a in part]
        if len(used) != len(set(used)):
            raise LayoutError(f"{jax.tree_util.keystr(path)}: axes {leaf.axes} claim one mesh axis twice: {spec}")
        for size, part in zip(leaf.shape, each, strict=True):
            ways = math.prod(mesh.shape[axis] for axis in part)
            if size % ways:
                raise LayoutError(
                    f"{jax.tree_util.keystr(path)} has a dimension of {size} that does not divide over "
                    f"{' × '.join(part)} ({ways} devices): change the mesh or the model"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, leaves, is_leaf=tree.is_leaf)


def check_stages(model: ModelConfig, mesh: Mesh) -> None:
    """Raises LayoutError where the model's layers cannot be cut into the mesh's stages."""
    stages = mesh.shape[STAGES]
    if stages == 1:
        return
    if model.staged is None:
        raise LayoutError(
            f"mesh.stage={stages}: no run of this model's layers can be cut into stages. One has to repeat a pattern "
            "that begins with a layer that computes its selection (indexer_types 'full'), and such a layer, or none, "
            "has to follow; set mesh.stage=1"
        )
    first, pattern, repeats = model.groups[model.staged]
    if repeats % stages:
        raise LayoutError(
            f"mesh.stage={stages}: layers {first} to {first + repeats * len(pattern) - 1} are {repeats} times "
            f"{len(pattern)}, and {repeats} does not divide over {stages} stages: change mesh.stage"
        )


def rows(mesh: Mesh, dimension: int = 0) -> NamedSharding:
    """Arrays whose `dimension` are batch rows."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, ROWS))


def slots(mesh: Mesh, dimension: int = 0) -> NamedSharding:
    """Arrays whose `dimension` are slots."""
    return NamedSharding(mesh, PartitionSpec(*[None] * dimension, SLOTS))


def tracing_for(mesh: Mesh):
    """Traces the model for the mesh's devices, slots and heads divided among them."""
    return target.tracing_for(mesh.devices.flat[0].platform, mesh=mesh, rows=SLOTS, heads=LEARN["head"])


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
