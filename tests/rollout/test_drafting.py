"""Drafts change how fast tokens come and nothing else: distribution by counts, log-probs, who gets which token."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax
from glm_jax.model.draft import Drafts
from glm_jax.rollout import drafting, sampling, slots
from glm_jax.rollout.requests import GOES_ON, STOP
from tests.model.tiny import random_params, two_layers
from tests.rollout.driver import SIZES, WINDOW, Driver, some_requests
from tests.rollout.test_sampling import cut

VOCAB, DEPTH = 5, 3
CHAIN = np.random.default_rng(1).dirichlet(np.full(VOCAB, 0.7), VOCAB)  # next-token probabilities by last token
OTHER = np.random.default_rng(2).dirichlet(np.full(VOCAB, 0.7), VOCAB)
# A draft layer that knows the target, one that does not, one that always says the same, one that has diverged.
LAYERS = {
    "good": CHAIN,
    "random": OTHER,
    "stubborn": np.tile(np.eye(VOCAB)[2] + 1e-9, (VOCAB, 1)),
    "nan": np.full_like(CHAIN, np.nan),
}


def fake_slots(count: int, temperature: float, top_p: float) -> slots.Slots:
    state = slots.init(two_layers(), dataclasses.replace(SIZES, slots=count)).slots
    full = lambda value: jnp.full(count, value, jnp.float32)
    return state.replace(rollout=jnp.arange(count), temperature=full(temperature), top_p=full(top_p))


@partial(jax.jit, static_argnums=4)
def one_pass(live, last, target, layer, depth):
    """Drafts and verifies with two Markov chains (log-probs by last token) for models."""
    drafted, logits, token = [], [], last
    for step in range(depth):
        logits.append(layer[token])
        number = sampling.uniform(0, live.rollout, live.length + step, sampling.DRAFT)
        token = sampling.sample(logits[-1], live.temperature, live.top_p, number)[0]
        drafted.append(token)
    drafts = Drafts(jnp.stack(drafted, 1), jnp.stack(logits, 1), [])
    before = jnp.concatenate([last[:, None], drafts.token], axis=1)
    offered = jnp.full(last.shape, depth) - live.rollout % 2  # not every slot is offered all
    return drafting.verify(target[before], drafting.Proposal(drafts, offered), live, 0)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 0.8)])
@pytest.mark.parametrize("layer", LAYERS)
def test_sampled_triples_have_the_targets_distribution(layer, temperature, top_p):
    """χ² of the first three tokens, over as many passes as they take, against the chain's own probabilities."""
    count = 40_000
    live = fake_slots(count, temperature, top_p)
    target, layer = jnp.log(jnp.asarray(CHAIN, jnp.float32)), jnp.log(jnp.asarray(LAYERS[layer], jnp.float32))
    found, length = np.zeros((count, 3 + DEPTH), int), np.zeros(count, int)
    logps = np.zeros((count, 3 + DEPTH))
    last = np.zeros(count, int)
    while (short := length < 3).any():
        token, logp, kept = map(np.asarray, one_pass(live.replace(length=5 + length), last, target, layer, DEPTH))
        for step in range(DEPTH + 1):
            rows = np.flatnonzero(short & (step < kept))
            rows = rows[length[rows] < found.shape[1]]
            found[rows, length[rows]], logps[rows, length[rows]] = token[rows, step], logp[rows, step]
            length[rows] += 1
            last[rows] = token[rows, step]
    chain = CHAIN ** (1 / temperature)
    chain /= chain.sum(1, keepdims=True)
    chain = np.where([cut(row, top_p) for row in chain], chain, 0) if top_p < 1 else chain
    chain /= chain.sum(1, keepdims=True)
    want = np.einsum("i,ij,jk->ijk", chain[0], chain, chain).reshape(-1)
    seen = np.bincount(np.ravel_multi_index(found[:, :3].T, (VOCAB,) * 3), minlength=VOCAB**3)
    assert not seen[want == 0].any()
    likely = want * count >= 5
    cells, expected = np.append(seen[likely], seen[~likely].sum()), np.append(want[likely], want[~likely].sum()) * count
    chi2 = ((cells - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = likely.sum()
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom), (chi2, freedom)
    steps = np.stack([chain[0][found[:, 0]], chain[found[:, 0], found[:, 1]], chain[found[:, 1], found[:, 2]]], 1)
    np.testing.assert_allclose(logps[:, :3], np.log(steps), atol=1e-5)


@pytest.mark.parametrize("layer, rate", [("good", 1.0), ("random", None), ("nan", 0.0)])
def test_drafts_are_kept_as_often_as_the_distributions_overlap(layer, rate):
    count = 20_000
    live = fake_slots(count, 1.0, 1.0)
    log = lambda chain: jnp.log(jnp.asarray(chain, jnp.float32))
    _, _, kept = one_pass(live, np.zeros(count, int), log(CHAIN), log(LAYERS[layer]), 2)
    overlap = np.minimum(CHAIN[0], OTHER[0]).sum() if rate is None else rate
    assert np.mean(np.asarray(kept) > 1) == pytest.approx(overlap, abs=4 * 0.5 / np.sqrt(count))


MODEL = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
DRAFTING = dataclasses.replace(SIZES, drafts=(3,))


def silent(layer):
    """A layer that adds nothing to its input."""
    nothing = jax.tree.map(jnp.zeros_like, layer.mlp)
    return layer.replace(attn=layer.attn.replace(o=jnp.zeros_like(layer.attn.o)), mlp=nothing)


@cache
def weights(kind: str):
    """A target with a random, a diverged, or an all-knowing draft layer; the last one's target sees one token back."""
    params = random_params(MODEL)
    if kind == "nan":
        return params.replace(draft=params.draft.replace(proj=jnp.full_like(params.draft.proj, jnp.nan)))
    if kind == "good":
        ones, size = jnp.ones(MODEL.hidden_size), MODEL.hidden_size
        proj = jnp.concatenate([jnp.eye(size), jnp.zeros((size, size))])
        known = params.draft.replace(embed_norm=ones, proj=proj, layer=silent(params.draft.layer), norm=params.norm)
        groups = jax.tree.map(lambda x: x, params.groups)
        groups = tuple(tuple(silent(layer) for layer in group) for group in groups)
        return params.replace(groups=groups, draft=known)
    return params


@cache
def driven(kind: str, drafts: bool = True) -> Driver:
    sizes = DRAFTING if drafts else SIZES
    return Driver(sizes, MODEL, weights(kind)).finish(some_requests())


def passes(driver: Driver) -> list[tuple[int, int, int]]:
    """(drafted, sampled, ending) of every pass."""
    found = []
    for log in driver.logs:
        for tick, slot in np.argwhere(log.rollout >= 0):
            found.append(tuple(int(a[tick, slot]) for a in (log.drafted, log.count, log.ending)))
    return found


@pytest.mark.parametrize("kind", ["random", "nan", "good"])
def test_greedy_rollouts_are_those_without_drafts(kind):
    requests = some_requests()
    greedy = [rollout for rollout, _, _, settings in requests if settings["temperature"] == 0]
    plain, drafted = driven(kind, drafts=False), driven(kind)
    assert greedy and all(drafted.tokens[rollout] == plain.tokens[rollout] for rollout in greedy)
    assert drafted.ending == plain.ending
    assert all(len(drafted.tokens[r]) == len(plain.tokens[r]) for r in drafted.tokens), "limits are kept"
    offered = [(d, n) for d, n, ending in passes(drafted) if d == 3 and ending == GOES_ON]
    assert offered
    if kind == "good":
        assert all(n == 4 for _, n in offered) and len(passes(drafted)) < 0.5 * len(passes(plain))
    assert sum(int(u.drafted) for u in drafted.usages) == sum(d for d, _, _ in passes(drafted))
    assert sum(int(u.decoded) for u in drafted.usages) == sum(n for _, n, _ in passes(drafted))


def test_log_probs_are_the_targets():
    done = driven("random")
    run = jax.jit(lambda p, t, d: glm_jax.forward(p, MODEL, t, d).logits)
    for rollout, prompt, limit, settings in some_requests():
        if settings["temperature"] == 0 or settings["top_p"] < 1:
            continue
        whole = np.zeros((1, WINDOW), np.int32)
        whole[0, :limit] = prompt + done.tokens[rollout]
        logits = run(weights("random"), whole, (np.arange(WINDOW) < limit)[None].astype(np.int32))[0]
        want = jax.nn.log_softmax(logits / settings["temperature"])
        want = want[np.arange(len(prompt) - 1, limit - 1), whole[0, len(prompt) : limit]]
        np.testing.assert_allclose(done.logp[rollout], want, atol=2e-5)


@pytest.mark.rollout
def test_slots_ticks_rounds_and_prefill_sizes_change_no_token():
    sizes = dict(slots=2, ticks=1, prefill_slots=1, prefill_chunk=2)
    other = Driver(dataclasses.replace(DRAFTING, **sizes), MODEL, weights("random")).finish(reversed(some_requests()))
    assert other.tokens == driven("random").tokens and other.ending == driven("random").ending


def test_a_stop_id_in_mid_pass_ends_the_rollout_there():
    rollout, prompt, *_ = some_requests()[0]
    settings = dict(temperature=0.0)
    free = Driver(DRAFTING, MODEL, weights("good")).finish([(rollout, prompt, 20, settings)]).tokens[rollout]
    for stop in dict.fromkeys(free):
        ids = np.array([stop, *[-1] * 7])
        done = Driver(DRAFTING, MODEL, weights("good")).finish([(rollout, prompt, 20, settings | dict(stop=ids))])
        assert done.tokens[rollout] == free[: free.index(stop) + 1] and done.ending[rollout] == STOP


@pytest.mark.rollout
def test_ticks_without_drafts_leave_drafting_as_if_it_had_never_paused():
    requests = [(i, prompt, 20, dict(temperature=0.0)) for i, (_, prompt, *_) in enumerate(some_requests(3))]
    always, paused = (Driver(dataclasses.replace(DRAFTING, ticks=1), MODEL, weights("random")) for _ in range(2))
    always.round(requests)
    paused.round(requests)
    for depth in (0, 0, 0, 0, 0, 0, 3):  # more ticks than one pass catches up with
        paused.depth = depth
        paused.round()
        always.round()
    # Compare what both have run; what is pending or merely drafted differs.
    for slot in range(3):
        pair = [(d.state.slots.length[slot], d.state.drafting) for d in (always, paused)]
        sure = min(int(length) - 1 - int(state.pending[slot]) for length, state in pair)
        assert sure >= len(requests[slot][1]) - 1 + 3
        for name in ("row", "index_key"):
            a, b = (getattr(state.caches, name)[0, slot, :sure] for _, state in pair)
            np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
    assert paused.finish().tokens == always.finish().tokens == driven_greedily(requests)


def driven_greedily(requests):
    return Driver(SIZES, MODEL, weights("random")).finish(requests).tokens


@pytest.mark.rollout
def test_an_observation_is_drafted_behind_as_in_a_rollout_that_was_sent_whole():
    rollout, prompt = 7, [5, 9, 2]
    free = driven_greedily([(rollout, prompt, 20, dict(temperature=0.0))])[rollout]
    parks = next(n for n in range(3, 9) if free[n] not in free[:n])
    settings = dict(temperature=0.0, park=free[parks])
    driver = Driver(DRAFTING, MODEL, weights("random"))
    driver.round([(rollout, prompt, WINDOW, settings)])
    assert driver.parked == {rollout} and driver.tokens[rollout] == free[: parks + 1], "the pass ends where it parks"
    whole = prompt + driver.tokens[rollout] + [11, 3, 8]
    fresh = Driver(dataclasses.replace(DRAFTING, ticks=1), MODEL, weights("random"))
    driver.sizes = fresh.sizes
    for each in (driver, fresh):
        each.round([(rollout, whole, WINDOW, dict(temperature=0.0))])
    assert int(driver.usages[-1].prefilled) < int(fresh.usages[-1].prefilled), "the cache was kept"
    assert driver.state.drafting.pending[0] == fresh.state.drafting.pending[0] > 0
    for name in ("row", "index_key"):
        rows = (getattr(each.state.drafting.caches, name)[0, 0, : len(whole) - 1] for each in (driver, fresh))
        np.testing.assert_allclose(*rows, atol=2e-5, err_msg=name)
    assert driver.finish().tokens[rollout][parks + 1 :] == fresh.finish().tokens[rollout]


@pytest.mark.rollout
def test_a_rollout_whose_states_were_lost_goes_on_without_drafts(monkeypatch):
    monkeypatch.setattr(slots, "HELD", 4)
    requests = [(i, prompt, 20, dict(temperature=0.0)) for i, (_, prompt, *_) in enumerate(some_requests(3))]
    driver = Driver(dataclasses.replace(DRAFTING, ticks=5), MODEL, weights("random"))
    driver.depth = 0
    driver.round(requests)
    assert driver.state.drafting.pending.tolist() == [-1] * 3
    driver.depth = 3
    driver.round([(9, [1, 2], 20, dict(temperature=0.0))])
    assert (driver.logs[-1].drafted == 0).all()
    driver.finish()
    assert driver.tokens == driven_greedily([*requests, (9, [1, 2], 20, dict(temperature=0.0))])
    assert any(log.drafted.any() for log in driver.logs), "the next rollout is drafted for again"


def test_a_model_without_a_draft_layer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"drafts=\(3,\).*num_nextn_predict_layers is 0"):
        slots.init(two_layers(), DRAFTING)
