"""What loading takes of the host beside the parameters themselves, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import glm_jax
from tests.model.tiny import random_params, tiny_config

LOAD = """
import json, re, sys
import jax
import glm_jax

jax.block_until_ready(jax.numpy.zeros(8))
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
_, params = glm_jax.load(sys.argv[1])
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"taken": peak() - before, "parameters": size}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process its own peak (VmHWM)")
def test_loading_holds_one_parameter_and_one_file_tensor_beside_the_model(tmp_path):
    types = ("full", *("shared",) * 7)
    config = tiny_config(
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=8,
        n_routed_experts=8,
        indexer_types=types,
        mlp_layer_types=("dense", *("sparse",) * 7),
    )
    glm_jax.save(tmp_path, config, random_params(config), shard_bytes=40 << 20)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 4
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    largest = 7 * 8 * 512 * 2 * 512 * 4  # gate and up of the experts of the layers that a scan runs over
    assert found["parameters"] > 170 << 20
    # Mapped pages of the files may stay resident, one file at a time; a second copy of the model may not.
    assert found["parameters"] < found["taken"] < found["parameters"] + largest + (60 << 20), found
