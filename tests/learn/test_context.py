"""Devices that share rows learn what one does that has them whole: every loss, gradient and selection, in float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn.forward import token_logp
from glm_jax.model import kernels, rows, tree, weights
from glm_jax.model.target import tracing_for
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.equations import equations
from tests.learn.spread import ELSEWHERE, close, learnt
from tests.model.tiny import two_layers

MODEL = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, dtype="float64", remat=True)
ROWS, COLUMNS = 4, 24
# Padding before, between and behind; more documents than devices, and fewer.
DOCUMENTS = np.array(
    [[0] * 3 + [1] * 9 + [2] * 12, [1] * 24, [1] * 7 + [0] * 2 + [2] * 4 + [3] * 11, [1] * 9 + [0] * 15]
)


@cache
def on_one_device():
    """With dense attention, as rows this short have it on a CPU."""
    return learnt(MODEL, DOCUMENTS, "cpu")


@pytest.mark.scale
@pytest.mark.parametrize(
    "axes, platform, dense_columns",
    [
        (dict(context=2), "cpu", rows.DENSE_COLUMNS),
        (dict(fsdp=2, expert=2, context=2), "cpu", 4),  # selected cache rows are gathered
        (dict(data=2, context=4), ELSEWHERE, 4),
    ],
    ids=str,
)
def test_devices_that_share_rows_learn_what_one_does(axes, platform, dense_columns, monkeypatch):
    want, calls, attend = on_one_device(), [], kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *args: calls.append(1) or attend(*args))
    monkeypatch.setattr(rows, "DENSE_COLUMNS", dense_columns)
    got, by_kernels = learnt(MODEL, DOCUMENTS, platform, **axes), platform == ELSEWHERE
    assert bool(calls) == by_kernels
    close(got, want, by_kernels)


def test_what_crosses_for_a_token_is_an_index_key_and_a_cache_row_for_all_heads():
    """Every gather over the axis alone in a forward pass, by the width of what each token sends."""
    model = dataclasses.replace(MODEL, dtype="float32")
    abstract = tree.shapes(weights.abstract(model), model.dtype)
    rows_of = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    with tracing_for("cpu", mesh=make_mesh(MeshConfig(context=4)), rows=layout.SLOTS):
        said = jax.make_jaxpr(lambda p, t, d: token_logp(p, model, t, d, 1.0, 1.0))(abstract, rows_of, rows_of)
    found = [e for e in equations(said.jaxpr) if e.params.get("axis_name") in ("context", ("context",))]
    shapes = sorted(e.invars[0].aval.shape for e in found if e.primitive.name == "all_gather")
    row, key = MODEL.kv_lora_rank + MODEL.qk_rope_head_dim, MODEL.index_head_dim
    mine = (ROWS, COLUMNS // 4)
    assert shapes == sorted([mine, mine, (*mine, key), (*mine, row), (*mine, row)]), "log-prob, entropy, two layers"
