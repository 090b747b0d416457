"""What a handoff moves: where each parameter lies for learning and for sampling, and what a device has of it already.

Nothing is compiled or measured here: it follows from the two layouts, for meshes of any size.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from glm_jax.model import tree, weights
from glm_jax.model.config import ModelConfig
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import AXES, MeshConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter. Bytes are of one device, means over all of them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    learn: tuple[tuple[str, ...], ...]  # mesh axes of each dimension
    sample: tuple[tuple[str, ...], ...]
    bytes: float  # that a device samples with
    stays: float  # of these, what it learns with too
    axes: tuple[str, ...]  # of the devices that the rest comes from; empty where nothing moves


def abstract(config: MeshConfig) -> AbstractMesh:
    """A mesh of devices that need not be there."""
    return AbstractMesh(tuple(getattr(config, a) for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def manifest(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[Entry]:
    """Of every parameter of the policy, in the order of the tree. Raises LayoutError as `layout.shardings` does."""
    leaves = weights.abstract(config)
    learn, sample = (layout.shardings(leaves, rules, mesh) for rules in (layout.LEARN, layout.SAMPLE))
    named = jax.tree_util.tree_leaves_with_path(leaves, is_leaf=tree.is_leaf)
    pairs = zip(named, jax.tree.leaves(learn), jax.tree.leaves(sample), strict=True)
    sizes = dict(mesh.shape)
    return [
        _entry(jax.tree_util.keystr(path), leaf, config.dtype, a.spec, b.spec, sizes) for (path, leaf), a, b in pairs
    ]


def moved(entries: Sequence[Entry]) -> dict[tuple[str, ...], float]:
    """Bytes that reach a device, by the mesh axes that they cross."""
    found: Counter[tuple[str, ...]] = Counter()
    for entry in entries:
        if entry.axes:
            found[entry.axes] += entry.bytes - entry.stays
    return dict(found.most_common())


def in_place(entries: Sequence[Entry]) -> float:
    """The share of the parameters that no device has to fetch."""
    count = lambda some: sum(math.prod(e.shape) for e in some)
    return count(e for e in entries if not e.axes) / count(entries)


def stays(entries: Sequence[Entry]) -> float:
    """The share of what devices sample with that is where it was; small where many have copies of the same."""
    return sum(e.stays for e in entries) / sum(e.bytes for e in entries)


def plain(entries: Sequence[Entry]) -> dict[str, Any]:
    """The manifest and its sums, as JSON takes them."""
    return {
        "in_place": in_place(entries),
        "stays": stays(entries),
        "moved": {" × ".join(axes): size for axes, size in moved(entries).items()},
        "parameters": [dataclasses.asdict(entry) for entry in entries],
    }


def _entry(
    name: str, leaf: tree.Leaf, dtype: str, learn: PartitionSpec, sample: PartitionSpec, sizes: dict[str, int]
) -> Entry:
    dtype = leaf.dtype or dtype
    before, after = (_axes(spec, sizes) for spec in (learn, sample))
    overlap = math.prod(
        (_overlap(n, a, b, sizes) for n, a, b in zip(leaf.shape, before, after, strict=True)), start=np.ones(1)
    )
    size = jax.numpy.dtype(dtype).itemsize
    needed = size * math.prod(n // _ways(axes, sizes) for n, axes in zip(leaf.shape, after, strict=True))
    kept = size * float(np.mean(overlap))
    crossed = set()
    if kept < needed:
        for x, y in zip(before, after, strict=True):
            same = len(os.path.commonprefix([x, y]))  # devices that differ in these have nothing for one another
            crossed |= {*x[same:], *y[same:]}
    return Entry(name, leaf.shape, dtype, before, after, needed, kept, tuple(a for a in sizes if a in crossed))


def _axes(spec: PartitionSpec, sizes: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that split each dimension."""
    each = [(part,) if isinstance(part, str) else part or () for part in spec]
    return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in each)


def _ways(axes: Sequence[str], sizes: dict[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)


def _overlap(size: int, before: Sequence[str], after: Sequence[str], sizes: dict[str, int]) -> np.ndarray:
    """How much of a dimension each device has before and after: an array over all devices, axes in the mesh's order."""
    coordinate = dict(zip(sizes, np.indices(tuple(sizes.values()), sparse=True), strict=True))

    def part(axes: Sequence[str]):
        number = 0
        for axis in axes:
            number = number * sizes[axis] + coordinate[axis]
        length = size // _ways(axes, sizes)
        return number * length, number * length + length

    (first, end), (first_after, end_after) = part(before), part(after)
    found = np.minimum(end, end_after) - np.maximum(first, first_after)
    return np.broadcast_to(np.maximum(found, 0), tuple(sizes.values())).astype(float)
