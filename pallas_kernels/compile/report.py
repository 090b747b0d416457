"""Every kernel's figures on every device, and how they read."""

from __future__ import annotations

from pallas_kernels.compile import gpu_report, tpu_report
from pallas_kernels.compile.cases import CASES
from pallas_kernels.compile.gpus import GPUS
from pallas_kernels.compile.tpus import TPUS

MIB = 1 << 20


def report(kernels: list[str], devices: list[str]) -> dict:
    """The compilers' versions and a row per kernel, shape and device. SystemExit where a compiler is missing."""
    compilers = {}
    if any(device in TPUS for device in devices):
        compilers["libtpu"] = tpu_report.libtpu()
    if any(device in GPUS for device in devices):
        compilers["cuda"] = gpu_report.compilers()
    rows = []
    for name, case in CASES.items():
        if case.kernel in kernels:
            of_tpu = [device for device in devices if device in TPUS]
            of_gpu = [device for device in devices if device in GPUS and gpu_report.serves(device, case)]
            rows += [tpu_report.measure(name, device) for device in of_tpu]
            rows += [gpu_report.measure(name, device) for device in of_gpu]
    return {**compilers, "kernels": rows}


TPU_COLUMNS = {
    "cycles": "cycles",
    "matrix floor": "floor_cycles",
    "HBM floor": "hbm_cycles",
    "at": "matrix_share",
    "selection adds": "selection_share",
    "with bytes": "cost",
    "XLA with bytes": "xla_cost",
    "spills": "spills",
}
GPU_COLUMNS = {
    "matrix floor, µs": "matrix_us",
    "HBM floor, µs": "hbm_us",
    "registers": "registers",
    "spilled bytes": "spills",
    "shared KiB": "shared_kib",
    "wgmma": "wgmma",
    "mma": "mma",
    "async copies": "async_copies",
    "temporary MiB": "temp_bytes",
    "XLA's": "xla_temp_bytes",
}


def table(found: dict) -> str:
    """Markdown: for each compiler one table per kernel, with the columns that it has."""
    parts = []
    if "libtpu" in found:
        parts += _tables(f"libtpu {found['libtpu']}, cycles of one core", found["kernels"], TPUS, TPU_COLUMNS)
    if "cuda" in found:
        parts += _tables(found["cuda"], found["kernels"], GPUS, GPU_COLUMNS)
    return "\n".join(parts)


def _tables(heading: str, rows: list[dict], devices: dict, named: dict[str, str]) -> list[str]:
    lines = [heading]
    rows = [row for row in rows if row["device"] in devices]
    for kernel in dict.fromkeys(row["name"] for row in rows):
        of_kernel = [row for row in rows if row["name"] == kernel]
        columns = {"device": "device", "shape": "shape"}
        columns |= {head: key for head, key in named.items() if key in of_kernel[0]}
        lines += ["", f"`{kernel}`", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(_shown(key, row[key]) for key in columns.values()) + " |" for row in of_kernel]
    return [*lines, ""]


def _shown(key: str, value) -> str:
    if key.endswith("_share"):
        return f"{value:.0%}"
    if key.endswith("temp_bytes"):
        return f"{value / MIB:,.0f}"
    return value if isinstance(value, str) else f"{value:,}"
