"""Devices that share rows learn what one does that has them whole: every loss, gradient and selection, in float64."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn import draft_step
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.config import LearnConfig
from glm_jax.learn.forward import state_values, token_logp
from glm_jax.model import context, kernels, rows
from glm_jax.model.selection import as_indices
from glm_jax.model.target import tracing_for
from glm_jax.model.transformer import hidden_states
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import as_float64, named_leaves, random_params, random_tokens, three_layers

pytestmark = [pytest.mark.usefixtures("hasty_compiles"), pytest.mark.scale]

MODEL = three_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, dtype="float64", remat=True)
ROWS, COLUMNS, DEPTH = 4, 24, 2
SETUP = Setup(MODEL, LearnConfig(rows=ROWS, length=COLUMNS, draft_depth=DEPTH, indexer_kl=0.5))
PACKED = np.array([[1] * 9 + [2] * 13 + [0] * 2, [1] * 24, [1] * 3 + [2] * 4 + [3] * 17, [1] * 5 + [0] * 19])
# Padding in front and between, and a document that another interrupts: what kernels are not given.
LOOSE = np.array([[0] * 3 + [1] * 9 + [2] * 12, [1] * 24, [1] * 7 + [2] * 6 + [1] * 9 + [0] * 2, [0] * 5 + [1] * 19])
ELSEWHERE = "a platform that has no kernels"  # gets XLA's formulation of them


def losses(policy, critic, documents, by_kernels: bool):
    """A number that hangs on everything learnt from, and its parts. Kernels do not tell what trains an indexer."""
    tokens = jnp.asarray(random_tokens(MODEL, ROWS, COLUMNS))
    rng = np.random.default_rng(1)
    trainable = jnp.asarray((documents > 0) & (rng.random(documents.shape) < 0.8))
    weight = [jnp.where(trainable, rng.standard_normal(documents.shape), 0.0) for _ in range(2)]
    logp, entropy, kl = token_logp(policy, MODEL, tokens, documents, 0.8, 0.9, train_indexer=not by_kernels)
    value = state_values(critic, MODEL, tokens, documents)
    setup = SETUP._replace(learn=LearnConfig(draft_depth=DEPTH)) if by_kernels else SETUP
    drafted, seen = draft_step._loss(policy, tokens, documents, trainable, setup, "tv")
    parts = {"logp": logp * trainable, "entropy": entropy * trainable, "value": value * trainable, "kl": kl, **seen}
    return jnp.sum(weight[0] * logp) + jnp.sum(weight[1] * value) + 0.5 * kl + drafted, parts


def selections(policy, documents):
    """Of the layers that compute one, for every token of the rows."""

    def run(policy, tokens, documents):
        _, _, traced = hidden_states(policy, MODEL, tokens, documents, trace=True)
        found = [as_indices(s, COLUMNS, MODEL.index_topk) for _, _, s in traced if s is not None]
        return jax.tree.map(context.whole, found)

    on_rows = each_on_its_rows(run, policy, MODEL, layout.LEARN, (0, 0), [(0, 0)])
    return on_rows(jnp.asarray(random_tokens(MODEL, ROWS, COLUMNS)), documents)


@cache
def learnt(platform: str, loose: bool, dense: bool, axes: tuple[tuple[str, int], ...] = ()):
    mesh, documents = make_mesh(MeshConfig(**dict(axes))), jnp.asarray(LOOSE if loose else PACKED)

    def run(policy, critic):
        with tracing_for(platform, mesh=mesh, rows=layout.SLOTS, heads=("tensor",)):
            both = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)
            return both(policy, critic, documents, platform == ELSEWHERE), selections(policy, documents)

    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        if not dense:
            patch.setattr(rows, "DENSE_COLUMNS", 4)
        params = as_float64(random_params(MODEL)), as_float64(random_params(MODEL, seed=1, critic=True))
        (((_, parts), gradients), selected) = jax.device_get(jax.jit(run)(*params))
    return parts, gradients, selected


@pytest.mark.parametrize(
    "axes, dense, platform, loose",
    [
        (dict(context=2), True, "cpu", True),
        (dict(context=4), False, "cpu", True),
        (dict(fsdp=2, expert=2, context=2), False, "cpu", True),
        (dict(data=2, context=4), False, ELSEWHERE, False),
    ],
    ids=str,
)
def test_devices_that_share_rows_learn_what_one_does(axes, dense, platform, loose, monkeypatch):
    calls, attend = [], kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda *args: calls.append(1) or attend(*args))
    want, got = (learnt(platform, loose, dense, on) for on in ((), tuple(axes.items())))
    assert bool(calls) == (platform == ELSEWHERE)
    for name, value in want[0].items():
        np.testing.assert_allclose(got[0][name], value, rtol=1e-6, atol=1e-9, err_msg=name)
    for name, gradient in named_leaves(want[1]).items():
        scale = max(1e-3, np.abs(gradient).max())
        np.testing.assert_allclose(named_leaves(got[1])[name] / scale, gradient / scale, atol=1e-8, err_msg=name)
        assert gradient.any() or "indexer" in name or name.endswith(".bias"), f"{name} has a gradient to compare"
    for one, other in zip(jax.tree.leaves(want[2]), jax.tree.leaves(got[2]), strict=True):
        np.testing.assert_array_equal(other, one)
