"""What a model learns from rows, whichever devices they are on: losses, gradients and selections, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.learn import draft_step
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.config import LearnConfig
from glm_jax.learn.forward import state_values, token_logp
from glm_jax.model import context
from glm_jax.model.config import ModelConfig
from glm_jax.model.selection import as_indices
from glm_jax.model.target import tracing_for
from glm_jax.model.transformer import hidden_states
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import as_float64, named_leaves, random_params, random_tokens

ELSEWHERE = "a platform that has no kernels"  # gets XLA's formulation of them
DEPTH = 2  # of drafts


class Learnt(NamedTuple):
    parts: dict[str, Any]  # of the loss
    gradients: dict[str, Any]  # of a policy and a critic
    selections: list[Any]  # of the layers that compute one, for every token of the rows


def losses(policy, critic, model: ModelConfig, documents: np.ndarray, train_indexer: bool):
    """A number that hangs on everything learnt from, and its parts."""
    rng = np.random.default_rng(1)
    trainable = jnp.asarray((documents > 0) & (rng.random(documents.shape) < 0.8))
    scales = [jnp.where(trainable, rng.standard_normal(documents.shape), 0.0) for _ in range(2)]
    tokens, documents = jnp.asarray(random_tokens(model, *documents.shape)), jnp.asarray(documents)
    logp, entropy, kl = token_logp(policy, model, tokens, documents, 0.8, 0.9, train_indexer)
    value = state_values(critic, model, tokens, documents)
    learn = LearnConfig(draft_depth=DEPTH, indexer_kl=0.5 * train_indexer)
    drafted, seen = draft_step._loss(policy, tokens, documents, trainable, Setup(model, learn), "tv")
    parts = {"logp": logp * trainable, "entropy": entropy * trainable, "value": value * trainable, "kl": kl, **seen}
    return jnp.sum(scales[0] * logp) + jnp.sum(scales[1] * value) + 0.5 * kl + drafted, parts


def selections(policy, model: ModelConfig, documents: np.ndarray):

    def run(policy, tokens, documents):
        _, _, traced = hidden_states(policy, model, tokens, documents, trace=True)
        found = [as_indices(s, tokens.shape[1], model.index_topk) for _, _, s in traced if s is not None]
        return jax.tree.map(context.whole, found)

    on_rows = each_on_its_rows(run, policy, model, layout.LEARN, (0, 0), [(0, 0)] * len(model.full_layers))
    return on_rows(jnp.asarray(random_tokens(model, *documents.shape)), jnp.asarray(documents))


def learnt(model: ModelConfig, documents: np.ndarray, platform: str, **axes: int) -> Learnt:
    mesh, by_kernels = make_mesh(MeshConfig(**axes)), platform == ELSEWHERE

    def run(policy, critic):
        with tracing_for(platform, mesh=mesh, rows=layout.SLOTS, heads=("tensor",)):
            both = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)
            return both(policy, critic, model, documents, not by_kernels), selections(policy, model, documents)

    with jax.enable_x64(True):
        params = as_float64(random_params(model)), as_float64(random_params(model, seed=1, critic=True))
        (((_, parts), gradients), selected) = jax.device_get(jax.jit(run)(*params))
    return Learnt(parts, named_leaves(gradients), selected)


def close(got: Learnt, want: Learnt, by_kernels: bool = False) -> None:
    """Equal selections, and all numbers but those that kernels do not tell: what an indexer learns from."""
    for name, value in want.parts.items():
        if not (by_kernels and name == "kl"):
            np.testing.assert_allclose(got.parts[name], value, rtol=1e-6, atol=1e-9, err_msg=name)
    for name, gradient in want.gradients.items():
        assert gradient.any() or name.endswith(".bias") or name.startswith("[1]") and "indexer" in name, name
        if not (by_kernels and "indexer" in name):
            scale = max(1e-3, np.abs(gradient).max())
            np.testing.assert_allclose(got.gradients[name] / scale, gradient / scale, atol=1e-8, err_msg=name)
    assert want.selections
    for one, other in zip(jax.tree.leaves(want.selections), jax.tree.leaves(got.selections), strict=True):
        np.testing.assert_array_equal(other, one)
