"""Rollouts between ledger, device and scoring."""

from __future__ import annotations

import pytest

from glm_jax.host.errors import LedgerError
from glm_jax.host.evaluation import SHOWN, Evaluation
from tests.host.doubles import EOS, TASKS, FakePool, FakeProgram, make_loop, plan


@pytest.fixture
def sampling(tmp_path):
    program = FakeProgram(slots=4, ticks=2, stop_share=10**9)
    return make_loop(tmp_path, plan(), program=program, pool=FakePool()).sampling


def test_training_draws_as_configured_and_evaluation_at_1(sampling):
    sampling.open(TASKS.train[0], 0, "train")
    sampling.open(TASKS.eval[0], 0, "eval")
    found = [(r.temperature, r.top_p, r.stop, r.limit) for r in sampling.next_requests()]
    assert found == [(0.7, 0.9, (EOS,), 12), (1.0, 1.0, (EOS,), 12)]


def test_a_rollout_that_goes_on_is_sent_with_the_tokens_it_has(sampling):
    rollout = sampling.open(TASKS.train[0], 0, "train")
    sampling.device.dispatch(sampling.next_requests(), (), None)
    sampling.take(sampling.device.collect())
    sampling.device.reset_sampler()
    sampling.resume()
    (request,) = sampling.next_requests()
    assert request.tokens == [*rollout.prompt, *rollout.tokens] and len(rollout.tokens) == 2
    assert sampling.next_requests() == []


def test_requests_go_out_by_id_whatever_came_back_first(sampling):
    for index in range(5):
        sampling.open(TASKS.train[index], index, "train")
    first = [request.rollout for request in sampling.next_requests()]
    sampling.resume()
    assert first == [0, 1, 2] and [request.rollout for request in sampling.next_requests()] == [0, 1, 2]


def test_what_a_cancelled_rollout_still_samples_is_surplus(sampling):
    rollout = sampling.open(TASKS.train[0], 0, "train")
    sampling.device.dispatch(sampling.next_requests(), (), None)
    sampling.cut(rollout.id)
    sampling.take(sampling.device.collect())
    assert not rollout.tokens and rollout.ending == "cancelled"
    sampling.device.dispatch([], sampling.next_cancellations(), None)
    assert sampling.device.collect().sampled == []


def test_a_rollout_cut_before_it_was_sent_is_never_sent(sampling):
    rollout = sampling.open(TASKS.train[0], 0, "train")
    sampling.cut(rollout.id)
    assert sampling.next_requests() == [] and sampling.next_cancellations() == []


def test_tokens_for_a_rollout_that_was_never_submitted_are_an_error(sampling):
    sampling.open(TASKS.train[0], 0, "train")
    sampling.device.dispatch(sampling.next_requests(), (), None)
    sampling.ledger.book.submitted, sampling.on_device = 0, set()
    with pytest.raises(LedgerError, match="sampled for rollout 0, never submitted"):
        sampling.take(sampling.device.collect())


def test_the_oldest_version_of_what_has_not_come_back_is_that_of_the_round_under_way(sampling):
    rollout = sampling.open(TASKS.train[0], 0, "train")
    sampling.device.version = 4
    assert sampling.oldest(rollout) == 4
    sampling.device.version = 0
    sampling.device.dispatch(sampling.next_requests(), (), None)
    sampling.device.version = 1  # as after a round that learned
    assert sampling.oldest(rollout) == 0
    sampling.take(sampling.device.collect())
    sampling.device.version = 5
    assert sampling.oldest(rollout) == 0


def test_an_evaluation_shows_a_few_and_counts_all(sampling):
    evaluation = Evaluation(3, sampling, TASKS.eval, 2)
    while not evaluation.done:
        sampling.device.dispatch(sampling.next_requests(), (), None)
        sampling.take(sampling.device.collect())
        evaluation.take(sampling.scorer.poll())
    assert len(evaluation.shown) == SHOWN and len(evaluation.results) == 6
    assert evaluation.metrics()["eval/truncated_share"] == 1.0 and evaluation.metrics()["eval/count"] == 6
    assert sampling.ledger.book.fates == {"unused": 6}
