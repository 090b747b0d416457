"""The model against a numpy model that shares no code with it, where the golden cases do not reach."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import glm_jax
from glm_jax.model.transformer import hidden_states
from glm_jax.model.yarn import Yarn
from tests.model import reference
from tests.model.tiny import as_float64, random_params, random_tokens, three_layers, tiny_config

# Left padding, padding between documents, documents above and below index_topk, one interrupted by another.
DOCUMENTS = np.array(
    [
        [0] * 3 + [1] * 9 + [2] * 4 + [0] * 2 + [3] * 2,
        [5] * 14 + [7] * 6,
        [1] * 4 + [2] * 3 + [1] * 8 + [0] * 2 + [1] * 3,
    ],
    np.int32,
)
CASES = {
    "packed documents": tiny_config(),
    "expert groups, biases, tied embeddings": three_layers(
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        n_shared_experts=2,
        attention_bias=True,
        tie_word_embeddings=True,
        latent_norm_eps=1e-3,
        rms_norm_eps=1e-2,
        rope_theta=100.0,
        qk_rope_head_dim=8,
        yarn=Yarn(8.0, 16, beta_fast=4.0, mscale=1.0, mscale_all_dim=2.0),
        index_n_heads=3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_everything_matches_an_independent_model_in_float64(case, tmp_path):
    config = CASES[case]
    params = random_params(config, seed=1)
    tokens = random_tokens(config, *DOCUMENTS.shape)
    glm_jax.save(tmp_path / "model", config, params)
    want = reference.run(load_file(tmp_path / "model/model.safetensors"), config, tokens, DOCUMENTS)

    def both(params, tokens, documents):
        _, carried, _ = hidden_states(params, wide, tokens, documents, train_indexer=True)
        return glm_jax.forward(params, wide, tokens, documents, trace=True), carried.kl

    with jax.enable_x64(True):
        wide = dataclasses.replace(config, dtype="float64")
        got, kl = jax.device_get(jax.jit(both)(as_float64(params), tokens, DOCUMENTS))

    rows, columns = np.nonzero(DOCUMENTS)
    for layer, (index, count) in enumerate(got.selection):
        for b, s in zip(rows, columns, strict=True):
            assert index[b, s, : count[b, s]].tolist() == want.selection[layer][b][s], (layer, b, s)
    for layer, routes in enumerate(got.routes):
        for b, s in zip(rows, columns, strict=True):
            assert routes[b, s].tolist() == want.routes[layer][b][s], (layer, b, s)
    assert len(got.selection) == len(want.selection) and len(got.routes) == len(want.routes)
    np.testing.assert_allclose(got.logits[rows, columns], want.logits[rows, columns], atol=1e-10)
    np.testing.assert_allclose(kl, want.kl, rtol=1e-10)
