"""The TPUs that kernels are compiled for, and what to hold them to. libtpu compiles for each on any x86 machine."""

from __future__ import annotations

from typing import NamedTuple


class Tpu(NamedTuple):
    topology: str  # as jax.experimental.topologies spells it
    accelerator: str  # TPU_ACCELERATOR_TYPE
    cores: int
    multiply_adds: int  # of a core per cycle in bfloat16: matrix units x columns² x rows that one takes per cycle
    vmem_mib: int  # of a core
    hbm_bytes: float  # per cycle, of the memory's share of a core
    clock: float  # Hz


def tpu(topology: str, accelerator: str, cores: int, matrix: int, vmem_mib: int, tflops: float, gb_s: float):
    """A chip's peaks per core and cycle, with the clock at which the matrix units reach the TFLOP/s that jax gives."""
    clock = tflops * 1e12 / (2 * matrix)
    return Tpu(topology, accelerator, cores, matrix, vmem_mib, gb_s * 1e9 / clock, clock)


# Matrix units, peak and bandwidth of a core as in jax's table of TPUs. From v6e on a matrix unit takes two rows per
# cycle: the schedule of a plain product shows it, and the clocks come out as published.
TPUS = {
    "v5e": tpu("v5e:2x2", "v5litepod-4", 1, 4 * 128**2, 128, 197, 820),
    "v5p": tpu("v5p:2x2x1", "v5p-8", 2, 4 * 128**2, 64, 229.5, 1230),
    "v6e": tpu("v6e:2x2", "v6e-4", 1, 2 * 256**2 * 2, 128, 920, 1640),
    "tpu7x": tpu("tpu7x:2x2x1", "tpu7x-8", 1, 2 * 256**2 * 2, 64, 1155, 3700),  # jax shows each core as a device
}


def environment(device: Tpu, dump: str | None = None) -> dict[str, str]:
    """What a process has to find in its environment, before it imports jax, to compile for the device.

    `dump` names a folder for the schedules.
    """
    dumps = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_mosaic_dump_to={dump}"
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server outside the cloud
        "TPU_ACCELERATOR_TYPE": device.accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # its lock guards a TPU; compiling needs none
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program leaves no schedule
        "LIBTPU_INIT_ARGS": dumps if dump else "",
    }
