"""Attention by the Pallas kernels gives what attention on a CPU gives, and divides over a mesh."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import glm_jax
from glm_jax.model import cache, kernels, rows, weights
from glm_jax.model.target import tracing_for
from glm_jax.model.transformer import hidden_states
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from pallas_kernels.index_select import gpu as index_select_gpu
from pallas_kernels.index_select import reference as index_select_reference
from pallas_kernels.sparse_mla import gpu, gpu_backward, reference, tpu, tpu_backward
from tests.model.tiny import random_params, random_tokens, two_layers

CONFIG = two_layers()
ELSEWHERE = "a platform that has no kernels"  # gets XLA's formulation of them
# Two documents, the second one interrupted, with padding between and behind.
DOCUMENTS = jnp.array([[1] * 9 + [0] * 2 + [2] * 4 + [1] * 3 + [2] * 6, [3] * 23 + [0]])


@pytest.fixture(autouse=True)
def short_rows_are_sparse(monkeypatch):
    monkeypatch.setattr(rows, "DENSE_COLUMNS", 4)


def loss_and_gradient(config, params, tokens, platform, documents=DOCUMENTS, **how):
    def loss(params):
        hidden, _, _ = hidden_states(params, config, tokens, documents)
        return jnp.sum(jnp.where(documents[..., None] > 0, jnp.sin(hidden), 0.0))

    with tracing_for(platform, **how):
        return jax.jit(jax.value_and_grad(loss))(params)


def assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()))


@pytest.fixture
def calls(monkeypatch):
    """How often attention went by the kernels."""
    counted = []
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *args: counted.append(1) or attend(*args))
    return counted


def test_loss_and_gradient_are_those_of_a_cpu(calls):
    params, tokens = random_params(CONFIG), random_tokens(CONFIG, *DOCUMENTS.shape)
    wanted = loss_and_gradient(CONFIG, params, tokens, "cpu")
    assert not calls
    assert_close(loss_and_gradient(CONFIG, params, tokens, ELSEWHERE), wanted)
    assert calls


@pytest.mark.scale
def test_every_device_of_a_mesh_attends_its_rows_and_heads(calls):
    params, tokens = random_params(CONFIG), random_tokens(CONFIG, *DOCUMENTS.shape)
    wanted = loss_and_gradient(CONFIG, params, tokens, "cpu")
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    how = {"mesh": mesh, "rows": layout.ROWS, "heads": ("tensor",)}
    assert_close(loss_and_gradient(CONFIG, params, jax.device_put(tokens, layout.rows(mesh)), ELSEWHERE, **how), wanted)
    assert calls


@pytest.mark.kernels
def test_a_trace_still_tells_every_selection():
    params, tokens = random_params(CONFIG), random_tokens(CONFIG, *DOCUMENTS.shape)
    traces = []
    for platform in ("cpu", ELSEWHERE):
        with tracing_for(platform):
            traces.append(glm_jax.forward(params, CONFIG, tokens, DOCUMENTS, trace=True).selection)
    for found, wanted in zip(*traces, strict=True):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.kernels
def test_the_tpu_kernels_in_the_model(monkeypatch):
    """Widths that they serve, interpreted, in tiles of 16 rows."""
    for module, name in ((tpu, "forward"), (tpu_backward, "backward")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), tile=16))
    config = two_layers(kv_lora_rank=128, index_head_dim=128)
    documents = DOCUMENTS[:1]
    params, tokens = random_params(config), random_tokens(config, *documents.shape)
    wanted = loss_and_gradient(config, params, tokens, "cpu", documents)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        assert_close(loss_and_gradient(config, params, tokens, "tpu", documents), wanted)


@pytest.mark.kernels
def test_the_gpu_kernels_in_the_model(monkeypatch, calls):
    kernels = (gpu, "forward"), (gpu_backward, "backward"), (index_select_gpu, "index_select")
    for module, name in kernels:
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
    config = two_layers(kv_lora_rank=32, qk_rope_head_dim=16, index_head_dim=16)
    documents = DOCUMENTS[:1]
    params, tokens = random_params(config), random_tokens(config, *documents.shape)
    wanted = loss_and_gradient(config, params, tokens, "cpu", documents)
    monkeypatch.setattr(index_select_reference, "index_select", None)  # XLA's is not asked for
    assert_close(loss_and_gradient(config, params, tokens, "gpu", documents), wanted)
    assert calls


PAGES = jnp.array([[5, 2, 7], [1, 6, 9]], jnp.int32)  # page 9 is none: the second row needs two


def decoded(config, platform, table=PAGES, columns=16):
    """States of tokens that follow prompts, in pieces, one and three at a time, by the platform's kernels."""
    params, tokens = random_params(config), random_tokens(config, 2, 44)
    view, at, found = weights.unstack(params, config), np.array([0, 0]), []
    with tracing_for(platform):
        state = cache.init(config, 2 if table is None else 8, columns)

    @jax.jit
    def step(state, *new):
        with tracing_for(platform):
            return cache.extend(view, config, state, *new, table)

    for width, counts in ((12, (12, 9)), (12, (12, 11)), (1, (1, 1)), (3, (3, 2)), (1, (1, 0)), (3, (3, 3))):
        piece = np.stack([row[i : i + width] for row, i in zip(tokens, at, strict=True)])
        hidden, state = step(state, piece, at, np.array(counts))
        found += [hidden[b, : counts[b]] for b in range(2) if counts[b]]
        at = at + counts
    return found


@pytest.fixture
def by_pages(monkeypatch):
    """Which kernels read caches."""
    called = []
    for name in ("select_paged", "attend_paged"):
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, run=run, name=name: called.append(name) or run(*args))
    return called


@pytest.mark.parametrize(
    "table, columns, rank",
    [
        (None, 48, 128),
        pytest.param(None, 44, 128, marks=pytest.mark.kernels),
        pytest.param(PAGES, 12, 128, marks=pytest.mark.kernels),
        pytest.param(PAGES, 16, 128, marks=pytest.mark.kernels),
        pytest.param(PAGES, 16, 16, marks=pytest.mark.kernels),
    ],
)
def test_caches_in_pages_of_any_size_and_in_none_are_read_as_a_cpu_reads_them(table, columns, rank, by_pages):
    """Pages of 12 and windows of 44 columns are pages of 4 to the kernels, too few to select from.

    Latents of 16 fill no lanes: their rows are attended by XLA.
    """
    config = two_layers(index_topk=6, kv_lora_rank=rank)
    wanted = decoded(config, "cpu", table, columns)
    assert not by_pages
    assert_close(decoded(config, ELSEWHERE, table, columns), wanted)
    assert ("select_paged" in by_pages) == (columns % 16 == 0)
    assert ("attend_paged" in by_pages) == (rank == 128)


@pytest.mark.kernels
@pytest.mark.parametrize("platform, widths", [("tpu", {"index_head_dim": 128}), ("gpu", {"qk_rope_head_dim": 16})])
def test_the_kernels_read_caches_as_a_cpu_does(platform, widths, by_pages, monkeypatch):
    config = two_layers(**{"index_topk": 6, "kv_lora_rank": 128, "index_head_dim": 16, **widths})
    wanted = decoded(config, "cpu")
    if platform == "gpu":
        for module, name in ((index_select_gpu, "index_select_paged"), (gpu, "paged")):
            monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
    else:
        monkeypatch.setattr(tpu, "paged", partial(tpu.paged, tile=16))
    monkeypatch.setattr(index_select_reference, "index_select_paged", None)
    monkeypatch.setattr(reference, "paged", None)
    interpreted = pltpu.InterpretParams(uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(interpreted) if platform == "tpu" else nullcontext():
        assert_close(decoded(config, platform), wanted)
    assert {*by_pages} == {"attend_paged", "select_paged"}
