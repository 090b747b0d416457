"""A device's memory by part, whether it fits, and the nearest change of the config by which it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from glm_jax.host.config import RunConfig

PARTS = ("weights", "optimizer", "critic", "caches", "activations", "temporaries", "other")


def parts(found: dict) -> dict[str, float]:
    """Bytes of a device by part, from what the compiling process found.

    The state's are those of its shapes. Activations are what the policy's backward pass keeps, by shape, temporaries
    what the compiler takes beyond; `other` are inputs, padding, results that take no argument's place, and code.
    """
    state, kept = found["state"], found["activations"]
    if memory := found.get("memory"):
        temporary = memory["temp"]
        other = memory["argument"] - sum(state.values()) + memory["output"] - memory["alias"] + memory["generated_code"]
    else:
        other, needed = 0, found["needed"]
        temporary = needed["temp"] if "temp" in needed else max(0, needed["all"] - sum(state.values()))
    kept = min(kept, temporary)
    return {**state, "activations": kept, "temporaries": temporary - kept, "other": other}


def nearest_change(config: RunConfig, parts: dict[str, float], capacity: float, with_remat: float) -> str:
    """The smallest change of one key by which the parts would fit; temporaries are taken to stay as they are."""
    total = sum(parts.values())
    for change, saved in _changes(config, parts, with_remat):
        if total - saved <= capacity:
            left = (total - saved) / 2**30
            return f"{change}: {left:.1f} GiB by this account (compile again to be sure)"
    largest = max(parts, key=lambda name: parts[name])
    return f"none of one key: {largest} take the most, {parts[largest] / 2**30:.1f} GiB; use a larger topology"


def _changes(config: RunConfig, parts: dict[str, float], with_remat: float) -> Iterator[tuple[str, float]]:
    """Changes and the bytes that each saves, the mildest first."""
    if with_remat < parts["activations"]:
        yield "model.changes.remat=True", parts["activations"] - with_remat
    mesh, rollout, learn = config.mesh, config.rollout, config.learn
    for factor in (2, 4, 8, 16):
        less = 1 - 1 / factor
        if learn.rows % (factor * mesh.rows) == 0:
            yield (
                f"learn.rows={learn.rows // factor} with learn.micro_batches={learn.micro_batches * factor}",
                parts["activations"] * less,
            )
        if rollout.slots % (factor * mesh.slots) == 0:
            yield f"rollout.slots={rollout.slots // factor}", parts["caches"] * less
        if rollout.window % factor == 0:
            yield f"rollout.window={rollout.window // factor}", parts["caches"] * less
        for axis in ("fsdp", "context"):
            size = factor * getattr(mesh, axis)
            more = dataclasses.replace(mesh, **{axis: size})
            left = rollout.slots % more.slots, learn.rows % more.rows, learn.length % more.context
            if not any(left) and not more.check():
                split = ("weights", "optimizer", "critic", "caches", "activations")
                yield f"mesh.{axis}={size} on {factor} times the devices", sum(parts[name] for name in split) * less


def roofline(phases: dict[str, dict], tflops: float, hbm_gb_s: float, link_gb_s: float) -> dict[str, dict[str, float]]:
    """Seconds of each phase at each of the device's peaks, and the longest: what it takes where the three overlap.

    HBM's are of the bytes as instructions read and write them; what a cache on the way saves is not known.
    """
    found = {}
    for name, cost in phases.items():
        moved = sum(row["bytes"] for row in cost["collectives"])
        seconds = {
            "products": cost["flops"] / (tflops * 1e12),
            "hbm": cost["hbm_bytes"] / (hbm_gb_s * 1e9),
            "links": moved / (link_gb_s * 1e9),
        }
        found[name] = {**seconds, "longest": max(seconds.values())}
    return found
