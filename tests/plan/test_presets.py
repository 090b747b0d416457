"""The shipped configs of full size are valid and lay the whole model out over their machines."""

from __future__ import annotations

import jax
import pytest

from glm_jax.cli.flags import parse
from glm_jax.config.strict import read
from glm_jax.host import compose
from glm_jax.host.config import RunConfig
from glm_jax.model import weights
from glm_jax.plan import machine, report
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import AXES

MACHINES = {"v5p": "v5p:8x8x8", "tpu7x": "tpu7x:4x4x8", "v6e": "v6e:16x16", "h200": "h200:16x8"}


@pytest.mark.parametrize("name", MACHINES)
def test_the_released_model_lies_on_its_machine(name):
    config = read(RunConfig, parse("plan", [f"--config=experiments/configs/glm52_744b.py:{name}"], required=()).config)
    report.check_mesh(config, machine.read(MACHINES[name]))
    model = compose.model_of(config)
    mesh = jax.sharding.AbstractMesh(tuple(getattr(config.mesh, axis) for axis in AXES), AXES)
    for rules in (layout.LEARN, layout.SAMPLE):
        assert layout.shardings(weights.abstract(model), rules, mesh)
