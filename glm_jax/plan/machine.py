"""The machines that a plan is made for, by name: what a device has, and how its compiler is reached without one."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from glm_jax.plan.errors import PlanError
from pallas_kernels.compile import gpus, ptx, tpus

HOST_GPUS = 8  # of a host
# The compiler takes memory and clocks from its description; an H200 is an H100 with more and faster memory.
H200 = gpus.GPUS["h100"]._replace(name="NVIDIA H200", memory_gib=140, gb_s=4800)
GPUS = {"h100": gpus.GPUS["h100"], "h200": H200}


class Device(NamedTuple):
    """Peaks of what jax shows as one device; on tpu7x that is each of a chip's two cores."""

    hbm_gib: float  # that a program may have
    tflops: float  # of bfloat16 products
    hbm_gb_s: float
    link_gb_s: float  # to other devices, all links together
    clock: float  # Hz; 0 where the compiler estimates no cycles


def _tpu(name: str, hbm_gib: float, link_gb_s: float) -> Device:
    kind = tpus.TPUS[name]
    tflops = 2 * kind.cores * kind.multiply_adds * kind.clock / 1e12
    return Device(hbm_gib, tflops, kind.cores * kind.hbm_bytes * kind.clock / 1e9, link_gb_s, kind.clock)


def _gpu(name: str, hbm_gib: float) -> Device:
    return Device(hbm_gib, GPUS[name].tflops, GPUS[name].gb_s, 900, 0)


# HBM as the TPU compiler names it where a program exceeds it; links as Google Cloud's and NVIDIA's pages give them.
DEVICES = {
    "v5e": _tpu("v5e", 15.75, 200),
    "v5p": _tpu("v5p", 95.74, 600),
    "v6e": _tpu("v6e", 31.25, 448),
    "tpu7x": _tpu("tpu7x", 94.75, 600),
    "h100": _gpu("h100", 79),
    "h200": _gpu("h200", 140),
}


class Machine(NamedTuple):
    """A topology: `v5p:8x8x8` is one slice of 512 chips, `h100:16x8` sixteen hosts of eight."""

    family: str
    shape: str

    @property
    def device(self) -> Device:
        return DEVICES[self.family]

    @property
    def is_tpu(self) -> bool:
        return self.family in tpus.TPUS

    @property
    def count(self) -> int:
        """Devices."""
        return math.prod(map(int, self.shape.split("x"))) * (2 if self.family == "tpu7x" else 1)

    def __str__(self) -> str:
        return f"{self.family}:{self.shape}"


def read(text: str) -> Machine:
    """Raises PlanError for a name that no machine has."""
    family, _, shape = text.partition(":")
    if family not in DEVICES:
        raise PlanError(f"--topology={text}: {family!r} is no known machine; known: {', '.join(DEVICES)}")
    sizes = shape.split("x")
    if not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise PlanError(f"--topology={text}: write sizes after the colon, as in v5e:2x2, v5p:8x8x8 or h100:16x8")
    machine = Machine(family, shape)
    if machine.is_tpu:
        like = tpus.TPUS[family].topology
        sides = like.partition(":")[2].count("x") + 1
        if len(sizes) != sides:
            raise PlanError(f"--topology={text}: a slice of {family} has {sides} sides, as in {like}")
    elif len(sizes) != 2 or sizes[1] != str(HOST_GPUS):
        raise PlanError(f"--topology={text}: write {family}:HOSTSx{HOST_GPUS}, whole hosts of {HOST_GPUS} GPUs")
    return machine


def environment(machine: Machine) -> dict[str, str]:
    """What a process needs in its environment, before it imports jax, to compile for the machine.

    Raises PlanError where the compiler is not installed, with the remedy.
    """
    wants, remedy = ("libtpu", "libtpu") if machine.is_tpu else ("jax_cuda13_plugin", "jax-cuda13-plugin")
    if importlib.util.find_spec(wants) is None:
        import jaxlib

        more = (
            "" if machine.is_tpu else f"=={jaxlib.__version__} jax-cuda13-pjrt=={jaxlib.__version__} nvidia-cuda-nvcc"
        )
        more = "pip install 'glm-jax[tpu]'" if machine.is_tpu else f"pip install --no-deps {remedy}{more}"
        raise PlanError(f"the compiler for {machine.family} is not installed here; it needs no accelerator: {more}")
    if machine.is_tpu:
        return tpus.environment(tpus.TPUS[machine.family])
    path = f"{Path(ptx.ptxas()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "PATH": path}


def devices(machine: Machine) -> Any:
    """The topology's devices, for a mesh; wants `environment`. Raises PlanError where there is no such topology."""
    import jax
    from jax.experimental import topologies

    how: dict[str, str] = {}
    if not machine.is_tpu:
        from pallas_kernels import gpu

        kind = GPUS[machine.family]
        gpu.ASSUMED = float("{}.{}".format(*kind.capability))
        hosts = machine.shape.partition("x")[0]
        how = {"topology": f"1x{hosts}x{HOST_GPUS}", "target_config": kind.description}
    name, platform = (str(machine), "tpu") if machine.is_tpu else (machine.family, "cuda")
    try:
        return topologies.get_topology_desc(name, platform=platform, **how).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise PlanError(f"--topology={machine}: the compiler knows no such topology: {error}") from error
