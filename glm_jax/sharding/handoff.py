"""The handoff: the policy's weights as the sampler sees them, inside the program, as a pytree."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from glm_jax.model import transformer
from glm_jax.model.config import ModelConfig
from glm_jax.model.transformer import Transformer
from glm_jax.sharding import layout


def handoff(params: Transformer, config: ModelConfig, mesh: Mesh) -> Transformer:
    """Reshards from the learning to the sampling layout.

    On a CPU the layers come one by one: a decode loop over a stack would copy every layer's weights at each tick.
    """
    target = layout.shardings(transformer.abstract(config), layout.SAMPLE, mesh)
    view = jax.lax.with_sharding_constraint(params, target)
    return transformer.unstack(view, config) if jax.default_backend() == "cpu" else view
