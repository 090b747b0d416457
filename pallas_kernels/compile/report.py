"""The table of every kernel's static schedule beside XLA's formulation of the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pallas_kernels.compile import schedule
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.devices import DEVICES, environment

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


def measure(case_name: str, device_name: str) -> dict:
    """One row of the table."""
    case, device = CASES[case_name], DEVICES[device_name]
    memory, kernels = compiled(case_name, "kernel", device_name)
    _, by_xla = compiled(case_name, "xla", device_name)
    loops = next(found for name, found in kernels.items() if name.startswith(case.kernel))
    times = case.times(loops)
    cycles = schedule.cycles(loops, times)
    scoring = sum(loop.bundles * count for loop, count in list(zip(loops, times, strict=True))[: case.scoring])
    floor = case.multiply_adds / (device.cores * device.multiply_adds)
    return {
        "name": case.kernel,
        "device": device_name,
        "shape": case.shape,
        "cycles": cycles,
        "xla_cycles": sum(schedule.cycles(found, schedule.runs(found)) for found in by_xla.values()),
        "floor_cycles": round(floor),
        "matrix_share": round(floor / max(scoring, floor), 3),
        "selection_share": round((cycles - scoring) / scoring, 3),
        "spills": sum(loop.issued["SPILL"] + loop.issued["FILL"] for loop in loops),
        "hbm_bytes": case.hbm_bytes,
        "temp_bytes": memory["temp_bytes"],
    }


def report(kernels: list[str], devices: list[str]) -> dict:
    rows = [measure(case, device) for case in CASES if CASES[case].kernel in kernels for device in devices]
    return {"libtpu": libtpu(), "kernels": rows}


def table(found: dict) -> str:
    """Markdown."""
    columns = "kernel", "device", "shape", "cycles", "matrix floor", "scoring at", "selection adds"
    columns += "XLA, scores alone", "spills", "temporary"
    head = "| " + " | ".join(columns) + " |"
    lines = [f"libtpu {found['libtpu']}, cycles of one core", "", head, "|" + "---|" * len(columns)]
    for row in found["kernels"]:
        lines.append(
            f"| {row['name']} | {row['device']} | {row['shape']} | {row['cycles']:,} | {row['floor_cycles']:,} "
            f"| {row['matrix_share']:.0%} | {row['selection_share']:.0%} | {row['xla_cycles']:,} | {row['spills']} "
            f"| {row['temp_bytes'] / 2**20:.1f} MiB |"
        )
    return "\n".join(lines)
