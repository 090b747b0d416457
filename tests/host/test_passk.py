"""pass@k is unbiased, and its intervals cover."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from glm_jax.host.passk import estimate, pass_at_k, wilson


def test_it_equals_the_mean_over_all_subsets():
    for n, c in [(5, 0), (5, 2), (5, 5), (7, 3)]:
        answers = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = [any(s) for s in itertools.combinations(answers, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(2, 1, 3)
    with pytest.raises(ValueError, match="no question has 3 samples"):
        estimate([(2, 1)], 3)


def test_wilson_agrees_with_the_published_example():
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@pytest.mark.parametrize("samples", [1, 4])
def test_the_interval_covers_the_truth_about_19_times_in_20(samples):
    rng, covered, trials = np.random.default_rng(0), 0, 200
    for _ in range(trials):
        chance = rng.beta(2, 3, 150)
        counts = [(samples, int(c)) for c in rng.binomial(samples, chance)]
        found = estimate(counts, 1)
        covered += found.low <= 0.4 <= found.high
    assert 0.90 <= covered / trials <= 0.99


def test_all_wrong_is_no_proof_that_nothing_can_be_right():
    found = estimate([(3, 0)] * 20, 2)
    assert found.value == 0 and found.high > 0.1
