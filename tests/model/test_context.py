"""Columns of rows over several devices: which are whose, and what it takes to have them whole or moved."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from glm_jax.model import context
from glm_jax.model.target import tracing_for

COLUMNS = 12
X = np.random.default_rng(0).standard_normal((2, COLUMNS, 3)).astype(np.float32)


def shared(f, ways: int):
    """`f` of the whole array by devices that share its rows."""
    if ways == 1:
        return f

    def on_one(x):
        with tracing_for("cpu", context="context"):
            return f(x)

    mesh = Mesh(np.asarray(jax.devices()[:ways]), ("context",))
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


@pytest.mark.parametrize("ways", [1, 2, 4])
def test_columns_go_round_the_devices_and_come_back_in_order(ways):
    round_trip = shared(lambda x: context.whole(context.own(x)), ways)
    np.testing.assert_array_equal(round_trip(X), X)
    early = shared(lambda x: context.total(jnp.sum(context.own(x)[:, :1], axis=1)), ways)
    np.testing.assert_allclose(early(X), X[:, :ways].sum(1), atol=1e-6, err_msg="each has its share of early tokens")


@pytest.mark.parametrize("ways", [1, 2, 4])
@pytest.mark.parametrize("by", [1, 2, 3, 5, 8])
def test_a_column_moves_to_where_it_would_in_a_whole_row_and_its_gradient_back(ways, by):
    weight = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)
    moved = shared(lambda x: context.whole(context.moved(context.own(x), by)), ways)
    want = np.concatenate([np.zeros_like(X[:, :by]), X[:, :-by]], axis=1)
    np.testing.assert_array_equal(moved(X), want)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(weight * moved(x))))(X)
    np.testing.assert_array_equal(gradient, np.concatenate([weight[:, by:], np.zeros_like(X[:, :by])], axis=1))


def test_the_gradient_of_whole_rows_adds_up_what_every_device_makes_of_them():
    def loss(x):
        mine = context.own(x)
        pairs = jnp.einsum("bsd,btd->bst", jnp.sin(mine), context.whole(mine))  # queries of one's own, all keys
        return context.total(jnp.sum(pairs))

    run = partial(jax.value_and_grad, argnums=0)
    for got, want in zip(run(shared(loss, 4))(X), run(shared(loss, 1))(X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)
