"""The TPU kernels' selection alone, interpreted: eight rows of unlike scores over several spans of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select import tpu_select
from pallas_kernels.index_select.reference import LOWEST, ranks

pytestmark = pytest.mark.kernels
KEYS, TOP_K = 5 * tpu_select.SPAN, 600  # more spans than one product counts, and a last product that is not full


def rows_of_unlike_scores(seed=0):
    rng = np.random.default_rng(seed)
    clustered = np.where(np.arange(KEYS) < 500, 9.0, 0.0) + rng.standard_normal(
        KEYS
    )  # most of the best are in one span
    return np.stack(
        [
            rng.standard_normal(KEYS),
            rng.standard_cauchy(KEYS) * 1e12,
            -rng.exponential(size=KEYS),
            np.zeros(KEYS),
            rng.integers(-50, 51, KEYS) * 0.5,
            np.repeat(rng.standard_normal(KEYS // 512), 512),
            np.maximum(rng.standard_normal(KEYS) - 3, 0),
            clustered,
        ]
    ).astype(np.float32)


def selected(rank, visible, spans):
    """`tpu_select.select` on ranks [8, KEYS]."""

    def kernel(rank_in, seen, index, count, rank, words, reach):
        rank[...] = rank_in[...]
        tpu_select.select(rank, pl.ds(0, 8), spans, seen[...], TOP_K, index, count, words, reach)

    index, count = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((8, tpu_select.slots_of(TOP_K)), jnp.int32),
            jax.ShapeDtypeStruct((8, tpu_select.LANES), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((8, KEYS), jnp.int32), *tpu_select.scratch(KEYS)],
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )(rank, jnp.broadcast_to(visible[:, None], (8, tpu_select.LANES)).astype(jnp.int32))
    return np.asarray(index), np.asarray(count[:, 0])


def check(hidden, spans):
    score = rows_of_unlike_scores()
    rank = jnp.where(hidden, LOWEST, ranks(jnp.asarray(score)))
    rank = rank.at[:, spans * tpu_select.SPAN :].set(tpu_select.HIGHEST - 1)  # better than all, were it looked at
    index, count = selected(rank, np.sum(~hidden, axis=1), spans)
    for row in range(8):
        seen = np.flatnonzero(~hidden[row])
        best = np.sort(seen[np.argsort(-score[row, seen], kind="stable")][:TOP_K])
        np.testing.assert_array_equal(index[row, : len(best)], best, err_msg=f"row {row}")
        assert count[row] == len(best)
        assert not index[row, len(best) :].any()


def test_every_distribution_of_scores_is_selected_exactly():
    check(np.zeros((8, KEYS), bool), KEYS // tpu_select.SPAN)


def test_what_is_hidden_is_not_selected_and_spans_beyond_are_not_read():
    rng = np.random.default_rng(1)
    hidden = np.arange(KEYS) >= rng.integers(2, 3 * tpu_select.SPAN, (8, 1))
    hidden |= np.arange(KEYS) < np.array([[0], [7], [0], [40000], [0], [0], [300], [KEYS]])
    check(hidden, 3)
