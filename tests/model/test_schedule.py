"""Which layers compute a selection, by every way a config can say it, and how layers group into scans."""

from __future__ import annotations

import random

import pytest

from glm_jax.model.config import glm52_744b
from glm_jax.model.schedule import LayerKind, ScheduleError, indexer_types, layer_groups, mlp_types, staged_group

F, S = "full", "shared"


def letters(layers: int, **raw) -> str:
    return "".join("F" if kind == F else "S" for kind in indexer_types(layers, raw))


@pytest.mark.parametrize(
    "raw, want",
    [
        (dict(), "FFFFFFFFFF"),
        (dict(index_topk_freq=4), "FFSSSFSSSF"),
        (dict(index_topk_freq=4, index_skip_topk_offset=3), "FFFSSSFSSS"),
        (dict(index_topk_freq=4, index_skip_topk_offset=1), "FSSSFSSSFS"),
        (dict(index_topk_freq=0), "FFFFFFFFFF"),
        (dict(index_topk_pattern="FSSFSFFSSS"), "FSSFSFFSSS"),
        (dict(index_topk_pattern=[F, S, S, F, S, F, F, S, S, S]), "FSSFSFFSSS"),
        (dict(indexer_types=[F] * 9 + [S]), "FFFFFFFFFS"),
        (dict(indexer_types=[F] * 9 + [S], index_topk_pattern="FSSSSSSSSS", index_topk_freq=2), "FFFFFFFFFS"),
        (dict(indexer_types=None, index_topk_pattern="FSSSSSSSSS", index_topk_freq=2), "FSSSSSSSSS"),
        (dict(indexer_types=None, index_topk_pattern=None, index_topk_freq=2), "FFSFSFSFSF"),
    ],
)
def test_schedule_is_the_list_else_the_pattern_else_frequency_and_offset(raw, want):
    assert letters(10, **raw) == want


@pytest.mark.parametrize(
    "raw, told",
    [
        (dict(index_topk_freq=3, index_skip_topk_offset=0), "layer 0 shared"),
        (dict(index_topk_freq=None), "index_topk_freq=None"),
        (dict(index_topk_freq=4, index_skip_topk_offset="3"), "index_skip_topk_offset='3'"),
        (dict(index_topk_pattern="FSS"), "index_topk_pattern has 3 entries for num_hidden_layers=4"),
        (dict(indexer_types=[F] * 5), "indexer_types has 5 entries for num_hidden_layers=4"),
        (dict(indexer_types=["F", "S", "S", "S"]), "write 'full' or 'shared'"),
        (dict(index_topk_pattern="FXSS"), "X"),
        (dict(indexer_types=[S, F, F, F]), "indexer_types makes layer 0 shared"),
    ],
)
def test_a_schedule_that_cannot_run_or_would_be_misread_is_refused(raw, told):
    with pytest.raises(ScheduleError, match=told):
        indexer_types(4, raw)


def test_dense_layers_come_from_the_list_else_from_first_k_dense_replace():
    assert mlp_types(5, {}) == ("dense",) * 3 + ("sparse",) * 2
    assert mlp_types(2, {}) == ("dense",) * 2
    assert mlp_types(3, {"first_k_dense_replace": 1}) == ("dense", "sparse", "sparse")
    both = {"first_k_dense_replace": 2, "mlp_layer_types": ["sparse", "dense"]}
    assert mlp_types(2, both) == ("sparse", "dense")
    for wrong in (["dense"], ["dense", "moe"]):
        with pytest.raises(ScheduleError, match="mlp_layer_types must be 2 times"):
            mlp_types(2, {"mlp_layer_types": wrong})


def test_glm52_computes_in_21_of_78_layers():
    assert glm52_744b().full_layers == (0, 1, 2, *range(6, 75, 4))
    assert len(glm52_744b().full_layers) == 21


def test_glm52_groups_as_three_dense_three_shared_and_eighteen_fours_that_begin_with_a_selection():
    dense, full, shared = LayerKind(True, False), LayerKind(True, True), LayerKind(False, True)
    assert glm52_744b().groups == (
        (0, (dense,), 3),
        (3, (shared,), 3),
        (6, (full, shared, shared, shared), 18),
    )


def test_stages_share_out_the_longest_group_that_passes_no_selection_in_or_on():
    kinds = {"F": LayerKind(True, True), "S": LayerKind(False, True), "D": LayerKind(True, False)}
    staged = lambda text: (groups := layer_groups(tuple(kinds[k] for k in text)), staged_group(groups))
    groups, found = staged("DDDSSS" + "FSSS" * 18)
    assert found == 2 and groups[found].size == 72
    groups, found = staged("DDFSFSFS")
    assert groups[found] == (2, tuple(kinds[k] for k in "FS"), 3)
    assert staged("FSFSFSS")[1] is None, "the last layer takes its selection from the group"
    assert staged("DFS")[1] is None, "nothing repeats"
    assert staged("FSSS")[1] is None, "what repeats computes no selection"


def test_groups_cover_every_layer_once_in_order_whatever_the_schedule():
    rng = random.Random(0)
    for _ in range(300):
        kinds = tuple(LayerKind(rng.random() < 0.5, rng.random() < 0.7) for _ in range(rng.randrange(1, 14)))
        groups = layer_groups(kinds)
        assert [kind for group in groups for kind in group.pattern * group.repeats] == list(kinds)
        starts = [sum(len(g.pattern) * g.repeats for g in groups[:i]) for i in range(len(groups))]
        assert [group.first for group in groups] == starts
