"""Devices that share out layers learn what one does that has all: every loss, gradient and selection, in float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn.forward import token_logp
from glm_jax.model import rows, tree, weights
from glm_jax.model.target import tracing_for
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.equations import equations
from tests.learn.spread import ELSEWHERE, close, learnt
from tests.model.tiny import tiny_config

# A dense layer, then four times one that computes a selection and one that shares it, which up to four stages cut.
MODEL = tiny_config(
    num_hidden_layers=9,
    indexer_types=("full", *("full", "shared") * 4),
    mlp_layer_types=("dense", *("sparse",) * 8),
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
    dtype="float64",
    remat=True,
)
ROWS, COLUMNS = 8, 16
# Padding before, between and behind, and a row of nothing else.
DOCUMENTS = np.array(
    [[0] * 3 + [1] * 9 + [2] * 4, [1] * 16, [1] * 7 + [0] * 2 + [2] * 2 + [3] * 5, [1] * 9 + [0] * 7]
    + [[1] * 8 + [2] * 8, [0] * 16, [1] * 12 + [0] * 4, [1] * 4 + [2] * 11 + [0]]
)


@cache
def on_one_device():
    return learnt(MODEL, DOCUMENTS, "cpu")


@pytest.mark.scale
@pytest.mark.parametrize(
    "axes, platform, dense_columns",
    [
        (dict(stage=4, context=2), "cpu", 4),  # two rows a device, in columns; selected cache rows are gathered
        (dict(fsdp=2, stage=4), ELSEWHERE, 4),  # one
    ],
    ids=str,
)
def test_devices_that_share_out_layers_learn_what_one_does(axes, platform, dense_columns, monkeypatch):
    monkeypatch.setattr(rows, "DENSE_COLUMNS", dense_columns)
    close(learnt(MODEL, DOCUMENTS, platform, **axes), on_one_device(), platform == ELSEWHERE)


def test_a_row_passes_each_stage_in_turn_and_no_weight_of_a_stage_crosses():
    """Of a forward pass: a row at a time is permuted, over as many ticks as GPipe takes, and nothing else crosses."""
    model = dataclasses.replace(MODEL, dtype="float32")
    abstract = tree.shapes(weights.abstract(model), model.dtype)
    rows_of = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    stages, mine = 4, ROWS // 4
    with tracing_for("cpu", mesh=make_mesh(MeshConfig(stage=stages)), rows=layout.SLOTS):
        said = jax.make_jaxpr(lambda p, t, d: token_logp(p, model, t, d, 1.0, 1.0))(abstract, rows_of, rows_of)
    found = list(equations(said.jaxpr))
    loops = [e for e in found if e.primitive.name == "scan" and e.params["length"] == mine * stages + stages - 1]
    assert len(loops) == 1
    inside = list(equations(loops[0].params["jaxpr"].jaxpr))
    moved = sorted(e.invars[0].aval.shape for e in inside if e.primitive.name == "ppermute")
    assert moved == [(2, COLUMNS, MODEL.hidden_size), (COLUMNS, MODEL.hidden_size)]
    over_stages = [e for e in inside if "stage" in (e.params.get("axis_name") or ())]
    assert {e.primitive.name for e in over_stages} <= {"ppermute", "axis_index"}
    gathered = {e.params["axis_name"] for e in inside if e.primitive.name == "all_gather"}
    assert ("data", "fsdp", "context") in gathered, "its layers' weights, where other axes split them"
