"""Drafts inside the one program: sampled and learned on one device and on eight, to the same numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from glm_jax.learn.batch import DRAFT, IDLE, RL, SFT
from tests.model.tiny import named_leaves, two_layers
from tests.program.runs import LEARN, ROLLOUT, inbox, program, prompts, sampled, to_batch

MODEL = two_layers(num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
MODES = (SFT, DRAFT, RL, IDLE)


@cache
def run(page: int = 0, **axes: int) -> tuple[dict, list[dict], list, int]:
    """Samples with drafts and learns in every mode that the draft layer has a part in.

    Returns the tokens by rollout, the metrics of each round, the policy's parameters after each, and compilations.
    """
    learn = replace(LEARN, draft_depth=2, advantage="running_mean")
    sizes = replace(ROLLOUT, drafts=(2,), page=page)
    built = program(axes, model=MODEL, rollout=sizes, config=learn)
    batch = to_batch({rollout: [(1 + n, -1.0) for n in range(6)] for rollout, *_ in prompts()})
    state, logs, metrics, seen = built.init(3), [], [], []
    for n, mode in enumerate(MODES):
        some = [(rollout + 100 * n, *rest) for rollout, *rest in prompts()[: ROLLOUT.slots]]
        state, out = built.round(state, inbox(some if n in (0, 3) else (), batch, mode, built.shards, sizes))
        logs.append(jax.device_get(out.log))
        metrics.append({k: float(v) for k, v in out.metrics.items()})
        seen.append(jax.device_get(state.policy.params))
    return sampled(logs), metrics, seen, built.round._cache_size()


def test_a_run_with_drafts_compiles_once_and_each_mode_moves_its_part():
    tokens, metrics, seen, compiled = run()
    assert compiled == 1
    assert {r: len(t) for r, t in tokens.items() if r < 200} == {r: limit - len(p) for r, p, limit in prompts()[:8]}
    assert metrics[0]["sample/drafted"] > 0
    moved = []
    for before, after in zip(seen, seen[1:], strict=False):
        before, after = named_leaves(before), named_leaves(after)
        moved.append({".draft" in name for name in before if (before[name] != after[name]).any()})
    assert moved == [{True}, {False}, set()], "the draft stage moves the draft layer alone, RL leaves it alone"
    assert [m["draft/length"] > 1 for m in metrics] == [True, True, False, False]


@pytest.mark.scale
@pytest.mark.parametrize("axes", [dict(data=2, expert=2, context=2, page=4), dict(fsdp=4, tensor=2)], ids=str)
def test_eight_devices_draft_and_learn_as_one_does(axes):
    alone, spread = run(), run(**axes)
    tokens = lambda found: {rollout: [token for token, _ in pairs] for rollout, pairs in found.items()}
    assert tokens(spread[0]) == tokens(alone[0])
    for one, eight in zip(alone[1], spread[1], strict=True):
        assert eight.pop("sample/retracted", 0) == 0
        for name in one:
            assert eight[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    for one, eight in zip(alone[2], spread[2], strict=True):
        one, eight = named_leaves(one), named_leaves(eight)
        for name in one:
            np.testing.assert_allclose(eight[name], one[name], atol=1e-5, err_msg=name)
