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
    view = params
    # Layers in stages leave them last: of a change to two dimensions at once XLA makes a whole copy on every device.
    for rules in ({**layout.SAMPLE, "stage": layout.LEARN["stage"]}, layout.SAMPLE):
        view = jax.lax.with_sharding_constraint(view, layout.shardings(weights.abstract(config), rules, mesh))
    return weights.for_decoding(view, config)
