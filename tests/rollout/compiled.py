"""Compiles steps over the caches of a cut of GLM-5.2 for a device that is not there; prints what it says as JSON.

python -m tests.rollout.compiled TOPOLOGY WINDOW PAGE QUERIES SLOTS

A process of its own, since compilers read the device at start.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp

from glm_jax.model import cache, tree, weights
from glm_jax.model.config import glm52_744b
from glm_jax.plan import cost, hlo, machine
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh

# What reads caches is as wide as in the model, all else small. A scan is among the layers.
MODEL = glm52_744b(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=256,
    moe_intermediate_size=256,
    num_hidden_layers=3,
    n_routed_experts=2,
    num_experts_per_tok=2,
    q_lora_rank=256,
    indexer_types=("full", "shared", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse"),
)
COLUMNS = 7 << 17  # of all slots


def main(topology: str, *numbers: str) -> None:
    """A loop of steps of so many queries for some of the slots. PAGE 0: every slot keeps its window to itself."""
    window, page, queries, slots = map(int, numbers)
    columns, held = page or window, COLUMNS // window
    mesh = make_mesh(MeshConfig(), machine.devices(machine.read(topology))[:1])

    def init():
        with layout.tracing_for(mesh):
            return cache.init(MODEL, COLUMNS // columns, columns)

    def steps(view, caches, tokens, start, count, table, last):
        def step(carry):
            caches, start, _ = carry
            with layout.tracing_for(mesh):
                hidden, caches = cache.extend(view, MODEL, caches, tokens, start, count, table)
            return caches, start + count, hidden

        hidden = jnp.zeros((*tokens.shape, MODEL.hidden_size), jnp.dtype(MODEL.dtype))
        return jax.lax.while_loop(lambda carry: carry[1][0] < last, step, (caches, start, hidden))

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    table = None if slots == held and not page else shape(slots, window // columns)
    rows = shape(slots, queries), shape(slots), shape(slots), table, shape()
    arguments = tree.shapes(weights.abstract(MODEL), MODEL.dtype), jax.eval_shape(init), *rows
    on_it = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.replicated(mesh))
    done = jax.jit(steps, donate_argnums=1).lower(*jax.tree.map(on_it, arguments)).compile()
    memory, program = done.memory_analysis(), hlo.parse(done.as_text())
    leaves = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[1])]
    found = {
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "cache_bytes": leaves,
        "as_large": sorted({row["op"] for row in cost.largest(program, 64) if row["bytes"] in leaves}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
