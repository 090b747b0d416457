"""The stack of layers: one scan per layer group, with the caller's attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.model.attention import Attention
from glm_jax.model.config import ModelConfig
from glm_jax.model.exchange import over_widths
from glm_jax.model.moe import mlp, moe
from glm_jax.model.norms import rms_norm
from glm_jax.model.schedule import LayerKind
from glm_jax.model.target import on_cpu
from glm_jax.model.weights import Layer, Transformer, gathered

Attend = Callable[[LayerKind, Attention, Any, Any, Any], tuple[Any, Any]]


def run_layer(kind: LayerKind, p: Layer, x, state, numbers, *, config: ModelConfig, valid, attend: Attend, trace: bool):
    """h ← h + Attn(RMS(h)); h ← h + MLP(RMS(h)). Returns h, the caller's state, and what was seen (with `trace`)."""
    p = gathered(p, config, kind)
    out, state = attend(kind, p.attn, rms_norm(x, p.attn_norm, config.rms_norm_eps), state, numbers)
    h = x + out
    normed = rms_norm(h, p.mlp_norm, config.rms_norm_eps)
    out, routes = moe(p.mlp, config, normed, valid) if kind.sparse else (over_widths(partial(mlp, p.mlp), normed), None)
    seen = (x, routes, state.selection if kind.full else None) if trace else None
    return h + out, state, seen


def run_layers(params: Transformer, config: ModelConfig, x, valid, state, attend: Attend, trace: bool = False):
    """Every layer in turn, one scan per layer group.

    `attend(kind, p.attn, x, state, numbers)` is the attention of the caller (over a row, or over a cache) and
    threads `state` (the carried selection, caches) from layer to layer; `numbers` are the layer's index among all
    layers and among the computing ones. Returns h, state and, with `trace`, per layer (input, routes, selection).
    """

    layer = partial(run_layer, config=config, valid=valid, attend=attend, trace=trace)
    if config.remat:
        layer = jax.checkpoint(layer, static_argnums=0)

    # A stack runs as a scan over its group; layers that come one by one (`unstack`) run one by one.
    numbers, traced, computing = 0, [], 0
    groups = config.groups
    if len(params.groups) != len(groups):
        groups = [g._replace(repeats=1) for g in groups for _ in range(g.repeats)]
    for group, layers in zip(groups, params.groups, strict=True):
        step, computing_step = len(group.pattern), sum(k.full for k in group.pattern)

        def body(carry, xs, pattern=group.pattern):
            x, state, number, full_number = carry
            seen = []
            for kind, p in zip(pattern, xs, strict=True):
                x, state, s = layer(kind, p, x, state, (number, full_number))
                seen.append(s)
                number, full_number = number + 1, full_number + int(kind.full)
            return (x, state, number, full_number), tuple(seen)

        carry = (x, state, numbers, computing)
        if group.repeats == 1:
            (x, state, *_), seen = body(carry, layers)
            traced.extend(seen)
        else:
            carry = (x, state, jnp.int32(numbers), jnp.int32(computing))
            (x, state, *_), seen = jax.lax.scan(
                body, carry, layers, length=group.repeats, unroll=_unroll(group.repeats)
            )
            for r in range(group.repeats):
                traced.extend(jax.tree.map(lambda a, r=r: a[r], s) for s in seen)
        numbers, computing = numbers + step * group.repeats, computing + computing_step * group.repeats
    return x, state, traced


def _unroll(repeats: int) -> int:
    """Layers of a scan laid out one after another. A CPU gains an eighth of a gradient by it, for some compile time."""
    return min(repeats, 4) if on_cpu() else 1
