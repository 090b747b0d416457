"""A plan in one picture: a device's memory as a stacked bar, beside what it has."""

from __future__ import annotations

from pathlib import Path

from glm_jax.report.plots import blank


def draw(found: dict, path: Path) -> None:
    figure = blank((9, 2.6))
    axes = figure.subplots()
    left = 0.0
    for name, size in found["parts_gib"].items():
        axes.barh([0], [size], left=left, label=f"{name} {size:.1f}")
        left += size
    axes.axvline(found["hbm_gib_available"], color="black", linestyle="--")
    axes.set_yticks([])
    axes.set_xlim(0, 1.05 * max(left, found["hbm_gib_available"]))
    word = "fits" if found["fits"] else "does not fit"
    axes.set_title(f"{found['topology']}: {word}, {left:.1f} of {found['hbm_gib_available']:.1f} GiB per device")
    axes.set_xlabel("GiB per device")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
