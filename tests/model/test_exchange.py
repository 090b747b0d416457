"""Experts spread over devices against all on one: tokens travel, and however skewed the routes, none is lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from glm_jax.model import exchange
from glm_jax.model.exchange import capacity, over_widths, routed
from glm_jax.model.experts import routed_mlp
from glm_jax.model.target import tracing_for

DIM, WIDTH, COUNT, TOKENS, K = 6, 8, 8, 128, 2


def case(skewed: bool):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
    among = 2 if skewed else COUNT  # the first two experts live on one device
    expert = jnp.asarray(np.array([rng.permutation(among)[:K] for _ in range(TOKENS)], np.int32))
    arrays = normal(TOKENS, DIM), normal(TOKENS, K), normal(COUNT, DIM, 2, WIDTH), normal(COUNT, WIDTH, DIM)
    return arrays, expert, jnp.asarray(rng.random(TOKENS) < 0.8)


def spread(mesh: Mesh, widths: tuple[str, ...], platform: str):
    """The experts on rows split over both axes, experts over one of them and, if asked, widths over the other."""
    rows, wide = PartitionSpec(("fsdp", "expert")), widths or None

    def on_one(x, expert, weight, valid, *weights):
        with tracing_for(platform, experts="expert", widths=widths):
            return over_widths(lambda *rows: routed(*rows, *weights), x, expert, weight, valid)

    places = PartitionSpec("expert", None, None, wide), PartitionSpec("expert", wide)
    return jax.shard_map(on_one, mesh=mesh, in_specs=(rows, rows, rows, rows, *places), out_specs=rows, check_vma=False)


@pytest.mark.parametrize(
    "axes, widths, skewed, platform",  # by blocks, and by ragged_dot as accelerators run it
    [
        ((2, 4), (), True, "cpu"),
        ((2, 4), ("fsdp",), True, "cpu"),
        ((2, 4), ("fsdp",), True, "gpu"),
        ((1, 8), (), False, "gpu"),
        ((8, 1), ("fsdp",), False, "cpu"),
    ],
)
def test_spread_experts_equal_experts_on_one_device_in_value_and_gradient(axes, widths, skewed, platform):
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(axes), ("fsdp", "expert"))
    arrays, expert, valid = case(skewed)
    target = jnp.asarray(np.random.default_rng(9).standard_normal((TOKENS, DIM), np.float32))

    def loss(f, arrays):
        x, weight, gate_up, down = arrays
        out = f(x, expert, weight, valid, gate_up, down)
        return jnp.sum(out * target), out

    functions = spread(mesh, widths, platform), routed_mlp
    got, want = (jax.jit(jax.grad(lambda a, f=f: loss(f, a), has_aux=True))(arrays) for f in functions)
    np.testing.assert_allclose(got[1], want[1], atol=2e-5)
    for name, a, b in zip(("x", "weight", "gate_up", "down"), got[0], want[0], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, err_msg=f"gradient of {name}")


@pytest.mark.parametrize("skewed", [False, True])
def test_a_fair_draw_takes_one_round_and_a_skewed_one_more(skewed, monkeypatch):
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(1, 8), ("fsdp", "expert"))
    assert capacity(TOKENS // 8 * K, 8) < TOKENS // 8 * K
    # In place of the exchange: how many rounds it would take, at every token.
    monkeypatch.setattr(exchange, "_in_rounds", lambda *args: jnp.full_like(args[2], args[-1].rounds))
    (x, weight, *weights), expert, valid = case(skewed)
    rounds = np.unique(spread(mesh, (), "cpu")(x, expert, weight, valid, *weights))
    assert rounds.size == 1 and (rounds[0] > 1) == skewed
