"""The draft layer against golden case `mtp`, and against itself: rows and cache, any chunking, any depth."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import glm_jax
from glm_jax.model import cache as caches
from glm_jax.model import draft, transformer
from glm_jax.model.yarn import Yarn
from tests.model.tiny import random_params, random_tokens, tiny_config

GOLDEN = Path(__file__).parents[1] / "golden/mtp"
TOLERANCE = dict(atol=2e-4, rtol=1e-4)
PROMPT = 24


@cache
def read():
    config, params = glm_jax.load(GOLDEN)
    assert config.num_nextn_predict_layers == 1 and config.index_share_for_mtp_iteration
    return config, params, load_file(GOLDEN / "expected.safetensors")


def real(index, count):
    return np.where(np.arange(index.shape[-1]) < np.asarray(count)[..., None], index, -1)


def test_rows_select_route_and_predict_as_the_public_engines_do():
    config, params, expected = read()
    run = jax.jit(lambda p, t: glm_jax.forward(p, config, t, trace=True, draft=True))
    output = run(params, expected["input_ids"])
    got = output.draft
    np.testing.assert_array_equal(real(*got.selection), expected["index_topk.mtp"])
    np.testing.assert_array_equal(got.routes, expected["router_experts.mtp"])
    np.testing.assert_allclose(got.hidden, expected["mtp.hidden"], **TOLERANCE)
    np.testing.assert_allclose(got.logits, expected["mtp.logits"], **TOLERANCE)
    np.testing.assert_allclose(output.logits, expected["logits"], **TOLERANCE)
    plain = jax.jit(lambda p, t: glm_jax.forward(p, config, t, draft=True))(params, expected["input_ids"]).draft
    assert plain.routes is None and plain.selection is None
    np.testing.assert_allclose(plain.logits, got.logits, atol=1e-6)


def target(config, params, tokens):
    """The target's final states of a prompt, and its next token."""
    state = caches.init(config, *tokens.shape)
    rows = tokens.shape[0]
    hidden, _ = caches.extend(params, config, state, tokens, jnp.zeros(rows, int), jnp.full(rows, tokens.shape[1]))
    return hidden, jnp.argmax(transformer.unembed(params, hidden[:, -1]), -1)


@pytest.mark.parametrize("mode, share", [("share", True), ("recompute", False)])
@pytest.mark.parametrize("dense_decode", [2, 10])  # gathered keys; all of them under a mask
def test_drafts_in_both_modes(mode, share, dense_decode, monkeypatch):
    monkeypatch.setattr(caches, "DENSE_DECODE", dense_decode)
    config, params, expected = read()
    config = dataclasses.replace(config, index_share_for_mtp_iteration=share)
    tokens = expected["input_ids"][:, :PROMPT]

    def run(params, tokens):
        hidden, first = target(config, params, tokens)
        accepted = jnp.concatenate([tokens[:, 1:], first[:, None]], axis=1)
        state = draft.init_cache(config, len(tokens), 32)
        nothing, all_of_it = jnp.zeros(len(tokens), int), jnp.full(len(tokens), PROMPT)
        return first, *draft.propose(params, config, state, accepted, hidden, nothing, all_of_it, depth=3)

    first, drafts, _ = jax.jit(run)(params, tokens)
    np.testing.assert_array_equal(first[:, None], expected["mtp_draft.first_token"])
    prefix = f"mtp_draft_{mode}."
    np.testing.assert_array_equal(drafts.token, expected[prefix + "tokens"])
    np.testing.assert_allclose(drafts.logits, expected[prefix + "logits"], **TOLERANCE)
    for step, (index, count) in enumerate(drafts.selection):
        np.testing.assert_array_equal(real(index, count), expected[prefix + "index_topk"][:, step])


CONFIG = tiny_config(num_nextn_predict_layers=1, yarn=Yarn(8.0, 16, mscale_all_dim=2.0))  # in every path
DOCUMENTS = np.array([[0] * 2 + [1] * 8 + [2] * 5, [1] * 15], np.int32)


@cache
def states():
    """Parameters, tokens, and final states of a target over packed documents."""
    params, tokens = random_params(CONFIG), random_tokens(CONFIG, *DOCUMENTS.shape)
    hidden, _, _ = jax.jit(lambda p, t: transformer.hidden_states(p, CONFIG, t, DOCUMENTS))(params, tokens)
    return params, tokens, hidden


def test_packed_documents_draft_as_each_would_alone():
    params, tokens, _ = states()
    together = jax.jit(lambda p, t: glm_jax.forward(p, CONFIG, t, DOCUMENTS, draft=True).draft.logits)(params, tokens)
    alone = jax.jit(lambda p, t: glm_jax.forward(p, CONFIG, t, draft=True).draft.logits)
    for row, first, last in ((0, 2, 10), (0, 10, 15), (1, 0, 15)):
        want = alone(params, tokens[row : row + 1, first:last])[0]
        np.testing.assert_allclose(together[row, first : last - 1], want, atol=2e-5)


def test_the_cache_gives_what_whole_rows_give_in_any_chunks_and_at_any_depth():
    params, tokens, hidden = states()
    tokens, hidden = tokens[1:], hidden[1:]
    want, m, shifted = [], hidden[:, :-1], tokens[:, 1:]
    for _ in range(3):  # depth d: the state of depth d - 1, and the token one further
        rows = jax.jit(lambda p, t, h: draft.forward(p, CONFIG, t, h, jnp.ones(t.shape, int)))(params, shifted, m)
        want.append(rows.hidden)
        m, shifted = rows.hidden[:, :-1], shifted[:, 1:]
    step = jax.jit(lambda p, c, t, h, s, n: draft.extend(p, CONFIG, c, t, h, s, n)[:2])
    for depth, rows in enumerate(want):
        state, got, at = draft.init_cache(CONFIG, 1, 16), [], 0
        source = hidden[:, :-1] if depth == 0 else want[depth - 1][:, :-1]
        following = tokens[:, depth + 1 :]
        for size in (4, 1, 4, 4, 4):
            size = min(size, following.shape[1] - at)
            piece = lambda a, size=size, at=at: jnp.pad(a, [(0, 0), (0, 4)] + [(0, 0)] * (a.ndim - 2))[:, at : at + 4]
            made, state = step(params, state, piece(following), piece(source), jnp.array([at]), jnp.array([size]))
            got.append(made[:, :size])
            at += size
        np.testing.assert_allclose(jnp.concatenate(got, 1), rows, atol=2e-5, err_msg=f"depth {depth}")


def test_unrolled_rows_are_what_proposing_the_following_tokens_computes():
    """From every state of both documents, with a selection smaller than the row and one that holds all of it."""
    params, tokens, hidden = states()
    depth, columns = 3, DOCUMENTS.shape[1]
    for top_k in (4, 64):
        config = dataclasses.replace(CONFIG, index_topk=top_k, index_share_for_mtp_iteration=True)
        unroll = jax.jit(lambda p, t, h, c=config: draft.unroll(p, c, t, h, DOCUMENTS, depth)[0])
        logits = transformer.unembed(params, unroll(params, tokens, hidden))

        @jax.jit
        def propose(p, following, hidden, count, wanted, config=config):
            pick = lambda step, _: wanted[:, step]
            args = p, config, draft.init_cache(config, 1, columns + depth), following, hidden, jnp.zeros(1, int)
            return draft.propose(*args, count, depth, pick=pick)[0].logits

        for row, first, last in ((0, 2, 10), (0, 10, 15), (1, 0, 15)):
            padded = lambda a, size: jnp.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1))[None]
            following = padded(tokens[row, first + 1 : last], columns)
            for column in range(first, last - depth - 1):
                wanted = tokens[row : row + 1, column + 2 : column + 2 + depth]
                count = jnp.array([column - first + 1])
                got = propose(params, following, padded(hidden[row, first:last], columns), count, wanted)
                np.testing.assert_allclose(logits[:, row, column], got[0], atol=3e-5, err_msg=f"{top_k} {row} {column}")


def test_slots_without_new_rows_keep_their_cache():
    params, tokens, hidden = states()
    state = jax.tree.map(lambda a: jnp.full_like(a, 7.0), draft.init_cache(CONFIG, 2, 12))
    args = jnp.zeros(2, int), jnp.array([0, 3])
    run = jax.jit(lambda p, c, t, h: draft.propose(p, CONFIG, c, t, h, *args, depth=3)[1])
    after = run(params, state, tokens[:, 1:4], hidden[:, :3])
    assert (
        (after.row[:, 0] == 7).all() and (after.row[:, 1, 5:] == 7).all() and (after.row[:, 1, :5] != 7).any(-1).all()
    )


def test_a_model_without_a_draft_layer_says_so():
    config = tiny_config()
    with pytest.raises(ValueError, match="no draft"):
        jax.eval_shape(
            lambda p, t: glm_jax.forward(p, config, t, draft=True), random_params(config), random_tokens(config, 1, 4)
        )
