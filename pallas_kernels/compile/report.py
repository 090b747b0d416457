"""The table of every kernel's static schedule beside XLA's formulation of the same work."""

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
from pallas_kernels.compile.devices import DEVICES, Device, environment

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
        env = {**os.environ, **environment(DEVICES[device_name], dump)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"{case_name} ({which}) does not compile for {device_name}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1]), schedule.kernels(Path(dump))


def of_kernel(case_name: str, device_name: str) -> dict:
    """What the compiler says of the program with the kernel: that of all loops, its own and what XLA puts around it."""
    case, device = CASES[case_name], DEVICES[device_name]
    memory, kernels = compiled(case_name, "kernel", device_name)
    name = next(name for name in kernels if re.fullmatch(case.kernel + r"(\.\d+)?", name))
    loops = kernels.pop(name)
    spent = [loop.bundles * count for loop, count in zip(loops, case.times(loops), strict=True)]
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
    row, device = of_kernel(case_name, device_name), DEVICES[device_name]
    memory, kernels = compiled(case_name, "xla", device_name)
    cycles = _cycles(kernels)
    cost = cycles + _in_cycles(device, memory["hbm_bytes"])
    return {**row, "xla_cycles": cycles, "xla_cost": cost, "xla_hbm_bytes": memory["hbm_bytes"]}


def _cycles(program: dict[str, list[schedule.Loop]]) -> int:
    return sum(schedule.cycles(loops, schedule.runs(loops)) for loops in program.values())


def _in_cycles(device: Device, moved: float) -> int:
    return round(moved / (device.cores * device.hbm_bytes))


def report(kernels: list[str], devices: list[str]) -> dict:
    rows = [measure(case, device) for case in CASES if CASES[case].kernel in kernels for device in devices]
    return {"libtpu": libtpu(), "kernels": rows}


COLUMNS = {
    "device": "device",
    "shape": "shape",
    "cycles": "cycles",
    "matrix floor": "floor_cycles",
    "HBM floor": "hbm_cycles",
    "at": "matrix_share",
    "selection adds": "selection_share",
    "with bytes": "cost",
    "XLA with bytes": "xla_cost",
    "spills": "spills",
}


def table(found: dict) -> str:
    """Markdown, one table per kernel with the columns that it has."""
    lines = [f"libtpu {found['libtpu']}, cycles of one core"]
    for kernel in dict.fromkeys(row["name"] for row in found["kernels"]):
        rows = [row for row in found["kernels"] if row["name"] == kernel]
        columns = {head: key for head, key in COLUMNS.items() if key in rows[0]}
        lines += ["", f"`{kernel}`", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        show = lambda value: (
            f"{value:.0%}" if isinstance(value, float) else format(value, "," if isinstance(value, int) else "")
        )
        lines += ["| " + " | ".join(show(row[key]) for key in columns.values()) + " |" for row in rows]
    return "\n".join(lines)
