"""Which layers compute a selection (IndexShare), which are sparse (MoE), and how they group into scans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    @property
    def size(self) -> int:
        """Layers."""
        return len(self.pattern) * self.repeats


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


def layer_groups(kinds: tuple[LayerKind, ...]) -> tuple[LayerGroup, ...]:
    """Covers the layers with as few scans as repetition allows, of those with the fewest layers in their patterns.

    Of equal covers it takes the one whose patterns begin with a layer that computes a selection, so that what repeats
    can be cut into pipeline stages: GLM-5.2 gives F F F dense, S S S, then 18 x [F S S S].
    """
    best: list[tuple[tuple[int, ...], tuple[LayerGroup, ...]]] = [((0, 0, 0, 0), ())]  # from each layer on, last first
    for first in reversed(range(len(kinds))):
        covers = []
        for group in _groups_from(kinds, first):
            (scans, traced, late, _), rest = best[len(kinds) - first - group.size]
            late += group.size if group.repeats > 1 and not group.pattern[0].full else 0
            covers.append(((scans + 1, traced + len(group.pattern), late, -group.size), (group, *rest)))
        best.append(min(covers, key=lambda cover: cover[0]))
    return best[-1][1]


def _groups_from(kinds: tuple[LayerKind, ...], first: int) -> Iterator[LayerGroup]:
    """The layer alone, and every run of repeats that begins with it."""
    yield LayerGroup(first, kinds[first : first + 1], 1)
    for period in range(1, (len(kinds) - first) // 2 + 1):
        pattern, repeats = kinds[first : first + period], 2
        while kinds[first + (repeats - 1) * period : first + repeats * period] == pattern:
            yield LayerGroup(first, pattern, repeats)
            repeats += 1


def staged_group(groups: Sequence[LayerGroup]) -> int | None:
    """The group that pipeline stages share out: the longest in which a stage's layers hang on no other's selection.

    Its pattern begins with a layer that computes one, and so does the layer after it.
    """
    found = None
    for i, group in enumerate(groups):
        after = groups[i + 1].pattern[0].full if i + 1 < len(groups) else True
        longest = found is None or group.size > groups[found].size
        if group.repeats > 1 and group.pattern[0].full and after and longest:
            found = i
    return found
