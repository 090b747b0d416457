"""What the TPU's compiler says of every kernel: its static schedule, beside that of XLA's formulation of the work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pallas_kernels.compile import schedule
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.tpus import TPUS, Tpu, environment

LIMIT_S = 600  # for one compilation


def libtpu() -> str:
    """The compiler's version; SystemExit with the remedy where there is none."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        raise SystemExit("the TPU compiler is not installed here: pip install 'glm-jax[tpu]' brings libtpu") from None


def compiled(case_name: str, which: str, device_name: str) -> tuple[dict, dict[str, list[schedule.Loop]]]:
    """Memory and loops of a case, compiled in a process of its own. RuntimeError with the compiler's words."""
    with tempfile.TemporaryDirectory() as dump:
        command = [sys.executable, "-m", "pallas_kernels.compile.one", case_name, which, device_name]
        env = {**os.environ, **environment(TPUS[device_name], dump)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{case_name} ({which}) does not compile for {device_name}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]), schedule.kernels(Path(dump))


def of_kernel(case_name: str, device_name: str) -> dict:
    """What the compiler says of the program with the kernel: that of all loops, its own and what XLA puts around it."""
    case, device = CASES[case_name], TPUS[device_name]
    memory, kernels = compiled(case_name, "kernel", device_name)
    loops, spent = [], []
    for wanted, times in (case.times if isinstance(case.times, dict) else {case.kernel: case.times}).items():
        own = kernels.pop(next(name for name in kernels if re.fullmatch(wanted + r"(\.\d+)?", name)))
        loops += own
        spent += [loop.bundles * count for loop, count in zip(own, times(own), strict=True)]
    cycles = sum(spent) + _cycles(kernels)
    floor = case.multiply_adds / (device.cores * device.multiply_adds)
    return {
        "name": case.kernel,
        "device": device_name,
        "shape": case.shape,
        "cycles": cycles,
        "cost": cycles + _in_cycles(device, memory["hbm_bytes"]),
        "floor_cycles": round(floor),
        "hbm_cycles": _in_cycles(device, case.hbm_bytes),
        **{name: round(share, 3) for name, share in case.shares(floor, spent).items()},
        "spills": sum(loop.issued["SPILL"] + loop.issued["FILL"] for loop in loops),
        "hbm_bytes": memory["hbm_bytes"],
        "temp_bytes": memory["temp_bytes"],
    }


def measure(case_name: str, device_name: str) -> dict:
    """One row of the table. A `cost` is cycles plus the bytes that are moved over what HBM moves in a cycle."""
    row, device = of_kernel(case_name, device_name), TPUS[device_name]
    memory, kernels = compiled(case_name, "xla", device_name)
    cycles = _cycles(kernels)
    cost = cycles + _in_cycles(device, memory["hbm_bytes"])
    return {**row, "xla_cycles": cycles, "xla_cost": cost, "xla_hbm_bytes": memory["hbm_bytes"]}


def _cycles(program: dict[str, list[schedule.Loop]]) -> int:
    return sum(schedule.cycles(loops, schedule.runs(loops)) for loops in program.values())


def _in_cycles(device: Tpu, moved: float) -> int:
    return round(moved / (device.cores * device.hbm_bytes))
