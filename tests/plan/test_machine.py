"""Topologies by name: what they hold, and what is said of those that are none or cannot be compiled for here."""

from __future__ import annotations

import importlib.util

import pytest

from glm_jax.plan import machine
from glm_jax.plan.errors import PlanError
from launch import topology as sold


@pytest.mark.parametrize(
    ("name", "devices"), [("v5e:2x2", 4), ("v5p:8x8x8", 512), ("tpu7x:4x4x8", 256), ("h100:16x8", 128)]
)
def test_a_name_tells_the_devices(name, devices):
    assert machine.read(name).count == devices and str(machine.read(name)) == name


def test_every_machine_that_is_launched_can_be_planned_for():
    for family, kind in sold.FAMILIES.items():
        for shape in kind.shapes or ("1x8", "16x8"):
            chips = sold.read(f"{family}:{shape}").chips
            assert machine.read(f"{family}:{shape}").count == chips * (2 if family == "tpu7x" else 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v9:2x2", "'v9' is no known machine; known: v5e, v5p, v6e, tpu7x, h100, h200"),
        ("v5p", "write sizes after the colon"),
        ("v5p:8x8", "a slice of v5p has 3 sides, as in v5p:2x2x1"),
        ("v5e:0x2", "write sizes"),
        ("h100:8", "write h100:HOSTSx8"),
        ("h100:2x4", "write h100:HOSTSx8, whole hosts of 8 GPUs"),
    ],
)
def test_a_name_that_no_machine_has_is_refused_with_what_would_do(name, said):
    with pytest.raises(PlanError, match=rf"--topology={name}: {said}"):
        machine.read(name)


@pytest.mark.parametrize(
    ("name", "remedy"), [("v5p:2x2x1", r"pip install 'glm-jax\[tpu\]'"), ("h100:1x8", r"jax-cuda13-plugin==\d")]
)
def test_a_missing_compiler_is_named_with_its_remedy(name, remedy, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        PlanError, match=f"is not installed here; it needs no accelerator: pip install.*{remedy}|{remedy}"
    ):
        machine.environment(machine.read(name))


def test_peaks_are_those_that_makers_publish():
    """TFLOP/s of bfloat16 and GB/s of HBM of a chip; jax shows two devices of a tpu7x."""
    published = {"v5e": (197, 820), "v5p": (459, 2460), "v6e": (920, 1640), "tpu7x": (1155, 3700), "h100": (989, 3352)}
    for name, peaks in published.items():
        device = machine.DEVICES[name]
        assert (device.tflops, device.hbm_gb_s) == pytest.approx(peaks)
