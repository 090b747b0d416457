"""The devices that kernels are compiled for, and what to hold them to. libtpu compiles for each on any x86 machine."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    topology: str  # as jax.experimental.topologies spells it
    accelerator: str  # TPU_ACCELERATOR_TYPE
    cores: int
    multiply_adds: int  # of a core per cycle in bfloat16: matrix units x columns², as in jax's table of TPUs
    vmem_mib: int  # of a core
    hbm_gb_s: float  # of the chip


DEVICES = {
    "v5e": Device("v5e:2x2", "v5litepod-4", 1, 4 * 128**2, 128, 820),
    "v5p": Device("v5p:2x2x1", "v5p-8", 2, 4 * 128**2, 64, 2460),
    "v6e": Device("v6e:2x2", "v6e-4", 1, 2 * 256**2, 128, 1640),
    "tpu7x": Device("tpu7x:2x2x1", "tpu7x-8", 1, 2 * 256**2, 64, 3700),  # jax shows each core as a device
}


def environment(device: Device, dump: str) -> dict[str, str]:
    """What a process has to find in its environment, before it imports jax, to compile for the device."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server outside the cloud
        "TPU_ACCELERATOR_TYPE": device.accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # its lock guards a TPU; compiling needs none
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program leaves no schedule
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_mosaic_dump_to={dump}",
    }
