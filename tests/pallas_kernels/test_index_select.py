"""Index scoring with selection: the reference against brute force, the TPU kernel interpreted against the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_select import index_select, tpu

pytestmark = pytest.mark.kernels
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


def example(seed=0, batch=1, queries=8, heads=4, width=128, keys=300, dtype=jnp.float32, whole=True):
    """Small integers, so that products are exact in every dtype and many scores tie."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.integers(-2, 3, shape), dtype) if whole else jnp.asarray(
        rng.standard_normal(shape), dtype
    )
    w = jnp.asarray(rng.integers(-2, 3, (batch, queries, heads)), jnp.float32)
    return draw(batch, queries, heads, width), w, draw(batch, keys, width)


def causal(batch, queries, keys):
    last = jnp.broadcast_to(jnp.arange(keys - queries, keys) + 1, (batch, queries))
    return jnp.zeros_like(last), last


def brute_force(q, w, k, first, last, top_k):
    q, w, k = (np.asarray(a, np.float64) for a in (q, w, k))
    keys = k.shape[1]
    index = np.zeros((*w.shape[:2], min(top_k, keys)), np.int32)
    count = np.zeros(w.shape[:2], np.int32)
    for b, s in np.ndindex(count.shape):
        score = w[b, s] @ np.maximum(q[b, s] @ k[b].T, 0)
        visible = [t for t in range(keys) if first[b, s] <= t < last[b, s]]
        best = sorted(sorted(visible, key=lambda t: (-score[t], t))[:top_k])
        index[b, s, : len(best)], count[b, s] = best, len(best)
    return index, count


def check(inputs, first, last, top_k, run):
    index, count = run(*inputs, first, last, top_k)
    want = brute_force(*inputs, np.asarray(first), np.asarray(last), top_k)
    np.testing.assert_array_equal(count, want[1])
    np.testing.assert_array_equal(index, want[0])


def interpreted(*args):
    return tpu.index_select(*args, interpret=STRICT)


def xla(*args):
    return index_select(*args, backend="xla")


@pytest.mark.parametrize("run", [xla, interpreted])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_selects_the_best_visible_keys_and_ties_go_to_the_lower(run, dtype):
    inputs = example(dtype=dtype)
    check(inputs, *causal(1, 8, 300), 64, run)
