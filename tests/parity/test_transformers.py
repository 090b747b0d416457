"""Random models of random shapes, built by transformers itself and read from its files: logits, and greedy text.

Covers what the golden cases leave out: biases, tied embeddings, expert groups, several shared experts, values wider and
narrower than keys, odd head counts, schedules given as patterns or frequencies, YaRN's scale of attention.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import glm_jax
from glm_jax.model import cache as caches
from glm_jax.model.heads import unembed

pytestmark = pytest.mark.parity

SHAPE = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=64,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    index_topk=9,
    index_head_dim=16,
    index_n_heads=12,  # with few, a key that no head likes scores exactly 0, and torch.topk has no rule for ties
    pad_token_id=0,
)
CASES = {
    "biases and tied embeddings": dict(attention_bias=True, tie_word_embeddings=True, index_topk_freq=2),
    "expert groups": dict(n_group=4, topk_group=2, n_shared_experts=2, index_topk_pattern="FSSF"),
    "odd heads, wide values": dict(
        num_attention_heads=3, v_head_dim=20, index_n_heads=11, norm_topk_prob=False, routed_scaling_factor=1.3
    ),
    "narrow values, all dense but one": dict(
        v_head_dim=6, mlp_layer_types=["dense", "dense", "sparse", "dense"], index_topk_freq=4, index_skip_topk_offset=3
    ),
    "more keys selected than there are": dict(
        index_topk=64, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    ),
    "a context that YaRN extends": dict(
        qk_rope_head_dim=12,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=500.0,
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            mscale=1.0,
            mscale_all_dim=2.0,
        ),
    ),
}


def build(folder, changes, seed: int):
    """A model of transformers with weights of a size that makes every part matter, saved by transformers."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    shape = {**SHAPE, **changes}
    heads = shape["num_attention_heads"]
    config = GlmMoeDsaConfig(**shape, num_key_value_heads=heads, eos_token_id=None, attn_implementation="eager")
    model = GlmMoeDsaForCausalLM(config).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            spread = value.shape[-1] ** -0.5 if value.ndim > 1 else 0.2
            middle = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            value.copy_(torch.tensor(middle + spread * rng.standard_normal(tuple(value.shape)), dtype=value.dtype))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)))
def test_logits_decoding_and_greedy_text_are_those_of_transformers(seed, case, tmp_path):
    import torch

    model = build(tmp_path, CASES[case], seed)
    tokens = np.random.default_rng(seed).integers(1, 96, (3, 26)).astype(np.int32)
    pads = np.array([0, 4, 9])
    mask = np.arange(26) >= pads[:, None]
    with torch.inference_mode():
        want = model(torch.tensor(tokens, dtype=torch.long), attention_mask=torch.tensor(mask).long()).logits.numpy()
        prompt = torch.tensor(tokens[:1, :14], dtype=torch.long)
        options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, 14:].tolist()

    config, params = glm_jax.load(tmp_path)
    got = np.asarray(jax.jit(lambda p: glm_jax.forward(p, config, tokens, mask).logits)(params))
    np.testing.assert_allclose(got[mask], want[mask], atol=2e-4, rtol=1e-4)

    extend = jax.jit(lambda p, c, t, s: caches.extend(p, config, c, t, s, np.array([t.shape[1]])))
    state = caches.init(config, 1, 26)
    for at, size in ((0, 5), (5, 5), (10, 5), (15, 1), (16, 1)):
        hidden, state = extend(params, state, tokens[:1, at : at + size], np.array([at]))
    np.testing.assert_allclose(np.asarray(unembed(params, hidden))[0, -1], want[0, 16], atol=2e-4, rtol=1e-4)

    assert glm_jax.generate(params, config, [tokens[0, :14].tolist()], 8)[0].tokens == text


def test_what_we_save_is_what_transformers_reads(tmp_path):
    import torch
    from transformers import GlmMoeDsaForCausalLM

    model = build(tmp_path / "theirs", CASES["expert groups"], seed=1)
    glm_jax.save(tmp_path / "ours", *glm_jax.load(tmp_path / "theirs"))
    again, told = GlmMoeDsaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, value), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(value, other), name
