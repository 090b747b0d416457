"""The work that every stack under measurement does: one RL iteration on a small GLM-MoE-DSA model."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Work:
    """Sample `completions` of exactly `new` tokens from prompts of `prompt` tokens, score them, one AdamW step."""

    completions: int = 64
    prompt: int = 24
    new: int = 64

    @property
    def window(self) -> int:
        return self.prompt + self.new


FULL, SMOKE = Work(), Work(completions=8, prompt=8, new=8)

# 1.28 M parameters: one dense layer, three of experts. Keys are those of config.json, which both sides read.
MODEL = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_topk": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "initializer_range": 0.02,
}
