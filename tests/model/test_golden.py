"""Golden cases: what the public implementation computes from the same files, selections and routes to the index."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import glm_jax
from glm_jax.model import cache as caches
from glm_jax.model.heads import unembed
from glm_jax.model.weights import unstack

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = dict(atol=2e-4, rtol=1e-4)
PREFILL = {
    "tiny": 24,
    "padded": 20,
    "all_full": 16,
    "mtp": 24,
    "yarn": 60,
}  # columns before `decode_logits` and `greedy_tokens` begin
in_every_case = pytest.mark.parametrize("case", sorted(PREFILL))


@cache
def read(case: str):
    config, params = glm_jax.load(GOLDEN / case)
    expected = load_file(GOLDEN / case / "expected.safetensors")
    return config, params, expected, expected["attention_mask"] > 0


@cache
def traced(case: str):
    config, params, expected, mask = read(case)
    return jax.jit(lambda p, t, m: glm_jax.forward(p, config, t, m, trace=True))(params, expected["input_ids"], mask)


@in_every_case
def test_selections_are_exactly_those_of_the_public_implementation(case):
    config, _, expected, mask = read(case)
    selection = traced(case).selection
    assert (
        len(selection)
        == len(config.full_layers)
        == sum(name.startswith("index_topk.") and name != "index_topk.mtp" for name in expected)
    )
    for layer, (index, count) in zip(config.full_layers, selection, strict=True):
        real = np.arange(index.shape[-1]) < np.asarray(count)[..., None]
        want = expected[f"index_topk.{layer}"]
        np.testing.assert_array_equal(np.where(real, index, -1)[mask], want[mask], err_msg=f"layer {layer}")
        assert not np.asarray(index)[~real].any(), "entries beyond count are 0"
    assert mask.sum(1).max() > config.index_topk, "sparsity has to be at work"


@in_every_case
def test_routes_are_exactly_those_of_the_public_implementation(case):
    config, _, expected, mask = read(case)
    sparse = [i for i, kind in enumerate(config.kinds) if kind.sparse]
    for layer, routes in zip(sparse, traced(case).routes, strict=True):
        np.testing.assert_array_equal(np.asarray(routes)[mask], expected[f"router_experts.{layer}"][mask])


@in_every_case
def test_hidden_states_agree_layer_by_layer(case):
    config, _, expected, mask = read(case)
    hidden = traced(case).hidden
    assert len(hidden) == config.num_hidden_layers + 1
    for layer, state in enumerate(hidden):
        want = expected["final_hidden" if layer == config.num_hidden_layers else f"hidden.{layer}"]
        np.testing.assert_allclose(np.asarray(state)[mask], want[mask], **TOLERANCE, err_msg=f"layer {layer}")


@in_every_case
def test_logits_agree(case):
    _, _, expected, mask = read(case)
    np.testing.assert_allclose(np.asarray(traced(case).logits)[mask], expected["logits"][mask], **TOLERANCE)


def test_without_a_trace_the_logits_are_the_same_and_nothing_else_is_kept():
    config, params, expected, mask = read("padded")
    plain = jax.jit(lambda p, t, m: glm_jax.forward(p, config, t, m))(params, expected["input_ids"], mask)
    assert plain.hidden is None and plain.routes is None and plain.selection is None
    np.testing.assert_allclose(np.asarray(plain.logits)[mask], expected["logits"][mask], **TOLERANCE)


def left_aligned(case: str):
    """Tokens without their left padding, and how many columns of it each row had."""
    _, _, expected, mask = read(case)
    pad = mask.shape[1] - mask.sum(1)
    return np.stack([np.roll(row, -n) for row, n in zip(expected["input_ids"], pad, strict=True)]), pad


@in_every_case
def test_prefill_in_chunks_and_scrambled_slots_then_decode_gives_the_cached_logits(case):
    config, params, expected, _ = read(case)
    tokens, pad = left_aligned(case)
    rows, columns = tokens.shape
    view = unstack(params, config)
    prefill = jax.jit(lambda c, t, s, n, slot: caches.extend(view, config, c, t, s, n, slot))
    decode = jax.jit(lambda c, t, s: caches.extend(view, config, c, t, s, jnp.ones_like(s)))
    cache, want, chunk = caches.init(config, rows, columns), PREFILL[case] - pad, 7
    slot = np.roll(np.arange(rows), 1)  # rows arrive in another order than slots stand, each a page
    done = np.zeros(rows, np.int64)
    while (done < want).any():
        count = np.minimum(chunk, want - done)
        piece = np.stack([np.pad(row, (0, chunk))[at : at + chunk] for row, at in zip(tokens, done, strict=True)])
        _, cache = prefill(cache, piece[slot], done[slot], count[slot], slot[:, None])
        done += count
    for step in range(expected["decode_logits"].shape[1]):
        at = want + step
        hidden, cache = decode(cache, np.take_along_axis(tokens, at[:, None], 1), at)
        got = unembed(view, hidden)[:, 0]
        np.testing.assert_allclose(got, expected["decode_logits"][:, step], **TOLERANCE, err_msg=f"step {step}")


@in_every_case
def test_greedy_tokens_of_generate(case):
    config, params, expected, _ = read(case)
    tokens, pad = left_aligned(case)
    prompts = [row[: PREFILL[case] - n].tolist() for row, n in zip(tokens, pad, strict=True)]
    made = glm_jax.generate(params, config, prompts, expected["greedy_tokens"].shape[1])
    assert [one.tokens for one in made] == expected["greedy_tokens"].tolist()
    assert all(logp == 0.0 for one in made for logp in one.logp), "a greedy token has probability 1"
