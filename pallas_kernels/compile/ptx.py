"""Reads what XLA leaves of a program for a GPU: its launches, and by ptxas what each kernel of it takes.

Registers that were spilled, shared memory, and which instructions do the work are facts of the compiled kernel; cycles
are not among them, as a GPU's schedule is made while it runs.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

LAUNCH = re.compile(r"kCustomKernel .*\] (\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\] +shared_memory: (\d+) bytes")
LIMIT_S = 120


class Kernel(NamedTuple):
    name: str
    registers: int
    spills: int  # bytes that a thread stores
    wgmma: int  # instructions as they stand in the code: Hopper's products of operands in shared memory,
    mma: int  # products of operands in registers,
    async_copies: int  # copies from HBM to shared memory that nobody waits for at once


class Launch(NamedTuple):
    name: str
    programs: int
    threads: int
    shared_bytes: int


def ptxas() -> str:
    """The path of the package's, or of the CUDA toolkit's; SystemExit with the remedy where there is none."""
    packages = importlib.util.find_spec("nvidia")
    places = [Path(root) / "cu13" / "bin" / "ptxas" for root in packages.submodule_search_locations] if packages else []
    found = next((str(place) for place in places if place.exists()), None) or shutil.which("ptxas")
    if found is None:
        raise SystemExit("there is no ptxas here: pip install nvidia-cuda-nvcc brings it, or a CUDA toolkit on PATH")
    return found


def launches(folder: Path) -> list[Launch]:
    """The program's launches of kernels in order, as XLA dumped them."""
    (path,) = folder.glob("*thunk_sequence.txt")
    number = lambda sizes: math.prod(map(int, sizes.split(",")))
    found = LAUNCH.findall(path.read_text())
    return [Launch(name, number(grid), number(threads), int(shared)) for name, grid, threads, shared in found]


def kernels(folder: Path) -> list[Kernel]:
    """Every kernel whose code lies in the folder."""
    found = []
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text()
        if (target := re.search(r"\.target (sm_\w+)", text)) is None:
            continue
        command = [ptxas(), "-v", f"-arch={target[1]}", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stderr
        issued = [len(re.findall(what, text)) for what in (r"wgmma\.mma_async", r"mma\.sync", r"cp\.async\.c[ag]")]
        for name in re.findall(r"\.entry (\w+)", text):
            registers, spills = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
            found.append(Kernel(name, int(registers[1]), int(spills[1]), *issued))
    return found
