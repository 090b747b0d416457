"""Which layers compute a selection (IndexShare), which are sparse (MoE), and how they group into scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"
_LETTERS = {"F": FULL, "S": SHARED}


class ScheduleError(ValueError):
    """A layer schedule that cannot run."""


class LayerKind(NamedTuple):
    """What a layer is made of."""

    full: bool  # runs its own indexer; otherwise it takes the selection carried to it
    sparse: bool  # mixture of experts; otherwise one dense MLP


class LayerGroup(NamedTuple):
    """A run of layers that one `lax.scan` covers: `pattern`, `repeats` times over, from layer `first` on."""

    first: int
    pattern: tuple[LayerKind, ...]
    repeats: int


def indexer_types(layers: int, raw: dict[str, Any]) -> tuple[str, ...]:
    """The IndexShare schedule of a Hugging Face config: list, else pattern, else frequency and offset.

    With freq and offset, layer i computes iff max(i - offset + 1, 0) mod max(freq, 1) == 0 (defaults 1 and 2).

    Raises:
        ScheduleError: for a schedule that transformers would read differently from what it says, or cannot run.
    """
    name, types = "indexer_types", raw.get("indexer_types")
    if types is None and raw.get("index_topk_pattern") is not None:
        name, types = "index_topk_pattern", raw["index_topk_pattern"]
        if isinstance(types, str):
            types = [_LETTERS.get(letter, letter) for letter in types]
    if types is None:
        freq, offset = raw.get("index_topk_freq", 1), raw.get("index_skip_topk_offset", 2)
        if not isinstance(freq, int) or not isinstance(offset, int):
            raise ScheduleError(f"index_topk_freq={freq!r} and index_skip_topk_offset={offset!r} must be integers")
        name = f"index_topk_freq={freq}, index_skip_topk_offset={offset}"
        types = [FULL if max(i - offset + 1, 0) % max(freq, 1) == 0 else SHARED for i in range(layers)]
    unknown = sorted({str(t) for t in types} - {FULL, SHARED})
    if unknown:
        raise ScheduleError(f"{name} holds {unknown}: write 'full' or 'shared' (letters F and S only in a string)")
    if len(types) != layers:
        raise ScheduleError(f"{name} has {len(types)} entries for num_hidden_layers={layers}")
    if layers and types[0] != FULL:
        raise ScheduleError(f"{name} makes layer 0 shared: no layer before it computes a selection, so it must be full")
    return tuple(types)


def mlp_types(layers: int, raw: dict[str, Any]) -> tuple[str, ...]:
    """Dense or sparse per layer: the list `mlp_layer_types`, else `first_k_dense_replace` dense layers (default 3)."""
    types = raw.get("mlp_layer_types")
    if types is None:
        dense = min(raw.get("first_k_dense_replace", 3), layers)
        types = [DENSE] * dense + [SPARSE] * (layers - dense)
    if len(types) != layers or set(types) - {DENSE, SPARSE}:
        raise ScheduleError(f"mlp_layer_types must be {layers} times 'dense' or 'sparse', got {list(types)}")
    return tuple(types)


def layer_groups(kinds: Sequence[LayerKind]) -> tuple[LayerGroup, ...]:
    """Covers the layers with as few scans as repetition allows: at each layer the pattern whose repeats reach furthest.

    GLM-5.2 gives F F F dense, then 18 x [S S S F], then S S S.
    """
    groups, first = [], 0
    while first < len(kinds):
        best, rest = LayerGroup(first, tuple(kinds[first : first + 1]), 1), kinds[first:]
        for period in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * period : (repeats + 1) * period] == rest[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.pattern):
                best = LayerGroup(first, tuple(rest[:period]), repeats)
        groups.append(best)
        first += best.repeats * len(best.pattern)
    return tuple(groups)
