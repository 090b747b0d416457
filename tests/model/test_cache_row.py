"""Cache rows in the form that the kernels read, where they do, hold the numbers that were written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import cache_row
from glm_jax.model.target import tracing_for
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import tiny_config


@pytest.mark.parametrize(
    "platform, dtype, rank, words",
    [
        ("tpu", "bfloat16", 512, 384),
        ("gpu", "float32", 128, 256),
        ("tpu", "bfloat16", 128, None),  # half a row of lanes: the kernels do not serve it
        ("gpu", "float16", 512, None),
        ("cpu", "bfloat16", 512, None),
    ],
)
def test_rows_are_packed_where_kernels_read_them_and_keep_every_bit(platform, dtype, rank, words):
    config = tiny_config(dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=8)
    row = jax.random.normal(jax.random.key(0), (2, 3, config.row_dim), jnp.dtype(dtype))
    with tracing_for(platform):
        stored, buffer = cache_row.store(config, row), cache_row.empty(config, 4, 2, 3)
    assert cache_row.packed(stored) == (words is not None)
    assert stored.shape == ((2, 3, 1, words) if words else row.shape)
    assert (buffer.shape, buffer.dtype) == ((4, *stored.shape), stored.dtype) and not np.any(buffer)
    np.testing.assert_array_equal(cache_row.load(config, stored), row)


def test_where_a_tensor_axis_splits_the_model_rows_stay_as_they_are():
    """No device then reads the caches by itself, and XLA cannot divide a kernel."""
    config = tiny_config(kv_lora_rank=128)
    for axes, packed in ((dict(data=4, tensor=2), False), (dict(data=4, fsdp=2), True)):
        mesh = make_mesh(MeshConfig(**axes))
        with tracing_for("tpu", mesh=mesh, rows=layout.ROWS, heads=("tensor",)):
            assert cache_row.packed(cache_row.empty(config, 1)) == packed
