"""The draft layer's losses: closed-form gradients, brute force over states, and what the update may touch."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.learn import draft_step, optimizer
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.batch import empty_batch
from glm_jax.learn.config import LearnConfig
from glm_jax.learn.optimizer import DRAFT, INDEXER, MAIN
from glm_jax.model import draft, transformer
from tests.model.tiny import as_float64, named_leaves, random_params, two_layers

DEPTH = 2
MODEL = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
SETUP = Setup(MODEL, LearnConfig(micro_batches=2, rows=2, length=14, draft_depth=DEPTH, indexer_kl=0.1))


@cache
def batch():
    """Two micro-batches, one of packed documents with prompts, one with a single short document."""
    made, rng = empty_batch(2, 2, 14), np.random.default_rng(0)
    for m, r, first, last, prompt in ((0, 0, 0, 8, 2), (0, 0, 8, 14, 3), (0, 1, 1, 13, 1), (1, 0, 0, 6, 2)):
        made.tokens[m, r, first:last] = rng.integers(1, MODEL.vocab_size, last - first)
        made.document_ids[m, r, first:last] = 1 + first
        made.trainable[m, r, first + prompt : last] = True
    return made.replace(used=np.int32(2))


def test_the_overlaps_gradient_is_the_published_one():
    rng = np.random.default_rng(1)
    p, logits = rng.dirichlet(np.ones(9), (2, 3)), rng.standard_normal((2, 3, 9))
    with jax.enable_x64(True):
        refused = lambda x: jnp.sum(1 - draft_step._overlap(jnp.asarray(p), jax.nn.log_softmax(x)))
        got = jax.grad(refused)(jnp.asarray(logits))
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    within = q <= p
    np.testing.assert_allclose(got, -q * (within - (q * within).sum(-1, keepdims=True)), atol=1e-12)
    alpha = draft_step._overlap(jnp.asarray(p), jnp.log(jnp.asarray(q)))
    np.testing.assert_allclose(alpha, 1 - 0.5 * np.abs(p - q).sum(-1), atol=1e-6)


def by_hand(params, kind):
    """Sums over the states from which every depth has a trainable label, one by one."""
    sums = np.zeros(4)  # loss, overlap, length, count
    run = jax.jit(lambda t, d: transformer.hidden_states(params, MODEL, t, d)[0])
    rows = jax.jit(lambda t, h, d: draft.unroll(params, MODEL, t, h, d, DEPTH)[0])
    b = batch()
    for m in range(2):
        hidden = run(b.tokens[m], b.document_ids[m])
        p = np.asarray(jax.nn.softmax(transformer.unembed(params, hidden)), np.float64)
        q = np.asarray(jax.nn.softmax(transformer.unembed(params, rows(b.tokens[m], hidden, b.document_ids[m]))))
        for r in range(2):
            for j in range(14 - DEPTH - 1):
                labels = range(j + 2, j + 2 + DEPTH)
                if not all(b.trainable[m, r, t] and b.document_ids[m, r, t] == b.document_ids[m, r, j] for t in labels):
                    continue
                alpha = [np.minimum(p[r, t - 1], q[d, r, j]).sum() for d, t in enumerate(labels)]
                kept = np.cumprod(alpha).sum()
                ce = -np.mean([np.log(q[d, r, j, b.tokens[m, r, t]]) for d, t in enumerate(labels)])
                sums += [1 - kept / DEPTH if kind == "tv" else ce, np.mean(alpha), 1 + kept, 1]
    return sums


@pytest.mark.parametrize("kind", ["tv", "ce"])
def test_the_update_is_of_the_mean_over_labelled_states_and_moves_the_draft_layer_alone(kind):
    params = random_params(MODEL)
    names = optimizer.labels(params)
    learner = optimizer.init(params, names, SETUP.learn.policy, (MAIN, INDEXER, DRAFT))
    after, figures = jax.jit(lambda learner, b: draft_step.update(learner, b, 1e-2, SETUP, kind))(learner, batch())
    *want, count = by_hand(params, kind)
    assert count >= 10
    got = [figures[f"draft/{name}"] for name in ("loss", "overlap", "length")]
    np.testing.assert_allclose(got, np.array(want) / count, rtol=2e-5)
    new = named_leaves(after.params)
    moved = {name for name, leaf in named_leaves(params).items() if (leaf != new[name]).any()}
    assert moved and all(".draft" in name for name in moved), moved
    assert any("indexer" in name for name in moved) and not any(name.endswith(".bias") for name in moved)
    assert after.version == learner.version, "what is sampled stays the same"
    assert set(figures) == set(draft_step.METRICS)


@pytest.mark.parametrize("kind", ["tv", "ce"])
def test_the_gradient_is_that_of_finite_differences(kind):
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        model = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, dtype="float64")
        setup = SETUP._replace(model=model, learn=LearnConfig(length=14, draft_depth=DEPTH))
        params, b = as_float64(random_params(model)), jax.tree.map(lambda a: a[0] if a.ndim else a, batch())

        def loss(layer):
            whole = params.replace(draft=layer)
            return draft_step._loss(whole, b.tokens, b.document_ids, b.trainable, setup, kind)[0]

        layer = params.draft
        direction = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), layer)
        products = jax.tree.map(jnp.vdot, jax.jit(jax.grad(loss))(layer), direction)
        slope = float(sum(jax.tree.leaves(products)))
        at, run = lambda t: jax.tree.map(lambda a, d: a + t * d, layer, direction), jax.jit(loss)
        step = 1e-6
        assert slope == pytest.approx(float(run(at(step)) - run(at(-step))) / (2 * step), rel=1e-5)


def test_without_labels_nothing_moves():
    params, none = random_params(MODEL), batch().replace(trainable=np.zeros_like(batch().trainable))
    learner = optimizer.init(params, optimizer.labels(params), SETUP.learn.policy, (MAIN, INDEXER, DRAFT))
    after, figures = jax.jit(lambda learner, b: draft_step.update(learner, b, 1e-2, SETUP, "tv"))(learner, none)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, after.params)
    assert figures["draft/loss"] == 0 and all(jax.tree.leaves(same))
