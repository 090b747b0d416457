"""Measuring stacks side by side: each in a process of its own on one thread, taking turns iteration by iteration.

Interleaving makes a machine's drift hit all of them alike; CPU seconds of a process pinned to one core leave out what
others do there.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_LIMIT, TURN_LIMIT = 600.0, 300.0  # seconds that a start (compiles included) and a turn may take


class BenchError(RuntimeError):
    """A stack under measurement failed."""


class Contender:
    """A process that makes one iteration whenever it is told to. `program` is a module's name, or a script's path."""

    def __init__(self, name: str, python: str, program: str, args: Sequence[str] = ()):
        self.name = name
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
        env |= {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        how = [program] if program.endswith(".py") else ["-m", program]
        pinned = [sys.executable, "-c", _PIN, python, *how, *args]
        self._errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            pinned, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env
        )

    def hear(self, limit: float) -> dict:
        """The next line that it says, as JSON. Raises BenchError when it ends, or says nothing for `limit` seconds."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            end = time.monotonic() + limit
            while time.monotonic() < end:
                if ready.select(timeout=1.0):
                    line = self.process.stdout.readline()
                    if line.startswith("{"):
                        return json.loads(line)
                    if not line:
                        break
        raise BenchError(
            f"{self.name} said nothing for {limit:.0f} s or ended (code {self.process.poll()}).\n{self._tail()}"
        )

    def turn(self) -> dict[str, float]:
        """One iteration: CPU seconds by part."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.hear(TURN_LIMIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _tail(self) -> str:
        """What it said last on its error stream."""
        self._errors.seek(0)
        return self._errors.read()[-2000:]


# Pins itself to one core, then becomes the program.
_PIN = "import os,sys; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))}); os.execv(sys.argv[1], sys.argv[1:])"


def cpu_seconds() -> float:
    """CPU seconds that this process has used so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mib() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(iteration: Callable[[], dict[str, float]], about: dict | None = None) -> None:
    """A contender's side: says that it is ready, then makes an iteration per line that it is sent."""
    print(json.dumps({"ready": True, **(about or {})}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(iteration()), flush=True)


def duel(contenders: Sequence[Contender], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Figures of `repeats` iterations of each, in turns, after one that is not counted."""
    try:
        for c in contenders:
            c.hear(START_LIMIT)
            c.turn()
        figures: dict[str, list[dict[str, float]]] = {c.name: [] for c in contenders}
        for _ in range(repeats):
            for c in contenders:
                figures[c.name].append(c.turn())
        return figures
    finally:
        for c in contenders:
            c.close()


def medians(figures: dict[str, list[dict[str, float]]], report: Path | None, size: str) -> dict[str, dict[str, float]]:
    """Of each contender's figures over its iterations; with `report`, all of them go there as JSON."""
    found = {n: {k: statistics.median(f[k] for f in rows) for k in rows[0]} for n, rows in figures.items()}
    if report is not None:
        repeats = len(next(iter(figures.values())))
        about = {"machine": platform.machine(), "python": platform.python_version(), "repeats": repeats, "size": size}
        report.write_text(json.dumps({**about, "median": found, "all": figures}, indent=1) + "\n")
    return found


def has_modules(python: str, *names: str) -> bool:
    """Whether that interpreter finds every one of these modules."""
    probe = f"import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in {names!r}))"
    return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
