"""The GPUs that kernels are compiled for: XLA's description of each, from which it compiles without one at hand."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    name: str  # as the driver gives it
    capability: tuple[int, int]
    multiprocessors: int
    shared_kib: int  # that a program may have
    clock_ghz: float
    memory_gib: int
    l2_mib: int
    tflops: float  # of bfloat16 products, dense
    gb_s: float

    @property
    def description(self) -> str:
        """XLA's GpuTargetConfig as protobuf text."""
        major, minor = self.capability
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_core": self.shared_kib + 1 << 10,
            "threads_per_core_limit": 2048,
            "core_count": self.multiprocessors,
            "fpus_per_core": 128 if major >= 9 else 64,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": round(self.gb_s * 1e9),
            "l2_cache_size": self.l2_mib << 20,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_gib << 30,
            "shared_memory_per_block_optin": self.shared_kib << 10,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        fields = "\n".join(f"  {name}: {value}" for name, value in numbers.items())
        return (
            f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 }}\ndevice_description_str: "{self.name}"\n'
        )


# Peaks and clocks as NVIDIA's data sheets give them.
GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 1.98, 80, 50, 989, 3352),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 1.41, 80, 40, 312, 2039),
}


def environment(dump: str) -> dict[str, str]:
    """What a process has to find in its environment, before it imports jax, to leave its kernels' code in a folder."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program leaves no code
        "XLA_FLAGS": f"--xla_dump_to={dump}",
    }
