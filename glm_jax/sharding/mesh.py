"""The mesh: named axes over the devices at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "stage", "fsdp", "expert", "tensor", "context")


class LayoutError(ValueError):
    """Sizes that cannot be laid out over a mesh."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis has. Slots are split over all but tensor, batch rows over all but tensor and context.

    The columns of batch rows are split over context; stage shares out the layers of the longest group in learning.
    """

    data: int = 1
    stage: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def rows(self) -> int:
        """Ways that batch rows are split."""
        return self.data * self.stage * self.fsdp * self.expert

    @property
    def size(self) -> int:
        """Devices."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def slots(self) -> int:
        """Ways that slots are split."""
        return self.rows * self.context

    def check(self) -> list[str]:
        problems = [f"{k}={getattr(self, k)} must be at least 1" for k in AXES if getattr(self, k) < 1]
        for axis, what in (("context", "the columns of rows"), ("stage", "layers")):
            if self.tensor > 1 and (size := getattr(self, axis)) > 1:
                problems.append(
                    f"tensor={self.tensor} with {axis}={size}: a model split over tensor is left to XLA, and that does "
                    f"not share out {what}; set one of them to 1"
                )
        return problems


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first devices (default: of those at hand). Raises LayoutError where that cannot be."""
    if problems := config.check():
        raise LayoutError("; ".join(problems))
    devices = jax.devices() if devices is None else devices
    shape = tuple(getattr(config, axis) for axis in AXES)
    want, have = math.prod(shape), len(devices)
    if want > have:
        sizes = " × ".join(f"{a} {n}" for a, n in zip(AXES, shape, strict=True) if n > 1)
        raise LayoutError(f"the mesh ({sizes}) needs {want} devices, {have} are there: lower one of its axes")
    return Mesh(np.asarray(devices[:want]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
