"""Reads the bundles that libtpu's compiler wrote for a kernel: one issues per cycle when nothing stalls.

A loop's bundles times its trips are the cycles that it takes at least; DMA waits and contention are not in them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|\d+) +([A-Z]{2})? *: ?(>*)")
EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\S+, (\d+) /\* loop exit test")
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")


class Loop(NamedTuple):
    """A loop's own bundles, those of loops inside it apart."""

    depth: int  # 1: not inside another
    trips: int | None  # None: decided at run time
    bundles: int
    issued: dict[str, int]  # per unit


def kernels(folder: Path) -> dict[str, list[Loop]]:
    """Loops of every kernel whose final schedule lies in the folder, in program order."""
    found = {}
    for path in sorted(folder.glob("*final_bundles.txt")):
        match = re.match(r"\d+-(.*)-\d+-final_bundles", path.name)
        if match and "schedule-analysis" not in path.name:
            stem = path.name[: match.end(1)]
            used = sorted(folder.glob(f"{glob_safe(stem)}-*final_hlo-static-per-bundle-utilization.txt"))
            found[match.group(1)] = loops(path.read_text(), used[0].read_text() if used else "")
    return found


def glob_safe(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def loops(bundles_text: str, utilization: str = "") -> list[Loop]:
    """A loop runs from its label LB to the last bundle at its depth before the next that is no deeper."""
    lines = [(match, line) for line in bundles_text.splitlines() if (match := BUNDLE.match(line))]
    depths = [len(match.group(3)) for match, _ in lines]
    starts = [i for i, (match, _) in enumerate(lines) if match.group(2) == "LB"]
    units = _utilization(utilization)
    ends = []
    for n, start in enumerate(starts):
        stop = next((other for other in starts[n + 1 :] if depths[other] <= depths[start]), len(lines))
        ends.append(max(i for i in range(start, stop) if depths[i] >= depths[start]))
    own: list[list[int]] = [[] for _ in starts]
    for i in range(len(lines)):
        inside = [n for n, start in enumerate(starts) if start <= i <= ends[n]]
        if inside:
            own[inside[-1]].append(i)
    found = []
    for start, mine in zip(starts, own, strict=True):
        trips = [int(test.group(1)) for i in mine if (test := EXIT.search(lines[i][1]))]
        issued = {unit: sum(units[i][n] for i in mine if i < len(units)) for n, unit in enumerate(UNITS)}
        found.append(Loop(depths[start], trips[-1] if trips else None, len(mine), issued))
    return found


def _utilization(text: str) -> list[list[int]]:
    lines = text.splitlines()
    start = next((i + 1 for i, line in enumerate(lines) if "UTILIZATION" in line), len(lines))
    return [list(map(int, line.split())) for line in lines[start:] if line.strip()]


def runs(found: list[Loop], unknown: int = 1) -> list[int]:
    """How often each loop's body runs: its trips times those of the loops around it."""
    times, around = [], []
    for loop in found:
        del around[loop.depth - 1 :]
        around.append(unknown if loop.trips is None else loop.trips)
        product = 1
        for trips in around:
            product *= trips
        times.append(product)
    return times


def cycles(found: list[Loop], times: list[int]) -> int:
    return sum(loop.bundles * count for loop, count in zip(found, times, strict=True))
