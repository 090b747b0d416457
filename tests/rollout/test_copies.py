"""Caches are updated in place: the compiled decode loop holds no operation that passes over a whole one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from glm_jax.rollout import generate, slots
from glm_jax.rollout.config import RolloutConfig
from tests.model.tiny import random_params, tiny_config


# One slot's row is written by another operation than many slots' rows.
@pytest.mark.parametrize(
    "count, drafts, page",
    [(1, (), 0), (4, (), 0), *[pytest.param(4, (3,), page, marks=pytest.mark.rollout) for page in (0, 8)]],
)
def test_no_operation_of_the_decode_loop_passes_over_a_whole_cache(count, drafts, page):
    config = tiny_config(num_nextn_predict_layers=1 if drafts else 0, index_share_for_mtp_iteration=True)
    sizes = RolloutConfig(
        slots=count,
        window=72,
        ticks=9,
        queue=count,
        requests=count,
        prefill_slots=1,
        prefill_chunk=16,
        drafts=drafts,
        page=page,
        pages=5 * 9 if page else 0,
    )
    params = random_params(config)
    state = slots.init(config, sizes)
    sent = jnp.full(count, -1), *map(jnp.int32, (0, 0, 9))
    program = generate._run.lower(params, config, sizes, state, *sent).compile().as_text()
    for leaf in jax.tree.leaves((state.caches, state.drafting and state.drafting.caches)):
        shape = ",".join(map(str, leaf.shape))
        made = re.findall(rf"= f32\[{shape}\]\S* ([\w-]+)\(", program)
        assert {"dynamic-update-slice", "scatter"} & set(made), "the caches are in the program, and written"
        passes = set(made) - {"dynamic-update-slice", "scatter", "get-tuple-element", "parameter", "fusion", "call"}
        if leaf.shape[0] == 1:
            passes -= {"slice", "dynamic-slice"}  # reading the draft cache's only layer
        assert not passes, f"{passes} over f32[{shape}]"
