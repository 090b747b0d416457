"""Steps over caches at GLM-5.2's widths, compiled for devices that are not there: no cache is copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_jax.plan import machine

pytestmark = pytest.mark.compile

ROOT = Path(__file__).resolve().parents[2]
IN_PLACE = {"custom-call", "dynamic-update-slice", "fusion", "scatter"}  # temp_bytes tells whether they are


@pytest.mark.parametrize(
    "topology, window, page, queries, slots",
    [
        ("v5e:2x2", 1 << 17, 0, 1, 7),
        ("v5p:2x2x1", 1 << 17, 128, 1, 7),
        ("v6e:2x2", 1 << 17, 0, 2, 7),  # a draft to be verified
        ("tpu7x:2x2x1", 1 << 17, 128, 1, 7),
        ("h100:1x8", 1 << 17, 128, 1, 7),
        ("v5e:2x2", 1 << 12, 0, 64, 2),  # pieces of prompts
    ],
)
def test_no_step_copies_a_cache(topology, window, page, queries, slots):
    command = [sys.executable, "-m", "tests.rollout.compiled", topology, *map(str, (window, page, queries, slots))]
    env = {
        name: value for name, value in os.environ.items() if name != "JAX_DEFAULT_MATMUL_PRECISION"
    }  # the tests' own
    env |= machine.environment(machine.read(topology))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["alias_bytes"] >= sum(found["cache_bytes"]), "the caches are updated where they are"
    assert found["temp_bytes"] < min(found["cache_bytes"]), "there is no room for another"
    assert {*found["as_large"]} & IN_PLACE and {*found["as_large"]} <= IN_PLACE
