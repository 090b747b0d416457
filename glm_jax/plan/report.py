"""`glm-jax plan`: the real round compiled for a topology in a process of its own, and the plan that comes of it."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from glm_jax.host.config import RunConfig
from glm_jax.plan import account, machine
from glm_jax.plan.cost import LEARN, ONCE, PREFILL, TICK
from glm_jax.plan.errors import PlanError
from glm_jax.plan.machine import Machine
from glm_jax.sharding.mesh import AXES

GIB = 2**30
PROGRAMS = {"round": "the whole round", "sample": "a round that never learns"}


def plan(
    config: RunConfig, topology: str, limit_minutes: float, which: str = "round", text: Path | None = None
) -> dict:
    """The plan as it is written to JSON, of the program `which` (plan/compile.py). `text` gets the compiled program.

    Raises PlanError where the topology is unknown, its compiler missing, the mesh not the topology's, or the compile
    fails or takes too long.
    """
    on = machine.read(topology)
    check_mesh(config, on)
    found = compiled(config, on, limit_minutes, which, text)
    parts = account.parts(found)
    capacity, total = on.device.hbm_gib, sum(parts.values()) / GIB
    fits = "memory" in found and total <= capacity
    device = on.device
    times = account.roofline(found.get("phases", {}), device.tflops, device.hbm_gb_s, device.link_gb_s)
    for name, cost in found.get("phases", {}).items():
        times[name]["schedule"] = cost["cycles"] / device.clock if device.clock else None
    change = None
    if not fits:
        change = account.nearest_change(config, parts, capacity * GIB, found["activations_with_remat"])
    return {
        "topology": str(on),
        "program": which,
        "devices": found["devices"],
        "mesh": {axis: size for axis, size in dataclasses.asdict(config.mesh).items() if size > 1},
        "fits": fits,
        "change": change,
        "hbm_gib_per_chip": total,
        "hbm_gib_available": capacity,
        "parts_gib": {name: size / GIB for name, size in parts.items()},
        "phases": found.get("phases", {}),
        "seconds": times,
        "round_seconds": round_seconds(times, config.rollout.ticks),
        "largest_values": found.get("largest", []),
        "lower_seconds": found["lower_seconds"],
        "compile_seconds": found["compile_seconds"],
        "host_gib": found["host_gib"],
    }


def check_mesh(config: RunConfig, on: Machine) -> None:
    """Raises PlanError where the mesh has not as many devices as the topology."""
    ways = 1
    for axis in AXES:
        ways *= getattr(config.mesh, axis)
    if ways != on.count:
        raise PlanError(
            f"the mesh has {ways} devices and {on} has {on.count}: set mesh.fsdp, mesh.expert, … so that their product "
            f"is {on.count}"
        )


def compiled(config: RunConfig, on: Machine, limit_minutes: float, which: str, text: Path | None) -> dict:
    command = [sys.executable, "-m", "glm_jax.plan.compile", str(on), which, *([str(text)] if text else [])]
    env = {**os.environ, **machine.environment(on)}
    try:
        done = subprocess.run(
            command, input=pickle.dumps(config), env=env, stdout=subprocess.PIPE, timeout=60 * limit_minutes
        )
    except subprocess.TimeoutExpired:
        raise PlanError(f"compiling for {on} took more than {limit_minutes} minutes: raise --limit_minutes") from None
    if done.returncode:
        how = f"signal {-done.returncode} (9: out of host memory)" if done.returncode < 0 else "its error stands above"
        raise PlanError(f"compiling for {on} failed: {how}")
    return json.loads(done.stdout.splitlines()[-1])


def round_seconds(times: dict[str, dict], ticks: int) -> dict[str, float]:
    """Of a round whose ticks are all used, without prefill, and that learns."""
    runs = {TICK: ticks, LEARN: 1, ONCE: 1}
    found = {name: runs[name] * seconds["longest"] for name, seconds in times.items() if name in runs}
    return {**found, "all": sum(found.values())} if found else {}


def table(found: dict) -> str:
    """For the terminal."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items()) or "one device"
    word = "fits" if found["fits"] else "does not fit"
    lines = [
        f"{found['topology']}, {found['devices']} devices ({mesh}), {PROGRAMS[found['program']]}: {word}, "
        f"{found['hbm_gib_per_chip']:.2f} of "
        f"{found['hbm_gib_available']:.2f} GiB per device",
    ]
    lines += [f"  {name:<12} {size:9.3f} GiB" for name, size in found["parts_gib"].items()]
    if found["change"]:
        lines.append(f"nearest change: {found['change']}")
    for name in (TICK, PREFILL, LEARN, ONCE):
        if name in found["phases"]:
            lines += ["", *_phase(name, found["phases"][name], found["seconds"][name])]
    if "all" in found["round_seconds"]:
        lines += ["", f"a round with all its ticks, without prefill: roofline {found['round_seconds']['all']:.3g} s"]
    lines.append(
        f"lowered in {found['lower_seconds']:.0f} s, compiled in {found['compile_seconds']:.0f} s, "
        f"{found['host_gib']:.1f} GiB of host memory"
    )
    return "\n".join(lines)


def _phase(name: str, cost: dict, seconds: dict) -> list[str]:
    by = max(("products", "hbm", "links"), key=lambda peak: seconds[peak])
    lines = [
        f"{name}: {cost['flops'] / 1e12:.4g} TFLOP, {cost['hbm_bytes'] / 1e9:.4g} GB of HBM per device; roofline "
        f"{1e3 * seconds['longest']:.4g} ms ({by})"
        + (f", by the compiler's schedule {1e3 * seconds['schedule']:.4g} ms" if seconds["schedule"] else "")
    ]
    for row in cost["collectives"]:
        lines.append(f"  {row['kind']:<20} {row['axes']:<22} {row['calls']:8.0f} calls {row['bytes'] / 1e6:12.3f} MB")
    if cost["uncounted"]:
        lines.append(f"  operations of {', '.join(cost['uncounted'])} are not counted, nor what kernels of a GPU read")
    return lines
