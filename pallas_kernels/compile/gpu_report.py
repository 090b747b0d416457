"""What the GPU's compiler says of every kernel, beside what XLA's formulation of the same work takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pallas_kernels.compile import ptx
from pallas_kernels.compile.case import Case
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.gpus import GPUS, environment

LIMIT_S = 600  # for one compilation


def compilers() -> str:
    """XLA's and ptxas' versions; SystemExit with the remedy where one is missing."""
    try:
        plugin = version("jax-cuda13-plugin")
    except PackageNotFoundError:
        raise SystemExit(
            "the GPU compiler is not installed here: pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, of jax's "
            "version, brings XLA's, and nvidia-cuda-nvcc ptxas"
        ) from None
    said = subprocess.run([ptx.ptxas(), "--version"], check=True, capture_output=True, text=True).stdout
    return f"jaxlib {plugin}, ptxas {re.search(r'release [^,]*, V([0-9.]+)', said)[1]}"


def serves(device_name: str, case: Case) -> bool:
    return GPUS[device_name].capability >= (8, 9) or not case.float8


def compiled(case_name: str, which: str, device_name: str) -> tuple[dict, list[ptx.Launch], list[ptx.Kernel]]:
    """Memory, launches and kernels of a case, from a process of its own. RuntimeError with the compiler's words."""
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-m", "pallas_kernels.compile.one", case_name, which, device_name]
        env = {**os.environ, **environment(dump)}
        env["PATH"] = f"{Path(ptx.ptxas()).parent}{os.pathsep}{env.get('PATH', '')}"  # XLA calls it as well
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{case_name} ({which}) does not compile for {device_name}: {done.stderr[-2000:]}")
        found = ptx.kernels(Path(dump)) if which == "kernel" else []
        return json.loads(done.stdout.splitlines()[-1]), ptx.launches(Path(dump)), found


def of_kernel(case_name: str, device_name: str) -> dict:
    """Of the kernels that are ours: what a thread and a program take, and by which instructions they work."""
    case, gpu = CASES[case_name], GPUS[device_name]
    memory, launches, kernels = compiled(case_name, "kernel", device_name)
    ours = [kernel for kernel in kernels if re.match(r"index_|sparse_|quantize_", kernel.name)]
    names = {kernel.name for kernel in ours}
    return {
        "name": case.kernel,
        "device": device_name,
        "shape": case.shape,
        "registers": max(kernel.registers for kernel in ours),
        "spills": sum(kernel.spills for kernel in ours),
        "shared_kib": round(max(launch.shared_bytes for launch in launches if launch.name in names) / 1024),
        "wgmma": sum(kernel.wgmma for kernel in ours),
        "mma": sum(kernel.mma for kernel in ours),
        "async_copies": sum(kernel.async_copies for kernel in ours),
        "matrix_us": round(case.multiply_adds * 2 / gpu.tflops / 1e6, 1),
        "hbm_us": round(case.hbm_bytes / gpu.gb_s / 1e3, 1),
        "hbm_bytes": case.hbm_bytes,
        "temp_bytes": memory["temp_bytes"],
        "launches": len(launches),
    }


def measure(case_name: str, device_name: str) -> dict:
    """One row of the table."""
    memory, launches, _ = compiled(case_name, "xla", device_name)
    return {**of_kernel(case_name, device_name), "xla_temp_bytes": memory["temp_bytes"], "xla_launches": len(launches)}
