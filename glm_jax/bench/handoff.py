"""`glm-jax bench handoff`: bytes that a handoff moves over each mesh axis, the share that stays, and what it takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from glm_jax.host.compose import model_of
from glm_jax.host.config import RunConfig
from glm_jax.model import weights
from glm_jax.model.config import ModelConfig
from glm_jax.sharding import layout
from glm_jax.sharding.checksum import checksum
from glm_jax.sharding.handoff import handoff
from glm_jax.sharding.manifest import Entry, abstract, in_place, manifest, moved, plain, stays
from glm_jax.sharding.mesh import MeshConfig, make_mesh

GIB = 2**30


def run(config: RunConfig, repeats: int, report: Path | None) -> str:
    """The table as text; with `report` the manifest and the figures as JSON.

    The mesh may have more devices than are at hand: what moves follows from the layouts, and only the time is left out.
    """
    model = model_of(config)
    entries = manifest(model, abstract(config.mesh))
    taken = measure(model, config.mesh, repeats) if config.mesh.size <= jax.device_count() else None
    if report is not None:
        report.write_text(json.dumps({"seconds": taken, **plain(entries)}, indent=1) + "\n")
    return table(entries, config.mesh, taken)


def measure(model: ModelConfig, mesh_config: MeshConfig, repeats: int) -> dict[str, float]:
    """Median seconds of a handoff and of a checksum, on random weights; raises ValueError if a value changed."""
    mesh = make_mesh(mesh_config)
    shardings = layout.shardings(weights.abstract(model), layout.LEARN, mesh)

    def view_of(params):
        with layout.tracing_for(mesh):
            return handoff(params, model, mesh)

    params = jax.jit(lambda key: weights.init(model, key), out_shardings=shardings)(jax.random.key(0))
    hand_over, summed = jax.jit(view_of), jax.jit(checksum)
    view = hand_over(params)
    want, got = int(summed(params)), int(summed(view))
    if want != got:
        raise ValueError(f"the view's checksum is {got:#010x}, the weights' {want:#010x}: the handoff changed them")
    return {
        "handoff": _seconds(lambda: hand_over(params), repeats),
        "checksum": _seconds(lambda: summed(view), repeats),
    }


def _seconds(run, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def table(entries: Sequence[Entry], mesh: MeshConfig, taken: dict[str, float] | None) -> str:
    """The figures as a person reads them."""
    held, sizes = sum(e.bytes for e in entries), abstract(mesh).shape
    where = " × ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "one device"
    lines = [
        f"{where}: {100 * in_place(entries):.1f} % of the parameters stay where they are; of the {held / GIB:.4g} GiB "
        f"that a device samples with, {100 * stays(entries):.1f} %",
        "",
        "| over | GiB that reach a device | largest |",
        "|---|---|---|",
    ]
    for axes, size in moved(entries).items():
        largest = max((e for e in entries if e.axes == axes), key=lambda e: e.bytes - e.stays)
        lines.append(f"| {' × '.join(axes)} | {size / GIB:.4g} | {largest.name} |")
    if taken:
        lines += ["", f"handoff {1e3 * taken['handoff']:.2f} ms, checksum of the view {1e3 * taken['checksum']:.2f} ms"]
    else:
        lines += ["", f"{mesh.size} devices are not at hand: no time is measured"]
    return "\n".join(lines)
