"""The architecture of a model: a frozen, hashable record, and presets."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

from glm_jax.model import schedule
from glm_jax.model.yarn import Yarn

DTYPES = ("float32", "bfloat16", "float16", "float64")  # float64 where jax computes it (jax_enable_x64)


class ModelConfigError(ValueError):
    """A model configuration that names another architecture or cannot run."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """GLM-5.2 (`glm_moe_dsa`). Field names and defaults are those of `config.json`; ours stand at the end.

    `indexer_types` and `mlp_layer_types` are resolved: one word per layer.
    """

    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    num_experts_per_tok: int = 8
    routed_scaling_factor: float = 2.5
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    yarn: Yarn | None = None  # of a context longer than the trained one
    attention_bias: bool = False
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 32
    indexer_types: tuple[str, ...] = ()
    mlp_layer_types: tuple[str, ...] = ()
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 0  # draft (MTP) layers stored after the last one: 0 or 1
    index_share_for_mtp_iteration: bool = False  # later draft steps reuse the selection of the first
    initializer_range: float | None = 0.02  # None: fan-in^-1/2, for small models trained from nothing
    # Ours:
    latent_norm_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm: 1e-6 in transformers, 1e-5 in serving engines
    dtype: str = "float32"  # of activations and of parameters at rest; router, softmax and norms are float32
    remat: bool = False  # recompute each layer in the backward pass

    def __post_init__(self):
        layers = self.num_hidden_layers
        given = {k: v for k in ("indexer_types", "mlp_layer_types") if (v := getattr(self, k))}
        object.__setattr__(self, "indexer_types", schedule.indexer_types(layers, given))
        object.__setattr__(self, "mlp_layer_types", schedule.mlp_types(layers, given))
        if problems := self.check():
            raise ModelConfigError("; ".join(problems))

    def check(self) -> list[str]:
        """Every reason why this model cannot run."""
        sizes = [f.name for f in dataclasses.fields(self) if f.type == "int" and f.name != "num_nextn_predict_layers"]
        if problems := [f"{name}={size} must be at least 1" for name in sizes if (size := getattr(self, name)) < 1]:
            return problems
        if self.dtype not in DTYPES:
            problems.append(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.num_experts_per_tok > self.n_routed_experts:
            problems.append(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts={self.n_routed_experts}"
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            problems.append(
                f"n_group={self.n_group} must divide n_routed_experts={self.n_routed_experts} "
                f"and be at least topk_group={self.topk_group}"
            )
        elif self.n_group > 1 and (of_group := self.n_routed_experts // self.n_group) < 2:
            problems.append(f"n_group={self.n_group} leaves {of_group} expert in a group: its score wants two")
        elif (allowed := self.n_routed_experts // self.n_group * self.topk_group) < self.num_experts_per_tok:
            problems.append(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds the {allowed} experts of "
                f"topk_group={self.topk_group} groups"
            )
        if self.num_nextn_predict_layers not in (0, 1):
            problems.append(
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} must be 0 or 1: one stored draft layer "
                "drafts to any depth"
            )
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            problems.append(
                f"qk_rope_head_dim={self.qk_rope_head_dim} must be even and "
                f"at most index_head_dim={self.index_head_dim}"
            )
        return problems

    @property
    def kinds(self) -> tuple[schedule.LayerKind, ...]:
        return tuple(
            schedule.LayerKind(i == schedule.FULL, m == schedule.SPARSE)
            for i, m in zip(self.indexer_types, self.mlp_layer_types, strict=True)
        )

    @cached_property
    def groups(self) -> tuple[schedule.LayerGroup, ...]:
        return schedule.layer_groups(self.kinds)

    @property
    def staged(self) -> int | None:
        """The group that pipeline stages share out, where one can be cut."""
        return schedule.staged_group(self.groups)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that run their own indexer."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.full)

    @property
    def row_dim(self) -> int:
        """Width of a latent cache row: latent, then rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale * self.yarn.score_scale if self.yarn is not None else scale


def glm52_744b(**changes: Any) -> ModelConfig:
    """The released 744B-A40B model, without its draft layer (num_nextn_predict_layers=1 adds it)."""
    types = schedule.indexer_types(78, {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    shape = dict(rope_theta=8e6, dtype="bfloat16", indexer_types=types, index_share_for_mtp_iteration=True)
    return ModelConfig(**{**shape, **changes})


def small(**changes: Any) -> ModelConfig:
    """A GLM-5.2-shaped model that trains from nothing on a laptop: dense, then MoE, with one shared selection."""
    shape = dict(
        vocab_size=260,
        hidden_size=96,
        intermediate_size=192,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
        index_topk=16,
        index_head_dim=32,
        index_n_heads=4,
        indexer_types=("full", "full", "shared"),
        mlp_layer_types=("dense", "sparse", "sparse"),
        initializer_range=None,
        index_share_for_mtp_iteration=True,
    )
    return ModelConfig(**{**shape, **changes})


PRESETS = {"glm52_744b": glm52_744b, "small": small}
