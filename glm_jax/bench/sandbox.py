"""`glm-jax bench sandbox`: what a box costs: its start, a command in it, sixty-four at once, the probe."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

from glm_jax.envs.sandbox import probe
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.sandbox.limits import Limits

AT_ONCE = 64
_SMALL = Limits(memory_mb=128, disk_mb=16, processes=32)
_COMMAND_LIMIT = 60.0


def run(repeats: int, report: Path | None, smoke: bool) -> str:
    """The table as text; with `report` its figures as JSON."""
    repeats, many = (3, 4) if smoke else (repeats, AT_ONCE)
    found = probe.require()
    starts, closes = _starts(repeats)
    with Box(_SMALL) as box:
        one = lambda argv: _times(repeats, lambda: box.run(argv, _COMMAND_LIMIT))
        program, shell = one(["/usr/bin/true"]), one(":")
        read = _times(repeats, lambda: box.get("/etc/passwd"))
    figures = {
        "start": _spread(starts),
        "close": _spread(closes),
        "a command": _spread(program),
        "a command in bash": _spread(shell),
        "a file read": _spread(read),
    }
    all_started, all_done = at_once(many)
    if report is not None:
        extra = {"at_once": many, "all_started_s": all_started, "all_done_s": all_done, "probe_s": found.seconds}
        machine = {"cores": os.cpu_count(), "root": found.root, "memory_by": found.memory_by, "repeats": repeats}
        report.write_text(json.dumps({"milliseconds": figures, **extra, **machine}, indent=1) + "\n")
    rows = [f"| {name} | " + " | ".join(f"{row[k]:.1f}" for k in row) + " |" for name, row in figures.items()]
    user, memory = "root" if found.root else "an ordinary user", found.memory_by
    return "\n".join(
        [
            f"bubblewrap, started by {user}, memory held by {memory}, {os.cpu_count()} cores, {repeats} of each.",
            "",
            "| milliseconds | median | 95 % below | least |",
            "|---|---|---|---|",
            *rows,
            "",
            f"{many} boxes at once: all started after {all_started:.2f} s, each ran a command by {all_done:.2f} s.",
            f"The probe of {len(found.properties)} properties takes {found.seconds:.2f} s, once per process.",
        ]
    )


def _starts(repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds until a box answers, and until it is gone."""
    starts, closes = [], []
    for i in range(repeats + 2):
        begin = time.perf_counter()
        box = Box(_SMALL)
        started = time.perf_counter()
        box.close()
        if i >= 2:  # the first ones fill the caches of the system's files
            starts.append((started - begin) * 1e3)
            closes.append((time.perf_counter() - started) * 1e3)
    return starts, closes


def at_once(many: int) -> tuple[float, float]:
    """Seconds until `many` boxes that start together have all started, and until each has run a command."""
    boxes: list[Box | None] = [None] * many

    def each(work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(many)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def start(i: int) -> None:
        boxes[i] = Box(_SMALL)

    def command(i: int) -> None:
        result = boxes[i].run("echo $((6 * 7))", _COMMAND_LIMIT)
        if str(result.out) != "42\n":
            raise RuntimeError(f"box {i} of {many} answered {result}")

    begin = time.perf_counter()
    try:
        each(start)
        started = time.perf_counter() - begin
        each(command)
        return started, time.perf_counter() - begin
    finally:
        for box in boxes:
            if box is not None:
                box.close()


def _times(repeats: int, once: Callable[[], object]) -> list[float]:
    once()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        once()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": statistics.median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "min": ordered[0]}
