"""Drawing tokens: the distribution by exact counts, the nucleus by sorting, random numbers by what they depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model.heads import log_probs, nucleus
from glm_jax.rollout.sampling import SAMPLE, sample, uniform

VOCAB = 23
LOGITS = (3 * np.random.default_rng(0).standard_normal(VOCAB)).astype(np.float32)
LOGITS[[0, 22]] = -np.inf  # impossible tokens at both ends


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def cut(prob, top_p):
    """The nucleus by sorting: the fewest most probable tokens that reach top_p, with all equals of the last."""
    order = np.argsort(-prob, kind="stable")
    size = np.searchsorted(np.cumsum(prob[order]), top_p) + 1
    return prob >= prob[order[min(size, len(prob)) - 1]]


def exact(temperature, top_p):
    prob = softmax(LOGITS / temperature)
    prob = np.where(cut(prob, top_p), prob, 0)
    return prob / prob.sum()


def draw(numbers, temperature, top_p, logits=LOGITS):
    rows = len(numbers)
    full = lambda value: jnp.full(rows, value, jnp.float32)
    token, logp = jax.jit(sample)(
        jnp.tile(logits, (rows, 1)), full(temperature), full(top_p), jnp.asarray(numbers, jnp.float32)
    )
    return np.asarray(token), np.asarray(logp)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (2.0, 1.0), (1.0, 0.7), (1.5, 0.9)])
def test_a_grid_of_numbers_draws_each_token_as_often_as_its_probability_says(temperature, top_p):
    grid = 1 << 14
    token, logp = draw((np.arange(grid) + 0.5) / grid, temperature, top_p)
    want = exact(temperature, top_p)
    counts = np.bincount(token, minlength=VOCAB)
    assert np.abs(counts - grid * want).max() <= 1.01
    assert not counts[want == 0].any()
    np.testing.assert_allclose(logp, np.log(want[token]), atol=2e-6)


def test_the_ends_of_the_number_range_draw_possible_tokens():
    for top_p in (1.0, 0.7):
        token, _ = draw([0.0, 1 - 2**-24], 1.0, top_p)
        possible = np.flatnonzero(exact(1.0, top_p))
        assert token.tolist() == [possible[0], possible[-1]]


def test_temperature_zero_takes_the_lowest_id_of_the_most_probable_with_probability_one():
    logits = np.array([1.0, 5.0, 5.0, -np.inf, 4.9], np.float32)
    token, logp = draw([0.0, 0.5, 0.999], 0.0, 1.0, logits)
    assert token.tolist() == [1, 1, 1] and logp.tolist() == [0.0, 0.0, 0.0]


def test_rows_keep_their_own_temperature_and_nucleus():
    numbers = jnp.full(4, 0.93)
    temperature, top_p = jnp.array([1.0, 0.0, 1.0, 3.0]), jnp.array([1.0, 1.0, 0.5, 1.0])
    token, logp = sample(jnp.tile(LOGITS, (4, 1)), temperature, top_p, numbers)
    for row in range(4):
        alone = draw([0.93], float(temperature[row]), float(top_p[row]))
        assert int(token[row]) == alone[0][0] and float(logp[row]) == pytest.approx(alone[1][0], abs=1e-6)


def test_nucleus_equals_sorting():
    rng = np.random.default_rng(1)
    prob = rng.dirichlet(np.full(VOCAB, 0.3), 200).astype(np.float32)
    top_p = rng.uniform(0.01, 0.999, 200).astype(np.float32)
    got = np.asarray(jax.jit(nucleus)(prob, top_p))
    for row in range(200):
        np.testing.assert_array_equal(got[row], cut(prob[row].astype(np.float64), top_p[row]))


def test_nucleus_keeps_equals_together_and_stops_where_the_goal_is_reached_exactly():
    prob = jnp.array([0.25, 0.5, 0.125, 0.125])
    for top_p, kept in ((0.5, [1]), (0.75, [0, 1]), (0.76, [0, 1, 2, 3]), (0.875, [0, 1, 2, 3]), (1e-9, [1])):
        assert np.flatnonzero(nucleus(prob, jnp.float32(top_p))).tolist() == kept, top_p


def test_log_probs_normalise_over_the_nucleus_and_never_rule_out_the_token_that_was_sampled():
    row, one = jnp.asarray(LOGITS), jnp.float32(1.0)
    for token in (int(np.argmax(LOGITS)), int(np.argsort(LOGITS)[3])):
        logp, every = log_probs(row, one, jnp.float32(0.5), jnp.int32(token))
        want = np.where(cut(softmax(LOGITS), 0.5) | (np.arange(VOCAB) == token), softmax(LOGITS), 0)
        np.testing.assert_allclose(np.exp(every), want / want.sum(), atol=1e-6)
        assert logp == every[token] and np.isfinite(logp)


def test_a_random_number_is_a_function_of_seed_rollout_position_and_purpose():
    rollout, position = jnp.array([0, 1, 7, 2**31 - 1]), jnp.array([5, 5, 9, 100_000])
    numbers = np.asarray(uniform(jnp.int32(3), rollout, position, SAMPLE))
    order = jnp.array([2, 3, 0, 1, 1])
    np.testing.assert_array_equal(uniform(jnp.int32(3), rollout[order], position[order], SAMPLE), numbers[order])
    others = [
        uniform(jnp.int32(4), rollout, position, SAMPLE),
        uniform(jnp.int32(3), rollout ^ 256, position, SAMPLE),
        uniform(jnp.int32(3), rollout, position + 1, SAMPLE),
        uniform(jnp.int32(3), rollout, position, SAMPLE + 1),
        uniform(jnp.int32(3), position, rollout, SAMPLE),
    ]
    assert len(np.unique(np.concatenate([numbers, *map(np.asarray, others)]))) == 4 * 6


def test_random_numbers_fill_the_unit_interval_evenly():
    rollout, position = (a.ravel() for a in jnp.meshgrid(jnp.arange(64), jnp.arange(64)))
    numbers = np.asarray(uniform(jnp.int32(0), rollout, position, SAMPLE))
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert np.sum((counts - 64) ** 2 / 64) < 110  # χ² with 63 degrees of freedom: 1 in 10⁴ lies beyond 110
    grid = numbers.reshape(64, 64)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.06


def test_the_largest_random_number_draws_no_impossible_token():
    """Sums of the same numbers in another order may differ, and the cumulative sum fall where nothing is added."""
    logits = np.random.default_rng(4).standard_normal((512, 1000)).astype(np.float32)
    logits[:, 400:] = -np.inf
    full = lambda value: jnp.full(len(logits), value, jnp.float32)
    token, logp = jax.jit(sample)(logits, full(1.0), full(1.0), full(1 - 2.0**-24))
    assert np.isfinite(logp).all() and (token < 400).all()
