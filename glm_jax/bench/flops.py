"""`glm-jax bench flops`: what one token costs at each context length, counted on the traced program of decoding."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend import core

from glm_jax.model import cache, tree, weights
from glm_jax.model.config import ModelConfig, glm52_744b
from glm_jax.model.heads import unembed
from glm_jax.model.target import tracing_for

XLA = "xla"  # a platform without kernels, which tell no multiply-adds
CONTEXTS = (4096, 16384, 65536, 131072, 202752, 262144, 524288, 1048576)


class UncountedError(ValueError):
    """A program whose multiply-adds cannot be counted without running it."""


def count(jaxpr: core.Jaxpr) -> int:
    """Multiply-adds of a traced program, times two: products of matrices alone, loops times their trips.

    Of branches the one that costs most: that of the whole context. Raises UncountedError for products in a loop of
    unknown length.
    """
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
    if name.startswith("ragged_dot"):
        rows, inner = equation.invars[0].aval.shape
        return 2 * rows * inner * equation.invars[1].aval.shape[-1]
    inside = [count(jaxpr) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return max(inside)
    if name == "while" and any(inside):
        raise UncountedError("a loop of unknown length holds products of matrices")
    return sum(inside) * params.get("length", 1) if name == "scan" else sum(inside)


def _jaxprs(params: dict) -> Iterator[core.Jaxpr]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda x: isinstance(x, core.ClosedJaxpr | core.Jaxpr)):
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def of_token(config: ModelConfig, context: int) -> int:
    """Operations of decoding the last token of `context`, logits included, as XLA runs it on an accelerator."""
    params = tree.shapes(weights.abstract(config), config.dtype)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def decode(params, caches, token, start, count):
        hidden, caches = cache.extend(params, config, caches, token[:, None], start, count)
        return unembed(params, hidden), caches

    with tracing_for(XLA):
        caches = jax.eval_shape(lambda: cache.init(config, 1, context))
        return count(jax.make_jaxpr(decode)(params, caches, one, one, one).jaxpr)


def closed_form(config: ModelConfig, context: int) -> int:
    """The same by hand: 2 · (weights that a token meets) + attention over min(k, n) rows + index scores over n.

    Absorbed attention reads r + p numbers per row and head for its score, and r for its result. Holds beyond the
    lengths at which decoding scores every column under a mask (cache.no_selection).
    """
    dim, heads, rank, roped = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    nope, value, q_rank = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank
    attention = dim * q_rank + q_rank * heads * (nope + roped) + dim * (rank + roped)
    attention += rank * heads * (nope + value) + heads * value * dim
    experts = config.num_experts_per_tok + config.n_shared_experts
    sparse = 3 * dim * config.moe_intermediate_size * experts + dim * config.n_routed_experts
    mlps = sum(sparse if kind.sparse else 3 * dim * config.intermediate_size for kind in config.kinds)
    linear = config.num_hidden_layers * attention + mlps + dim * config.vocab_size
    j, width, computing = config.index_n_heads, config.index_head_dim, len(config.full_layers)
    indexer = computing * (q_rank * j * width + dim * width + dim * j)
    core_ = config.num_hidden_layers * heads * (2 * rank + roped) * min(config.index_topk, context)
    scores = computing * (j * width + j) * context
    return 2 * (linear + indexer + core_ + scores)


def cache_bytes(config: ModelConfig) -> int:
    """Of one token, all layers, as numbers of the model's dtype (cache_row.py: kernels read more, in whole lanes)."""
    caches = jax.eval_shape(lambda: cache.init(config, 1, 1))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def run(report: Path | None) -> str:
    """The table as text; with `report`, its figures as JSON. Raises UncountedError where count and form disagree."""
    shared = glm52_744b()
    full = dataclasses.replace(shared, indexer_types=("full",) * shared.num_hidden_layers)
    rows = []
    for context in CONTEXTS:
        counted = {}
        for name, config in (("all full", full), ("shared", shared)):
            counted[name] = of_token(config, context)
            if counted[name] != (by_hand := closed_form(config, context)):
                raise UncountedError(f"{name} at {context}: counted {counted[name]}, by hand {by_hand}")
        rows.append({"context": context, **counted, "ratio": counted["all full"] / counted["shared"]})
    sizes = {"all full": cache_bytes(full), "shared": cache_bytes(shared)}
    if report is not None:
        report.write_text(json.dumps({"operations": rows, "cache_bytes_per_token": sizes}, indent=1) + "\n")
    lines = [
        "GLM-5.2, 744B: operations of one decoded token (multiply and add are two), matrix products of the traced "
        "program, equal to the closed form.",
        "",
        "| context | GFLOP, indexer in all 78 layers | GFLOP, in 21, shared by the others | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['context']:,} | {row['all full'] / 1e9:.1f} | {row['shared'] / 1e9:.1f} | {row['ratio']:.3f} |"
        )
    longest = {name: f"{size * CONTEXTS[-1] / 2**30:.0f} GiB" for name, size in sizes.items()}
    lines += [
        "",
        f"Cache: {sizes['shared']:,} bytes per token, {longest['shared']} at {CONTEXTS[-1]:,} tokens; with an indexer "
        f"in every layer {sizes['all full']:,}, {longest['all full']}.",
    ]
    return "\n".join(lines)
