"""The handoff: the policy's weights as the sampler sees them, inside the program, as a pytree."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from glm_jax.model import weights
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer
from glm_jax.sharding import layout


def handoff(params: Transformer, config: ModelConfig, mesh: Mesh) -> Transformer:
    """Reshards from the learning to the sampling layout, in the form that decoding wants."""
    target = layout.shardings(weights.abstract(config), layout.SAMPLE, mesh)
    view = jax.lax.with_sharding_constraint(params, target)
    return weights.for_decoding(view, config)
