"""Devices that share rows learn what one does that has them whole: every loss, gradient and selection, in float64."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn import draft_step
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.config import LearnConfig
from glm_jax.learn.forward import state_values, token_logp
from glm_jax.model import context, kernels, rows, tree, weights
from glm_jax.model.selection import as_indices
from glm_jax.model.target import tracing_for
from glm_jax.model.transformer import hidden_states
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.equations import equations
from tests.model.tiny import as_float64, named_leaves, random_params, random_tokens, two_layers

pytestmark = pytest.mark.usefixtures("hasty_compiles")

MODEL = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, dtype="float64", remat=True)
ROWS, COLUMNS, DEPTH = 4, 24, 2
# Padding before, between and behind; more documents than devices, and fewer.
DOCUMENTS = np.array(
    [[0] * 3 + [1] * 9 + [2] * 12, [1] * 24, [1] * 7 + [0] * 2 + [2] * 4 + [3] * 11, [1] * 9 + [0] * 15]
)
ELSEWHERE = "a platform that has no kernels"  # gets XLA's formulation of them


def losses(policy, critic, train_indexer: bool):
    """A number that hangs on everything learnt from, and its parts."""
    tokens, documents = jnp.asarray(random_tokens(MODEL, ROWS, COLUMNS)), jnp.asarray(DOCUMENTS)
    rng = np.random.default_rng(1)
    trainable = jnp.asarray((DOCUMENTS > 0) & (rng.random(DOCUMENTS.shape) < 0.8))
    scales = [jnp.where(trainable, rng.standard_normal(DOCUMENTS.shape), 0.0) for _ in range(2)]
    logp, entropy, kl = token_logp(policy, MODEL, tokens, documents, 0.8, 0.9, train_indexer)
    value = state_values(critic, MODEL, tokens, documents)
    learn = LearnConfig(draft_depth=DEPTH, indexer_kl=0.5 * train_indexer)
    drafted, seen = draft_step._loss(policy, tokens, documents, trainable, Setup(MODEL, learn), "tv")
    parts = {"logp": logp * trainable, "entropy": entropy * trainable, "value": value * trainable, "kl": kl, **seen}
    return jnp.sum(scales[0] * logp) + jnp.sum(scales[1] * value) + 0.5 * kl + drafted, parts


def selections(policy):
    """Of the layers that compute one, for every token of the rows."""

    def run(policy, tokens, documents):
        _, _, traced = hidden_states(policy, MODEL, tokens, documents, trace=True)
        found = [as_indices(s, COLUMNS, MODEL.index_topk) for _, _, s in traced if s is not None]
        return jax.tree.map(context.whole, found)

    on_rows = each_on_its_rows(run, policy, MODEL, layout.LEARN, (0, 0), [(0, 0)])
    return on_rows(jnp.asarray(random_tokens(MODEL, ROWS, COLUMNS)), jnp.asarray(DOCUMENTS))


def learnt(platform: str, **axes: int):
    mesh, by_kernels = make_mesh(MeshConfig(**axes)), platform == ELSEWHERE

    def run(policy, critic):
        with tracing_for(platform, mesh=mesh, rows=layout.SLOTS, heads=("tensor",)):
            both = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)
            return both(policy, critic, not by_kernels), selections(policy)

    with jax.enable_x64(True):
        params = as_float64(random_params(MODEL)), as_float64(random_params(MODEL, seed=1, critic=True))
        (((_, parts), gradients), selected) = jax.device_get(jax.jit(run)(*params))
    return parts, named_leaves(gradients), selected


@cache
def on_one_device():
    """With dense attention, as rows this short have it on a CPU."""
    return learnt("cpu")


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
    got, by_kernels = learnt(platform, **axes), platform == ELSEWHERE
    assert bool(calls) == by_kernels
    for name, value in want[0].items():
        if not (by_kernels and name == "kl"):  # kernels do not tell what an indexer learns from
            np.testing.assert_allclose(got[0][name], value, rtol=1e-6, atol=1e-9, err_msg=name)
    for name, gradient in want[1].items():
        assert gradient.any() or name.endswith(".bias") or name.startswith("[1]") and "indexer" in name, name
        if not (by_kernels and "indexer" in name):
            scale = max(1e-3, np.abs(gradient).max())
            np.testing.assert_allclose(got[1][name] / scale, gradient / scale, atol=1e-8, err_msg=name)
    for one, other in zip(jax.tree.leaves(want[2]), jax.tree.leaves(got[2]), strict=True):
        np.testing.assert_array_equal(other, one)


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
