"""The table of machines: topology -> chips, hosts, and the names by which schedulers know them."""

from __future__ import annotations

import math
from dataclasses import dataclass


class LaunchError(ValueError):
    """A job that cannot be submitted as it was described."""


@dataclass(frozen=True)
class Family:
    """Machines of one kind. `shapes` lists what is sold; an empty tuple means any number of hosts."""

    gke: str  # value of GKE's accelerator label
    per_host: int  # chips of a host
    shapes: tuple[str, ...] = ()
    cores: int = 0  # that Cloud TPU counts per chip in an accelerator type; 0: types are named by shape
    runtime: str | None = None  # image of a TPU VM; None where there are no queued resources

    @property
    def tpu(self) -> bool:
        return bool(self.shapes)


_CUBES = tuple("2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split())
# From Google Cloud's pages on TPU v5p, TPU v6e, TPU7x and on GPU machine types.
FAMILIES = {
    "v5p": Family("tpu-v5p-slice", 4, (*_CUBES, "16x16x24"), cores=2, runtime="v2-alpha-tpuv5"),
    "v6e": Family(
        "tpu-v6e-slice", 4, tuple("2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()), cores=1, runtime="v2-alpha-tpuv6e"
    ),
    "tpu7x": Family("tpu7x", 4, _CUBES),
    "h100": Family("nvidia-h100-80gb", 8),
    "h200": Family("nvidia-h200-141gb", 8),
}


@dataclass(frozen=True)
class Topology:
    """One slice of TPU chips, or one group of GPU hosts: `v5p:8x8x8` or `h100:16x8` (16 hosts of 8 GPUs)."""

    family: str
    shape: str

    @property
    def of(self) -> Family:
        return FAMILIES[self.family]

    @property
    def chips(self) -> int:
        return math.prod(map(int, self.shape.split("x")))

    @property
    def hosts(self) -> int:
        return self.chips // self.of.per_host

    @property
    def accelerator_type(self) -> str:
        """As Cloud TPU and xpk call it."""
        return f"{self.family}-{self.chips * self.of.cores if self.of.cores else self.shape}"

    def __str__(self) -> str:
        return f"{self.family}:{self.shape}"


def read(text: str) -> Topology:
    """Raises LaunchError for a name that no machine has."""
    family, _, shape = text.partition(":")
    if family not in FAMILIES:
        raise LaunchError(f"--topology={text}: {family!r} is no known machine; known: {', '.join(FAMILIES)}")
    kind = FAMILIES[family]
    if kind.tpu and shape not in kind.shapes:
        raise LaunchError(f"--topology={text}: {family} is sold as {', '.join(kind.shapes)}")
    if not kind.tpu:
        hosts, _, gpus = shape.partition("x")
        if not (hosts.isdigit() and int(hosts) > 0 and gpus == str(kind.per_host)):
            raise LaunchError(f"--topology={text}: write {family}:HOSTSx{kind.per_host}, whole hosts of GPUs")
    return Topology(family, shape)
