"""`glm-jax bench checkpoint`: how fast a state is saved and restored, beside a plain copy of the same bytes."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from glm_jax.io.checkpoints import Checkpoints, abstract

LEAF = 1 << 24  # bytes of an array, as of a small model's layer
SMOKE = 16  # MiB
WRITE, HELD, SAVE = "plain write", "save, until the run goes on", "save, until it is sealed"
READ, RESTORE = "plain read", "check and restore"


def run(repeats: int, mib: int, folder: Path | None, report: Path | None, smoke: bool) -> str:
    """The table as text; with `report` its figures as JSON. folder: on the disk that is measured (None: here)."""
    mib = SMOKE if smoke else mib
    state = {f"layer {n}": _draw(n) for n in range(max(1, mib * 2**20 // LEAF))}
    size = sum(x.nbytes for x in state.values())
    place = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=folder or Path.cwd()))
    try:
        measure(state, place)  # the first one starts threads and compiles
        taken = [measure(state, place) for _ in range(repeats)]
    finally:
        shutil.rmtree(place)
    seconds = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    if report is not None:
        report.write_text(
            json.dumps({"bytes": size, "repeats": repeats, "seconds": seconds, "all": taken}, indent=1) + "\n"
        )
    rows = [f"| {name} | {s:.3f} | {size / s / 2**20:,.0f} |" for name, s in seconds.items()]
    about = (
        f"{size / 2**20:,.0f} MiB in arrays of {LEAF / 2**20:.0f}, wall seconds, median of {repeats} in turns. Writes "
        "go to the page cache and reads come from it; a checkpoint has checksums, which the plain copy has not."
    )
    return "\n".join([about, "", "| | seconds | MiB/s |", "|---|---|---|", *rows])


def measure(state: dict[str, jax.Array], place: Path) -> dict[str, float]:
    """Seconds of a plain copy and of a checkpoint, each written and read once. Raises ValueError for other bytes."""
    arrays = [np.asarray(x) for x in state.values()]
    plain, checkpoint = place / "plain", place / "checkpoint"
    plain.mkdir()
    files = [plain / str(n) for n in range(len(arrays))]
    taken = {WRITE: _timed(lambda: [x.tofile(file) for x, file in zip(arrays, files, strict=True)])}
    with Checkpoints(checkpoint) as saver:
        start = time.perf_counter()
        saver.save(1, state, None, {})
        taken[HELD] = time.perf_counter() - start
        saver.wait()
        taken[SAVE] = time.perf_counter() - start
    taken[READ] = _timed(lambda: [np.fromfile(file, np.float32) for file in files])
    target, found = abstract(state), {}
    with Checkpoints(checkpoint) as saver:

        def restore() -> None:
            step, _ = saver.newest()
            found.update(jax.block_until_ready(saver.restore(step, target, None)[0]))

        taken[RESTORE] = _timed(restore)
    if any(np.asarray(found[name]).tobytes() != np.asarray(x).tobytes() for name, x in state.items()):
        raise ValueError("the restored state has other bytes than the saved one")
    shutil.rmtree(plain)
    shutil.rmtree(checkpoint)
    return taken


def _draw(seed: int) -> jax.Array:
    """Random floats, which do not compress."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(LEAF // 4, np.float32))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
