"""Optimisers over parts of a tree: leaves that are not trained have no state and are never touched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from glm_jax.learn.config import OptimizerConfig

MAIN, INDEXER, DRAFT, FROZEN = "main", "indexer", "draft", "frozen"


@struct.dataclass
class Learner:
    """A model in training."""

    params: Any
    opt_state: Any  # by part of the tree: MAIN, and INDEXER and DRAFT where those are trained
    version: Int[Array, ""]  # updates so far


def labels(params: Any, frozen_attention: bool = False) -> Any:
    """MAIN, INDEXER, DRAFT or FROZEN for each leaf. The router's bias is no gradient's business."""

    def label(path, _):
        names = [getattr(k, "name", "") for k in path]
        if names[-1] == "bias":
            return FROZEN
        if "draft" in names:
            return DRAFT
        if "indexer" in names:
            return INDEXER
        return FROZEN if frozen_attention and "attn" in names else MAIN

    return jax.tree_util.tree_map_with_path(label, params)


def part(tree: Any, labels: Any, name: str) -> Any:
    """The leaves with this label, None elsewhere."""
    return jax.tree.map(lambda x, label: x if label == name else None, tree, labels)


def merge(tree: Any, new: Any) -> Any:
    """`tree` with the leaves that `new` has."""
    return jax.tree.map(lambda new, old: old if new is None else new, new, tree, is_leaf=lambda x: x is None)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps), optax.add_decayed_weights(config.weight_decay)
    )


def init(params: Any, labels: Any, config: OptimizerConfig, parts: tuple[str, ...]) -> Learner:
    state = {name: _adam(config).init(part(params, labels, name)) for name in parts}
    return Learner(params, state, jnp.zeros((), jnp.int32))


def step(
    learner: Learner, grads: Any, labels: Any, config: OptimizerConfig, lr: Float[Array, ""], parts: tuple[str, ...]
) -> tuple[Learner, Float[Array, ""]]:
    """Clips each part's gradient by its global norm, one Adam step; returns the first part's norm before clipping.

    The version is left to the caller: only the policy's updates count.
    """
    params, state, norms = learner.params, dict(learner.opt_state), {}
    for name in parts:
        g = part(grads, labels, name)
        norms[name] = optax.tree.norm(g)
        scale = jnp.minimum(1.0, config.clip_norm / jnp.maximum(norms[name], 1e-12))
        g = jax.tree.map(lambda g, scale=scale: g * scale.astype(g.dtype), g)
        held = part(params, labels, name)
        update, state[name] = _adam(config).update(g, state[name], held)
        params = merge(params, jax.tree.map(lambda p, u: p - (lr * u).astype(p.dtype), held, update))
    return learner.replace(params=params, opt_state=state), norms[parts[0]]
