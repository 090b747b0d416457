"""The work that every stack under measurement does: an RL iteration, or greedy text, on small GLM-MoE-DSA models.

Imports nothing of ours, for the peers' environments have only their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


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

# 17.0 M parameters, for `bench model`: selections shared by up to three layers, 256 of up to 4096 keys.
LARGER = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_topk": 256,
    "index_head_dim": 32,
    "index_n_heads": 8,
    "indexer_types": ["full", "full", "shared", "shared", "shared", "full", "shared", "shared"],
    "initializer_range": 0.02,
}


@dataclasses.dataclass(frozen=True)
class Text:
    """Greedy continuation of `new` tokens of a prompt of each length, and of `batch` prompts of the first length."""

    prompts: tuple[int, ...] = (1024, 4096)
    new: int = 96  # many, so that the difference of two prefills does not drown them
    batch: int = 32

    @property
    def alone(self) -> list[tuple[int, int]]:
        """(prompts, length) of the single prompts."""
        return [(1, length) for length in self.prompts]


@dataclasses.dataclass(frozen=True)
class Crowd:
    """Greedy continuation of many prompts at once."""

    prompts: int = 64
    length: int = 24
    new: int = 64

    @property
    def alone(self) -> list[tuple[int, int]]:
        return [(self.prompts, self.length)]


LONG, SHORT = Text(), Text(prompts=(40, 80), new=4, batch=2)
CROWDS = {"crowd": Crowd(), "crowd_smoke": Crowd(prompts=4, length=8, new=4)}
TEXTS = {"full": LONG, "smoke": SHORT, **CROWDS}


def rate(figures: dict[str, float], crowd: Crowd) -> float:
    """Tokens per second that the figures of `timed` come to, the prompts' time included."""
    name = f"{crowd.prompts} x {crowd.length}"
    seconds = figures[f"prefill {name}"] + crowd.new * figures[f"decode {name}"]
    return crowd.prompts * (crowd.new + 1) / seconds


def timed(
    shapes: Sequence[tuple[int, int]], new: int, generate: Callable[[int, int, int], None], clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds for each (prompts, length); `generate(prompts, length, new)` makes `new` tokens after each prompt.

    One new token is the prefill; what more of them take is decoding, per step.
    """
    figures = {}
    for prompts, length in shapes:
        start = clock()
        generate(prompts, length, 1)
        first = clock()
        generate(prompts, length, 1 + new)
        both = clock() - first
        prefill = first - start
        figures[f"prefill {prompts} x {length}"] = prefill
        figures[f"decode {prompts} x {length}"] = (both - prefill) / new
    return figures
