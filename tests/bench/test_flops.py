"""Operations counted on traced programs: known ones, and the 744B model against the published arithmetic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from glm_jax.bench import flops
from glm_jax.model.config import glm52_744b
from tests.model.tiny import tiny_config

A, B = jnp.zeros((3, 5)), jnp.zeros((5, 7))


def counted(f, *args) -> int:
    return flops.count(jax.make_jaxpr(f)(*args).jaxpr)


def test_products_count_and_loops_count_their_trips():
    product = 2 * 3 * 5 * 7
    assert counted(lambda a, b: a @ b, A, B) == product
    assert counted(lambda a, b: jnp.einsum("zad,zdb->zab", jnp.stack([a] * 4), jnp.stack([b] * 4)), A, B) == 4 * product
    assert counted(jax.jit(lambda a, b: jax.lax.fori_loop(0, 6, lambda _, c: c + a @ b, jnp.zeros((3, 7)))), A, B) == (
        6 * product
    )
    nested = lambda a, b: jax.lax.map(lambda row: jax.lax.map(lambda _: row @ b, jnp.arange(2)), a)
    assert counted(nested, A, B) == 2 * product
    assert counted(jax.checkpoint(lambda a, b: jnp.sin(a @ b)), A, B) == product
    grouped = lambda a, b: jax.lax.ragged_dot(a, jnp.stack([b] * 4), jnp.array([1, 0, 2, 0]))
    assert counted(grouped, A, B) == product
    either = lambda a, b, x: jax.lax.cond(x, lambda: a @ b, lambda: jnp.zeros((3, 7)))
    assert counted(either, A, B, True) == product, "of branches the one that costs most"


def test_what_cannot_be_counted_is_an_error():
    unknown = lambda a, b, n: jax.lax.fori_loop(0, n, lambda _, c: c + a @ b, jnp.zeros((3, 7)))
    with pytest.raises(flops.UncountedError, match="unknown length"):
        counted(unknown, A, B, 3)


def test_the_744b_model_costs_what_the_published_arithmetic_says():
    shared = glm52_744b()
    full = dataclasses.replace(shared, indexer_types=("full",) * 78)
    million = 1 << 20
    assert flops.of_token(full, million) / 1e9 == pytest.approx(779.2, abs=0.05)
    assert flops.of_token(shared, million) / 1e9 == pytest.approx(284.6, abs=0.05)
    assert flops.closed_form(full, million) / flops.closed_form(shared, million) == pytest.approx(2.737, abs=5e-4)
    assert flops.cache_bytes(shared) == 2 * 47616


@pytest.mark.parametrize("context", [5, 6, 11, 40, 1100])  # fewer keys than are selected, as many, scored, gathered
def test_the_count_is_the_closed_form(context):
    config = tiny_config(n_shared_experts=2)
    got = flops.of_token(config, context)
    everything_scored = config.index_topk < context <= 2 * config.index_topk
    want = flops.closed_form(dataclasses.replace(config, index_topk=context) if everything_scored else config, context)
    if context <= config.index_topk:  # all keys are attended to: no indexer runs
        want -= indexer_share(config, context)
    assert got == want


def indexer_share(config, context: int) -> int:
    heads, width, computing = config.index_n_heads, config.index_head_dim, len(config.full_layers)
    weights = config.q_lora_rank * heads * width + config.hidden_size * (width + heads)
    return 2 * computing * (weights + (heads * width + heads) * context)
