"""A bfloat16 model: near its float32 twin, with router, softmax and norms in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
from glm_jax.model import rows
from glm_jax.model.target import tracing_for
from tests.equations import equations
from tests.model.tiny import random_params, random_tokens, three_layers

EXPERTS = 5  # no other dimension has this size
CONFIG = three_layers(dtype="bfloat16", n_routed_experts=EXPERTS, attention_bias=True, tie_word_embeddings=True)


@pytest.mark.parametrize("target", ["cpu", "tpu"])
@pytest.mark.parametrize("dense_columns", [1024, 4])
def test_router_softmax_and_norms_run_in_float32_and_products_in_bfloat16(target, dense_columns, monkeypatch):
    monkeypatch.setattr(rows, "DENSE_COLUMNS", dense_columns)
    params, tokens = random_params(CONFIG), random_tokens(CONFIG, 2, 16)
    with tracing_for(target):
        traced = jax.make_jaxpr(lambda p, t: glm_jax.forward(p, CONFIG, t).logits)(params, tokens)
    seen: dict[str, set] = {}
    for equation in equations(traced.jaxpr):
        out = equation.outvars[0].aval
        name = equation.primitive.name
        if name == "dot_general" and out.shape[-1:] == (EXPERTS,):
            name = "router"
        seen.setdefault(name, set()).add(out.dtype)
    assert {name: seen[name] for name in ("exp", "rsqrt", "router")} == dict.fromkeys(
        ("exp", "rsqrt", "router"), {jnp.dtype("float32")}
    )
    # Index scores are the only other products in float32.
    assert seen["dot_general"] == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    assert traced.out_avals[0].dtype == jnp.bfloat16


def test_logits_are_near_those_of_the_same_weights_in_float32():
    """With every expert and every key chosen: a choice between near equals may fall otherwise."""
    config = dataclasses.replace(CONFIG, num_experts_per_tok=EXPERTS, index_topk=32)
    wide = dataclasses.replace(config, dtype="float32")
    params, tokens = random_params(config), random_tokens(config, 2, 16)
    run = jax.jit(glm_jax.forward, static_argnames="config")
    got = np.asarray(run(params, config, tokens).logits, np.float32)
    as_wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    want = np.asarray(run(as_wide, wide, tokens).logits)
    off = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert 1e-3 < off < 0.03, off
