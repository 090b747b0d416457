"""`glm-jax bench sparsity`: what a prompt's token costs at each context, part by part, with and without IndexShare."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from glm_jax.bench.shape import LARGER
from glm_jax.model import cache, cache_row, weights
from glm_jax.model.cache import CacheState
from glm_jax.model.config import ModelConfig
from glm_jax.model.hf_config import from_hf
from glm_jax.model.schedule import LayerKind
from glm_jax.report.plots import blank

CHUNK = 256  # tokens of a prompt that run at once
FULL, SMOKE = (4096, 8192, 16384, 32768), (1024, 2048)
ATTENTION, INDEXER = "attention over selected keys, one layer", "indexer, one layer"
SHARED, EVERY = "whole model, IndexShare", "whole model, an indexer in every layer"


def run(repeats: int, report: Path | None, picture: Path | None, smoke: bool) -> str:
    """The table as text; with `report` its figures as JSON, with `picture` as curves."""
    config = from_hf(LARGER)
    contexts = SMOKE if smoke else FULL
    figures = {context: of_context(config, context, repeats) for context in contexts}
    if report is not None:
        report.write_text(json.dumps({"microseconds_per_token": figures, "repeats": repeats}, indent=1) + "\n")
    if picture is not None:
        draw(figures, config, picture)
    names = (ATTENTION, INDEXER, SHARED, EVERY)
    lines = [
        f"17.0 M parameters, float32, {config.index_topk} keys selected: CPU microseconds per token of a prompt's last "
        f"{CHUNK}, median of {repeats}.",
        "",
        "| context | " + " | ".join(names) + " | saved by IndexShare |",
        "|" + "---|" * (len(names) + 2),
    ]
    for context, found in figures.items():
        cells = [f"{context:,}", *(f"{found[n]:.0f}" for n in names), f"{1 - found[SHARED] / found[EVERY]:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def of_context(config: ModelConfig, context: int, repeats: int) -> dict[str, float]:
    """Microseconds per token of the chunk that ends at `context`. The indexer is what a computing layer takes more."""
    share, compute = (partial(_layer, config, context, LayerKind(full=full, sparse=True)) for full in (False, True))
    every = dataclasses.replace(config, indexer_types=("full",) * config.num_hidden_layers)
    parts = {ATTENTION: share(), INDEXER: compute(), SHARED: _model(config, context), EVERY: _model(every, context)}
    for once in parts.values():
        once()  # compiles
    taken: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):  # in turns, so that a machine's drift hits all alike
        for name, once in parts.items():
            once()  # what another part left in the caches is not this one's cost
            start = time.process_time()
            once()
            taken[name].append((time.process_time() - start) / CHUNK * 1e6)
    found = {name: statistics.median(times) for name, times in taken.items()}
    return {**found, INDEXER: found[INDEXER] - found[ATTENTION]}


def _layer(config: ModelConfig, context: int, kind: LayerKind) -> Callable[[], None]:
    """Attention of one layer over a full cache; a layer that shares reads what a computing one selected."""
    caches = _random(config, cache.empty(config, 1, 1, 1, context))
    attention = weights.init(config, jax.random.key(0)).groups[0][0].attn
    assert attention.indexer is not None
    x = jax.random.normal(jax.random.key(1), (1, CHUNK, config.hidden_size))

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def attend(kind, x, caches, selection):
        at = cache.place(config, caches, CHUNK, jnp.array([context - CHUNK]), jnp.array([CHUNK]), None)
        before = cache.no_selection(config, at) if selection is None else selection
        out, state = cache.attend(config, at, kind, attention, x, CacheState(before, caches), (0, 0))
        return out, state.caches, state.selection

    _, caches, selection = attend(LayerKind(full=True, sparse=True), x, caches, None)
    held = [caches]

    def once() -> None:
        out, held[0], _ = attend(kind, x, held[0], None if kind.full else selection)
        out.block_until_ready()

    return once


def _model(config: ModelConfig, context: int) -> Callable[[], None]:
    """The whole model over a full cache, without its head."""
    params = weights.for_decoding(weights.init(config, jax.random.key(0)), config)
    tokens = jax.random.randint(jax.random.key(1), (1, CHUNK), 0, config.vocab_size)
    held = [_random(config, cache.init(config, 1, context))]

    @partial(jax.jit, donate_argnums=2)
    def extend(params, tokens, caches):
        at, count = jnp.array([context - CHUNK]), jnp.array([CHUNK])
        return cache.extend(params, config, caches, tokens, at, count)

    def once() -> None:
        out, held[0] = extend(params, tokens, held[0])
        out.block_until_ready()

    return once


def _random(config: ModelConfig, caches: cache.Caches) -> cache.Caches:
    """Rows as after a norm, so that the indexer's choice is spread over the context."""
    row_key, index_key = jax.random.split(jax.random.key(2))
    row = jax.random.normal(row_key, (*caches.row.shape[:3], config.row_dim), jnp.dtype(config.dtype))
    keys = jax.random.normal(index_key, caches.index_key.shape, caches.index_key.dtype)
    return cache.Caches(cache_row.store(config, row), keys)


def draw(figures: dict[int, dict[str, float]], config: ModelConfig, path: Path) -> None:
    """Curves over the context: the parts of one layer, and the whole model."""
    figure = blank((10, 3.8))
    for axes, names in zip(figure.subplots(1, 2), ((ATTENTION, INDEXER), (SHARED, EVERY)), strict=True):
        for name in names:
            axes.plot(list(figures), [found[name] for found in figures.values()], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(figures), [f"{context // 1024}k" for context in figures])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("CPU µs per token")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"Prefill at {config.index_topk} selected keys", fontsize=11)
    figure.savefig(path, dpi=110)
