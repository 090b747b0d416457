"""Tiny models for tests: every kind of layer, and parameters in which no norm is 1 and no bias 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model import tree, weights
from glm_jax.model.config import ModelConfig

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    index_topk=6,
    index_head_dim=8,
    index_n_heads=2,
    indexer_types=("full", "full", "shared", "shared"),  # a scan of two shared layers at the end
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    initializer_range=None,
)


def tiny_config(**changes) -> ModelConfig:
    return ModelConfig(**{**SHAPE, **changes})


def three_layers(**changes) -> ModelConfig:
    """The least that has a dense layer, experts, a shared selection and a scan: for tests that compile much."""
    types = dict(indexer_types=("full", "shared", "shared"), mlp_layer_types=("dense", "sparse", "sparse"))
    return tiny_config(num_hidden_layers=3, **{**types, **changes})


def two_layers(**changes) -> ModelConfig:
    """One dense layer that computes a selection and one of experts that shares it."""
    types = dict(indexer_types=("full", "shared"), mlp_layer_types=("dense", "sparse"))
    return tiny_config(num_hidden_layers=2, **{**types, **changes})


def staged_layers(**changes) -> ModelConfig:
    """A dense layer, one of experts that shares its selection, and two that compute their own: one for each stage."""
    return tiny_config(**{"indexer_types": ("full", "shared", "full", "full"), **changes})


def random_params(config: ModelConfig, seed: int = 0, critic: bool = False) -> weights.Transformer:
    """Drawn with numpy, without a compile: matrices at fan-in^-1/2, norms and biases spread around their constant."""
    rng = np.random.default_rng(seed)

    def draw(leaf: tree.Leaf):
        spread = leaf.fan_in**-0.5 if leaf.fan_in else 0.2
        return jnp.asarray(leaf.value + spread * rng.standard_normal(leaf.shape), leaf.dtype or config.dtype)

    return tree.map_leaves(draw, weights.abstract(config, critic))


def random_tokens(config: ModelConfig, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, config.vocab_size, (rows, columns)).astype(np.int32)


def as_float64(params):
    """Every leaf in float64, the router included: for use under `jax.enable_x64`."""
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)


def named_leaves(params) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
