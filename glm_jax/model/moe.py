"""Mixture of experts: the sigmoid router, the shared expert, and the dense MLP they are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.config import ModelConfig
from glm_jax.model.exchange import over_widths, routed
from glm_jax.model.norms import linear, wide
from glm_jax.model.tree import Leaf


@struct.dataclass
class Mlp:
    """down( silu(gate x) ⊙ up x ); experts have a leading dimension E."""

    gate_up: Array  # [D, 2, I]: gate, then up
    down: Array  # [I, D]


@struct.dataclass
class Moe:
    router: Array  # [D, E] float32
    bias: Array  # [E] float32: selects, never enters the weights
    experts: Mlp
    shared: Mlp


def init_mlp(dim: int, width: int) -> Mlp:
    return Mlp(
        gate_up=Leaf((dim, 2, width), ("embed", None, "mlp"), dim), down=Leaf((width, dim), ("mlp", "embed"), width)
    )


def init_moe(config: ModelConfig) -> Moe:
    dim, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    return Moe(
        router=Leaf((dim, experts), ("embed", None), dim, dtype="float32"),
        bias=Leaf((experts,), (None,), dtype="float32"),
        experts=Mlp(
            gate_up=Leaf((experts, dim, 2, width), ("expert", None, None, "expert_width"), dim),
            down=Leaf((experts, width, dim), ("expert", "expert_width", None), width),
        ),
        shared=init_mlp(dim, width * config.n_shared_experts),
    )


def mlp(p: Mlp, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    hidden = linear(x, p.gate_up)
    return linear(jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :], p.down)


def route(p: Moe, config: ModelConfig, x: Float[Array, "N D"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Experts of each token (best first) and their float32 weights.

    s = sigmoid(x W); the top-k of s + bias, within the topk_group groups whose two best sum highest; weights from s.
    """
    dtype = wide(x.dtype)
    s = jax.nn.sigmoid(x.astype(dtype) @ p.router.astype(dtype))
    biased = s + p.bias.astype(dtype)
    if config.n_group > 1:
        grouped = biased.reshape(-1, config.n_group, config.n_routed_experts // config.n_group)
        group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        kept = jax.lax.top_k(group_score, config.topk_group)[1]
        in_kept = jnp.any(jnp.arange(config.n_group)[:, None] == kept[:, None], axis=-1)
        biased = jnp.where(in_kept[..., None], grouped, -jnp.inf).reshape(biased.shape)
    expert = jax.lax.top_k(biased, config.num_experts_per_tok)[1]
    weight = jnp.take_along_axis(s, expert, axis=-1)
    if config.norm_topk_prob:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return expert, weight * config.routed_scaling_factor


def moe(
    p: Moe, config: ModelConfig, x: Float[Array, "B S D"], valid: Bool[Array, "B S"]
) -> tuple[Float[Array, "B S D"], Int[Array, "B S k"]]:
    """Routed and shared experts, and the routes. Tokens that are not `valid` (padding, idle slots) visit no expert."""
    flat = x.reshape(-1, x.shape[-1])
    expert, weight = route(p, config, flat)

    def both(flat, expert, weight, valid):
        return routed(flat, expert, weight, valid, p.experts.gate_up, p.experts.down) + mlp(p.shared, flat)

    out = over_widths(both, flat, expert, weight, valid.reshape(-1))
    return out.reshape(x.shape), expert.reshape(*x.shape[:2], -1)
