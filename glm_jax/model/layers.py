"""The stack of layers: one scan per layer group, with the caller's attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from glm_jax.model import stages
from glm_jax.model.attention import Attention
from glm_jax.model.config import ModelConfig
from glm_jax.model.exchange import over_widths
from glm_jax.model.moe import mlp, moe
from glm_jax.model.norms import rms_norm
from glm_jax.model.schedule import LayerGroup, LayerKind
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


def run_layers(params: Transformer, config: ModelConfig, x, view, state, attend: Callable, trace: bool = False):
    """Every layer in turn, one scan per layer group; devices that share out a group each run their part (stages.py).

    `attend(view, kind, p.attn, x, state, numbers)` is the attention of the caller (over a row, or over a cache) and
    threads `state` (the carried selection, caches) from layer to layer. `view` is what tokens see, and which of them
    are `valid`; `numbers` are the layer's index among all layers and among the computing ones. Returns h, state and,
    with `trace`, per layer (input, routes, selection).
    """
    # A stack runs as a scan over its group; layers that come one by one (`unstack`) run one by one.
    groups, staged = config.groups, config.staged if stages.ways() > 1 else None
    if len(params.groups) != len(groups):
        groups = [g._replace(repeats=1) for g in groups for _ in range(g.repeats)]
    numbers, traced = (0, 0), []
    for number, (group, layers) in enumerate(zip(groups, params.groups, strict=True)):
        stack = partial(_run_group, group, config=config, attend=attend, trace=trace)
        steps = len(group.pattern), sum(kind.full for kind in group.pattern)
        if number == staged:
            x, state, seen = stages.run(stack, layers, x, view, state, numbers, steps)
        else:
            x, state, seen = stack(layers, x, view, state, numbers)
        for r in range(group.repeats):
            traced.extend(s if group.repeats == 1 else jax.tree.map(lambda a, r=r: a[r], s) for s in seen)
        numbers = tuple(n + step * group.repeats for n, step in zip(numbers, steps, strict=True))
    return x, state, traced


def _run_group(
    group: LayerGroup, layers, x, view, state, numbers, *, config: ModelConfig, attend: Callable, trace: bool
):
    """The group's layers, or those of its repeats that are given. Seen is per layer of the pattern, stacked."""
    layer = partial(run_layer, config=config, valid=view.valid, attend=partial(attend, view), trace=trace)
    if config.remat:
        layer = jax.checkpoint(layer, static_argnums=0)

    def body(carry, xs):
        x, state, number, full_number = carry
        seen = []
        for kind, p in zip(group.pattern, xs, strict=True):
            x, state, s = layer(kind, p, x, state, (number, full_number))
            seen.append(s)
            number, full_number = number + 1, full_number + int(kind.full)
        return (x, state, number, full_number), tuple(seen)

    if group.repeats == 1:
        (x, state, *_), seen = body((x, state, *numbers), layers)
        return x, state, seen
    repeats = jax.tree.leaves(layers)[0].shape[0]
    (x, state, *_), seen = jax.lax.scan(body, (x, state, *map(jnp.int32, numbers)), layers, unroll=_unroll(repeats))
    return x, state, seen


def _unroll(repeats: int) -> int:
    """Layers of a scan laid out one after another. A CPU gains an eighth of a gradient by it, for some compile time."""
    return min(repeats, 4) if on_cpu() else 1
